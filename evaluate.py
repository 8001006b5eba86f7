# The measure: `python evaluate.py run=outputs/NAME` decodes prompts for real, with and without the drafter of a run,
# and writes report.json, report.md and a picture.

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

if TYPE_CHECKING:
    from drafters.decoding.measure import MeasureConfig, Prompt


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The settings of this door beside those of the source, the target and the measurement."""

    run: str
    out: str | None = None
    split: str | None = "validation"
    num_prompts: int | None = None
    allow_other_target: bool = False
    device: str | None = None


def evaluate(cfg: DictConfig) -> None:
    """Measure the drafter of `cfg.run` on the prompts of `cfg.source`."""
    from data.prompts import source_prompts, trained_on
    from data.sources import DataConfig
    from drafters.chat import ChatEncoder
    from drafters.checkpoint import load_drafter, provenance
    from drafters.config import build_config, to_plain, typed
    from drafters.decoding.measure import check_settings
    from drafters.door import load_target, measure_and_write
    from drafters.runs import open_run

    plain = to_plain(cfg)
    choice = typed(Choice, {f.name: plain[f.name] for f in fields(Choice)}, key="")
    config = read_config(cfg)
    _, source = build_config(cfg.source, key="source")
    run, settings = open_run(choice.run)
    _, own = build_config(settings["source"], key="source")
    data = typed(DataConfig, settings["data"], key="data")
    node = plain.get("target") or seen_from(settings["cwd"], settings["target"])
    target = load_target(node, device=choice.device)
    drafter = load_drafter(run.drafter, spec=target.spec, allow_other_target=choice.allow_other_target)
    encoder = ChatEncoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs=data.template_kwargs)
    prompts, part = source_prompts(
        source,
        encoder,
        split=choice.split,
        num_prompts=choice.num_prompts,
        room=target.spec.max_position - config.max_new_tokens,
        trained=trained_on(source, own=own.seen_from(settings["cwd"]), data=data) if choice.split else None,
    )
    check_settings(drafter, prompts, config)
    out = choice.out or run.folder / "evaluate" / folder_name(prompts, config, target.spec.weights_hash)
    facts = {
        "weights": node["weights"],
        "drafter": provenance(run.drafter),
        "prompts": {
            "source": source.hub_id or [str(path) for path in source.paths],
            "split": part,
            "num_prompts": len(prompts),
        },
    }
    drafter = drafter.to(target.device)
    measure_and_write(target, drafter, prompts, config, out=Path(out).expanduser(), provenance=facts)


def folder_name(prompts: Sequence["Prompt"], config: "MeasureConfig", weights_hash: str) -> str:
    """At most 60 characters that people can read, and a hash of all that is measured, so that no measurement takes the
    place of another."""
    import hashlib
    import json
    import re

    marks = [f"t{config.sampling.temperature:g}"] if config.sampling.temperature else []
    marks += [f"length{config.length}"] if config.length != "auto" else []
    marks += [f"batch{config.batch_size}"] if config.batch_size > 1 else []
    what = [asdict(config), [[name, tokens.tolist()] for name, tokens in prompts], weights_hash]
    marks.append(hashlib.sha256(json.dumps(what).encode()).hexdigest()[:6])
    end = "-" + "-".join(marks)
    names = "-".join(dict.fromkeys(name for name, _ in prompts))
    return re.sub(r"[^\w.-]+", "_", names)[: 60 - len(end)].strip("-_.") + end


def seen_from(folder: str, target: dict[str, Any]) -> dict[str, Any]:
    """A run's target, where a relative path to its weights is meant from the folder that the run was begun in."""
    path = Path(folder, target["weights"])
    return {**target, "weights": str(path)} if path.exists() else target


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
