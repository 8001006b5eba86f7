# What a format is: a module `export.to_<name>` with these names. One that is added here and to `table` can be chosen.

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from drafters.errors import ConfigError
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec
from export import table
from export.source import Source

__all__ = ["Format", "Manifest", "format_of"]

# Shape and type of tensors by name; types as the file's format spells them.
Manifest = dict[str, tuple[tuple[int, ...], str]]


class Format(Protocol):
    """`options` is an instance of the module's `Options`."""

    Options: type

    def refuse(self, source: Source, quant: str, *, options: Any) -> None:
        """Raises ConfigError for what no engine would serve, with what to do instead."""

    def manifest(self, source: Source, quant: str, *, options: Any) -> Manifest:
        """Every tensor that must be in the file, from numbers alone."""

    def write(self, source: Source, quant: str, out: Path, *, options: Any) -> None:
        """Fill the empty folder `out`."""

    def stored(self, folder: Path) -> Manifest:
        """What is in the file of a folder."""

    def read(self, folder: Path, *, spec: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings and float32 tensors by our own names."""

    def bounds(self, source: Source, quant: str, *, options: Any) -> Mapping[str, Tensor]:
        """By our names, how far each weight may be off when it comes back; it broadcasts."""

    def load(self, folder: Path, *, source: Source) -> Drafter | None:
        """A drafter that decodes as the folder says; None where the folder has none on purpose."""

    def commands(self, source: Source, *, options: Any, target: str, folder: str) -> dict[str, str]:
        """By engine, how to serve it."""

    def notes(self, source: Source, *, options: Any) -> list[str]:
        """What to know before it is served."""


def format_of(to: str) -> Format:
    """The module of a format. Raises ConfigError for one that is unknown."""
    if to not in table.FORMATS:
        raise ConfigError(f"to: got '{to}'; accepted: {', '.join(table.FORMATS)}")
    return cast(Format, importlib.import_module(f"export.to_{to}"))
