# What tests of schedules share: costs that are a table, random survivals, naive twins of the schedulers, and schedulers
# that are not lossless.

import math
from dataclasses import dataclass

import torch

from drafters.scheduling.schedulers import Outcome, Schedule, Scheduler


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """`steps_s[n]`: seconds of a step over `n` tokens, drawn out flat. Drafting costs `per_draft_s` for each row and
    draft, and `read_s` for each row whether it drafts or not."""

    steps_s: tuple[float, ...]
    layout: str = "ragged"
    per_draft_s: float = 0.0
    read_s: float = 0.0
    rest_s: float = 0.0

    def step_s(self, rows, tokens):
        last = len(self.steps_s) - 1
        if isinstance(tokens, torch.Tensor):
            return torch.tensor(self.steps_s, dtype=torch.float64)[tokens.long().clamp(max=last)]
        return self.steps_s[min(int(tokens), last)]

    def tokens_of(self, lengths_R):
        if self.layout == "padded":
            return len(lengths_R) * (1 + max(lengths_R.tolist(), default=0))
        return len(lengths_R) + int(lengths_R.sum())

    def round_s(self, lengths_R, drafted):
        return naive_round_s(self, len(lengths_R), self.tokens_of(lengths_R), drafted, whole_round=True)

    def draft_s(self, rows, length):
        return rows * (self.read_s + length * self.per_draft_s)

    def overhead_s(self, rows):
        return self.rest_s


def roofline(num_tokens, *, flat=16, step_s=1.0, rise=1.0):
    """Seconds by tokens of a step that costs the same up to `flat` tokens, and from there rises in proportion."""
    return tuple(step_s * max(1.0, 1 + rise * (n - flat) / flat) for n in range(num_tokens + 1))


def jagged(num_tokens, *, tile=8):
    """Seconds by tokens of a step that pays for whole tiles."""
    return tuple(1.0 + 0.35 * math.ceil(n / tile) for n in range(num_tokens + 1))


def random_steps(num_tokens, generator):
    """Seconds by tokens that rise on the whole, with dips everywhere."""
    noise = torch.rand(num_tokens + 1, generator=generator, dtype=torch.float64)
    return tuple(((0.3 + noise) * (1 + torch.arange(num_tokens + 1) / 8)).tolist())


def random_survival(num_rows, num_slots, generator, *, grid=None):
    """[R, S] products of random confidences; on eighths for a `grid` of 8, where ties and exact sums are common."""
    confidence_RS = torch.rand(num_rows, num_slots, generator=generator, dtype=torch.float64) ** 0.5
    survival_RS = confidence_RS.cumprod(1)
    return survival_RS if grid is None else (survival_RS * grid).round() / grid


def outcome(lengths, accepted, *, drafted):
    return Outcome(drafted=drafted, proposed_R=torch.as_tensor(lengths), accepted_R=torch.as_tensor(accepted))


def naive_round_s(costs, num_rows, tokens, drafted, *, whole_round):
    seconds = costs.step_s(num_rows, tokens)
    return seconds + costs.draft_s(num_rows, drafted) + costs.overhead_s(num_rows) if whole_round else seconds


def naive_candidates(survival):
    """(gain, rows that get one draft more) of each admission in order, of a list of rows."""
    found = [(-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row)]
    return [(-a, [r]) for a, _, r in sorted(found)]


def naive_columns(survival):
    slots = len(survival[0]) if survival else 0
    return [(sum(row[j] for row in survival), list(range(len(survival)))) for j in range(slots)]


def naive_prefix(survival, costs, *, whole_round=True, budget=None):
    """Algorithm 1 as it is written, one candidate at a time; with a `budget`, that many candidates instead."""
    num_rows, num_slots = len(survival), len(survival[0]) if survival else 0
    lengths = [0] * num_rows
    tokens, tau = num_rows, float(num_rows)
    best = tau / naive_round_s(costs, num_rows, tokens, num_slots, whole_round=whole_round) if num_rows else 0.0
    candidates = naive_columns(survival) if costs.layout == "padded" else naive_candidates(survival)
    for count, (gain, rows) in enumerate(candidates):
        tokens, tau = tokens + len(rows), tau + gain
        rate = tau / naive_round_s(costs, num_rows, tokens, num_slots, whole_round=whole_round)
        if (rate <= best) if budget is None else (count >= budget):
            break
        best = rate
        for row in rows:
            lengths[row] += 1
    return lengths


def naive_budget(survival, costs, *, whole_round=True):
    """The number of candidates with the most expected tokens per second, whatever lies between."""
    num_rows, num_slots = len(survival), len(survival[0]) if survival else 0
    candidates = naive_columns(survival) if costs.layout == "padded" else naive_candidates(survival)
    tokens, tau, rates = num_rows, float(num_rows), []
    for gain, rows in [(0.0, []), *candidates]:
        tokens, tau = tokens + len(rows), tau + gain
        rates.append(tau / naive_round_s(costs, num_rows, tokens, num_slots, whole_round=whole_round))
    return rates.index(max(rates))


def naive_threshold(survival, threshold):
    lengths = []
    for row in survival:
        before, length = 1.0, 0
        for a in row:
            if (a / before if before else 0.0) < threshold:
                break
            before, length = a, length + 1
        lengths.append(length)
    return lengths


@dataclass(frozen=True, kw_only=True)
class GlobalToday(Scheduler):
    """The best number of today's drafts by a search over all of today's survivals: not lossless."""

    def begin(self, costs, num_slots):
        return _GlobalToday(costs, num_slots)


class _GlobalToday(Schedule):
    def __init__(self, costs, num_slots):
        self.costs, self.num_slots = costs, num_slots

    def want(self, num_rows):
        return self.num_slots

    def lengths(self, survival_RS):
        survival = survival_RS.tolist()
        return torch.tensor(naive_prefix(survival, self.costs, budget=naive_budget(survival, self.costs)))

    def observe(self, outcome):
        pass


@dataclass(frozen=True, kw_only=True)
class Crossed(Scheduler):
    """Each of two rows verifies its first draft if the second survival of the other row is high, whether the other's
    first draft, on which that depends, is admitted or not. Each row alone is lossless, both together are not."""

    def begin(self, costs, num_slots):
        return _Crossed()


class _Crossed(_GlobalToday):
    def __init__(self):
        super().__init__(None, 2)

    def lengths(self, survival_RS):
        return (survival_RS[:, 1] > 0.2).flip(0).long()
