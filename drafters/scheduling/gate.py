# Whether to draft at all. Where drafting does not pay (large batches, a weak drafter) the best schedule is none, and it
# takes drafting to find out. So the gate keeps an account of what drafting won or lost against not drafting: no model
# of acceptance, only tokens that came and seconds that were measured.

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from drafters.config import build_config
from drafters.scheduling.schedulers import Costs, Outcome, Prefix, Schedule, Scheduler, StepTable

__all__ = ["Gated"]

BUCKETS_PER_OCTAVE = 4
START_SHARE = 1 / 16  # of `credit`: what all loads together may lose before anything is known of them


@final
@dataclass(frozen=True, kw_only=True)
class Gated(Scheduler):
    """Drafts as `inner` does while that pays, and not at all while it does not.

    For each load (number of rows; neighbouring ones share) there is a balance in tokens. A drafted round adds what it
    gained less what rounds without drafts would have gained in its seconds; a round without drafts adds `probe_share`
    of its tokens. It drafts while the balance is not negative. So:

    - against never drafting, at most `probe_share` of the tokens are lost, however acceptance behaves, but for a first
      `credit` / 16 tokens in all and one round at each load;
    - while drafting pays, the balance stays above 0 by itself, at up to `credit` tokens, so that bad luck does not stop
      it; while it does not, what the other rounds add buys a probe now and then, and one good probe turns it on again;
    - at a load where not even full acceptance pays, there are no probes.

    A larger `credit` bears more noise and notices later that drafting has stopped to pay. `inner` is a scheduler, or a
    mapping with `_target_`; None = `Prefix`. Rounds without drafts are charged `draft_s(rows, 0)`, what the drafter's
    reading costs.
    """

    inner: Any = None
    probe_share: float = 0.01
    credit: float = 256.0

    def __post_init__(self) -> None:
        if not 0 < self.probe_share < 1:
            raise ValueError(f"probe_share: got {self.probe_share}; accepted: above 0 and below 1")
        if not (self.credit > 0 and math.isfinite(self.credit)):
            raise ValueError(f"credit: got {self.credit}; accepted: a number of tokens above 0")
        if self.inner is None:
            object.__setattr__(self, "inner", Prefix())
        elif isinstance(self.inner, Mapping):
            object.__setattr__(self, "inner", build_config(self.inner, key="schedule.inner")[1])
        if not isinstance(self.inner, Scheduler):
            raise ValueError(f"inner: got {self.inner!r}; accepted: a scheduler")

    def begin(self, costs: Costs, num_slots: int) -> Schedule:
        return _GatedSchedule(self, costs, self.inner.begin(costs, num_slots))


@final
class _GatedSchedule(Schedule):
    def __init__(self, config: Gated, costs: Costs, inner: Schedule) -> None:
        self._config, self._costs, self._inner = config, costs, inner
        self._table = StepTable(costs)
        self._balances: dict[int, float] = {}
        self._start = START_SHARE * config.credit
        self._hopeless: dict[tuple[int, int], bool] = {}

    def want(self, num_rows: int) -> int:
        drafts = self._inner.want(num_rows)
        if num_rows == 0 or drafts == 0 or self._is_hopeless(num_rows, drafts):
            return 0
        return drafts if self._balance(num_rows) >= 0 else 0

    def lengths(self, survival_RS: Tensor) -> Tensor:
        return self._inner.lengths(survival_RS)

    def observe(self, outcome: Outcome) -> None:
        self._inner.observe(outcome)
        num_rows = outcome.num_rows
        if num_rows == 0:
            return
        if outcome.drafted == 0:
            change = self._config.probe_share * num_rows
        else:
            seconds = self._costs.round_s(outcome.proposed_R, outcome.drafted)
            change = num_rows + int(outcome.accepted_R.sum()) - self._plain_rate(num_rows) * seconds
        balance = self._balance(num_rows) + change
        if balance < 0:
            lent = min(self._start, -balance)
            self._start, balance = self._start - lent, balance + lent
        self._balances[_bucket(num_rows)] = min(balance, self._config.credit)

    def _balance(self, num_rows: int) -> float:
        return self._balances.get(_bucket(num_rows), 0.0)

    def _plain_rate(self, num_rows: int) -> float:
        """Tokens per second of rounds without drafts."""
        step_s = self._costs.step_s(num_rows, float(num_rows))
        return num_rows / (step_s + self._costs.draft_s(num_rows, 0) + self._costs.overhead_s(num_rows))

    def _is_hopeless(self, num_rows: int, drafts: int) -> bool:
        """Whether drafting would not pay even if every verified draft were accepted."""
        key = num_rows, drafts
        if key not in self._hopeless:
            seconds_M = self._table.seconds(num_rows, drafts)
            unit = num_rows if self._table.layout == "padded" else 1
            tokens_M = num_rows + unit * torch.arange(len(seconds_M))
            self._hopeless[key] = bool((tokens_M / seconds_M).max() <= self._plain_rate(num_rows))
        return self._hopeless[key]


def _bucket(num_rows: int) -> int:
    """Loads that share a balance: each number of rows up to 8, then within a fifth of each other."""
    return round(BUCKETS_PER_OCTAVE * math.log2(num_rows))
