# From a SourceConfig to conversations: read, shuffle, convert, filter, split. Everything is lazy up to the split.

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data.sources.config import SourceConfig
from data.sources.read import Row, check_file, file_rows, hub_rows, numbered
from data.sources.shapes import SkipRow, find_shape, is_ready, rename, to_conversation
from data.sources.template import compile_template, render
from drafters.errors import ConfigError, DataError
from drafters.progress import over
from drafters.splits import split_conversations
from drafters.types import Conversation

__all__ = ["load_conversations", "load_part", "load_splits"]

_VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
_TRAIN_SPLITS = ("train", "training")
_FILTERED = "filtered"
_PARTS = {None: (), "train": _TRAIN_SPLITS, "validation": _VALIDATION_SPLITS}


@dataclass(frozen=True)
class _Part:
    """One file, or one hub data set."""

    where: str
    source: str
    rows: Iterable[Row]


def load_conversations(config: SourceConfig) -> Iterator[Conversation]:
    """The conversations of a source, file after file.

    Raises DataError at once for files that cannot be sources, and later for damaged files, rows without a shape that
    is known, unknown roles, and files of which nothing is left. Warns of rows that were skipped.
    """
    return (conversation for conversation, _ in _load(config))


def load_part(config: SourceConfig, part: str | None) -> tuple[list[Conversation], bool]:
    """The conversations of a part, and whether rows told it: those that their `split` column puts in `part` ("train" or
    "validation") and those without one; all when no row names that part, as in files made for measuring, or for None.

    Raises ConfigError for an unknown part.
    """
    if part not in _PARTS:
        raise ConfigError(f"split: got '{part}'; accepted: train, validation, or null for all")
    pairs = list(over(_load(config), "reading the source", unit="conversations"))
    if not any(split in _PARTS[part] for _, split in pairs):
        return [c for c, _ in pairs], False
    return [c for c, split in pairs if split is None or split in _PARTS[part]], True


def load_splits(config: SourceConfig, *, validation: float, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation) conversations, by the rows' own `split` column where they have one.

    Rows of other splits than training and validation ("test") are left out. Without validation rows of its own a
    source is split at random by conversation, a share of `validation`.
    """
    pairs = list(_load(config))
    train = [c for c, split in pairs if split is None or split in _TRAIN_SPLITS]
    held_out = [c for c, split in pairs if split in _VALIDATION_SPLITS]
    if not train:
        found = ", ".join(sorted({str(split) for _, split in pairs}))
        raise DataError(f"source: no training conversations; the `split` column holds: {found}")
    return (train, held_out) if held_out else split_conversations(train, validation=validation, seed=seed)


def _load(config: SourceConfig) -> Iterator[tuple[Conversation, str | None]]:
    """Conversations with the value of their `split` column."""
    if config.hub_id is not None:
        name = config.name or config.hub_id.split("/")[-1]
        parts = [_Part(f"hub data set '{config.hub_id}'", name, hub_rows(config))]
    else:
        for path in config.paths:
            check_file(path)
        single = config.name if len(config.paths) == 1 else None
        parts = [_Part(f"'{path}'", single or path.name.split(".")[0], file_rows(path)) for path in config.paths]
    return (pair for part in parts for pair in _load_part(part, config))


def _load_part(part: _Part, config: SourceConfig) -> Iterator[tuple[Conversation, str | None]]:
    left_out: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    num_kept = 0
    template = None if config.template is None else compile_template(config.template)
    for number, raw in numbered(part.rows, seed=config.seed, streaming=config.streaming):
        where = f"{part.where} row {number}"
        row = rename(raw, config.columns, where=where)
        if template is not None and is_ready(row):
            notes["are conversations already, so source.template is not applied to them"] += 1
        elif template is not None:
            row = {**row, "prompt": render(template, row, where=where)}
        try:
            shape = find_shape(row, where=where)
            source = str(row["source"]) if "source" in config.columns else part.source
            conversation = to_conversation(row, shape=shape, number=number, source=source, where=where)
            _select(conversation, row, config=config, notes=notes)
        except SkipRow as reason:
            left_out[str(reason)] += 1
            continue
        num_kept += 1
        yield conversation, row.get("split")
        if num_kept == config.limit:
            break
    counts = ", ".join(f"{count} rows: {reason}" for reason, count in left_out.items())
    if not num_kept:
        raise DataError(f"source: no conversations in {part.where}; {counts or 'it has no rows'}")
    if set(left_out) - {_FILTERED}:
        warnings.warn(f"{part.where}: left out {counts}", stacklevel=2)
    for note, count in notes.items():
        warnings.warn(f"{part.where}: {count} rows {note}", stacklevel=2)


def _select(conversation: Conversation, row: Row, *, config: SourceConfig, notes: Counter[str]) -> None:
    """Raises SkipRow for a conversation that the settings do not ask for."""
    wanted = dict(config.equals)
    if config.split is not None and config.hub_id is None:
        if "split" in row:
            wanted["split"] = config.split
        else:
            notes[f"have no column `split` and are taken as split '{config.split}'"] += 1
    for column, values in wanted.items():
        if column not in row:
            raise SkipRow(f"no column '{column}' to select by")
        if row[column] not in (values if isinstance(values, list) else [values]):
            raise SkipRow(_FILTERED)
    turns = sum(message.role == "user" for message in conversation.messages)
    length = sum(len(message.content) for message in conversation.messages)
    fits = config.max_turns is None or turns <= config.max_turns
    if turns < config.min_turns or not fits or (config.max_characters is not None and length > config.max_characters):
        raise SkipRow(_FILTERED)
