# Door: the target answers the prompts itself. Batches are fixed lists of prompts of similar length, each with its own
# seed, and every finished batch is appended to `OUT.part`: killed at any moment, the same command goes on with the next
# batch and ends with the same file.
#
#     python -m data.regenerate prompts=FILE out=FILE

import fcntl
import gzip
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from drafters.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.target import FrozenTarget
    from drafters.types import Message

__all__ = ["FilesConfig", "RegenerateConfig", "claim", "read_prompts", "regenerate", "run"]

CONF = str(Path(__file__).resolve().parents[1] / "conf")
# Columns of a row that are read or written here; all others are kept as they are.
KNOWN = (
    *("id", "system", "turns", "messages", "conversations", "prompt", "response"),
    *("finish_reason", "finish_reasons", "answered_by"),
)


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


def regenerate(
    target: "FrozenTarget",
    rows: list[dict[str, Any]],
    out: Path,
    config: RegenerateConfig,
    *,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> None:
    """Answer every user turn of `rows` (`id`, `turns`, perhaps `system`) and write them to `out` (.jsonl or .jsonl.gz).

    Turn k of all rows is answered before turn k+1, with the target's own earlier answers in the history.
    `progress(answers done, answers in all, new tokens)` is called after each batch. Raises DataError when `out.part`
    belongs to other prompts, settings or another target, ConfigError when the settings leave no room for a prompt.
    """
    from drafters.chat import ChatEncoder

    room = target.spec.max_position - config.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens: got {config.max_new_tokens}, which leaves no room for a prompt; "
            f"accepted: less than the target's {target.spec.max_position} positions"
        )
    encoder = ChatEncoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs=config.template_kwargs)
    part = _Part(_part_of(out), _key(target, rows, config))
    answers: dict[tuple[int, int], dict[str, str]] = {}
    total = sum(len(row["turns"]) for row in rows)
    for number, (turn, members) in enumerate(_batches(rows, config.batch_size)):
        done, tokens = part.get(number), 0
        if done is None:
            prompts = [encoder.prompt(_history(rows[i], answers, i, turn))[-room:] for i in members]
            done, tokens = _answer(target, prompts, config, seed=config.seed + number)
            part.add(number, done)
        answers.update({(index, turn): answer for index, answer in zip(members, done, strict=True)})
        progress(len(answers), total, tokens)
    _write(out, rows, answers, weights_hash=target.spec.weights_hash)
    part.path.unlink()


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Hold `out` for this process. Raises DataError when it cannot be written, or another process holds it."""
    part = _part_of(out)
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


def _part_of(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def _batches(rows: list[dict[str, Any]], size: int) -> Iterator[tuple[int, list[int]]]:
    for turn in range(max(len(row["turns"]) for row in rows)):
        members = [i for i, row in enumerate(rows) if len(row["turns"]) > turn]
        members.sort(key=lambda i: (sum(len(t) for t in rows[i]["turns"][: turn + 1]), i))
        for start in range(0, len(members), size):
            yield turn, members[start : start + size]


def _history(
    row: dict[str, Any], answers: dict[tuple[int, int], dict[str, str]], index: int, turn: int
) -> "list[Message]":
    """What was said in `row`, number `index`, up to its user turn `turn`, included."""
    from drafters.types import Message

    turns = row["turns"]
    history = [Message(role="system", content=row["system"])] if row.get("system") else []
    for t in range(turn):
        history.append(Message(role="user", content=turns[t]))
        history.append(Message(role="assistant", content=answers[index, t]["content"]))
    return [*history, Message(role="user", content=turns[turn])]


def _answer(
    target: "FrozenTarget", prompts: "list[Tensor]", config: RegenerateConfig, *, seed: int
) -> tuple[list[dict[str, str]], int]:
    """Answers as message fields, and the number of tokens drawn."""
    from drafters.decoding.loop import DecodeConfig, decode
    from drafters.types import Sampling

    decoding = DecodeConfig(
        max_new_tokens=config.max_new_tokens,
        sampling=Sampling(temperature=config.temperature, top_p=config.top_p),
        seed=seed,
        batch_size=len(prompts),
    )
    made = decode(target, None, prompts, decoding)
    stop = set(target.spec.eos_ids)
    texts = [target.tokenizer.decode([t for t in g.tokens if t not in stop]) for g in made]
    done = [{"content": text, "finish_reason": g.finish_reason} for text, g in zip(texts, made, strict=True)]
    return done, sum(len(g.tokens) for g in made)


class _Part:
    """Finished batches, one JSON line each under a first line with the key; a torn last line is cut off."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._done: dict[int, list[dict[str, str]]] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"key": key}) + "\n")
            return
        try:
            head, *entries = map(json.loads, whole)
            self._done = {entry["batch"]: entry["answers"] for entry in entries}
            same = head["key"] == key
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"out: {path} is damaged ({error}); remove it to begin anew") from error
        if not same:
            raise DataError(
                f"out: {path} was begun with other prompts, settings or another target; "
                "finish it with those, remove it, or choose another out="
            )
        os.truncate(path, sum(map(len, whole)))

    def get(self, batch: int) -> list[dict[str, str]] | None:
        return self._done.get(batch)

    def add(self, batch: int, answers: list[dict[str, str]]) -> None:
        with self.path.open("ab") as stream:
            stream.write(json.dumps({"batch": batch, "answers": answers}).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def _key(target: "FrozenTarget", rows: list[dict[str, Any]], config: RegenerateConfig) -> str:
    settings = vars(config)
    if not config.template_kwargs:  # without them keys stay what they were before there were any
        settings = {name: value for name, value in settings.items() if name != "template_kwargs"}
    what = [rows, settings, target.spec.weights_hash, target.spec.template_hash]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _write(
    out: Path, rows: list[dict[str, Any]], answers: dict[tuple[int, int], dict[str, str]], *, weights_hash: str
) -> None:
    lines = []
    for i, row in enumerate(rows):
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(row["turns"]):
            messages += [{"role": "user", "content": text}, {"role": "assistant", **answers[i, turn]}]
        kept = {k: v for k, v in row.items() if k != "turns"}
        made = {**kept, "answered_by": weights_hash, "messages": messages}
        lines.append(json.dumps(made, ensure_ascii=False, default=str))
    text = ("\n".join(lines) + "\n").encode()
    temp = out.with_name(out.name + ".tmp")
    with temp.open("wb") as stream:
        stream.write(gzip.compress(text, 9, mtime=0) if out.suffix == ".gz" else text)
        os.fsync(stream.fileno())
    temp.replace(out)


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
    """Read the prompts, load the target, answer."""
    from drafters.config import to_plain, typed
    from drafters.door import load_target, progress_bar, say

    plain = to_plain(cfg)
    config, files = (
        typed(schema, {f.name: plain[f.name] for f in fields(schema)}, key="")
        for schema in (RegenerateConfig, FilesConfig)
    )
    if config.temperature == 0 and config.top_p < 1:
        warnings.warn(f"top_p: {config.top_p} is ignored at temperature 0", stacklevel=2)
    out = Path(files.out).expanduser()
    with claim(out):
        if out.exists() and not files.overwrite:
            raise DataError(f"out: {out} is finished; remove it, choose another out=, or overwrite=true to replace it")
        rows = read_prompts(Path(files.prompts).expanduser(), limit=files.limit)
        target = load_target(plain["target"], device=files.device)
        with progress_bar("answers", unit="tokens/s") as advance:
            regenerate(target, rows, out, config, progress=advance)
    say(f"Written: {out}")


@hydra.main(version_base="1.3", config_path=CONF, config_name="regenerate")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        run(cfg)


if __name__ == "__main__":
    main()
