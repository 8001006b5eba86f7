# What an export costs, by real decodes. The drafter as it was trained and as it was read back take turns on the same
# prompts, so that what makes a prompt easy or a minute slow cancels.

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from drafters.decoding import metrics
from drafters.decoding.render import Section, number
from drafters.decoding.runner import Execution, Run, Runner

if TYPE_CHECKING:
    from drafters.decoding.dialogue import Dialogue
    from drafters.decoding.loop import DecodeConfig
    from drafters.heads.base import Drafter
    from drafters.target import FrozenTarget

__all__ = ["Cost", "Kept", "cost_section", "kept_section", "measure_kept"]

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Accepted lengths of one source, bonus included. `share` is what is left of (accepted length - 1), with its paired
    95 % interval by prompt; NaN where nothing was accepted before, or of a single prompt."""

    source: str
    prompts: int
    before: float
    after: float
    share: float
    share_low: float
    share_high: float


@dataclass(frozen=True)
class Cost:
    """Of one of the two: bytes on the disk, seconds to load, and decoding in this package's loop: milliseconds of
    drafting a round and of a whole output token."""

    num_bytes: int
    load_s: float
    draft_ms: float
    token_ms: float


def measure_kept(
    target: "FrozenTarget",
    before: "Drafter",
    after: "Drafter",
    dialogues: Sequence["Dialogue"],
    config: "DecodeConfig",
    execution: Execution,
) -> tuple[list[Kept], dict[str, tuple[float, float]]]:
    """What is kept, by source and, of several, of all; and by name the milliseconds of drafting and of a token."""
    runner = Runner(target, {BEFORE: before, AFTER: after}, config, execution)
    runs = runner.turns("what is kept", dialogues, [BEFORE, AFTER], {})
    sums: dict[str, dict[int, tuple[str, int, int]]] = {}
    for name, found in runs.items():
        for run in found:
            for item, row in zip(run.unit.items, run.rows, strict=True):
                full = metrics.full_rounds(row.rounds)
                tokens = sum(r.accepted + 1 for r in full)
                sums.setdefault(name, {})[item.number] = item.source, tokens, len(full)
    sources = list(dict.fromkeys(source for source, _, _ in sums[BEFORE].values()))
    groups = [[source] for source in sources] + ([sources] if len(sources) > 1 else [])
    kept = [_kept(sums, group, seed=config.seed) for group in groups]
    return kept, {name: _times(found) for name, found in runs.items()}


def _kept(sums: Mapping[str, Mapping[int, tuple[str, int, int]]], sources: Sequence[str], *, seed: int) -> Kept:
    numbers = [n for n, (source, _, _) in sums[BEFORE].items() if source in sources]
    rows = [(*sums[AFTER][n][1:], *sums[BEFORE][n][1:]) for n in numbers]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    after, before = (totals[i] / totals[i + 1] if totals[i + 1] else math.nan for i in (0, 2))
    low, high = metrics.bootstrap_ci(rows, _share, seed=seed)
    return Kept(
        source=sources[0] if len(sources) == 1 else "all",
        prompts=len(rows),
        before=before,
        after=after,
        share=(after - 1) / (before - 1) if before > 1 else math.nan,
        share_low=low,
        share_high=high,
    )


def _share(sums_RC: Tensor) -> Tensor:
    """(tau_after - 1) / (tau_before - 1) of the sums (tokens, rounds) after and before."""
    return (sums_RC[:, 0] / sums_RC[:, 1] - 1) / (sums_RC[:, 2] / sums_RC[:, 3] - 1)


def _times(runs: Sequence[Run]) -> tuple[float, float]:
    rounds = sum(run.timings.steps for run in runs)
    tokens = sum(run.num_tokens for run in runs)
    draft_s = sum(run.timings.draft_s for run in runs)
    decode_s = sum(run.timings.decode_s for run in runs)
    return 1000 * draft_s / max(1, rounds), 1000 * decode_s / max(1, tokens)


def kept_section(kept: Sequence[Kept]) -> Section:
    """The table of accepted lengths."""
    return Section(
        title="Accepted length, before and after",
        header=["source", "prompts", "before", "after", "kept of (length - 1)"],
        rows=[
            [one.source, str(one.prompts), number(one.before, ".3f"), number(one.after, ".3f"), _percent(one)]
            for one in kept
        ],
        notes=["Paired by prompt, temperature 0, bonus token included, at the full block; 95 % intervals by prompt."],
    )


def cost_section(costs: Mapping[str, Cost]) -> Section:
    """The table of bytes and times."""
    return Section(
        title="What it costs",
        header=["", "MB", "load, s", "ms a draft", "ms a token"],
        rows=[
            [name, f"{one.num_bytes / 1e6:,.1f}", *(number(x, ".2f") for x in (one.load_s, one.draft_ms, one.token_ms))]
            for name, one in costs.items()
        ],
        notes=["Times of this package's own loop on this machine; an engine has its own."],
    )


def _percent(one: Kept) -> str:
    if math.isnan(one.share):
        return "-"
    text = f"{100 * one.share:.1f} %"
    if math.isnan(one.share_low):
        return text
    return f"{text} [{100 * one.share_low:.1f}, {100 * one.share_high:.1f}]"
