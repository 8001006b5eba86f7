"""drafters: train, measure and export draft heads for speculative decoding on frozen language models.

The names below are for programs; see docs/library.md. They are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafters.checkpoint import load_drafter, save_drafter
    from drafters.decoding.loop import DecodeConfig
    from drafters.errors import CheckpointError, ConfigError, DataError, DraftersError
    from drafters.heads.base import Drafter
    from drafters.library import Generated, generate, load_target
    from drafters.target import FrozenTarget
    from drafters.training.library import fit
    from drafters.types import Conversation, Message, Sampling

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Conversation",
    "DataError",
    "DecodeConfig",
    "Drafter",
    "DraftersError",
    "FrozenTarget",
    "Generated",
    "Message",
    "Sampling",
    "fit",
    "generate",
    "load_drafter",
    "load_target",
    "save_drafter",
]

__version__ = "0.1.0"

_PLACES = {
    "checkpoint": ("load_drafter", "save_drafter"),
    "decoding.loop": ("DecodeConfig",),
    "errors": ("CheckpointError", "ConfigError", "DataError", "DraftersError"),
    "heads.base": ("Drafter",),
    "library": ("Generated", "generate", "load_target"),
    "target": ("FrozenTarget",),
    "training.library": ("fit",),
    "types": ("Conversation", "Message", "Sampling"),
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"drafters.{module}"), name)
    raise AttributeError(f"module 'drafters' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
