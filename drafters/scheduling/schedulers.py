# How many drafts to ask for, and how many of them the target is to verify. A scheduler is a rule with its settings; a
# schedule is its state over one decode run. No rule may look at a draft before it is admitted: an admission depends on
# past rounds and on survivals that admitted drafts decide, and on nothing else, which is what keeps decoding lossless.

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final, overload

import torch
from torch import Tensor

from drafters.errors import ConfigError, DataError

__all__ = [
    "Asynchronous",
    "Costs",
    "Fixed",
    "Off",
    "Outcome",
    "Prefix",
    "Schedule",
    "Scheduler",
    "StepTable",
    "Threshold",
]

DELAY = 2  # rounds between the confidences that set an asynchronous budget and the drafts that it is spent on
MAX_TABLES = 64
ROUNDING = 1e-6


class Costs(Protocol):
    """Seconds of the parts of a round, and what a step pays for: "padded", R (1 + max l_r) tokens, or "ragged",
    sum (1 + l_r). Tokens count the anchors."""

    @property
    def layout(self) -> str: ...
    @overload
    def step_s(self, rows: int, tokens: float) -> float: ...
    @overload
    def step_s(self, rows: int, tokens: Tensor) -> Tensor: ...
    def draft_s(self, rows: int, length: float) -> float: ...
    def overhead_s(self, rows: int) -> float: ...
    def round_s(self, lengths_R: Tensor, drafted: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One round: `drafted` drafts were made for every row, `proposed_R` of them verified, `accepted_R` accepted."""

    drafted: int
    proposed_R: Tensor  # int64
    accepted_R: Tensor  # int64

    @property
    def num_rows(self) -> int:
        """Rows of the round, those that it finished included."""
        return len(self.proposed_R)


class Schedule(ABC):
    """The state of one decode run. A round calls `want`, then, if it drafted, `lengths`, and at the end `observe`. Rows
    may come and go between rounds."""

    @abstractmethod
    def want(self, num_rows: int) -> int:
        """Drafts to ask the drafter for, for each of `num_rows` rows; 0 = do not draft. From past rounds alone."""

    @abstractmethod
    def lengths(self, survival_RS: Tensor) -> Tensor:
        """How many of the drafts just made to verify, int64 [R].

        `survival_RS` is the calibrated probability that draft k and all before it are accepted; it may depend on the
        tokens before draft k alone, and is 0 where a row has no draft. What is admitted depends on admitted tokens
        alone: no survival beyond the first draft of each row that is not admitted has a say, in that row or another, so
        that the joint law of all rows is the target's too. Raises DataError for survivals that are no probabilities or
        rise along a row.
        """

    @abstractmethod
    def observe(self, outcome: Outcome) -> None:
        """Learn what became of a round, one without drafts too."""


class Scheduler(ABC):
    """A rule for when and how far to draft: settings, without state."""

    @abstractmethod
    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        """The schedule of a decode run with up to `num_slots` drafts a round."""


@final
@dataclass(frozen=True, kw_only=True)
class Off(Scheduler):
    """Never drafts."""

    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        return _Memoryless(0, lambda survival_RS: torch.zeros(len(survival_RS), dtype=torch.int64))


@final
@dataclass(frozen=True, kw_only=True)
class Fixed(Scheduler):
    """`length` drafts a round, all of them verified; None = as many as the drafter can. `begin` raises ConfigError when
    that is more than the drafter's."""

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length: got {self.length}; accepted: 0 or more, or null for the drafter's block size")

    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        length = num_slots if self.length is None else self.length
        if length > num_slots:
            raise ConfigError(
                f"schedule.length: got {length}; accepted: 0 to {num_slots}, what the drafter drafts a round"
            )

        def admit(survival_RS: Tensor) -> Tensor:
            return torch.full((len(survival_RS),), min(length, survival_RS.shape[1]))

        return _Memoryless(length, admit)


@final
@dataclass(frozen=True, kw_only=True)
class Threshold(Scheduler):
    """Verifies up to the first draft whose conditional confidence (its survival over the one before) is below
    `threshold`, whatever that costs: a diagnostic."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold: got {self.threshold}; accepted: 0 to 1")

    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        def admit(survival_RS: Tensor) -> Tensor:
            before_RS = _before(survival_RS)
            # After a survival of 0 nothing is likely.
            confidence_RS = torch.where(before_RS > 0, survival_RS / before_RS, 0.0)
            return (confidence_RS >= self.threshold).long().cumprod(1).sum(1)

        return _Memoryless(num_slots, admit)


@final
@dataclass(frozen=True, kw_only=True)
class Prefix(Scheduler):
    """The hardware-aware prefix scheduler (DSpark 2607.05147, Algorithm 1): drafts are admitted by falling survival
    while the expected tokens per second rise, and the first that does not raise them ends it.

    Layout "padded": a draft below the widest row costs nothing, so whole columns are admitted: depth j of all rows, for
    R tokens, gains sum_r a_{r,j}. Column j knows the survivals of columns 1..j alone, hence the tokens of admitted
    columns alone, so this is as non-anticipating as the ragged order.

    `whole_round`: seconds of drafting and overhead count beside the step's, since a round pays them whatever is
    verified; False: the step alone, as published.
    """

    whole_round: bool = True

    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        table = StepTable(costs, whole_round=self.whole_round)

        def admit(survival_RS: Tensor) -> Tensor:
            return _admit(survival_RS, table.layout, _early_stop(survival_RS, table))

        return _Memoryless(num_slots, admit)


@final
@dataclass(frozen=True, kw_only=True)
class Asynchronous(Scheduler):
    """Orders today's drafts as `Prefix` does, but admits as many as a search over the whole cost curve finds best for
    the survivals of two drafted rounds ago: that budget cannot depend on today's tokens, so it may cross local dips.

    When rows came or went since, the expected gain is scaled: so many drafts a row. The first two rounds stop early.
    Layout "padded": the budget is a number of columns.
    """

    whole_round: bool = True

    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        return _AsynchronousSchedule(StepTable(costs, whole_round=self.whole_round), num_slots)


class StepTable:
    """Seconds of a round by how much it verifies: [M + 1] after 0..M admissions, each a draft, or in a padded layout a
    column of R drafts. Kept for the numbers of rows seen last."""

    def __init__(self, costs: Costs, *, whole_round: bool = True) -> None:
        self.layout = costs.layout
        self._costs, self._whole_round = costs, whole_round
        self._known: dict[tuple[int, int], Tensor] = {}

    def seconds(self, num_rows: int, num_slots: int) -> Tensor:
        """Of a round of `num_rows` rows that drafted `num_slots` tokens each; float64."""
        key = num_rows, num_slots
        if key not in self._known:
            if len(self._known) == MAX_TABLES:
                self._known.pop(next(iter(self._known)))
            unit = num_rows if self.layout == "padded" else 1
            tokens_M = torch.arange(num_rows, num_rows * (1 + num_slots) + 1, unit, dtype=torch.float64)
            seconds_M = self._costs.step_s(num_rows, tokens_M).to("cpu", torch.float64)
            if self._whole_round:
                seconds_M = seconds_M + self._costs.draft_s(num_rows, num_slots) + self._costs.overhead_s(num_rows)
            self._known[key] = seconds_M
        return self._known[key]


@final
class _Memoryless(Schedule):
    """Always asks for `num_drafts` and admits by today's survivals alone."""

    def __init__(self, num_drafts: int, admit: Callable[[Tensor], Tensor]) -> None:
        self._num_drafts, self._admit = num_drafts, admit

    def want(self, num_rows: int) -> int:
        return self._num_drafts

    def lengths(self, survival_RS: Tensor) -> Tensor:
        return _checked_lengths(survival_RS, self._admit)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn."""


@final
class _AsynchronousSchedule(Schedule):
    """`_past` holds the survivals of the last drafted rounds, the oldest first."""

    def __init__(self, table: StepTable, num_slots: int) -> None:
        self._table, self._num_slots = table, num_slots
        self._past: deque[Tensor] = deque(maxlen=DELAY)

    def want(self, num_rows: int) -> int:
        return self._num_slots

    def lengths(self, survival_RS: Tensor) -> Tensor:
        return _checked_lengths(survival_RS, self._admit)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn that `lengths` was not shown."""

    def _admit(self, survival_RS: Tensor) -> Tensor:
        if len(self._past) < DELAY:
            count = _early_stop(survival_RS, self._table)
        else:
            count = self._budget(*survival_RS.shape)
        self._past.append(survival_RS)
        return _admit(survival_RS, self._table.layout, count)

    def _budget(self, num_rows: int, num_slots: int) -> int:
        """The best number of admissions for rows like those of two rounds ago."""
        past = self._past[0]
        seconds_M = self._table.seconds(num_rows, num_slots)
        tau_P = _expected(past, self._table.layout) / len(past)
        # So many admissions a row then, where an admission is a draft; a column is one at any number of rows.
        scale = 1.0 if self._table.layout == "padded" else len(past) / num_rows
        place_M = (torch.arange(len(seconds_M), dtype=torch.float64) * scale).clamp(max=len(tau_P) - 1)
        low_M = place_M.floor().long()
        tau_M = torch.lerp(tau_P[low_M], tau_P[(low_M + 1).clamp(max=len(tau_P) - 1)], place_M - low_M)
        return int((num_rows * tau_M / seconds_M).argmax())


def _checked_lengths(survival_RS: Tensor, admit: Callable[[Tensor], Tensor]) -> Tensor:
    """`admit` of survivals that were checked, on the CPU and in float64; nothing where there are none."""
    if survival_RS.ndim != 2:
        raise DataError(f"survival: got shape {tuple(survival_RS.shape)}; accepted: [rows, slots]")
    survival = survival_RS.detach().to("cpu", torch.float64)
    if not survival.numel():
        return torch.zeros(len(survival), dtype=torch.int64, device=survival_RS.device)
    # NaN compares as False. Products of a parallel scan may rise by their rounding.
    falls_RS = (survival >= 0) & (survival <= _before(survival) + ROUNDING)
    if not bool(falls_RS.all()):
        row, slot = (~falls_RS).nonzero()[0].tolist()
        raise DataError(
            f"survival: got {float(survival[row, slot])} at row {row}, draft {slot + 1}; accepted: probabilities that "
            "do not rise along a row; check the drafter's confidence and its calibration"
        )
    return admit(survival.clamp(max=1).cummin(1).values).to(survival_RS.device)


def _before(survival_RS: Tensor) -> Tensor:
    """The survival of the draft before each, 1 before the first."""
    return torch.cat([torch.ones_like(survival_RS[:, :1]), survival_RS[:, :-1]], 1)


def _gains(survival_RS: Tensor, layout: str) -> Tensor:
    """Expected tokens that each admission adds, in the order of admission."""
    if layout == "padded":
        return survival_RS.sum(0)
    losses_M = -survival_RS.flatten()
    # In place, through numpy, whose sort of values is a dozen times as fast as torch's.
    losses_M.numpy().sort()
    return -losses_M


def _expected(survival_RS: Tensor, layout: str) -> Tensor:
    """Expected tokens of a round after 0, 1, ... admissions, bonus tokens included."""
    gains_M = _gains(survival_RS, layout)
    return torch.cat([gains_M.new_full((1,), len(survival_RS)), gains_M]).cumsum(0)


def _early_stop(survival_RS: Tensor, table: StepTable) -> int:
    """Admissions before the first that does not raise the expected tokens per second."""
    rate_M = _expected(survival_RS, table.layout) / table.seconds(*survival_RS.shape)
    return int((rate_M[1:] > rate_M[:-1]).long().cumprod(0).sum())


def _admit(survival_RS: Tensor, layout: str, count: int) -> Tensor:
    """Drafts a row when `count` admissions are made, the likeliest first. Of equals the one at the earlier slot comes
    first, so that a row's admitted drafts are always a prefix, then the one of the earlier row."""
    num_rows = len(survival_RS)
    if layout == "padded" or count == 0:
        return torch.full((num_rows,), count)
    least = _gains(survival_RS, layout)[count - 1]
    above_RS = survival_RS > least
    equal_M = (survival_RS.T.flatten() == least).nonzero()[: count - int(above_RS.sum()), 0]
    return above_RS.sum(1) + torch.bincount(equal_M % num_rows, minlength=num_rows)
