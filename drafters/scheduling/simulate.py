# What a schedule would give under load: recorded rounds are replayed for many requests at once, a measured profile says
# what each step takes, and the real scheduler decides. No model runs. All requests of a step are handled together.

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafters.decoding.render import Section
from drafters.errors import ConfigError
from drafters.scheduling.calibration import Calibration
from drafters.scheduling.observations import Observations
from drafters.scheduling.profile import CostProfile
from drafters.scheduling.schedulers import Off, Outcome, Scheduler

__all__ = [
    "NO_DRAFTER",
    "Estimate",
    "Replay",
    "SimulateConfig",
    "Simulation",
    "frontier",
    "frontier_section",
    "simulate",
]

NO_DRAFTER = "no drafter"
CHUNK = 1024  # requests that are drawn at a time

# simulations that are done, all of them
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """`rate`: requests per second that come as a Poisson process and wait where all places are taken; None = a closed
    loop, where a request that ends is followed by another at once. A request ends with `tokens_per_request` tokens.
    Each of `num_seeds` runs has `num_steps` steps that count, after `warmup_steps` that do not."""

    rate: float | None = None
    tokens_per_request: int = 256
    num_steps: int = 2000
    warmup_steps: int = 200
    num_seeds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"rate: got {self.rate}; accepted: a positive number of requests per second, or null")
        for name, least in (("tokens_per_request", 1), ("num_steps", 1), ("warmup_steps", 0), ("num_seeds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}; accepted: {least} or more")
        if self.num_steps < 2 * self.tokens_per_request:
            raise ValueError(
                f"num_steps: got {self.num_steps}; accepted: {2 * self.tokens_per_request} or more, twice the "
                "tokens_per_request, or requests that get one token a step do not end"
            )


class Replay:
    """Recorded rounds as a schedule sees them: `survival_NG` (calibrated, 0 beyond what was proposed), `proposed_N` and
    `accepted_N`, grouped by prompt; prompt p has `count_P[p]` rounds from `start_P[p]` on. After a round n that gained
    g tokens comes round `next_NJ[n, g - 1]`: the first of the same prompt that was recorded that far on, beginning
    again at the end.

    With rounds from every place of the texts that is the round that a real text goes on with. With those of whole
    blocks alone a cut block goes on where the whole one would have ended, which is mostly at an easier place.
    """

    def __init__(self, observations: Observations, calibration: Calibration | None = None) -> None:
        raw_NG = observations.by("confidence" if calibration is None else calibration.signal).confidence_NG
        survival_NG = raw_NG.cumprod(1) if calibration is None else calibration.survival(raw_NG)
        survival_NG = torch.where(observations.counted_NG, survival_NG.double(), 0.0)
        prompts_N, order_N = observations.prompt_N.sort(stable=True)
        self.survival_NG = survival_NG[order_N]
        self.proposed_N = observations.proposed_N[order_N].numpy()
        self.accepted_N = observations.accepted_N[order_N].numpy()
        self.count_P = prompts_N.unique_consecutive(return_counts=True)[1].numpy()
        self.start_P = self.count_P.cumsum() - self.count_P
        self.next_NJ = self._next(observations.context_N[order_N].numpy())

    def _next(self, context_N: np.ndarray) -> np.ndarray:
        gains_J = np.arange(1, self.num_slots + 2)
        next_NJ = np.empty((len(context_N), len(gains_J)), dtype=np.int64)
        for start, count in zip(self.start_P, self.count_P, strict=True):
            places_n = context_N[start : start + count]
            found_nJ = np.searchsorted(places_n, places_n[:, None] + gains_J)
            next_NJ[start : start + count] = start + np.where(found_nJ < count, found_nJ, 0)
        return next_NJ

    @property
    def num_slots(self) -> int:
        """Drafts of a full block."""
        return self.survival_NG.shape[1]


class Estimate(NamedTuple):
    """The mean over seeds and its 95 % interval by Student's law, NaN for one seed. It tells the noise of the
    simulation, not what other prompts would do."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What one scheduler gives with up to `concurrency` requests at once.

    `tokens_per_second`: of all requests; `tokens_per_second_per_user`: the mean, over requests that ended, of tokens by
    time from arrival to end. `accepted_length`: tokens of a row and step, bonus included. `verified_tokens`: of a step,
    anchors included, padding not; `paid_tokens`: those that the layout makes it pay for. `drafts_per_row`: verified, of
    a row and step. `not_drafting`: the share of steps without drafting. `rows`: of a step. `waiting`: requests that
    have come and have no place yet, of a step.
    """

    name: str
    concurrency: int
    tokens_per_second: Estimate
    tokens_per_second_per_user: Estimate
    accepted_length: Estimate
    verified_tokens: Estimate
    paid_tokens: Estimate
    drafts_per_row: Estimate
    not_drafting: Estimate
    rows: Estimate
    waiting: Estimate

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values: an estimate as {"value", "low", "high"}, None for NaN."""
        values = asdict(self)
        for name in _estimates():
            one: Estimate = values[name]
            values[name] = {key: number if number == number else None for key, number in one._asdict().items()}
        return values


def simulate(
    replay: Replay, costs: CostProfile, scheduler: Scheduler | None, *, concurrency: int, config: SimulateConfig
) -> Simulation:
    """Run a scheduler for every seed; None: no drafter at all, so that none reads along (`Off` pays for the reading).

    A request begins at a random round and walks through the text that it is of, beginning again at the end; a step
    gives it min(accepted, verified) + 1 tokens. Prefill is not part of it. Requests are the same for all
    schedulers of a seed. A closed loop begins with requests of random progress. Raises ConfigError for a concurrency
    below 1.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency: got {concurrency}; accepted: 1 or more")
    name = NO_DRAFTER if scheduler is None else type(scheduler).__name__
    if scheduler is None:
        scheduler, costs = Off(), replace(costs, draft=())
    runs = []
    for seed in range(config.seed, config.seed + config.num_seeds):
        runs.append(_Run(replay, costs, scheduler, concurrency, replace(config, seed=seed)).totals())
    estimates = {name: _estimate([run[name] for run in runs]) for name in _estimates()}
    return Simulation(name=name, concurrency=concurrency, **estimates)


def frontier(
    replay: Replay,
    costs: CostProfile,
    schedulers: Mapping[str, Scheduler],
    concurrencies: Sequence[int],
    config: SimulateConfig,
    *,
    progress: Progress = lambda *_: None,
) -> list[Simulation]:
    """`simulate` for every scheduler, by name, and for no drafter, at every concurrency."""
    named: dict[str, Scheduler | None] = {NO_DRAFTER: None, **schedulers}
    found: list[Simulation] = []
    for name, scheduler in named.items():
        for concurrency in concurrencies:
            one = simulate(replay, costs, scheduler, concurrency=concurrency, config=config)
            found.append(replace(one, name=name))
            progress(len(found), len(named) * len(concurrencies))
    return found


class _Request(NamedTuple):
    arrived_s: float
    round: int


class _Requests:
    """The requests of a run in the order of their arrival, the same whatever becomes of them."""

    def __init__(self, replay: Replay, rate: float | None, seed: int) -> None:
        self._replay, self._rate = replay, rate
        self._generator = np.random.default_rng(seed)
        self._drawn: deque[_Request] = deque()
        self._clock_s = 0.0

    def first(self) -> _Request:
        """The next to come; of a closed loop, its time of arrival is 0."""
        if not self._drawn:
            self._draw()
        return self._drawn[0]

    def take(self) -> _Request:
        """Like `first`, which it is no more."""
        request = self.first()
        self._drawn.popleft()
        return request

    def num_waiting(self, now_s: float) -> int:
        """Requests that came by `now_s` and were not taken."""
        while not self._drawn or self._drawn[-1].arrived_s <= now_s:
            self._draw()
        return bisect_right(self._drawn, now_s, key=lambda request: request.arrived_s)

    def _draw(self) -> None:
        generator, replay = self._generator, self._replay
        rounds = generator.integers(len(replay.accepted_N), size=CHUNK)
        gaps_s = np.zeros(CHUNK) if self._rate is None else generator.exponential(1 / self._rate, size=CHUNK)
        times_s = self._clock_s + gaps_s.cumsum()
        self._clock_s = float(times_s[-1])
        self._drawn += [_Request(*values) for values in zip(times_s.tolist(), rounds.tolist(), strict=True)]


class _Run:
    """One seed of one simulation: `concurrency` places, some of them taken."""

    def __init__(
        self, replay: Replay, costs: CostProfile, scheduler: Scheduler, concurrency: int, config: SimulateConfig
    ) -> None:
        self.replay, self.costs, self.config = replay, costs, config
        self.schedule = scheduler.begin(costs, replay.num_slots)
        self.requests = _Requests(replay, config.rate, config.seed)
        self.is_closed = config.rate is None
        self.now_s = 0.0
        self.taken_C = np.zeros(concurrency, dtype=bool)
        self.round_C, self.left_C = (np.zeros(concurrency, dtype=np.int64) for _ in range(2))
        # NaN where a request is not to be timed: it was there before the time that counts.
        self.arrived_C = np.full(concurrency, np.nan)
        self.sums: dict[str, float] = {}
        self.rates: list[np.ndarray] = []

    def totals(self) -> dict[str, float]:
        """Run all steps; the means over those that count."""
        config = self.config
        self._admit(counts=False)
        if self.is_closed:
            progress = np.random.default_rng([config.seed, 1])
            self.left_C = progress.integers(1, config.tokens_per_request + 1, size=len(self.left_C))
        for _ in range(config.warmup_steps):
            self._step(counts=False)
        began_s, self.sums, self.rates = self.now_s, {}, []
        for _ in range(config.num_steps):
            self._step(counts=True)
        s, steps = self.sums, config.num_steps
        rates = np.concatenate(self.rates) if self.rates else np.zeros(0)
        return {
            "tokens_per_second": s["tokens"] / (self.now_s - began_s),
            "tokens_per_second_per_user": float(rates.mean()) if len(rates) else float("nan"),
            "accepted_length": s["accepted"] / s["rows"] + 1,
            "verified_tokens": (s["rows"] + s["drafts"]) / steps,
            "paid_tokens": s["paid"] / steps,
            "drafts_per_row": s["drafts"] / s["rows"],
            "not_drafting": s["idle"] / steps,
            "rows": s["rows"] / steps,
            "waiting": s["waiting"] / steps,
        }

    def _admit(self, *, counts: bool) -> None:
        """Give free places to the requests that came; where nobody is there at all, wait for the first."""
        if not self.is_closed and not self.taken_C.any():
            self.now_s = max(self.now_s, self.requests.first().arrived_s)
        for place in np.flatnonzero(~self.taken_C):
            if self.requests.first().arrived_s > self.now_s:
                break
            request = self.requests.take()
            arrived_s = self.now_s if self.is_closed else request.arrived_s
            self.taken_C[place] = True
            self.round_C[place] = request.round
            self.left_C[place] = self.config.tokens_per_request
            self.arrived_C[place] = arrived_s if counts else np.nan

    def _step(self, *, counts: bool) -> None:
        self._admit(counts=counts)
        rows_R = np.flatnonzero(self.taken_C)
        at_R = self.round_C[rows_R]
        drafted = self.schedule.want(len(rows_R))
        lengths_R, accepted_R = self._verify(at_R, drafted)
        verified_R = torch.from_numpy(lengths_R)
        waiting = 0 if self.is_closed else self.requests.num_waiting(self.now_s)
        self.now_s += self.costs.round_s(verified_R, drafted)
        self.schedule.observe(Outcome(drafted=drafted, proposed_R=verified_R, accepted_R=torch.from_numpy(accepted_R)))
        gains_R = np.minimum(accepted_R + 1, self.left_C[rows_R])
        self._add(
            rows=len(rows_R),
            tokens=int(gains_R.sum()),
            accepted=int(accepted_R.sum()),
            drafts=int(lengths_R.sum()),
            paid=self.costs.tokens_of(verified_R),
            idle=int(drafted == 0),
            waiting=waiting,
        )
        self.round_C[rows_R] = self.replay.next_NJ[at_R, accepted_R]
        self.left_C[rows_R] -= gains_R
        self._leave(rows_R[self.left_C[rows_R] == 0])

    def _verify(self, at_R: np.ndarray, drafted: int) -> tuple[np.ndarray, np.ndarray]:
        """Drafts verified and accepted of each row."""
        if drafted == 0:
            return np.zeros_like(at_R), np.zeros_like(at_R)
        survival_RS: Tensor = self.replay.survival_NG[torch.from_numpy(at_R), :drafted]
        admitted_R = self.schedule.lengths(survival_RS).numpy()
        lengths_R = np.minimum(admitted_R, np.minimum(self.replay.proposed_N[at_R], drafted))
        return lengths_R, np.minimum(self.replay.accepted_N[at_R], lengths_R)

    def _leave(self, places: np.ndarray) -> None:
        """Requests that ended free their places."""
        spent_s = self.now_s - self.arrived_C[places]
        timed = ~np.isnan(spent_s)
        if timed.any():
            self.rates.append(self.config.tokens_per_request / spent_s[timed])
        self.taken_C[places] = False

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


def _estimates() -> list[str]:
    return [f.name for f in fields(Simulation) if f.name not in ("name", "concurrency")]


def _estimate(values: Sequence[float]) -> Estimate:
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, float("nan"), float("nan"))
    half = float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / len(values) ** 0.5)
    return Estimate(mean, mean - half, mean + half)


def frontier_section(found: Sequence[Simulation]) -> Section:
    """The table of `frontier`: a row a concurrency, tokens per second of all requests by scheduler."""
    names = list(dict.fromkeys(one.name for one in found))
    rows = []
    for concurrency in dict.fromkeys(one.concurrency for one in found):
        here = {one.name: one for one in found if one.concurrency == concurrency}
        best = max(here.values(), key=lambda one: one.tokens_per_second.value)
        cells = [f"{here[n].tokens_per_second.value:,.1f}" + (" ★" if here[n] is best else "") for n in names]
        rows.append([str(concurrency), *cells])
    return Section(
        title="Tokens per second of all requests, simulated",
        header=["requests\nat once", *(name.replace(" ", "\n") for name in names)],
        rows=rows,
        notes=["Replayed from recorded rounds with the measured costs; ★: the most at that number of requests."],
    )
