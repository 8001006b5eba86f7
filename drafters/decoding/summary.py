# From what the phases of a measurement found to the numbers of a report.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from drafters.decoding import metrics
from drafters.decoding.dispatch import dispatch_share
from drafters.decoding.divergence import first_difference, logit_margin
from drafters.decoding.records import Round
from drafters.decoding.report import LengthCost, Part, Prediction, PromptCounts, Report, UnitSpeed, with_versions
from drafters.decoding.runner import Item, Run
from drafters.decoding.tree import Tree
from drafters.heads.base import Drafter

if TYPE_CHECKING:
    from drafters.decoding.measure import MeasureConfig
    from drafters.scheduling.policy import Policy
    from drafters.target import FrozenTarget

__all__ = ["Found", "report_of"]

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the phases found of one drafter: runs at the full block (or tree), costs by draft length and the accepted
    length that each length should have, and pairs of speed runs at `length`, (drafted, plain)."""

    drafter: Drafter
    acceptance: list[Run]
    costs: metrics.Costs
    accepted_lengths: Mapping[int, float]
    length: int
    tree: Tree | None
    policy: "Policy | None"
    speed: list[tuple[Run, Run]]
    num_ranks: int

    @property
    def block_size(self) -> int:
        """Positions that a draft can have: of a tree, its depth."""
        return self.drafter.block_size if self.tree is None else self.tree.max_depth

    @property
    def rows(self) -> list[tuple[Item, list[Round]]]:
        """Rounds of every prompt, in the order of prompts: units, and so batches, leave no trace in intervals."""
        pairs = [pair for run in self.acceptance for pair in zip(run.unit.items, run.rows, strict=True)]
        return [(item, row.rounds) for item, row in sorted(pairs, key=lambda pair: pair[0].number)]


def report_of(
    target: "FrozenTarget", found: Found, config: "MeasureConfig", *, provenance: Mapping[str, Any], name: str
) -> Report:
    """The report of one drafter."""
    rows = found.rows
    speed = _speed_part(found, config.seed)
    parameters, num_bytes = found.drafter.size(target)
    sampling = config.sampling
    return Report(
        name=name,
        **_acceptance_part([rounds for _, rounds in rows], found.block_size, config.seed),
        verify_rate=metrics.verify_rate(r for _, rounds in rows for r in rounds),
        block_size=found.block_size,
        tree=None if found.tree is None else {"parents": list(found.tree.parents), "ranks": list(found.tree.ranks)},
        schedule=_schedule_part(found),
        draft_length=found.length,
        **speed,
        predicted_speedup=_predicted(found, found.length, found.accepted_lengths.get(found.length, NAN)),
        prediction=_prediction(found, rows, speed["speedup"]),
        costs=_cost_table(found),
        dispatch_share=dispatch_share(target, found.acceptance[0].unit.items[0].tokens),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        processes=found.num_ranks,
        seed=config.seed,
        drafter_parameters=parameters,
        drafter_bytes=num_bytes,
        by_source=_parts(found, config.seed, lambda item: item.source),
        by_turn=_parts(found, config.seed, lambda item: str(item.turn + 1)),
        by_context=_by_context(found, config.seed),
        per_prompt=[_counts(item, rounds) for item, rounds in rows],
        divergences=None if sampling.temperature > 0 else _divergences(target, found.speed),
        provenance=with_versions(provenance, target),
    )


def _acceptance_part(prompts: list[list[Round]], block_size: int, seed: int) -> dict[str, Any]:
    """What `Report` says of acceptance, from the rounds of each prompt."""
    rounds = metrics.full_rounds(r for one in prompts for r in one)
    return {
        "accepted_length": metrics.accepted_length(rounds),
        "accepted_length_ci95": metrics.accepted_length_ci(prompts, seed=seed),
        "acceptance_by_position": metrics.conditional_acceptance(rounds, block_size),
        "acceptance_by_position_ci95": metrics.conditional_acceptance_ci(prompts, block_size, seed=seed),
        "survival_by_position": metrics.survival(rounds, block_size),
        "accepted_histogram": metrics.accepted_histogram(rounds, block_size),
        "prompts": len(prompts),
        "rounds": len(rounds),
        "tokens": sum(r.accepted + 1 for r in rounds),
    }


def _speed_part(found: Found, seed: int) -> dict[str, Any]:
    drafted, plain = [d for d, _ in found.speed], [p for _, p in found.speed]
    length = found.length
    costs = metrics.costs_from(*([cost for run in side for cost in run.timings.rounds] for side in (drafted, plain)))
    totals = [
        _rate(sum(len(row.tokens) for run in side for row in run.rows), sum(run.total_s for run in side))
        for side in (drafted, plain)
    ]
    units = sorted((_unit_speed(*pair) for pair in found.speed), key=lambda one: one.unit)
    sums = [(one.tokens, one.seconds, one.baseline_tokens, one.baseline_seconds) for one in units]
    return {
        "per_unit": units,
        "accepted_length_at_draft_length": metrics.accepted_length(r for run in drafted for r in run.rounds),
        **_speeds(found.speed),
        "speedup_ci95": metrics.speedup_ci(sums, seed=seed),
        "end_to_end_speedup": _rate(*totals),
        "draft_ms": 1e3 * costs.draft_s.get(length, NAN),
        "verify_ms": 1e3 * costs.verify_s.get(length, NAN),
        "overhead_ms": 1e3 * costs.overhead_s.get(length, NAN),
        "baseline_step_ms": 1e3 * costs.step_s,
        "verify_to_step": costs.verify_s.get(length, NAN) / costs.step_s,
        "overhead_share": _rate(
            sum(run.timings.overhead_s for run in drafted), sum(run.timings.decode_s for run in drafted)
        ),
    }


def _unit_speed(drafted: Run, plain: Run) -> UnitSpeed:
    return UnitSpeed(
        unit=drafted.unit.index,
        tokens=drafted.num_tokens,
        seconds=drafted.timings.decode_s,
        baseline_tokens=plain.num_tokens,
        baseline_seconds=plain.timings.decode_s,
    )


def _counts(item: Item, rounds: Sequence[Round]) -> PromptCounts:
    full = metrics.full_rounds(rounds)
    tokens = sum(r.accepted + 1 for r in full)
    return PromptCounts(prompt=item.number, source=item.source, turn=item.turn, tokens=tokens, rounds=len(full))


def _speeds(pairs: Sequence[tuple[Run, Run]]) -> dict[str, float]:
    drafted, plain = (
        _rate(sum(run.num_tokens for run in side), sum(run.timings.decode_s for run in side))
        for side in ([d for d, _ in pairs], [p for _, p in pairs])
    )
    return {"tokens_per_second": drafted, "baseline_tokens_per_second": plain, "speedup": _rate(drafted, plain)}


def _rate(amount: float, per: float) -> float:
    return amount / per if per else NAN


def _schedule_part(found: Found) -> dict[str, Any] | None:
    """What the schedule did in the speed runs."""
    if found.policy is None:
        return None
    rounds = [r for drafted, _ in found.speed for r in drafted.rounds]
    steps = [cost for drafted, _ in found.speed for cost in drafted.timings.rounds]
    return {
        **found.policy.describe(),
        "drafts_verified": sum(r.proposed for r in rounds) / len(rounds),
        "accepted": sum(r.accepted for r in rounds) / len(rounds),
        "not_drafting": sum(cost.length == 0 for cost in steps) / len(steps),
    }


def _predicted(found: Found, length: int, accepted_length: float) -> float:
    """NaN under a schedule: what it verifies differs from round to round."""
    if found.policy is not None or length not in found.costs.draft_s:
        return NAN
    return found.costs.speedup(length, accepted_length)


def _prediction(found: Found, rows: list[tuple[Item, list[Round]]], measured: float) -> Prediction:
    """Speed-up of the speed prompts, predicted from costs profiled before and acceptances of other dialogues: those
    without a speed run, or, where all have one, each half from the other."""
    timed = {item.dialogue for drafted, _ in found.speed for item in drafted.unit.items}
    others = {item.dialogue for item, _ in rows} - timed
    ordered = sorted(timed)
    folds = [(timed, others)] if others else [(set(ordered[i::2]), set(ordered[1 - i :: 2])) for i in (0, 1)]
    tokens, steps, weighted = 0.0, 0.0, 0.0
    used: set[int] = set()
    for told, learned in folds:
        rounds = [r for item, one in rows if item.dialogue in learned for r in one]
        # A tree was verified as it is; of a chain the full block.
        tau = metrics.accepted_length(rounds, found.length)
        speedup = _predicted(found, found.length, tau)
        share = sum(
            len(row.tokens) - 1
            for _, plain in found.speed
            for item, row in zip(plain.unit.items, plain.rows, strict=True)
            if item.dialogue in told
        )
        if not share:
            continue
        used |= learned
        tokens, steps, weighted = tokens + share, steps + share / speedup, weighted + share / tau
    predicted = _rate(tokens, steps)
    return Prediction(
        speedup=predicted,
        accepted_length=_rate(tokens, weighted),
        prompts=sum(item.dialogue in used for item, _ in rows),
        error=predicted / measured - 1,
    )


def _parts(found: Found, seed: int, group: Callable[[Item], str]) -> dict[str, Part]:
    """A part for each group of prompts; all prompts of a unit are in one group."""
    groups: dict[str, list[list[Round]]] = {}
    for item, rounds in found.rows:
        groups.setdefault(group(item), []).append(rounds)
    parts = {}
    for name, prompts in groups.items():
        pairs = [pair for pair in found.speed if group(pair[0].unit.items[0]) == name]
        parts[name] = _part(prompts, found.block_size, seed, _speeds(pairs))
    return parts


def _by_context(found: Found, seed: int) -> dict[str, Part]:
    """By the tokens of text before a round. Speeds are not known: a run passes through several buckets."""
    prompts = [metrics.full_rounds(rounds) for _, rounds in found.rows]
    buckets = sorted({metrics.context_bucket(r.context) for rounds in prompts for r in rounds})
    unknown = {"tokens_per_second": NAN, "baseline_tokens_per_second": NAN, "speedup": NAN}
    parts = {}
    for bucket in buckets:
        inside = [[r for r in rounds if metrics.context_bucket(r.context) == bucket] for rounds in prompts]
        inside = [rounds for rounds in inside if rounds]
        parts[f"{bucket[0]}-{bucket[1]}"] = _part(inside, found.block_size, seed, unknown)
    return parts


def _part(prompts: list[list[Round]], block_size: int, seed: int, speeds: Mapping[str, float]) -> Part:
    values: dict[str, Any] = {**_acceptance_part(prompts, block_size, seed), **speeds}
    return Part(**{f.name: values[f.name] for f in fields(Part)})


def _cost_table(found: Found) -> list[LengthCost]:
    costs, taus = found.costs, found.accepted_lengths
    return [
        LengthCost(
            length=k,
            draft_ms=1e3 * costs.draft_s[k],
            verify_ms=1e3 * costs.verify_s[k],
            overhead_ms=1e3 * costs.overhead_s[k],
            accepted_length=taus[k],
            single_steps_ms=1e3 * costs.step_s * taus[k],
            predicted_speedup=costs.speedup(k, taus[k]),
        )
        for k in costs.draft_s
        if k in taus
    ]


def _divergences(target: "FrozenTarget", pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """At temperature 0: how many rows differ from the baseline's, where each first does, and the target's margin
    between its two best logits there."""
    first = []
    for drafted, plain in pairs:
        for item, row, twin in zip(drafted.unit.items, drafted.rows, plain.rows, strict=True):
            at = first_difference(row.tokens, twin.tokens)
            if at is not None:
                margin = logit_margin(target, item.tokens, twin.tokens[:at])
                first.append({"prompt": item.number, "position": at, "logit_margin": margin})
    return {"prompts": len(first), "compared": sum(len(plain.rows) for _, plain in pairs), "first": first}
