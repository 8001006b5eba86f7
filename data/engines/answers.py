# What the engines of `python -m data.regenerate` share: how answers are drawn, who may write a file, the unfinished
# file `OUT.part` that survives a kill at any moment, the messages said so far, and the finished file.

import fcntl
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.errors import DataError
from drafters.plain_json import parse

if TYPE_CHECKING:
    from drafters.types import Message

__all__ = ["Answers", "Part", "Progress", "RegenerateConfig", "Row", "claim", "hash_of", "history", "part_of", "write"]

Row = dict[str, Any]
# Of (number of a row, number of a turn): the fields of the assistant's message, `content` and `finish_reason`.
Answers = dict[tuple[int, int], dict[str, str]]
# Called with (answers done, answers in all, new tokens).
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """How answers are drawn; every field changes the result, so all are part of the resume key."""

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 256
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens", self.max_new_tokens), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{name}: got {value}; accepted: 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: got {self.temperature}; accepted: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}; accepted: more than 0, at most 1")


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Hold `out` for this process. Raises DataError when it cannot be written, or another process holds it."""
    part = part_of(out)
    if out.is_dir():
        raise DataError(f"out: {out} is a folder; accepted: the name of a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stream = part.open("ab")
    except OSError as error:
        raise DataError(f"out: cannot write {part}: {error.strerror}; choose another out=") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(stream.fileno()), part.stat()):
                raise FileNotFoundError
        except OSError as error:  # held, or finished and taken away between opening and locking
            raise DataError(f"out: another process is writing {out}; wait for it, or choose another out=") from error
        try:
            yield
        finally:
            if part.exists() and part.stat().st_size == 0:
                part.unlink()


def part_of(out: Path) -> Path:
    """The unfinished file of `out`."""
    return out.with_name(out.name + ".part")


class Part:
    """Finished work in `path`, one JSON object a line under a first line with `key`; a torn last line is cut off.

    Raises DataError when the file is damaged, or was begun with another key.
    """

    def __init__(self, path: Path, key: str, *, fields: tuple[str, ...]) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"key": key}) + "\n")
            return
        try:
            head, *entries = map(parse, whole)
            self.entries = [{name: entry[name] for name in fields} for entry in entries]
            same = head["key"] == key
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"out: {path} is damaged ({error}); remove it to begin anew") from error
        if not same:
            raise DataError(
                f"out: {path} was begun with other prompts, settings, another target or another model of the server; "
                "finish it with those, remove it, or choose another out="
            )
        os.truncate(path, sum(map(len, whole)))

    def add(self, **entry: Any) -> None:
        """Append an entry; it is on the disk when this returns."""
        with self.path.open("ab") as stream:
            stream.write(json.dumps(entry).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def hash_of(what: Any) -> str:
    """The sha256 of what a result depends on."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def history(row: Row, answers: Answers, index: int, turn: int) -> "list[Message]":
    """What was said in `row`, number `index`, up to its user turn `turn`, included."""
    from drafters.types import Message

    turns = row["turns"]
    said = [Message(role="system", content=row["system"])] if row.get("system") else []
    for t in range(turn):
        said.append(Message(role="user", content=turns[t]))
        said.append(Message(role="assistant", content=answers[index, t]["content"]))
    return [*said, Message(role="user", content=turns[turn])]


def write(out: Path, rows: list[Row], answers: Answers, *, answered_by: str | None) -> None:
    """Write the rows whose turns are all answered, in their order, to `out`; it appears whole or not at all.

    `answered_by`: the weights hash of the target that answered, None where it is not known.
    """
    lines = []
    for i, row in enumerate(rows):
        if any((i, turn) not in answers for turn in range(len(row["turns"]))):
            continue
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(row["turns"]):
            messages += [{"role": "user", "content": text}, {"role": "assistant", **answers[i, turn]}]
        kept = {k: v for k, v in row.items() if k != "turns"}
        lines.append(
            json.dumps({**kept, "answered_by": answered_by, "messages": messages}, ensure_ascii=False, default=str)
        )
    text = ("\n".join(lines) + "\n").encode()
    temp = out.with_name(out.name + ".tmp")
    with temp.open("wb") as stream:
        stream.write(gzip.compress(text, 9, mtime=0) if out.suffix == ".gz" else text)
        os.fsync(stream.fileno())
    temp.replace(out)
