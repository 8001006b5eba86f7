# Every number about acceptance and speed, once, with its formula. Plain Python on rounds and seconds: nothing here
# knows a model. "Accepted length" always includes the bonus token, the one that the target's pass adds.

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean

import torch
from torch import Tensor

from drafters.decoding.records import Round, RoundCost

__all__ = [
    "Costs",
    "accepted_histogram",
    "accepted_length",
    "accepted_length_ci",
    "bootstrap_ci",
    "choose_length",
    "conditional_acceptance",
    "conditional_acceptance_ci",
    "context_bucket",
    "costs_from",
    "expected_length",
    "full_rounds",
    "paired_difference_ci",
    "ratio",
    "ratio_of_rates",
    "speedup_ci",
    "survival",
    "tail_share",
    "verify_rate",
]

# From sums [R, C] of R resamples to values [R].
Statistic = Callable[[Tensor], Tensor]


def full_rounds(rounds: Iterable[Round]) -> list[Round]:
    """The rounds that acceptance is counted on: those that the token limit left room for, whatever their outcome, and
    that no accepted stop token cut. A cut round says where the text ended, not what the drafter can do."""
    return [r for r in rounds if r.full]


def accepted_length(rounds: Iterable[Round], most: float = math.inf) -> float:
    """tau = sum_r (min(accepted_r, most) + 1) / number of rounds, over full rounds; bonus included. NaN without one.

    `most`: had every draft been cut to so many tokens. Rounds that proposed less, or nothing, count as they are, which
    the product of conditional acceptances (`expected_length`) would leave out.
    """
    counted = full_rounds(rounds)
    return sum(min(r.accepted, most) + 1 for r in counted) / len(counted) if counted else float("nan")


def conditional_acceptance(rounds: Iterable[Round], length: int) -> list[float]:
    """a_k = #(accepted >= k) / #(accepted >= k - 1 and proposed >= k), k = 1..length, over full rounds.

    The share of rounds where draft k stood, of those where it was proposed and drafts 1..k-1 stood. NaN where no
    round came so far.
    """
    counted = full_rounds(rounds)
    tested = [sum(r.accepted >= k - 1 and r.proposed >= k for r in counted) for k in range(1, length + 1)]
    stood = [sum(r.accepted >= k for r in counted) for k in range(1, length + 1)]
    return [s / t if t else float("nan") for s, t in zip(stood, tested, strict=True)]


def survival(rounds: Iterable[Round], length: int) -> list[float]:
    """Marginal acceptance: s_k = #(accepted >= k) / number of rounds, over full rounds; s_k = prod_{i<=k} a_i when
    every round proposed `length` drafts."""
    counted = full_rounds(rounds)
    return [
        sum(r.accepted >= k for r in counted) / len(counted) if counted else float("nan") for k in range(1, length + 1)
    ]


def verify_rate(rounds: Iterable[Round]) -> float:
    """Drafts that stood / drafts proposed, over full rounds. NaN when nothing was proposed."""
    counted = full_rounds(rounds)
    proposed = sum(r.proposed for r in counted)
    return sum(r.accepted for r in counted) / proposed if proposed else float("nan")


def accepted_histogram(rounds: Iterable[Round], length: int) -> list[int]:
    """Number of full rounds with 0, 1, .. `length` accepted drafts."""
    counts = [0] * (length + 1)
    for r in full_rounds(rounds):
        counts[r.accepted] += 1
    return counts


def ratio(sums_RC: Tensor) -> Tensor:
    """The first sum to the second: an accepted length from (tokens, rounds)."""
    return sums_RC[:, 0] / sums_RC[:, 1]


def ratio_of_rates(sums_RC: Tensor) -> Tensor:
    """Speed-up (n_d / s_d) / (n_p / s_p) from the sums (n_d, s_d, n_p, s_p): tokens and seconds, drafted and plain."""
    return (sums_RC[:, 0] / sums_RC[:, 1]) / (sums_RC[:, 2] / sums_RC[:, 3])


def bootstrap_ci(
    sums: Sequence[Sequence[float]],
    statistic: Statistic = ratio,
    *,
    seed: int,
    level: float = 0.95,
    num_resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile interval of a statistic of sums over prompts, prompts drawn with replacement (Efron 1979), wider for
    few prompts (see `tail_share`).

    Rounds of one prompt resemble each other, so the prompt is the unit. `sums` [P, C]: what each prompt adds to each
    sum; prompts without any count are left out. NaN for fewer than two that count: one says nothing about others, and
    its interval would have no width.
    """
    used = [row for row in sums if any(row[1:])]
    if len(used) < 2:
        return float("nan"), float("nan")
    data_PC = torch.tensor(used, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(used), (num_resamples, len(used)), generator=generator)
    values_R = statistic(data_PC[picks].sum(1))
    values_R = values_R[values_R.isfinite()]
    if not len(values_R):
        return float("nan"), float("nan")
    tail = tail_share(len(used), level)
    bounds = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = values_R.quantile(bounds).tolist()
    return low, high


def tail_share(num_prompts: int, level: float = 0.95) -> float:
    """The share of resamples left out at either end: Phi(-sqrt(n / (n - 1)) t) with t the quantile of Student's law of
    n - 1 degrees of freedom, the expanded percentile interval (Hesterberg 1411.5279). Of few prompts the plain one,
    (1 - level) / 2, is too narrow. t by its series in 1 / (n - 1) (Abramowitz and Stegun 26.7.5)."""
    z, free = NormalDist().inv_cdf((1 + level) / 2), num_prompts - 1
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return NormalDist().cdf(-math.sqrt(num_prompts / free) * t)


def accepted_length_ci(prompts: Iterable[Iterable[Round]], *, seed: int) -> tuple[float, float]:
    """95 % interval of `accepted_length`; `prompts` gives the rounds of each prompt."""
    counted = [full_rounds(rounds) for rounds in prompts]
    return bootstrap_ci([(sum(r.accepted + 1 for r in c), len(c)) for c in counted], seed=seed)


def conditional_acceptance_ci(
    prompts: Iterable[Iterable[Round]], length: int, *, seed: int
) -> list[tuple[float, float]]:
    """95 % intervals of `conditional_acceptance`; `prompts` gives the rounds of each prompt."""
    counted = [full_rounds(rounds) for rounds in prompts]

    def sums(k: int) -> list[tuple[int, int]]:
        tested = [[r for r in rounds if r.accepted >= k - 1 and r.proposed >= k] for rounds in counted]
        return [(sum(r.accepted >= k for r in rounds), len(rounds)) for rounds in tested]

    return [bootstrap_ci(sums(k), seed=seed) for k in range(1, length + 1)]


def speedup_ci(units: Sequence[tuple[float, float, float, float]], *, seed: int) -> tuple[float, float]:
    """95 % interval of `ratio_of_rates` from what each unit (prompts that were timed together) adds to its sums."""
    return bootstrap_ci(units, ratio_of_rates, seed=seed)


def paired_difference_ci(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]], statistic: Statistic = ratio, *, seed: int
) -> tuple[float, float]:
    """95 % interval of statistic(left) - statistic(right), where left[i] and right[i] are sums of the same prompt.

    Both are taken of the same resampled prompts, so that what makes a prompt easy or hard for both cancels: where
    prompts differ more than drafters do, this tells drafters apart whose own intervals overlap.
    """

    def difference(sums_RC: Tensor) -> Tensor:
        half = sums_RC.shape[1] // 2
        return statistic(sums_RC[:, :half]) - statistic(sums_RC[:, half:])

    return bootstrap_ci([(*a, *b) for a, b in zip(left, right, strict=True)], difference, seed=seed)


def context_bucket(context: int) -> tuple[int, int]:
    """(first, last) number of tokens of the bucket that a text of `context` tokens is in: below 128, then doubling."""
    if context < 128:
        return 0, 127
    low = 1 << (context.bit_length() - 1)
    return low, 2 * low - 1


def expected_length(acceptances: Sequence[float]) -> float:
    """tau = 1 + sum_k prod_{i<=k} a_i from conditional acceptances; bonus included. A NaN (no round came so far)
    ends the sum: the product before it is zero."""
    total, alive = 1.0, 1.0
    for a in acceptances:
        if a != a:
            break
        alive *= a
        total += alive
    return total


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds by draft length, measured. `draft_s[k]`: drafting k tokens and reading the verified ones;
    `verify_s[k]`: the target's pass on k + 1 tokens; `overhead_s[k]`: the loop's rest. `step_s`: one round of the
    autoregressive baseline in the same loop, its overhead included."""

    step_s: float
    draft_s: Mapping[int, float] = field(default_factory=dict)
    verify_s: Mapping[int, float] = field(default_factory=dict)
    overhead_s: Mapping[int, float] = field(default_factory=dict)

    def round_s(self, length: int) -> float:
        """Seconds of a whole round at `length`."""
        return self.draft_s[length] + self.verify_s[length] + self.overhead_s[length]

    def speedup(self, length: int, accepted_length: float) -> float:
        """Predicted: step_s * tau / round_s(length), the cost model of Leviathan (2211.17192), with tau the accepted
        length at `length`, bonus included: what tau single steps take against one round."""
        return self.step_s * accepted_length / self.round_s(length)


def costs_from(rounds: Sequence[RoundCost], baseline: Sequence[RoundCost]) -> Costs:
    """Means of measured rounds without the slowest tenth, which is the machine's doing. Of each length, the rounds with
    the most rows count: a batch that is emptying is cheaper than the one that is asked about."""
    by_length = {k: _typical([r for r in rounds if r.length == k]) for k in sorted({r.length for r in rounds})}
    return Costs(
        step_s=fmean(r.seconds for r in _typical(baseline)),
        draft_s={k: fmean(r.draft_s for r in kept) for k, kept in by_length.items()},
        verify_s={k: fmean(r.verify_s for r in kept) for k, kept in by_length.items()},
        overhead_s={k: fmean(r.overhead_s for r in kept) for k, kept in by_length.items()},
    )


def _typical(rounds: Sequence[RoundCost]) -> list[RoundCost]:
    most = max(r.rows for r in rounds)
    full = sorted((r for r in rounds if r.rows == most), key=lambda r: r.seconds)
    return full[: max(1, len(full) * 9 // 10)]


def choose_length(costs: Costs, accepted_lengths: Mapping[int, float]) -> int:
    """Of the draft lengths of at least 1 that were profiled, the one with the best predicted speed-up;
    `accepted_lengths` gives tau of each. Ties go to the shorter.

    Never 0: a drafter that does not pay must be seen to (a speed-up below 1), not hidden by not drafting.
    """
    lengths = [k for k in costs.draft_s if k >= 1 and k in accepted_lengths]
    return max(lengths, key=lambda k: (costs.speedup(k, accepted_lengths[k]), -k))
