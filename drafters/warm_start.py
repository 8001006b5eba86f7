# Beginning from a drafter that was trained before: what fits by name and shape is taken, its draft vocabulary with it,
# and what is new starts so that it changes nothing, where an architecture knows how.

import logging
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from drafters.checkpoint import load_drafter, read_config
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec

__all__ = ["folder_of", "load_warm_start", "take_over", "weights_of"]

logger = logging.getLogger(__name__)

# Settings that may differ: they change no meaning of a tensor that keeps its name and shape.
FREE = {"name", "loss", "num_anchors", "num_layers", "block_size", "window", "sequential", "confidence", "init"}
FREE |= {"init_markov", "adapter", "depth_weights", "target_config", "draft_vocab_size"}


def folder_of(path: str) -> Path:
    """The `drafter` folder of a run, or the given one. Raises ConfigError when there is none at `path`."""
    for folder in (Path(path) / "drafter", Path(path)):
        if (folder / "config.json").is_file():
            read_config(folder)
            return folder
    raise ConfigError(
        f"warm_start: got '{path}', where no drafter is; accepted: the folder of a finished run, such as "
        "outputs/parallel-smollm2, or its drafter/ folder"
    )


def weights_of(path: str) -> str:
    """The sha256 of the weights at `path`, or `path` where they are gone: a resumed run does not need them."""
    try:
        return str(read_config(folder_of(path))["weights"]["sha256"])
    except (CheckpointError, ConfigError):
        return path


def load_warm_start(path: str, spec: TargetSpec) -> Drafter:
    """The drafter at `path`, of this target or of other weights of the same sizes, which warns.

    Raises ConfigError or CheckpointError when it is missing, damaged, or for a target of other sizes.
    """
    folder = folder_of(path)
    drafter = load_drafter(folder, spec=spec, allow_other_target=True)
    if (before := read_config(folder)["target"]["weights_hash"]) != spec.weights_hash:
        warnings.warn(
            f"warm_start: {folder} was trained for a target with weights {before[:12]}, this one has "
            f"{spec.weights_hash[:12]}; it has to learn the difference",
            stacklevel=2,
        )
    return drafter


@torch.no_grad()
def take_over(drafter: Drafter, old: Drafter) -> None:
    """Take the weights of `old` that fit, and let what is new begin as nothing; the log lists both.

    Raises ConfigError when no weight fits, and warns of settings that give equal tensors another meaning.
    """
    mine, theirs = dict(drafter.named_parameters()), dict(old.named_parameters())
    taken = [name for name in mine if name in theirs and theirs[name].shape == mine[name].shape]
    if not taken:
        raise ConfigError(
            f"warm_start: nothing of a {type(old).__name__} ('{old.config.name}') fits this {type(drafter).__name__} "
            f"('{drafter.config.name}'): no weight has an equal name and shape; choose a drafter of the same family"
        )
    _warn_of_settings(asdict(drafter.config), asdict(old.config))
    for name in taken:
        mine[name].copy_(theirs[name])
    new = [name for name in mine if name not in taken]
    drafter.begin_neutral(new)
    shapes = {name: f"{name} {list(theirs[name].shape)} -> {list(mine[name].shape)}" for name in new if name in theirs}
    logger.info("warm start: taken %s", _listed(taken))
    logger.info("warm start: new %s", _listed([shapes.get(name, name) for name in new]))
    logger.info("warm start: left behind %s", _listed([name for name in theirs if name not in mine]))


def _warn_of_settings(mine: dict[str, object], theirs: dict[str, object]) -> None:
    for key in sorted((mine.keys() & theirs.keys()) - FREE):
        if mine[key] != theirs[key]:
            warnings.warn(
                f"warm_start: drafter.{key} is {mine[key]}, but was {theirs[key]} when these weights were trained; "
                "they have to learn the difference",
                stacklevel=3,
            )


def _listed(names: Iterable[str]) -> str:
    """Names with their common beginnings once: `layers.0 (11), fc.weight`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(" ")[0].split(".")
        depth = 2 if len(parts) > 2 and parts[1].isdigit() else 1
        groups.setdefault(".".join(parts[:depth]), []).append(name)
    shown = [only[0] if len(only) == 1 else f"{group} ({len(only)})" for group, only in groups.items()]
    return ", ".join(shown) or "nothing"
