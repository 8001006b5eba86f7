# One measurement of a drafter, by real target passes. First acceptance at the full block, then what drafts and passes
# cost here, then the draft length that these make best, then the speed of both loops at it, interleaved so that a
# machine that slows down slows both.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drafters.decoding import metrics
from drafters.decoding.dispatch import dispatch_share
from drafters.decoding.divergence import first_difference, logit_margin
from drafters.decoding.loop import DecodeConfig, Generation, Round, RoundCost, RunTimings, decode
from drafters.decoding.report import LengthCost, Report, SourceReport, with_versions
from drafters.errors import ConfigError, DataError
from drafters.heads.base import Drafter
from drafters.types import Sampling

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["MeasureConfig", "Progress", "Prompt", "check_settings", "measure"]

Prompt = tuple[str, Tensor]  # source name, token ids [T]
Progress = Callable[[str, int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """`length`: drafts a round in the speed runs, or "auto". `profile_rounds`: rounds timed at each draft length.
    `num_speed_prompts`: prompts in the speed runs, spread over the sources; None = all."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    length: int | str = "auto"
    batch_size: int = 1
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    profile_rounds: int = 12
    num_speed_prompts: int | None = None


@dataclass(frozen=True)
class _PromptBatch:
    """Prompts of one source that are decoded together; `start` numbers the first among all."""

    source: str
    start: int
    prompts: list[Tensor]


@dataclass(frozen=True)
class _Run:
    """What decoding a batch gave."""

    batch: _PromptBatch
    rows: list[Generation]
    timings: RunTimings

    @property
    def rounds(self) -> list[Round]:
        return [r for row in self.rows for r in row.rounds]

    @property
    def num_tokens(self) -> int:
        """New tokens that rounds gave: the first token of each row is prefill's."""
        return sum(len(row.tokens) - 1 for row in self.rows)


def measure(
    target: "FrozenTarget",
    drafter: Drafter,
    prompts: Sequence[Prompt],
    config: MeasureConfig,
    *,
    provenance: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Decode `prompts` with and without `drafter` and report acceptance and speed.

    `progress(phase, done, total, accepted_length)` is called after every batch; phases: "acceptance", "costs",
    "speed". Raises ConfigError for settings out of range and DataError when there is too little text to measure.
    """
    check_settings(drafter, prompts, config)
    runner = _Runner(target, drafter, config, progress or (lambda *_: None))
    batches = _batches(prompts, config.batch_size)
    runner.warm_up(batches[0])
    acceptance = runner.acceptance(batches)
    rounds = [r for run in acceptance for r in run.rounds]
    if not metrics.full_rounds(rounds):
        raise DataError(
            f"max_new_tokens: no round of {drafter.block_size} drafts ran uncut within {config.max_new_tokens} new "
            f"tokens on {len(prompts)} prompts; raise it, or give prompts with longer answers"
        )
    accepted = metrics.conditional_acceptance(rounds, drafter.block_size)
    costs = runner.costs(batches)
    length = metrics.choose_length(costs, accepted) if isinstance(config.length, str) else config.length
    speed = runner.speed(_spread(batches, config), length)
    share = dispatch_share(target, prompts[0][1])
    return Report(
        **_acceptance_part(acceptance, drafter.block_size, config.seed),
        **_speed_part(speed, length),
        predicted_speedup=costs.speedup(length, accepted) if length in costs.draft_s else float("nan"),
        costs=_cost_table(costs, accepted),
        dispatch_share=share,
        temperature=config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        seed=config.seed,
        by_source=_by_source(acceptance, speed, drafter.block_size, config.seed),
        divergences=None if config.sampling.temperature > 0 else _divergences(target, speed),
        provenance=with_versions(provenance or {}, target),
    )


def check_settings(drafter: Drafter, prompts: Sequence[Prompt], config: MeasureConfig, *, key: str = "") -> None:
    """Raises ConfigError for settings out of range and DataError without prompts; `key` is where the settings stand."""
    if not prompts:
        raise DataError("prompts: there are none to measure on; name a source that has some")
    prefix = f"{key}." if key else ""
    is_auto = config.length == "auto"
    if not is_auto and not (isinstance(config.length, int) and 1 <= config.length <= drafter.block_size):
        got = repr(config.length) if isinstance(config.length, str) else config.length
        raise ConfigError(f"{prefix}length: got {got}; accepted: 'auto' or 1 to {drafter.block_size}")
    for name in ("max_new_tokens", "profile_rounds", "batch_size", "num_speed_prompts"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{prefix}{name}: got {value}; accepted: 1 or more")
    least = drafter.block_size + 2  # the first token comes from the prompt's pass, the last is the bonus
    if config.max_new_tokens < least:
        raise ConfigError(
            f"{prefix}max_new_tokens: got {config.max_new_tokens}; accepted: {least} or more, since only rounds "
            f"in which a whole block of {drafter.block_size} drafts fits are measured"
        )


def _batches(prompts: Sequence[Prompt], batch_size: int) -> list[_PromptBatch]:
    """Batches of one source each, sources taking turns, so that any first part of the list is a mix."""
    by_source: dict[str, list[Tensor]] = {}
    for source, tokens in prompts:
        by_source.setdefault(source, []).append(tokens)
    queues = [
        [(source, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
        for source, rows in by_source.items()
    ]
    turns = [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]
    done, start = [], 0
    for source, rows in turns:
        done.append(_PromptBatch(source, start, rows))
        start += len(rows)
    return done


def _spread(batches: list[_PromptBatch], config: MeasureConfig) -> list[_PromptBatch]:
    if config.num_speed_prompts is None:
        return batches
    taken, count = [], 0
    for batch in batches:
        if count >= config.num_speed_prompts:
            break
        taken.append(batch)
        count += len(batch.prompts)
    return taken


class _Runner:
    """Runs the phases of one measurement with one set of settings."""

    def __init__(self, target: "FrozenTarget", drafter: Drafter, config: MeasureConfig, progress: Progress) -> None:
        self.target, self.drafter, self.config, self.progress = target, drafter, config, progress
        self.decode_config = DecodeConfig(
            max_new_tokens=config.max_new_tokens,
            sampling=config.sampling,
            stop_ids=config.stop_ids,
            batch_size=config.batch_size,
        )

    def run(self, batch: _PromptBatch, drafter: Drafter | None, **changes: Any) -> _Run:
        """Decode one batch; `changes` replace fields of the decode settings."""
        timings = RunTimings()
        config = replace(self.decode_config, seed=self.config.seed + batch.start, **changes)
        return _Run(batch, decode(self.target, drafter, batch.prompts, config, timings=timings), timings)

    def warm_up(self, batch: _PromptBatch) -> None:
        """First calls allocate, compile and page weights in; they are not measured."""
        few = min(8, self.config.max_new_tokens)
        self.run(batch, self.drafter, max_new_tokens=few)
        self.run(batch, None, max_new_tokens=few)

    def acceptance(self, batches: list[_PromptBatch]) -> list[_Run]:
        """Every prompt at the full block."""
        runs: list[_Run] = []
        for batch in batches:
            runs.append(self.run(batch, self.drafter))
            rounds = [r for run in runs for r in run.rounds]
            self.progress("acceptance", len(runs), len(batches), metrics.accepted_length(rounds))
        return runs

    def costs(self, batches: list[_PromptBatch]) -> metrics.Costs:
        """Real rounds whose draft length cycles through 1..block size, beside the baseline on the same prompts, until
        each length was timed `profile_rounds` times (or the prompts end)."""
        lengths = tuple(range(1, self.drafter.block_size + 1))
        drafted, plain = RunTimings(), RunTimings()
        for turn, batch in enumerate(batches):
            shift = turn % len(lengths)
            run = self.run(batch, self.drafter, length=lengths[shift:] + lengths[:shift])
            drafted.rounds += run.timings.rounds
            plain.rounds += self.run(batch, None).timings.rounds
            fewest = min(sum(cost.length == k for cost in drafted.rounds) for k in lengths)
            self.progress("costs", min(fewest, self.config.profile_rounds), self.config.profile_rounds, float("nan"))
            if fewest >= self.config.profile_rounds:
                break
        return _costs(drafted.rounds, plain.rounds)

    def speed(self, batches: list[_PromptBatch], length: int) -> list[tuple[_Run, _Run]]:
        """(drafted, baseline) of each batch, taking turns in who goes first."""
        pairs: list[tuple[_Run, _Run]] = []
        for turn, batch in enumerate(batches):
            if turn % 2:
                plain = self.run(batch, None)
                drafted = self.run(batch, self.drafter, length=length)
            else:
                drafted = self.run(batch, self.drafter, length=length)
                plain = self.run(batch, None)
            pairs.append((drafted, plain))
            rounds = [r for run, _ in pairs for r in run.rounds]
            self.progress("speed", len(pairs), len(batches), metrics.accepted_length(rounds))
        return pairs


def _acceptance_part(runs: list[_Run], block_size: int, seed: int) -> dict[str, Any]:
    rounds = metrics.full_rounds(r for run in runs for r in run.rounds)
    counts = [metrics.full_rounds(row.rounds) for run in runs for row in run.rows]
    return {
        "block_size": block_size,
        "accepted_length": metrics.accepted_length(rounds),
        "accepted_length_ci95": metrics.bootstrap_ci(
            [(sum(r.accepted + 1 for r in c), len(c)) for c in counts], seed=seed
        ),
        "acceptance_by_position": metrics.conditional_acceptance(rounds, block_size),
        "survival_by_position": metrics.survival(rounds, block_size),
        "accepted_histogram": metrics.accepted_histogram(rounds, block_size),
        "verify_rate": metrics.verify_rate(rounds),
        "prompts": len(counts),
        "rounds": len(rounds),
        "tokens": sum(r.accepted + 1 for r in rounds),
    }


def _speed_part(pairs: list[tuple[_Run, _Run]], length: int) -> dict[str, Any]:
    drafted, plain = [d for d, _ in pairs], [p for _, p in pairs]
    costs = _costs(*([cost for run in side for cost in run.timings.rounds] for side in (drafted, plain)))
    totals = [
        _rate(
            sum(len(row.tokens) for run in side for row in run.rows),
            sum(run.timings.prefill_s + run.timings.decode_s for run in side),
        )
        for side in (drafted, plain)
    ]
    nan = float("nan")
    return {
        "draft_length": length,
        "accepted_length_at_draft_length": metrics.accepted_length(r for run in drafted for r in run.rounds),
        **_speeds(pairs),
        "end_to_end_speedup": _rate(*totals),
        "draft_ms": 1e3 * costs.draft_s.get(length, nan),
        "verify_ms": 1e3 * costs.verify_s.get(length, nan),
        "overhead_ms": 1e3 * costs.overhead_s.get(length, nan),
        "baseline_step_ms": 1e3 * costs.step_s,
        "verify_to_step": costs.verify_s.get(length, nan) / costs.step_s,
        "overhead_share": _rate(
            sum(run.timings.overhead_s for run in drafted), sum(run.timings.decode_s for run in drafted)
        ),
    }


def _costs(drafted: list[RoundCost], plain: list[RoundCost]) -> metrics.Costs:
    if not plain or not any(cost.length for cost in drafted):
        raise DataError("max_new_tokens: answers were too short to time a round; raise it, or give other prompts")
    return metrics.costs_from(drafted, plain)


def _speeds(pairs: list[tuple[_Run, _Run]]) -> dict[str, float]:
    drafted, plain = (
        _rate(sum(run.num_tokens for run in side), sum(run.timings.decode_s for run in side))
        for side in ([d for d, _ in pairs], [p for _, p in pairs])
    )
    return {"tokens_per_second": drafted, "baseline_tokens_per_second": plain, "speedup": _rate(drafted, plain)}


def _rate(amount: float, per: float) -> float:
    return amount / per if per else float("nan")


def _by_source(
    acceptance: list[_Run], speed: list[tuple[_Run, _Run]], block_size: int, seed: int
) -> dict[str, SourceReport]:
    result = {}
    for source in dict.fromkeys(run.batch.source for run in acceptance):
        part = _acceptance_part([run for run in acceptance if run.batch.source == source], block_size, seed)
        pairs = [pair for pair in speed if pair[0].batch.source == source]
        values = {**part, **_speeds(pairs)}
        result[source] = SourceReport(**{f.name: values[f.name] for f in fields(SourceReport)})
    return result


def _cost_table(costs: metrics.Costs, accepted: Sequence[float]) -> list[LengthCost]:
    return [
        LengthCost(
            length=k,
            draft_ms=1e3 * costs.draft_s[k],
            verify_ms=1e3 * costs.verify_s[k],
            overhead_ms=1e3 * costs.overhead_s[k],
            accepted_length=metrics.expected_length(accepted[:k]),
            single_steps_ms=1e3 * costs.step_s * metrics.expected_length(accepted[:k]),
            predicted_speedup=costs.speedup(k, accepted),
        )
        for k in costs.draft_s
        if k >= 1
    ]


def _divergences(target: "FrozenTarget", pairs: list[tuple[_Run, _Run]]) -> dict[str, Any]:
    """At temperature 0: how many rows differ from the baseline's, where each first does, and the target's margin
    between its two best logits there."""
    first = []
    for drafted, plain in pairs:
        for row, twin, prompt in zip(drafted.rows, plain.rows, drafted.batch.prompts, strict=True):
            at = first_difference(row.tokens, twin.tokens)
            if at is not None:
                margin = logit_margin(target, prompt, twin.tokens[:at])
                first.append({"prompt": drafted.batch.start + row.prompt, "position": at, "logit_margin": margin})
    return {"prompts": len(first), "compared": sum(len(plain.rows) for _, plain in pairs), "first": first}
