# The settings of one data source, as conf/source/*.yaml spells them. What becomes of its conversations is set by
# `DataConfig` of the trunk.

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.sources.template import check_template
from drafters.errors import ConfigError

__all__ = ["SourceConfig"]


ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where conversations come from, and which of them to take.

    `path` is a file (.jsonl, .json, either with .gz; .parquet; .arrow) or a list of files; `hub_id` a data set of the
    Hugging Face hub, with `subset`, `split` ("train" when not given) and `revision`, or those `files` of it that are
    named: then they are read as they are, which data sets with a loading script need. Of a local file `split` keeps
    the rows whose `split` column has this value, and those without one. `columns` renames: {what is expected: the
    column's name}; expected are messages, conversations, prompt, response, turns, system, id, split, finish_reason(s),
    answered_by (the weights hash of who answered), and source, which then gives every row its own source name.
    `template` (Jinja) writes the prompt from the row's fields: "{{ question }} Think first." Rows that are
    conversations already, with messages, conversations or turns of their own, are taken as they stand: no template is
    applied, and a column that would have given them a conversation is not missed.
    `limit` counts conversations of each file after the filters. With a `seed` rows are shuffled first (within a buffer
    when streaming). A turn is a user message.
    """

    name: str | None = None  # default: the file's stem, or the last part of hub_id
    path: Any = None
    hub_id: str | None = None
    subset: str | None = None
    files: list[str] = field(default_factory=list)  # of hub_id
    revision: str | None = None
    split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    streaming: bool = False
    seed: int | None = None
    limit: int | None = None
    min_turns: int = 1
    max_turns: int | None = None
    max_characters: int | None = None
    equals: dict[str, Any] = field(default_factory=dict)  # column -> value, or list of values, to keep

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hub_id is None):
            raise ConfigError(
                f"source.path: got path={self.path!r} and hub_id={self.hub_id!r}; set one of them, and only one"
            )
        if self.path is not None and not self.paths:
            raise ConfigError(f"source.path: got {self.path!r}; accepted: a file name, or a list of file names")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"source.limit: got {self.limit}; accepted: 1 or more, or null for all")
        if self.max_turns is not None and self.max_turns < self.min_turns:
            raise ConfigError(
                f"source.max_turns: got {self.max_turns}, below min_turns={self.min_turns}; no conversation fits"
            )
        if self.template is not None:
            check_template(self.template)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of `path`; empty when they are not given as text."""
        files = self.path if isinstance(self.path, list | tuple) else [self.path]
        if not all(isinstance(f, str | Path) and f for f in files):
            return ()
        return tuple(_found(Path(f).expanduser()) for f in files)

    def seen_from(self, folder: str | Path) -> "SourceConfig":
        """The same source with its relative paths meant from `folder`, as in a run that was begun there."""
        if self.path is None:
            return self
        return replace(self, path=[str(Path(folder, path)) for path in self.paths])


def _found(path: Path) -> Path:
    """A relative path that is not here but in the checkout, such as that of the bundled samples, is meant there."""
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path
