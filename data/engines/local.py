# The target, loaded in this process, answers. Batches are fixed lists of prompts of similar length, each with its own
# seed, and every finished batch is appended to `OUT.part`.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.engines.answers import Answers, Part, Progress, RegenerateConfig, Row, hash_of, history, part_of, write
from drafters.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.target import FrozenTarget

__all__ = ["LocalEngine", "regenerate", "resume_key"]


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """The target in this process. It has no settings of its own: `batch_size` and `device` stand beside the others."""

    def run(
        self, rows: list[Row], out: Path, config: RegenerateConfig, *, target: Mapping[str, Any], device: str | None
    ) -> None:
        """Load the target of a node of conf/target/ and let it answer."""
        from drafters.door import load_target
        from drafters.progress import progress_bar

        loaded = load_target(target, device=device)
        with progress_bar("answering", unit="answers", rate="tokens") as advance:
            regenerate(loaded, rows, out, config, progress=advance)


def regenerate(
    target: "FrozenTarget",
    rows: list[Row],
    out: Path,
    config: RegenerateConfig,
    *,
    progress: Progress = lambda done, total, tokens: None,
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
    part = Part(part_of(out), resume_key(target, rows, config), fields=("batch", "answers"))
    finished = {entry["batch"]: entry["answers"] for entry in part.entries}
    answers: Answers = {}
    total = sum(len(row["turns"]) for row in rows)
    for number, (turn, members) in enumerate(_batches(rows, config.batch_size)):
        done, tokens = finished.get(number), 0
        if done is None:
            prompts = [encoder.prompt(history(rows[i], answers, i, turn))[-room:] for i in members]
            done, tokens = _answer(target, prompts, config, seed=config.seed + number)
            part.add(batch=number, answers=done)
        answers.update({(index, turn): answer for index, answer in zip(members, done, strict=True)})
        progress(len(answers), total, tokens)
    write(out, rows, answers, answered_by=target.spec.weights_hash)
    part.path.unlink()


def resume_key(target: "FrozenTarget", rows: list[Row], config: RegenerateConfig) -> str:
    """A hash of all that the answers depend on."""
    settings = vars(config)
    if not config.template_kwargs:  # without them keys stay what they were before there were any
        settings = {name: value for name, value in settings.items() if name != "template_kwargs"}
    return hash_of([rows, settings, target.spec.weights_hash, target.spec.template_hash])


def _batches(rows: list[Row], size: int) -> Iterator[tuple[int, list[int]]]:
    for turn in range(max(len(row["turns"]) for row in rows)):
        members = [i for i, row in enumerate(rows) if len(row["turns"]) > turn]
        members.sort(key=lambda i: (sum(len(t) for t in rows[i]["turns"][: turn + 1]), i))
        for start in range(0, len(members), size):
            yield turn, members[start : start + size]


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
