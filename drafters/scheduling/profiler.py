# Measures a cost profile by decoding for real. Every number of rows has a batch of its own, in which rows end and
# others take their places, and the batches take turns, round by round, at every number of drafts. So caches have the
# holes and the lengths that they have in use, and a machine that slows down slows every point alike.

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, cycle
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from drafters.decoding.batch import LiveBatch
from drafters.decoding.loop import DecodeConfig
from drafters.decoding.records import RoundCost, RunTimings
from drafters.decoding.report import with_versions
from drafters.decoding.runner import Progress
from drafters.decoding.sampling import Draws, check_sampling
from drafters.decoding.verify import empty_proposal
from drafters.errors import ConfigError, DataError
from drafters.heads.base import Drafter, Session
from drafters.scheduling.profile import CostProfile, DraftPoint, OverheadPoint, VerifyPoint
from drafters.types import Needs, Proposal, Sampling

if TYPE_CHECKING:
    from drafters.kv_cache import TargetCache
    from drafters.target import FrozenTarget

__all__ = ["ProfileConfig", "Profiler", "measure_profile"]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to time. `rows`: numbers of rows in a step. Rounds have 0 to `max_length` drafts a row; None = the drafter's
    block size, which it may not pass; without a drafter it is needed. `repeats` is the number of timings of each point,
    after `warmup` that do not count. Rows go on for `max_new_tokens`; `sampling` is that decoding's."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_length: int | None = None
    repeats: int = 10
    warmup: int = 2
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


def measure_profile(
    target: "FrozenTarget",
    drafter: Drafter | None,
    prompts: Sequence[Tensor],
    config: ProfileConfig,
    *,
    progress: Progress = lambda *_: None,
) -> CostProfile:
    """Time this target and drafter on this machine, after `prompts` (int64 ids [T]), which are repeated where there are
    fewer than rows. Layout "padded": that is how this package decodes.

    A verify point is the median of the target's step, over 1 to `max_length` + 1 tokens a row, a draft point that of
    propose and extend at one length (what a round without drafts verified is read before the next draft, so length 0
    costs next to nothing), an overhead point that of the rest of all rounds. Raises ConfigError for settings out of
    range and DataError for prompts that do not fit.
    """
    profiler = Profiler(target, drafter, prompts, config)
    laps = config.warmup + config.repeats
    for lap in range(laps):
        profiler.lap(counts=lap >= config.warmup)
        progress("rounds", lap + 1, laps, math.nan)
    return profiler.profile()


class Profiler:
    """The work of `measure_profile` in laps, each of which times every point once."""

    def __init__(
        self, target: "FrozenTarget", drafter: Drafter | None, prompts: Sequence[Tensor], config: ProfileConfig
    ) -> None:
        self.target, self.drafter, self.prompts, self.config = target, drafter, prompts, config
        self._length = _check(target, drafter, prompts, config)
        self._random = random.Random(config.seed)
        self._rows = {rows: _Rows(self, rows) for rows in config.rows}
        self._found: list[RoundCost] = []

    @torch.inference_mode()
    def lap(self, *, counts: bool = True) -> None:
        """One round of every number of rows and of drafts, in an order of its own."""
        places = [(rows, length) for rows in self.config.rows for length in range(self._length + 1)]
        for rows, length in self._random.sample(places, len(places)):
            cost = self._rows[rows].round(length)
            if counts:
                self._found.append(cost)

    def batch(self, rows: int) -> LiveBatch:
        """An empty one."""
        config = DecodeConfig(
            max_new_tokens=self.config.max_new_tokens,
            sampling=self.config.sampling,
            seed=self.config.seed,
            stop_ids=(),
            batch_size=rows,
        )
        filling = _FillingDrafter(self.drafter, self._length)
        return LiveBatch(self.target, filling, config, num_slots=self._length, timings=RunTimings())

    def shuffled(self) -> list[Tensor]:
        """The prompts in an order of their own."""
        return self._random.sample(list(self.prompts), len(self.prompts))

    def profile(self) -> CostProfile:
        """What was timed so far."""
        config, target, drafter = self.config, self.target, self.drafter
        facts = with_versions({}, target)
        return CostProfile(
            layout="padded",
            verify=tuple(_verify_points(self._found)),
            draft=() if drafter is None else tuple(_draft_points(self._found)),
            overhead=tuple(_overhead_points(self._found)),
            hardware={name: facts[name] for name in ("device", "num_threads")},
            dtype=facts["dtype"],
            versions=facts["versions"],
            target={"name": target.spec.name, "weights_hash": target.spec.weights_hash},
            drafter={} if drafter is None else {"class": type(drafter).__name__, "block_size": drafter.block_size},
            conditions={
                "prompts": len(self.prompts),
                "mean_prompt_tokens": fmean(len(prompt) for prompt in self.prompts),
                "max_new_tokens": config.max_new_tokens,
                "repeats": len(self._found) // (len(config.rows) * (self._length + 1)),
                "sampling": asdict(config.sampling),
            },
        )


class _Rows:
    """A batch that always has as many rows at work: where some end, the next prompts begin."""

    def __init__(self, profiler: Profiler, rows: int) -> None:
        self._rows = rows
        self._live = profiler.batch(rows)
        self._prompts = cycle(profiler.shuffled())
        self._numbers = count()

    def round(self, length: int) -> RoundCost:
        """The cost of a round of all rows, after which some go on."""
        while True:
            self._fill()
            if length and self._live.unread:
                # Reads what rounds without drafts left, which is not this one's.
                self._live.round(1, None)
                self._fill()
            self._live.round(length, None)
            cost = self._live.timings.rounds[-1]
            # Where all rows end they are not read, and where none has room they draft less.
            if cost.length == length and self._live.live:
                return cost

    def _fill(self) -> None:
        while len(self._live.live) < self._rows:
            new = [next(self._numbers) for _ in range(self._rows - len(self._live.live))]
            self._live.admit([(number, next(self._prompts), number) for number in new])
        self._live.done.clear()


class _FillingDrafter(Drafter):
    """Proposes as much as it is asked for: what the other drafter (None: none) leaves open is filled with a token that
    stands for any, so that steps of every width can be timed."""

    def __init__(self, inner: Drafter | None, length: int) -> None:
        super().__init__()
        self._inner, self._length = inner, length

    @property
    def needs(self) -> Needs:
        return Needs() if self._inner is None else self._inner.needs

    @property
    def block_size(self) -> int:
        return self._length

    def session(self, target: "FrozenTarget", batch_size: int) -> Session:
        inner = None if self._inner is None else self._inner.session(target, batch_size)
        return _FillingSession(inner, batch_size, target.device)


class _FillingSession(Session):
    def __init__(self, inner: Session | None, batch_size: int, device: torch.device) -> None:
        self._inner, self._num_rows, self._device = inner, batch_size, device

    def share(self, cache: "TargetCache") -> None:
        if self._inner is not None:
            self._inner.share(cache)

    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        if self._inner is not None:
            self._inner.extend(tokens_BT, lengths_B, anchor_B, aux_BTLD, last_BTD)

    def propose(self, length: int, draws: Draws) -> Proposal:
        if self._inner is None:
            proposal = empty_proposal(self._num_rows, self._device)
        else:
            proposal = self._inner.propose(length, draws)
        return _filled(proposal, length)

    def keep(self, rows: Tensor) -> None:
        self._num_rows = len(rows)
        if self._inner is not None:
            self._inner.keep(rows)

    def join(self, other: Self) -> None:
        self._num_rows += other._num_rows
        if self._inner is not None and other._inner is not None:
            self._inner.join(other._inner)


def _filled(proposal: Proposal, length: int) -> Proposal:
    """The same with `length` drafts in every row; those added are points on the first token of the support."""
    missing = length - proposal.tokens_BS.shape[1]
    slots_S = torch.arange(length, device=proposal.tokens_BS.device)
    is_added_BS = slots_S >= proposal.lengths_B[:, None]
    if not bool(is_added_BS.any()):
        return proposal
    token = 0 if proposal.support_V is None else int(proposal.support_V[0])
    tokens_BS = torch.nn.functional.pad(proposal.tokens_BS, (0, missing)).masked_fill(is_added_BS, token)
    probs_BSV = proposal.probs_BSV
    if probs_BSV is not None:
        point_V = torch.zeros_like(probs_BSV[0, 0])
        point_V[0] = 1
        probs_BSV = torch.nn.functional.pad(probs_BSV, (0, 0, 0, missing))
        probs_BSV = torch.where(is_added_BS[..., None], point_V, probs_BSV)
    lengths_B = torch.full_like(proposal.lengths_B, length)
    return replace(proposal, tokens_BS=tokens_BS, lengths_B=lengths_B, probs_BSV=probs_BSV, confidence_BS=None)


def _verify_points(costs: Sequence[RoundCost]) -> list[VerifyPoint]:
    groups: dict[tuple[int, int], list[float]] = {}
    for cost in costs:
        groups.setdefault((cost.rows, cost.rows * (1 + cost.length)), []).append(cost.verify_s)
    return [_verify_point(rows, tokens, found) for (rows, tokens), found in sorted(groups.items())]


def _verify_point(rows: int, tokens: int, seconds: Sequence[float]) -> VerifyPoint:
    low, high = median(seconds), median(seconds)
    if len(seconds) > 1:
        low, _, high = quantiles(seconds, n=4, method="inclusive")
    return VerifyPoint(rows=rows, tokens=tokens, seconds=median(seconds), low=low, high=high, count=len(seconds))


def _draft_points(costs: Sequence[RoundCost]) -> list[DraftPoint]:
    groups: dict[tuple[int, int], list[float]] = {}
    for cost in costs:
        groups.setdefault((cost.rows, cost.length), []).append(cost.draft_s)
    return [DraftPoint(rows=rows, length=n, seconds=median(found)) for (rows, n), found in sorted(groups.items())]


def _overhead_points(costs: Sequence[RoundCost]) -> list[OverheadPoint]:
    groups: dict[int, list[float]] = {}
    for cost in costs:
        groups.setdefault(cost.rows, []).append(cost.overhead_s)
    return [OverheadPoint(rows=rows, seconds=median(found)) for rows, found in sorted(groups.items())]


def _check(target: "FrozenTarget", drafter: Drafter | None, prompts: Sequence[Tensor], config: ProfileConfig) -> int:
    """The most drafts a row. Raises ConfigError and DataError."""
    check_sampling(config.sampling)
    if not config.rows or min(config.rows) < 1 or len(set(config.rows)) < len(config.rows):
        raise ConfigError(
            f"task.rows: got {list(config.rows)}; accepted: different whole numbers, 1 or more, at least one"
        )
    for name, value, least in (("repeats", config.repeats, 1), ("warmup", config.warmup, 0)):
        if value < least:
            raise ConfigError(f"task.{name}: got {value}; accepted: {least} or more")
    most = None if drafter is None else drafter.block_size
    length = most if config.max_length is None else config.max_length
    if length is None:
        raise ConfigError("task.max_length: got null without a drafter; accepted: 1 or more, the most drafts to verify")
    if length < 1 or (most is not None and length > most):
        upto = "or more" if most is None else f"to {most}, the drafter's block size"
        raise ConfigError(f"task.max_length: got {length}; accepted: 1 {upto}")
    if config.max_new_tokens < length + 3:
        raise ConfigError(
            f"max_new_tokens: got {config.max_new_tokens}; accepted: {length + 3} or more, since the first token comes "
            f"from the prompt and no answer may end with its first round of up to {length} drafts"
        )
    if not prompts:
        raise DataError("prompts: there are none to measure on; name a source that has some")
    room = target.spec.max_position - config.max_new_tokens
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= room:
            raise DataError(
                f"prompt {i}: it has {len(prompt)} tokens; accepted: 1 to {room}, since max_new_tokens="
                f"{config.max_new_tokens} must fit into the target's {target.spec.max_position} positions too"
            )
    return length
