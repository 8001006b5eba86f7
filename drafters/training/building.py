# Lightning's Trainer and logger of plain settings, for a program that trains in its own process. The door builds its
# own with Hydra, for any number of processes.

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from drafters.config import locate, suited
from drafters.distributed import Ranks
from drafters.errors import ConfigError
from drafters.training.plan import OWN, check_trainer, one_line
from drafters.training.strategies import check_kind, num_processes

__all__ = ["build_logger", "build_trainer", "check_alone"]


def check_alone(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError where the trainer's `settings` ask for more than the process that is here."""
    check_kind(settings)
    if isinstance(settings.get("strategy"), Mapping) or num_processes(settings, Ranks()) != 1:
        raise ConfigError(
            f"trainer: got devices={settings.get('devices', 1)!r}, strategy={settings.get('strategy', 'auto')!r}; "
            "accepted here: trainer=single, since a program trains in its own process; for more use train.py"
        )


def build_trainer(settings: Mapping[str, Any], **given: Any) -> Trainer:
    """A Trainer of the trainer's `settings` and what a run adds. Raises ConfigError for a setting that it refuses, or
    that is not its own to decide."""
    decided = check_trainer(settings)
    node = {name: value for name, value in settings.items() if name not in OWN}
    trainer: Trainer = _made(node, key="trainer", **decided | given)
    return trainer


def build_logger(settings: Mapping[str, Any] | None) -> Any:
    """A logger of Lightning, or False for none. Raises ConfigError."""
    return _made(settings, key="logger") if settings else False


def _made(node: Mapping[str, Any], *, key: str, **given: Any) -> Any:
    """The object that a node's `_target_` makes of its settings."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{key}: got {node!r}; accepted: settings with a `_target_`, as conf/{key} has them")
    arguments = {name: value for name, value in suited(node, key=key).items() if not name.startswith("_")}
    try:
        return locate(node["_target_"], key=f"{key}._target_")(**arguments | given)
    except (MisconfigurationException, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {one_line(error)}") from error
