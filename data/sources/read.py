# Rows of files and hub data sets, read by the `datasets` library. Files are streamed, so nothing is copied into its
# cache; its many exceptions become one DataError each, which names the file and, for JSON, the line.

import glob
import gzip
import json
import logging
import random
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError

from data.sources.config import SourceConfig
from drafters.errors import DataError

__all__ = ["Row", "check_file", "file_rows", "hub_rows", "numbered"]

Row = dict[str, Any]

_FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_SHUFFLE_BUFFER = 10_000

# Reading a local file must not call the hub, to count downloads, and wait for its time-out where there is no network.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
# The library logs a damaged file before it raises; our error says it once.
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)


def check_file(path: Path) -> None:
    """Raises DataError when `path` cannot be a source: missing, a folder, empty, of an unknown format."""
    if not path.exists():
        raise DataError(f"source.path: no file '{path}' (looked in {path.absolute().parent})")
    if not path.is_file():
        raise DataError(f"source.path: '{path}' is not a file; give its files as a list: source.path=[a.jsonl,b.jsonl]")
    _format(path)
    if path.stat().st_size == 0:
        raise DataError(f"source.path: '{path}' is empty")


def file_rows(path: Path) -> Iterator[Row]:
    """Rows of one file. Raises DataError when it is damaged, with the line where JSON is malformed."""
    kind = _format(path)
    try:
        if kind == "json" and _holds_array(path):
            yield from _array_rows(path)
            return
        try:
            # Names with brackets or stars would be taken for patterns.
            rows = load_dataset(kind, data_files=[glob.escape(str(path))], split="train", streaming=True)
        except StopIteration:  # a compressed file with nothing in it
            return
        yield from rows
    except (DatasetsError, EOFError, OSError, ValueError) as error:
        bad_line = _bad_line(path, error) if kind == "json" else None
        raise DataError(
            f"source.path: '{path}' {bad_line or f'cannot be read as {kind}: {_first_line(error)}'}"
        ) from error


def hub_rows(config: SourceConfig) -> Dataset | IterableDataset:
    """The rows of a hub data set. Raises DataError when it is not there, or not reachable."""
    split = config.split or "train"
    try:
        return load_dataset(
            config.hub_id, config.subset, split=split, revision=config.revision, streaming=config.streaming
        )
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"source.hub_id: cannot load '{config.hub_id}' (subset {config.subset}, split {split}): "
            f"{_first_line(error)}; check the names and the connection, or use a local copy: source=jsonl "
            "source.path=FILE"
        ) from error


def numbered(rows: Iterable[Row], *, seed: int | None, streaming: bool) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row), shuffled by `seed` if there is one: within a buffer when streaming, else fully."""
    if seed is None:
        yield from enumerate(rows, start=1)
        return
    generator = random.Random(seed)
    if isinstance(rows, Dataset):
        order = list(range(len(rows)))
        generator.shuffle(order)
        yield from ((i + 1, rows[i]) for i in order)
        return
    pool: list[tuple[int, Row]] = []
    for item in enumerate(rows, start=1):
        if not streaming or len(pool) < _SHUFFLE_BUFFER:
            pool.append(item)
            continue
        k = generator.randrange(len(pool))
        yield pool[k]
        pool[k] = item
    generator.shuffle(pool)
    yield from pool


def _format(path: Path) -> str:
    for suffix, kind in _FORMATS.items():
        if path.name.endswith(suffix):
            return kind
    raise DataError(f"source.path: unknown format of '{path}'; accepted: {', '.join(_FORMATS)}")


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _holds_array(path: Path) -> bool:
    with _open(path) as file:
        return file.read(1) == b"["


def _array_rows(path: Path) -> list[Row]:
    """Rows of a JSON array, which is read whole. The library would do so too, but where the values of a field differ
    in type it hands out some as JSON text."""
    with _open(path) as file:
        rows = json.load(file)
    wrong = [number for number, row in enumerate(rows, start=1) if not isinstance(row, dict)]
    if wrong:
        raise DataError(f"source.path: '{path}' element {wrong[0]}: expected a JSON object")
    return rows


def _bad_line(path: Path, error: Exception) -> str | None:
    """What is wrong with the first line that is not a JSON object; None when every line is one."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}: malformed JSON: {error}"
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as reason:
                    return f"line {number}: malformed JSON: {reason}"
                if not isinstance(value, dict):
                    return f"line {number}: expected a JSON object, got {type(value).__name__}"
    except (EOFError, OSError):
        return None
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
