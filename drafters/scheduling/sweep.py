# What a fixed confidence threshold would do, for every threshold at once, from recorded rounds: drafts accepted and
# rejected a round, and, with a cost profile, tokens per second of a single request. Some engines take one such number.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.decoding.pictures import BLUE, GREY, RED, tidy
from drafters.decoding.render import Section, number
from drafters.errors import ConfigError
from drafters.scheduling.observations import Observations
from drafters.scheduling.profile import CostProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ENGINES", "ThresholdRow", "best_row", "draw_sweep", "recommended", "sweep", "sweep_section"]

# What engines take one threshold, by which flag. llama.cpp stops a draft at the first token whose confidence is below:
# the confidence head's, as it stands, of a DSpark drafter (common/speculative.cpp), else the likeliest token's
# probability, which is what drafters without such a head say here too. It knows no calibration.
ENGINES = {"llama.cpp": "--spec-draft-p-min"}


@dataclass(frozen=True, kw_only=True)
class ThresholdRow:
    """Means over rounds when drafts are verified up to the first whose confidence is below `threshold`.
    `acceptance_rate`: accepted / verified, NaN when nothing is verified. `accepted_length`: bonus included.
    `tokens_per_second`: of one row, NaN without a profile; drafting is paid for the whole block."""

    threshold: float
    verified: float
    accepted: float
    rejected: float
    acceptance_rate: float
    accepted_length: float
    tokens_per_second: float


def sweep(
    observations: Observations, confidence_NG: Tensor, thresholds: Sequence[float], costs: CostProfile | None = None
) -> list[ThresholdRow]:
    """A row for each threshold. `confidence_NG`: conditional, in the order of the rounds, raw or calibrated; it is read
    where a draft was proposed. Raises ConfigError for a threshold outside 0..1."""
    wrong = [value for value in thresholds if not 0 <= value <= 1]
    if wrong or not thresholds:
        raise ConfigError(f"task.thresholds: got {wrong or list(thresholds)}; accepted: one or more of 0 to 1")
    return [_row(observations, confidence_NG, value, costs) for value in thresholds]


def _row(
    observations: Observations, confidence_NG: Tensor, threshold: float, costs: CostProfile | None
) -> ThresholdRow:
    # A comparison with NaN, where nothing was proposed, is false.
    verified_N = ((confidence_NG >= threshold) & observations.counted_NG).long().cumprod(1).sum(1)
    accepted_N = torch.minimum(observations.accepted_N, verified_N)
    verified, accepted = float(verified_N.double().mean()), float(accepted_N.double().mean())
    speed = float("nan")
    if costs is not None:
        fixed_s = costs.draft_s(1, observations.num_slots) + costs.overhead_s(1)
        seconds_N = costs.step_s(1, 1.0 + verified_N.double()) + fixed_s
        speed = float((1 + accepted_N).sum() / seconds_N.sum())
    return ThresholdRow(
        threshold=threshold,
        verified=verified,
        accepted=accepted,
        rejected=verified - accepted,
        acceptance_rate=accepted / verified if verified else float("nan"),
        accepted_length=1 + accepted,
        tokens_per_second=speed,
    )


def best_row(rows: Sequence[ThresholdRow]) -> ThresholdRow | None:
    """The row of the most tokens per second, of equals the lowest threshold; None where speeds are not known."""
    known = [row for row in rows if row.tokens_per_second == row.tokens_per_second]
    return max(known, key=lambda row: (row.tokens_per_second, -row.threshold)) if known else None


def recommended(rows: Sequence[ThresholdRow], raw: Sequence[ThresholdRow]) -> dict[str, float]:
    """The best threshold for whom it may concern: `schedule=threshold` by `rows`, engines, with their flags, by `raw`,
    the rows of the confidence as the drafter gives it. Empty where speeds are not known."""
    best, best_raw = best_row(rows), best_row(raw)
    if best is None or best_raw is None:
        return {}
    engines = {f"{engine} {flag}": best_raw.threshold for engine, flag in ENGINES.items()}
    return {"schedule=threshold": best.threshold, **engines}


def sweep_section(rows: Sequence[ThresholdRow], *, found: Mapping[str, float], calibrated: bool) -> Section:
    """The table, with what is `recommended`."""
    best = best_row(rows)
    kind = "calibrated confidence" if calibrated else "confidence as the drafter gives it"
    notes = [f"Means a round; the threshold is on the {kind} in a draft, given that all before it stand."]
    if found:
        told = ", ".join(f"{threshold:g} for {whom}" for whom, threshold in found.items())
        notes.append(
            f"Most tokens per second of a single request at the costs of the profile: {told}. Engines compare the "
            "confidence as the drafter gives it, and have costs of their own: give theirs with profile=."
        )
    return Section(
        title="Verifying up to the first draft below a threshold",
        header=["threshold", "verified", "accepted", "rejected", "acceptance\nrate", "accepted\nlength", "tokens/s"],
        rows=[
            [f"{row.threshold:.2f}" + (" ★" if row is best else "")]
            + [number(value, ".2f") for value in (row.verified, row.accepted, row.rejected)]
            + [number(100 * row.acceptance_rate, ".1f", " %"), number(row.accepted_length, ".2f")]
            + [number(row.tokens_per_second, ".1f")]
            for row in rows
        ],
        notes=notes,
    )


def draw_sweep(rows: Sequence[ThresholdRow]) -> "Figure":
    """Accepted and rejected drafts a round against the threshold, and the acceptance rate."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    at = [row.threshold for row in rows]
    left.stackplot(
        at,
        [row.accepted for row in rows],
        [row.rejected for row in rows],
        labels=["accepted", "rejected"],
        colors=[BLUE, GREY],
    )
    tidy(left, title="Drafts verified in a round")
    left.set(xlabel="threshold", xlim=(0, 1), ylim=(0, None))
    left.legend(frameon=False, fontsize=9)
    right.plot(at, [row.acceptance_rate for row in rows], color=RED, marker="o", ms=4, lw=1.7)
    tidy(right, title="Share of the verified drafts that is accepted")
    right.set(xlabel="threshold", xlim=(0, 1), ylim=(0, 1.02))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure
