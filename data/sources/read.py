# Rows of files and hub data sets. JSON is read by the standard library, row by row as it stands: `datasets` gives the
# values of a field one type, guessed from the first ones, so that answers that look like dates become dates. The other
# formats, which carry their types, and the hub are read by `datasets`. Files are streamed, nothing is copied into its
# cache. Every exception becomes one DataError, which names the file and, for JSON, the line.

import glob
import gzip
import json
import logging
import random
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, disable_progress_bars, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import hf_hub_download

from data.sources.config import SourceConfig
from drafters.errors import DataError
from drafters.progress import is_terminal

__all__ = ["Row", "check_file", "file_rows", "hub_rows", "json_rows", "numbered"]

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


def check_file(path: Path, *, key: str = "source.path") -> None:
    """Raises DataError when `path` cannot be a source: missing, a folder, empty, of an unknown format. `key` is the
    setting that names it."""
    if not path.exists():
        raise DataError(f"{key}: no file '{path}' (looked in {path.absolute().parent}); give one that exists")
    if not path.is_file():
        hint = "; give its files as a list: source.path=[a.jsonl,b.jsonl]" if key == "source.path" else ""
        raise DataError(f"{key}: '{path}' is not a file{hint}")
    _format(path, key=key)
    if path.stat().st_size == 0:
        raise DataError(f"{key}: '{path}' is empty; give a file with conversations")


def file_rows(path: Path, *, key: str = "source.path") -> Iterator[Row]:
    """Rows of one file. Raises DataError when it is damaged, with the line where JSON is malformed."""
    kind = _format(path, key=key)
    if kind == "json":
        yield from (row for _, row in json_rows(path, key=key))
        return
    try:
        # Names with brackets or stars would be taken for patterns.
        yield from load_dataset(kind, data_files=[glob.escape(str(path))], split="train", streaming=True)
    except (DatasetsError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{key}: '{path}' cannot be read as {kind}: {_first_line(error)}") from error


def json_rows(path: Path, *, key: str = "source.path") -> Iterator[tuple[int, Row]]:
    """(number, row): of JSON lines the line's, of an array, which is read whole, the element's. Raises DataError."""
    where = f"{key}: '{path}'"
    try:
        with _open(path) as file:
            if _holds_array(path):
                for number, value in enumerate(json.load(file), start=1):
                    yield number, _row(value, where=f"{where} element {number}")
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parsed(line, where=f"{where} line {number}")
    except json.JSONDecodeError as error:
        raise DataError(f"{where} line {error.lineno}: malformed JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{where} cannot be read as json: it is nested too deep") from error
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise DataError(f"{where} cannot be read as json: {_first_line(error)}") from error


def hub_rows(config: SourceConfig) -> Iterable[Row]:
    """The rows of a hub data set. Raises DataError when it is not there, or not reachable."""
    hub_id, split = str(config.hub_id), config.split or "train"
    if not is_terminal():
        disable_progress_bars()  # they are redrawn by carriage returns, which a log would keep
    try:
        if config.files:
            paths = [
                Path(hf_hub_download(hub_id, name, repo_type="dataset", revision=config.revision))
                for name in config.files
            ]
            for path in paths:
                check_file(path, key="source.files")
            return (row for path in paths for row in file_rows(path, key="source.files"))
        return load_dataset(hub_id, config.subset, split=split, revision=config.revision, streaming=config.streaming)
    except (DatasetsError, OSError, RuntimeError, ValueError) as error:  # RuntimeError: it has a loading script
        part = f"files {', '.join(config.files)}" if config.files else f"subset {config.subset}, split {split}"
        raise DataError(
            f"source.hub_id: cannot load '{hub_id}' ({part}): {_first_line(error)}; check the names and the "
            "connection, name the files to read in source.files, or use a local copy: source.hub_id=null "
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


def _format(path: Path, *, key: str) -> str:
    for suffix, kind in _FORMATS.items():
        if path.name.endswith(suffix):
            return kind
    raise DataError(f"{key}: unknown format of '{path}'; accepted: {', '.join(_FORMATS)}")


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _holds_array(path: Path) -> bool:
    with _open(path) as file:
        return file.read(1) == b"["


def _parsed(line: bytes, *, where: str) -> Row:
    try:
        return _row(json.loads(line), where=where)
    except RecursionError as error:
        raise DataError(f"{where}: its JSON is nested too deep") from error
    except ValueError as error:
        raise DataError(f"{where}: malformed JSON: {error}; accepted: one object a line, or an array") from error


def _row(value: Any, *, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
