# Measures a cost profile: the target's step alone, on caches that real prompts filled, and drafting and the loop's rest
# in real decoding. All is done in shuffled order, so that a machine that slows down slows every point alike.

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.records import RoundCost, RunTimings
from drafters.decoding.report import with_versions
from drafters.decoding.runner import Progress
from drafters.decoding.sampling import check_sampling
from drafters.errors import ConfigError, DataError
from drafters.heads.base import Drafter
from drafters.scheduling.profile import CostProfile, DraftPoint, OverheadPoint, VerifyPoint
from drafters.types import Needs, Sampling

if TYPE_CHECKING:
    from drafters.kv_cache import TargetCache
    from drafters.target import FrozenTarget

__all__ = ["ProfileConfig", "measure_profile"]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to time. `rows`: numbers of rows in a step. Steps verify 0 to `max_length` drafts a row; None = the
    drafter's block size, which it may not pass; without a drafter it is needed. `repeats` is the number of timings of
    each point, after `warmup` steps or calls that do not count. `max_new_tokens`: of the decoding in which drafting
    is timed; `sampling` is that decoding's."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_length: int | None = None
    repeats: int = 10
    warmup: int = 2
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


class _Filled(NamedTuple):
    """A cache that prompts filled, and the tokens [B, W] that the timed steps read after it."""

    cache: "TargetCache"
    tokens_BW: Tensor


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

    A target step reads 1 to `max_length` + 1 tokens a row and asks for the states that the drafter reads; the cache is
    rolled back after each. A draft point is the median of propose and extend in real rounds of that length, length 0
    that of reading alone; an overhead point the median of the rest of those rounds, whatever their length. Raises
    ConfigError for settings out of range and DataError for prompts that do not fit.
    """
    length = _check(target, drafter, prompts, config)
    profiler = _Profiler(target, drafter, prompts, config, length, progress)
    verify, costs = profiler.time_steps(), profiler.time_rounds()
    facts = with_versions({}, target)
    return CostProfile(
        layout="padded",
        verify=tuple(verify),
        draft=() if drafter is None else tuple(_draft_points(costs)),
        overhead=tuple(_overhead_points(costs)),
        hardware={name: facts[name] for name in ("device", "num_threads")},
        dtype=facts["dtype"],
        versions=facts["versions"],
        target={"name": target.spec.name, "weights_hash": target.spec.weights_hash},
        drafter={} if drafter is None else {"class": type(drafter).__name__, "block_size": drafter.block_size},
        conditions={
            "prompts": len(prompts),
            "mean_prompt_tokens": fmean(len(prompt) for prompt in prompts),
            "max_new_tokens": config.max_new_tokens,
            "repeats": config.repeats,
            "sampling": asdict(config.sampling),
        },
    )


@dataclass(frozen=True)
class _Profiler:
    """The parts of `measure_profile`; no step verifies more than `length` drafts a row."""

    target: "FrozenTarget"
    drafter: Drafter | None
    prompts: Sequence[Tensor]
    config: ProfileConfig
    length: int
    progress: Progress

    def time_steps(self) -> list[VerifyPoint]:
        """Points of every number of rows and of tokens a row: each once a lap, in another order every time."""
        config, shuffle = self.config, random.Random(self.config.seed)
        filled = {rows: self._fill(rows) for rows in config.rows}
        places = [(rows, width) for rows in config.rows for width in range(1, self.length + 2)]
        seconds: dict[tuple[int, int], list[float]] = {place: [] for place in places}
        num_laps = config.warmup + config.repeats
        for lap in range(num_laps):
            for count, (rows, width) in enumerate(shuffle.sample(places, len(places)), start=1):
                spent = self._step_s(filled[rows], width)
                if lap >= config.warmup:
                    seconds[rows, width].append(spent)
                self.progress("target steps", lap * len(places) + count, num_laps * len(places), math.nan)
        return [_verify_point(rows, rows * width, seconds[rows, width]) for rows, width in places]

    @torch.inference_mode()
    def _fill(self, rows: int) -> _Filled:
        """Run `rows` prompts. The tokens of the timed steps are taken from them: any may stand there."""
        chosen = [prompt.to(self.target.device) for prompt in self._chosen(rows)]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        lengths_B = torch.tensor([len(prompt) for prompt in chosen], device=self.target.device)
        cache = self.target.new_cache(rows)
        self.target.step(tokens_BT, cache, lengths_B=None if rows == 1 else lengths_B, logits="last")
        width = self.length + 1
        read = [prompt.repeat(-(-width // len(prompt)))[-width:] for prompt in chosen]
        return _Filled(cache, torch.stack(read))

    @torch.inference_mode()
    def _step_s(self, filled: _Filled, width: int) -> float:
        """Seconds of one step of `width` tokens a row; the cache is left as it was."""
        needs = Needs() if self.drafter is None else self.drafter.needs
        lengths_B, tokens_BS = filled.cache.lengths_B, filled.tokens_BW[:, :width]
        started = _now(self.target.device)
        self.target.step(tokens_BS, filled.cache, needs=needs, logits="all")
        spent = _now(self.target.device) - started
        filled.cache.rollback(lengths_B)
        return spent

    def time_rounds(self) -> list[RoundCost]:
        """Real rounds, `repeats` of every number of rows and every length, in shuffled order; what one decoding was too
        short for is asked of the next."""
        config, shuffle = self.config, random.Random(self.config.seed)
        wanted = [0] if self.drafter is None else list(range(self.length + 1))
        waiting = {rows: shuffle.sample(wanted * config.repeats, len(wanted) * config.repeats) for rows in config.rows}
        total = sum(map(len, waiting.values()))
        for rows in config.rows if config.warmup else ():
            self._decode(rows, wanted * config.warmup, 0)
        found: list[RoundCost] = []
        lap = 0
        while any(waiting.values()):
            for rows in shuffle.sample(config.rows, len(config.rows)):
                if not waiting[rows]:
                    continue
                for cost in self._decode(rows, waiting[rows], lap):
                    if cost.length in waiting[rows]:
                        waiting[rows].remove(cost.length)
                        found.append(cost)
                self.progress("rounds", total - sum(map(len, waiting.values())), total, math.nan)
            lap += 1
        return found

    def _decode(self, rows: int, lengths: Sequence[int], lap: int) -> list[RoundCost]:
        """The rounds of one decoding in which all `rows` rows were at work. The last is left out: where it ends all of
        them, the drafter does not read it."""
        # A length that drafts stands at the end, since decoding drops a drafter that never shall.
        asked = None if self.drafter is None else (*lengths, self.length)
        config = DecodeConfig(
            max_new_tokens=self.config.max_new_tokens,
            sampling=self.config.sampling,
            length=asked,
            seed=self.config.seed + lap,
            stop_ids=(),
            batch_size=rows,
        )
        timings = RunTimings()
        decode(self.target, self.drafter, self._chosen(rows), config, timings=timings)
        return [cost for cost in timings.rounds[:-1] if cost.rows == rows]

    def _chosen(self, rows: int) -> list[Tensor]:
        return list(islice(cycle(self.prompts), rows))


def _now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
        raise ConfigError(f"rows: got {list(config.rows)}; accepted: different whole numbers, 1 or more, at least one")
    for name, value, least in (("repeats", config.repeats, 1), ("warmup", config.warmup, 0)):
        if value < least:
            raise ConfigError(f"{name}: got {value}; accepted: {least} or more")
    most = None if drafter is None else drafter.block_size
    length = most if config.max_length is None else config.max_length
    if length is None:
        raise ConfigError("max_length: got null without a drafter; accepted: 1 or more, the most drafts to verify")
    if length < 1 or (most is not None and length > most):
        upto = "or more" if most is None else f"to {most}, the drafter's block size"
        raise ConfigError(f"max_length: got {length}; accepted: 1 {upto}")
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
