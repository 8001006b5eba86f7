# Door: the target answers prompts itself, in this process or behind a server (conf/engine/). What is finished lies in
# `OUT.part`: killed at any moment, the same command goes on with what is missing and ends with the same file.
#
#     python -m data.regenerate prompts=FILE out=FILE
#     python -m data.regenerate engine=openai engine.base_url=http://localhost:8000/v1 prompts=FILE out=FILE

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from data.command import begin, check_settings
from data.engines.answers import RegenerateConfig, claim, part_of
from drafters.errors import DataError

__all__ = ["FilesConfig", "read_prompts", "run"]

CONF = str(Path(__file__).resolve().parents[1] / "conf")
# Columns of a row that are read or written here; all others are kept as they are.
KNOWN = (
    *("id", "system", "turns", "messages", "conversations", "prompt", "response"),
    *("finish_reason", "finish_reasons", "answered_by"),
)


@dataclass(frozen=True, kw_only=True)
class FilesConfig:
    """What is read and written."""

    prompts: str
    out: str
    overwrite: bool = False
    limit: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: got {self.limit}; accepted: 1 or more, or null for all")
        if not self.out.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"out: got '{self.out}'; accepted: a name that ends with .jsonl or .jsonl.gz")


def read_prompts(path: Path, *, limit: int | None) -> list[dict[str, Any]]:
    """Rows with `id`, `turns` (user texts), perhaps `system`, and their other fields, of any file that can be a source.

    Warns of rows that are left out. Raises DataError naming the file and line at fault.
    """
    from data.sources.read import check_file
    from data.sources.shapes import SkipRow

    if not path.exists():
        raise DataError(f"prompts: no file {path}; `python -m data.samples.prompts` writes the bundled ones")
    check_file(path, key="prompts")
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for number, row in _numbered_rows(path):
        try:
            rows.append(_prompt_row(row, number=number, path=path))
        except SkipRow as reason:
            left_out[str(reason)] += 1
        if len(rows) == limit:
            break
    counts = ", ".join(f"{count} rows: {reason}" for reason, count in left_out.items())
    if not rows:
        raise DataError(f"prompts: nothing to answer in {path}; {counts or 'it is empty'}")
    if counts:
        warnings.warn(f"prompts: {path}: left out {counts}", stacklevel=2)
    return rows


def _numbered_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows by number from 1, that of the line in JSON lines."""
    from data.sources.read import file_rows, json_rows

    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return json_rows(path, key="prompts")
    return enumerate(file_rows(path, key="prompts"), start=1)


def _prompt_row(row: dict[str, Any], *, number: int, path: Path) -> dict[str, Any]:
    """A row of any shape as `turns`, without its answers. Raises SkipRow, and DataError for one that is malformed."""
    from data.sources.shapes import SkipRow, find_shape, to_conversation

    where = f"{path} line {number}"
    shape = find_shape(row, where=where, key="prompts")
    messages = to_conversation(row, shape=shape, number=number, source="", where=f"prompts: {where}").messages
    if {message.role for message in messages} - {"system", "user", "assistant"}:
        raise SkipRow("roles other than system, user and assistant")
    turns = [message.content for message in messages if message.role == "user"]
    if not turns or not all(turns):
        raise SkipRow("no user message, or an empty one")
    system = [message.content for message in messages if message.role == "system"][:1]
    name = row["id"] if row.get("id") is not None else f"{Path(path.name.removesuffix('.gz')).stem}-{number:05d}"
    kept = {column: value for column, value in row.items() if column not in KNOWN}
    return {"id": name, **kept, **({"system": system[0]} if system else {}), "turns": turns}


def run(cfg: DictConfig) -> None:
    """Read the prompts, let the engine answer."""
    from drafters.config import build_config, to_plain, typed
    from drafters.door import say
    from drafters.stopping import keeping

    plain = to_plain(cfg)
    config, files = (
        typed(schema, {f.name: plain[f.name] for f in fields(schema)}, key="")
        for schema in (RegenerateConfig, FilesConfig)
    )
    _, engine = build_config(plain["engine"], key="engine")
    if config.temperature == 0 and config.top_p < 1:
        warnings.warn(f"top_p: {config.top_p} is ignored at temperature 0", stacklevel=2)
    out = Path(files.out).expanduser()
    with keeping(f"finished answers are kept in {part_of(out)}; the same command goes on"), claim(out):
        if out.exists() and not files.overwrite:
            raise DataError(f"out: {out} is finished; remove it, choose another out=, or overwrite=true to replace it")
        rows = read_prompts(Path(files.prompts).expanduser(), limit=files.limit)
        engine.run(rows, out, config, target=plain["target"], device=files.device)
    say(f"Written: {out}")


@hydra.main(version_base="1.3", config_path=CONF, config_name="regenerate")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        check_settings(cfg, "regenerate")
        run(cfg)


if __name__ == "__main__":
    begin(main)
