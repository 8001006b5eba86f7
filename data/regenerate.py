# The target answers the prompts itself (`python -m data.regenerate`). Batches are fixed lists of prompts of similar
# length, each with its own seed, and every finished batch is appended to `OUT.part`: killed at any moment, the same
# command goes on with the next batch and ends with the same file.

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from drafters.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.target import FrozenTarget
    from drafters.types import Message

__all__ = ["RegenerateConfig", "regenerate"]


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """How answers are drawn; every field changes the result, so all are part of the resume key."""

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 256
    batch_size: int = 128
    seed: int = 0


def regenerate(
    target: "FrozenTarget",
    rows: list[dict[str, Any]],
    out: Path,
    config: RegenerateConfig,
    *,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> None:
    """Answer every user turn of `rows` (`id`, `turns`) and write conversations to `out` (.jsonl.gz or .jsonl).

    Turn k of all rows is answered before turn k+1, with the target's own earlier answers in the history.
    `progress(answers done, answers in all, new tokens)` is called after each batch. Raises DataError when `out.part`
    belongs to other prompts, settings or another target, ConfigError when the settings leave no room for a prompt.
    """
    from drafters.chat import ChatEncoder

    room = target.spec.max_position - config.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"regenerate.max_new_tokens: got {config.max_new_tokens}, which leaves no room for a prompt; "
            f"accepted: less than the target's {target.spec.max_position} positions"
        )
    encoder = ChatEncoder(target.tokenizer, max_length=target.spec.max_position)
    part = _Part(out.with_name(out.name + ".part"), _key(target, rows, config))
    answers: dict[tuple[int, int], dict[str, str]] = {}
    total = sum(len(row["turns"]) for row in rows)
    for number, (turn, members) in enumerate(_batches(rows, config.batch_size)):
        done, tokens = part.get(number), 0
        if done is None:
            prompts = [encoder.prompt(_history(rows[i]["turns"], answers, i, turn))[-room:] for i in members]
            done, tokens = _answer(target, prompts, config, seed=config.seed + number)
            part.add(number, done)
        answers.update({(index, turn): answer for index, answer in zip(members, done, strict=True)})
        progress(len(answers), total, tokens)
    _write(out, rows, answers)
    part.path.unlink()


def _batches(rows: list[dict[str, Any]], size: int) -> Iterator[tuple[int, list[int]]]:
    for turn in range(max(len(row["turns"]) for row in rows)):
        members = [i for i, row in enumerate(rows) if len(row["turns"]) > turn]
        members.sort(key=lambda i: (sum(len(t) for t in rows[i]["turns"][: turn + 1]), i))
        for start in range(0, len(members), size):
            yield turn, members[start : start + size]


def _history(turns: list[str], answers: dict[tuple[int, int], dict[str, str]], row: int, turn: int) -> "list[Message]":
    """What was said in `row` up to its user turn `turn`, included."""
    from drafters.types import Message

    history = []
    for t in range(turn):
        history.append(Message(role="user", content=turns[t]))
        history.append(Message(role="assistant", content=answers[row, t]["content"]))
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
    what = [rows, vars(config), target.spec.weights_hash, target.spec.template_hash]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _write(out: Path, rows: list[dict[str, Any]], answers: dict[tuple[int, int], dict[str, str]]) -> None:
    lines = []
    for i, row in enumerate(rows):
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(row["turns"]):
            messages += [{"role": "user", "content": text}, {"role": "assistant", **answers[i, turn]}]
        kept = {k: v for k, v in row.items() if k != "turns"}
        lines.append(json.dumps({**kept, "messages": messages}, ensure_ascii=False))
    text = ("\n".join(lines) + "\n").encode()
    temp = out.with_name(out.name + ".tmp")
    with temp.open("wb") as stream:
        stream.write(gzip.compress(text, 9, mtime=0) if out.suffix == ".gz" else text)
        os.fsync(stream.fileno())
    temp.replace(out)


def read_prompts(path: Path, *, limit: int | None) -> list[dict[str, Any]]:
    """Rows with `id` and `turns`. Raises DataError naming the file and line at fault."""
    if not path.is_file():
        raise DataError(f"prompts: no file {path}; `python -m data.samples.prompts` writes the bundled ones")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"prompts: {path} line {number} is not JSON: {error}") from error
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise DataError(f"prompts: {path} line {number} needs `turns`, a list of user texts")
        rows.append({"id": f"{path.stem}-{number:05d}", **row})
    if not rows:
        raise DataError(f"prompts: {path} is empty")
    return rows[:limit]


@hydra.main(version_base=None, config_path="../conf", config_name="regenerate")
def main(cfg: DictConfig) -> None:
    """The door: load the target, answer, show progress."""
    from drafters.door import door, pick_device, progress_bar

    with door():
        from drafters.config import typed
        from drafters.target import FrozenTarget

        settings = {name: cfg[name] for name in RegenerateConfig.__dataclass_fields__}
        config = typed(RegenerateConfig, settings, key="regenerate")
        if config.max_new_tokens < 1 or config.batch_size < 1:
            raise ConfigError("regenerate: max_new_tokens and batch_size must be 1 or more")
        rows = read_prompts(Path(cfg.prompts), limit=cfg.limit)
        choice = {k: v for k, v in cfg.target.items() if k in ("weights", "sha256", "dtype", "mask_token")}
        target = FrozenTarget.load(**choice, device=pick_device(cfg.device))
        with progress_bar("answers", unit="tokens/s") as advance:
            regenerate(target, rows, Path(cfg.out), config, progress=advance)


if __name__ == "__main__":
    main()
