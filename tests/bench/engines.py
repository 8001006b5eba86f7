# What the benchmarks of engines share: our own rounds on prompts, kept in a file, and accepted lengths side by side.

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.prompts import PromptConfig, prompt_encoder, source_prompts
from data.sources import SourceConfig
from drafters.checkpoint import load_drafter
from drafters.contestants import find_entries, target_node
from drafters.decoding import metrics
from drafters.decoding.loop import DecodeConfig, decode
from drafters.door import load_target
from drafters.weights import resolve
from export.source import Source, open_source


@dataclass(frozen=True)
class Run:
    """A run whose exports are served: its drafter, and the settings of its target."""

    source: Source
    target: dict[str, Any]

    @classmethod
    def of(cls, folder: str) -> "Run":
        (entry,) = find_entries([folder], {}, key="run")
        node = target_node([entry], None)
        target_folder = resolve(node["weights"], sha256=node.get("sha256"))
        return cls(open_source(entry.run.drafter, target_folder=target_folder), node)


def arguments(parser: argparse.ArgumentParser, *, each: int) -> None:
    """What is measured, and where it is kept."""
    parser.add_argument("run")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--each", type=int, default=each, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)


def done(path: Path, work: Callable[[], Any]) -> Any:
    """What is in the file, after it was made where it was missing."""
    if not path.exists():
        path.write_text(json.dumps(work()))
    return json.loads(path.read_text())


def own_rounds(run: Run, paths: list[str], *, each: int, tokens: int, dtype: str) -> list[dict[str, Any]]:
    """Our own rounds on first turns, at temperature 0."""
    target = load_target({**run.target, "dtype": dtype}, device="cpu")
    drafter = load_drafter(run.source.folder, spec=target.spec, allow_other_target=True)
    encoder = prompt_encoder(target.tokenizer, max_length=target.spec.max_position, template_kwargs={})
    wanted = PromptConfig(num_prompts=each, turns=1)
    dialogues, _ = source_prompts(SourceConfig(path=paths), encoder, wanted, room=1024)
    prompts = [dialogue.encode(()) for dialogue in dialogues]
    rows = decode(target, drafter, prompts, DecodeConfig(max_new_tokens=tokens, batch_size=12))
    return [
        {
            "source": dialogue.source,
            "prompt": prompt.tolist(),
            "tokens": row.tokens,
            "rounds": [(r.accepted, r.proposed, r.full) for r in row.rounds],
        }
        for dialogue, prompt, row in zip(dialogues, prompts, rows, strict=True)
    ]


def own_sums(row: dict[str, Any], length: int) -> tuple[int, int]:
    """Tokens and rounds of those that no limit and no stop token cut, had every draft been cut to `length`."""
    full = [min(accepted, length) for accepted, _, is_full in row["rounds"] if is_full]
    return sum(full) + len(full), len(full)


def show_lengths(theirs: list[tuple[int, int]], ours: list[dict[str, Any]], length: int) -> None:
    """Accepted lengths on both sides from (tokens, rounds) of each prompt, and their ratio with its interval."""
    sums = [(*engine, *own_sums(row, length)) for engine, row in zip(theirs, ours, strict=True)]
    for source in [*dict.fromkeys(row["source"] for row in ours), "all"]:
        chosen = [one for one, row in zip(sums, ours, strict=True) if source in (row["source"], "all")]
        totals = [sum(column) for column in zip(*chosen, strict=True)]
        low, high = metrics.bootstrap_ci(chosen, metrics.ratio_of_rates, seed=0)
        engine, own = totals[0] / totals[1], totals[2] / totals[3]
        print(f"  {source:10s} {engine:.3f} against {own:.3f}: {engine / own:.3f} [{low:.3f}, {high:.3f}]", flush=True)
