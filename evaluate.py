# The measure: `python evaluate.py run=outputs/NAME` decodes prompts for real, with and without the drafter of a run,
# and writes report.json, report.md and a picture.

from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

if TYPE_CHECKING:
    from drafters.decoding.measure import Prompt
    from drafters.target import FrozenTarget


def evaluate(cfg: DictConfig) -> None:
    """Measure the drafter of `cfg.run` on the prompts of `cfg.source`."""
    from drafters.checkpoint import load_drafter
    from drafters.config import build_config, to_plain, typed
    from drafters.decoding.measure import MeasureConfig
    from drafters.door import load_target, measure_and_write
    from drafters.runs import open_run
    from drafters.types import Sampling

    run, settings = open_run(cfg.run)
    _, source = build_config(cfg.source, key="source")
    prompts = find_prompts(source, split=cfg.split, num_prompts=cfg.num_prompts)
    target = load_target(to_plain(cfg.target) or settings["target"], device=cfg.device)
    drafter = load_drafter(run.drafter, spec=target.spec, allow_other_target=cfg.allow_other_target)
    sampling = typed(Sampling, {k: cfg[k] for k in ("temperature", "top_k", "top_p")}, key="evaluate")
    own = ("max_new_tokens", "length", "batch_size", "seed", "num_speed_prompts")
    config = MeasureConfig(**{name: cfg[name] for name in own}, sampling=sampling)
    out = Path(cfg.out) if cfg.out else run.folder / "evaluate" / "-".join(dict.fromkeys(name for name, _ in prompts))
    encoded = encode_prompts(target, prompts, settings=settings["data"])
    measure_and_write(target, drafter.to(target.device), encoded, config, out=out)


def find_prompts(source: Any, *, split: str | None, num_prompts: int | None) -> list[tuple[str, tuple[str, ...]]]:
    """(source name, user turns): the rows of `split` where rows have one, `num_prompts` of each source."""
    from itertools import chain, groupby, islice

    from data.sources import load_splits, prompts

    train, validation = load_splits(source, validation=0.0, seed=0)
    parts = {"train": train, "validation": validation or train}
    found = prompts(chain(train, validation) if split is None else parts.get(split, validation or train))
    found = sorted(found, key=lambda pair: pair[0])
    return [row for _, rows in groupby(found, key=lambda pair: pair[0]) for row in islice(rows, num_prompts)]


def encode_prompts(
    target: "FrozenTarget", prompts: list[tuple[str, tuple[str, ...]]], *, settings: dict[str, Any]
) -> list["Prompt"]:
    """The first user turn of each prompt, in the target's own chat template."""
    from drafters.chat import ChatEncoder
    from drafters.types import Message

    encoder = ChatEncoder(
        target.tokenizer, max_length=target.spec.max_position, template_kwargs=settings["template_kwargs"]
    )
    return [(name, encoder.prompt([Message(role="user", content=turns[0])])) for name, turns in prompts]


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        evaluate(cfg)


if __name__ == "__main__":
    main()
