# The measure: `python evaluate.py run=outputs/NAME` decodes prompts for real, with and without the drafter of a run,
# and writes report.json, report.md and a picture.

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

if TYPE_CHECKING:
    from drafters.decoding.measure import MeasureConfig


def evaluate(cfg: DictConfig) -> None:
    """Measure the drafter of `cfg.run` on the prompts of `cfg.source`."""
    from data.prompts import source_prompts
    from drafters.chat import ChatEncoder
    from drafters.checkpoint import load_drafter, provenance
    from drafters.config import build_config, to_plain
    from drafters.decoding.measure import check_settings
    from drafters.door import load_target, measure_and_write
    from drafters.runs import open_run

    config = read_config(cfg)
    _, source = build_config(cfg.source, key="source")
    run, settings = open_run(cfg.run)
    node = to_plain(cfg.get("target")) or settings["target"]
    target = load_target(node, device=cfg.device)
    drafter = load_drafter(run.drafter, spec=target.spec, allow_other_target=cfg.allow_other_target)
    kwargs = settings["data"]["template_kwargs"]
    encoder = ChatEncoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs=kwargs)
    prompts = source_prompts(source, encoder, split=cfg.split, num_prompts=cfg.num_prompts)
    check_settings(drafter, prompts, config)
    out = Path(cfg.out) if cfg.out else run.folder / "evaluate" / "-".join(dict.fromkeys(name for name, _ in prompts))
    facts = {"weights": node["weights"], "drafter": provenance(run.drafter)}
    measure_and_write(target, drafter.to(target.device), prompts, config, out=out, provenance=facts)


def read_config(cfg: DictConfig) -> "MeasureConfig":
    """The settings of the measurement, typed. Raises ConfigError that names the wrong one."""
    from drafters.config import typed
    from drafters.decoding.measure import MeasureConfig
    from drafters.types import Sampling

    sampling = typed(Sampling, {name: cfg[name] for name in ("temperature", "top_k", "top_p")}, key="")
    own = ("max_new_tokens", "length", "batch_size", "seed", "num_speed_prompts")
    return replace(typed(MeasureConfig, {name: cfg[name] for name in own}, key=""), sampling=sampling)


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        evaluate(cfg)


if __name__ == "__main__":
    main()
