# Beginning from a drafter that was trained before: what fits by name and shape is taken, its draft vocabulary with it,
# and what is new starts so that it changes nothing, where an architecture knows how.

import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafters.checkpoint import is_packed, load_drafter, read_config
from drafters.errors import ConfigError
from drafters.heads.base import Drafter
from drafters.heads.draft_vocab import vocab_of
from drafters.runs import Run
from drafters.spec import TargetSpec

__all__ = ["begun_from", "folder_of", "load_warm_start", "take_over"]

logger = logging.getLogger(__name__)

# Settings that may differ: they change no meaning of a tensor that keeps its name and shape.
FREE = {"name", "loss", "num_anchors", "num_layers", "block_size", "sequential", "confidence", "init"}
FREE |= {"init_markov", "adapter", "depth_weights", "target_config", "draft_vocab_size"}


def folder_of(path: str) -> Path:
    """The `drafter` folder of a run, or the given one. Raises ConfigError when there is none at `path`."""
    for folder in (Path(path) / "drafter", Path(path)):
        if path and (folder / "config.json").is_file():
            read_config(folder)
            return folder
    raise ConfigError(
        f"warm_start: got '{path}', where no drafter is; accepted: the folder of a finished run, such as "
        "outputs/parallel-smollm2, or its drafter/ folder"
    )


def begun_from(path: str, run: Run) -> str:
    """The sha256 of the weights that `run` begins from, or began from: what lies at `path` may be another by then."""
    if run.checkpoint is not None and run.has_drafter:
        return str(read_config(run.drafter)["provenance"].get("warm_start"))
    return str(read_config(folder_of(path))["weights"]["sha256"])


def load_warm_start(path: str, cls: type[Drafter], config: Any, spec: TargetSpec) -> Drafter:
    """The drafter at `path`, for a new one of `cls` and `config`; other weights of a target of equal sizes warn.

    Raises ConfigError or CheckpointError when it is missing, damaged, of another family or draft vocabulary, or for a
    target of other sizes.
    """
    folder = folder_of(path)
    if is_packed(read_config(folder)):
        raise ConfigError(
            f"warm_start: {folder} is packed: its weights are rounded, and not trained on; accepted: the run that it "
            "was exported from"
        )
    drafter = load_drafter(folder, spec=spec, allow_other_target=True)
    if type(drafter) is not cls:
        raise ConfigError(
            f"warm_start: {folder} holds a {type(drafter).__name__} ('{drafter.config.name}'), of which a "
            f"{cls.__name__} ('{config.name}') can take nothing; accepted: a drafter of the same family"
        )
    if not list(drafter.parameters()):
        raise ConfigError(f"warm_start: {folder} holds no weights to begin from; choose a trained drafter")
    vocab_of(drafter, asdict(config).get("draft_vocab_size"), spec)
    if (before := read_config(folder)["target"]["weights_hash"]) != spec.weights_hash:
        warnings.warn(
            f"warm_start: {folder} was trained for a target with weights {before[:12]}, this one has "
            f"{spec.weights_hash[:12]}; it has to learn the difference",
            stacklevel=2,
        )
    _warn_of_settings(asdict(config), asdict(drafter.config))
    return drafter


@torch.no_grad()
def take_over(drafter: Drafter, old: Drafter) -> None:
    """Take the weights of `old` that fit, and let what is new begin as nothing; the log lists both."""
    mine, theirs = dict(drafter.named_parameters()), dict(old.named_parameters())
    taken = [name for name in mine if name in theirs and theirs[name].shape == mine[name].shape]
    for name in taken:
        mine[name].copy_(theirs[name])
    new = [name for name in mine if name not in taken]
    drafter.begin_neutral(new)
    everything = [*mine, *(name for name in theirs if name not in mine)]
    logger.info("warm start: taken %s", _listed(taken, everything))
    logger.info("warm start: new %s", _listed(new, everything))
    logger.info("warm start: left behind %s", _listed([name for name in theirs if name not in mine], everything))
    for name in (name for name in new if name in theirs):
        logger.info("warm start: %s is new since it was %s, now %s", name, [*theirs[name].shape], [*mine[name].shape])


def _warn_of_settings(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Of those that give tensors of equal names and shapes another meaning."""
    heads = [(settings.get("sequential") or {}).get("_target_") for settings in (mine, theirs)]
    differing = [key for key in sorted((mine.keys() & theirs.keys()) - FREE) if mine[key] != theirs[key]]
    pairs = {key: (mine[key], theirs[key]) for key in differing}
    if None not in heads and heads[0] != heads[1]:
        pairs["sequential"] = (heads[0], heads[1])
    for key, (now, before) in pairs.items():
        warnings.warn(
            f"warm_start: drafter.{key} is {now}, but was {before} when these weights were trained; they have to learn "
            "the difference",
            stacklevel=3,
        )


def _listed(names: Sequence[str], everything: Sequence[str]) -> str:
    """Names; where all with a common beginning are there, that and their number: `layers.0 (11), fc.weight`."""
    shown: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        group = ".".join(parts[: 2 if len(parts) > 2 and parts[1].isdigit() else 1]) + "."
        members = [other for other in everything if other.startswith(group)]
        whole = len(members) > 1 and all(other in names for other in members)
        shown[group if whole else name] = f"{group[:-1]} ({len(members)})" if whole else name
    return ", ".join(shown.values()) or "nothing"
