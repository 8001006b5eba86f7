# What a half-done measurement has so far, so that the same command goes on from there. One line for each unit of work,
# on the disk before the next unit begins; every rank writes a file of its own and reads those of all.

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from drafters.checkpoint import write_error
from drafters.decoding.records import Generation, Round, RoundCost, RunTimings
from drafters.distributed import Ranks
from drafters.errors import CheckpointError, DataError, DraftersError
from drafters.files import flush
from drafters.plain_json import parse

__all__ = ["Journal", "UnitKey", "UnitResult"]

SCHEMA = 3
NAME = re.compile(r"progress(\.rank\d+)?\.jsonl")


class UnitKey(NamedTuple):
    """A unit of work: what is decoded together. `contestant` names the drafter or the baseline."""

    phase: str
    contestant: str
    turn: int
    prompts: tuple[int, ...]


@dataclass
class UnitResult:
    """What decoding a unit gave."""

    rows: list[Generation]
    timings: RunTimings


class Journal:
    """The units done of one measurement, kept in `folder/progress.jsonl` (other ranks: `progress.rank<n>.jsonl`).

    `fingerprint` is a hash of everything that the results depend on. With `resume`, what the files of `folder` hold is
    taken over, whatever number of ranks wrote them; without, they are removed. A last line that a kill or a full disk
    cut is dropped. All ranks make their Journal at the same time.

    Raises DataError when the files belong to another measurement or an earlier line is damaged, CheckpointError when
    the disk does not take a line or another process measures into the folder.
    """

    def __init__(self, folder: Path, fingerprint: str, *, resume: bool, ranks: Ranks | None = None) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._ranks = ranks or Ranks()
        self._units: dict[UnitKey, Any] = {}
        self._notes: dict[str, Any] = {}
        self._path = folder / _name(self._ranks.rank)
        self._claimed = _claim(folder) if self._ranks.is_first else None
        try:
            self._open(resume)
        except DraftersError:
            self._release()
            raise

    def _open(self, resume: bool) -> None:
        if not resume and self._ranks.is_first:
            self._unlink()
        self._ranks.barrier()
        own_bytes = self._read_all()
        # Nobody writes before all have read, or ranks would know of different units.
        self._ranks.barrier()
        try:
            self._stream = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
            self._stream.truncate(own_bytes)
            self._stream.seek(own_bytes)
            flush(self._folder)
        except OSError as error:
            raise write_error(self._path, error) from error
        if not own_bytes:
            self._append({"schema": SCHEMA, "fingerprint": self._fingerprint})

    def _release(self) -> None:
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of units done."""
        return len(self._units)

    def get(self, key: UnitKey) -> UnitResult | None:
        """What a unit gave, equal to what was added; None when it is not done."""
        stored = self._units.get(key)
        if stored is None:
            return None
        rows = [Generation(**{**row, "rounds": [_round(values) for values in row["rounds"]]}) for row in stored["rows"]]
        costs = [RoundCost(*values) for values in stored["timings"]["rounds"]]
        return UnitResult(rows, RunTimings(**{**stored["timings"], "rounds": costs}))

    def add(self, key: UnitKey, result: UnitResult) -> None:
        """Store a unit; it is on the disk when this returns."""
        body = {"unit": key, "rows": [vars(row) for row in result.rows], "timings": vars(result.timings)}
        self._take(self._append(body))

    def get_note(self, name: str) -> Any:
        """A noted value, as JSON gives it back (tuples are lists); None when there is none."""
        return self._notes.get(name)

    def note(self, name: str, value: Any) -> None:
        """Store a small JSON value under a name. Where ranks differ, a resumed measurement sees the first rank's."""
        self._take(self._append({"note": name, "value": value}))

    def close(self) -> None:
        """Let go of the file, which stays for a resume, and of the folder."""
        self._stream.close()
        self._release()

    def remove(self) -> None:
        """Delete the files: the report is written."""
        self._stream.close()
        if self._ranks.is_first:
            self._unlink()
        self._release()

    def _unlink(self) -> None:
        for path in self._files():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"out: {path} cannot be removed: {error.strerror}; choose another out="
                ) from error

    def _files(self) -> list[Path]:
        """The journals of all ranks; the first rank's is the last."""
        found = [path for path in self._folder.iterdir() if NAME.fullmatch(path.name)]
        # "progress.rank1.jsonl" > "progress.jsonl": in reverse, notes of the first rank are read last and stay.
        return sorted(found, key=lambda path: path.stem, reverse=True)

    def _read_all(self) -> int:
        """Take in every file, one's own and the first rank's last; how many bytes of one's own are sound."""
        own_bytes = 0
        for path in self._files():
            num_bytes = 0
            for number, (body, size) in enumerate(_lines(path)):
                if number == 0:
                    self._check_header(path, body)
                else:
                    self._take(body)
                num_bytes += size
            if path.name == _name(self._ranks.rank):
                own_bytes = num_bytes
        return own_bytes

    def _check_header(self, path: Path, header: Any) -> None:
        expected = {"schema": SCHEMA, "fingerprint": self._fingerprint}
        if header != expected:
            what = "of another version" if header.get("schema") != SCHEMA else "with other settings, prompts or weights"
            raise DataError(
                f"resume: {path} holds a measurement {what}; resume=true goes on with the command and versions that "
                "it was begun with; resume=false removes it and measures anew"
            )

    def _take(self, body: Any) -> None:
        if "note" in body:
            self._notes[body["note"]] = body["value"]
        else:
            phase, contestant, turn, prompts = body["unit"]
            self._units[UnitKey(phase, contestant, turn, tuple(prompts))] = body

    def _append(self, body: Any) -> Any:
        """Write a line and wait for the disk; the body as a reader will see it."""
        text = json.dumps(body, allow_nan=False)
        rest = memoryview(f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n'.encode())
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise write_error(self._path, error) from error
        return json.loads(text)


def _claim(folder: Path) -> int:
    """Hold the folder for this measurement, as an open descriptor. Raises CheckpointError when it cannot be made, or
    another process measures into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise write_error(folder, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"out: another process measures into {folder}; wait for it, or choose another out="
        ) from error
    return descriptor


def _name(rank: int) -> str:
    return f"progress.rank{rank}.jsonl" if rank else "progress.jsonl"


def _lines(path: Path) -> Iterator[tuple[Any, int]]:
    """The body and the size in bytes of every sound line. Raises DataError when another than the last is damaged."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"resume: {path} cannot be read: {error.strerror}; resume=false measures anew") from error
    for number, line in enumerate(lines, start=1):
        body = _checked(line)
        if body is not None:
            yield body, len(line)
        elif number < len(lines):
            raise DataError(
                f"resume: line {number} of {path} is damaged; remove the file to measure its part again, or "
                "resume=false to measure anew"
            )


def _checked(line: bytes) -> Any:
    """The body of a whole line with the right checksum, else None."""
    try:
        record = parse(line)
        body = record["body"]
        is_sound = line.endswith(b"\n") and zlib.crc32(json.dumps(body).encode()) == record["crc32"]
    except (ValueError, KeyError, TypeError):
        return None
    return body if is_sound else None


def _round(values: list[Any]) -> Round:
    return Round._make(tuple(value) if isinstance(value, list) else value for value in values)
