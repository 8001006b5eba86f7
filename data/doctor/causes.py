# Why drafts may be accepted less than they could: what the run's report and logs say. Each cause has a threshold, says
# its evidence, and is silent where there is none.

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.doctor.case import Case
    from data.doctor.findings import Findings
    from drafters.training.curve import Row

__all__ = ["Measured", "check", "check_context", "check_gap", "check_sampling", "check_training"]

GAP = 0.2  # share of teacher-forced drafts that real decoding lacks, beyond its own uncertainty
GAIN = 0.05  # share of drafts that twice the training would add, by its own curve
OVERFIT = 0.05  # share of the best validation's drafts that the last one lacks
FALL = 0.25  # share of drafts that long texts lack against short ones
SAMPLED = 0.1  # share of greedy drafts that are lost where tokens are drawn
ROUNDS = 30  # of a range of lengths, to be judged at all
UNSURE = 0.25  # half the width of the interval, as a share of the drafts
CONSTANT = 0.9  # of the highest learning rate: below it the rate's own fall lifts the curve
# What rules out each of the causes of a gap that training warns of; None: nothing here does.
RULED_OUT_BY = (None, "text/mask", "run/template", "target/self-check", "run/dtype", None)
TAU, TAU_GREEDY = "val/accepted_length", "val/accepted_length_greedy"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What causes are judged by in a report, of this version or an earlier one of its schema."""

    accepted_length: float
    accepted_length_ci95: tuple[float, float]
    block_size: int
    prompts: int
    rounds: int
    temperature: float
    by_context: "Mapping[str, Measured]" = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Measured":
        """Of the values of report.json. Raises DataError for another schema, and where something is not there."""
        from drafters.decoding.report import SCHEMA, check_schema
        from drafters.errors import DataError

        check_schema(values, SCHEMA, what="report")
        try:
            whole = {name: values[name] for name in ("block_size", "temperature")}
            parts = {name: cls(**whole, **_lengths(part)) for name, part in values["by_context"].items()}
            return cls(**whole, **_lengths(values), by_context=parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"report: it is damaged, or of another version ({error!r})") from error


def _lengths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a report or a part of it; what was not measured is NaN, as in reports."""
    low, high = (math.nan if one is None else float(one) for one in values["accepted_length_ci95"])
    length = values["accepted_length"]
    return {
        "accepted_length": math.nan if length is None else float(length),
        "accepted_length_ci95": (low, high),
        **{name: int(values[name]) for name in ("prompts", "rounds")},
    }


def check(case: "Case") -> None:
    """All causes that the files of the run can show."""
    from drafters.checkpoint import read_config
    from drafters.decoding.report import read_json
    from drafters.training.curve import read_logs

    findings, run = case.findings, case.run
    assert run is not None
    if run.report.is_file():
        with findings.watched("acceptance/length"):
            report = read_json(Measured.from_dict, run.report)
            validation = _numbers(read_config(run.drafter)["provenance"].get("validation"))
            _describe(findings, report)
            check_gap(findings, report, validation)
            check_sampling(findings, report, validation)
            check_context(findings, report, [len(one.tokens_T) for one in case.splits.get("train", ())])
    else:
        findings.note("acceptance/length", "not known: the run has no report", f"python evaluate.py run={run.folder}")
    check_training(findings, read_logs(run.folder), _supervised(case))


def _numbers(values: Any) -> dict[str, float]:
    """What a drafter says of its validation; a file that was edited may say anything."""
    found = values if isinstance(values, dict) else {}
    return {name: float(one) for name, one in found.items() if isinstance(one, int | float)}


def _supervised(case: "Case") -> int | None:
    """Supervised tokens of the training conversations, where they are those of the run."""
    is_same = any(one.level == "ok" for one in case.findings.named("run/data"))
    return case.reports["train"].num_supervised if is_same else None


def _describe(findings: "Findings", report: "Measured") -> None:
    low, high = report.accepted_length_ci95
    found = (
        f"{report.accepted_length:.2f} (bonus included; 95 %: {low:.2f} to {high:.2f}) of {report.block_size + 1} at "
        f"most, {report.prompts} prompts, {report.rounds:,} rounds, temperature {report.temperature:g}"
    )
    drafts = report.accepted_length - 1
    if not (high - low) / 2 <= UNSURE * drafts:
        advice = "python evaluate.py run= with more prompts, before anything is changed"
        findings.note("acceptance/length", f"{found}: known to no better than {UNSURE:.0%} of the drafts", advice)
    else:
        findings.ok("acceptance/length", found)


def check_gap(findings: "Findings", report: "Measured", validation: Mapping[str, float]) -> None:
    """Teacher-forced against decoded, both without the bonus token."""
    from drafters.training.probing import CAUSES, LEAST

    name = TAU_GREEDY if report.temperature == 0 else TAU
    forced = validation.get(name, 0.0) - 1
    if forced < LEAST:
        findings.note("acceptance/gap", f"not judged: {name} says less than {LEAST} drafts a round, or is not there")
        return
    decoded, at_best = report.accepted_length - 1, report.accepted_length_ci95[1] - 1
    if not math.isfinite(at_best):
        findings.note("acceptance/gap", "not judged: the report's accepted length has no interval")
        return
    gap, least = (1 - drafts / forced for drafts in (decoded, at_best))
    found = (
        f"{forced:.2f} drafts a round teacher-forced ({name}), {decoded:.2f} decoded, {at_best:.2f} at the upper end "
        f"of its interval (a cause where that, too, lacks more than {GAP:.0%})"
    )
    if least > GAP:
        passed = {one.check for one in findings.all if one.level == "ok"}
        passed -= {one.check for one in findings.all if one.level != "ok"}
        left = [cause for cause, check in zip(CAUSES, RULED_OUT_BY, strict=True) if check not in passed]
        advice = f"one of: {'; '.join(left)}"
        if len(left) < len(CAUSES):
            advice += f" ({len(CAUSES) - len(left)} others are ruled out by the checks above)"
        findings.warning("acceptance/gap", found, advice, cost=gap)
    elif gap > GAP:
        findings.note("acceptance/gap", f"{found}: not certain", "python evaluate.py run= with more prompts")
    else:
        findings.ok("acceptance/gap", found)


def check_sampling(findings: "Findings", report: "Measured", validation: Mapping[str, float]) -> None:
    """What drawing tokens costs against taking the likeliest."""
    if report.temperature == 0:
        findings.ok("acceptance/sampling", "measured greedily, where drafts are accepted most")
        return
    greedy, drawn = (validation.get(name, 0.0) - 1 for name in (TAU_GREEDY, TAU))
    if greedy <= 0:
        findings.note("acceptance/sampling", f"not judged: no {TAU_GREEDY} in the run's validation")
        return
    lost = 1 - drawn / greedy
    found = (
        f"measured at temperature {report.temperature:g}; in validation {greedy:.2f} drafts a round stand greedily, "
        f"{drawn:.2f} at temperature 1: {lost:.0%} fewer (a cause above {SAMPLED:.0%})"
    )
    if lost > SAMPLED:
        advice = "expected where tokens are drawn; loss=l1 or loss=lk train for it; a lower temperature if it may be"
        findings.warning("acceptance/sampling", found, advice, cost=lost)
    else:
        findings.ok("acceptance/sampling", found)


def check_context(findings: "Findings", report: "Measured", lengths: Sequence[int]) -> None:
    """Drafts by length of the text before them, beside the lengths that were trained on."""
    parts = {name: one for name, one in report.by_context.items() if one.rounds >= ROUNDS}
    trained = f"; the longest of the training texts has {max(lengths):,} tokens" if lengths else ""
    if len(parts) < 2:
        found = f"not judged: fewer than two ranges of lengths have {ROUNDS} rounds{trained}"
        findings.note("acceptance/context", found, "python evaluate.py with longer prompts and max_new_tokens")
        return
    (first, short), (last, long) = next(iter(parts.items())), list(parts.items())[-1]
    lost = 1 - (long.accepted_length - 1) / (short.accepted_length - 1) if short.accepted_length > 1 else 0.0
    found = (
        f"{short.accepted_length:.2f} after {first} tokens, {long.accepted_length:.2f} after {last}: {lost:.0%} fewer "
        f"drafts (a cause above {FALL:.0%}, where the intervals do not meet){trained}"
    )
    if lost > FALL and long.accepted_length_ci95[1] < short.accepted_length_ci95[0]:
        share = sum(one.rounds for name, one in parts.items() if name != first) / sum(
            one.rounds for one in parts.values()
        )
        advice = "train on longer conversations: data.max_length, longer answers; or a larger drafter.window"
        findings.warning("acceptance/context", found, advice, cost=lost * share)
    else:
        findings.ok("acceptance/context", found)


def check_training(findings: "Findings", rows: "Sequence[Row]", supervised: int | None) -> None:
    """Whether the curve of validation was still rising, or falling, when training ended."""
    curve = [row for row in rows if TAU in row and "positions" in row]
    if not curve:
        findings.note("acceptance/training", "not judged: no csv log of a validation (logger=csv)")
        return
    epochs = max((row["epoch"] for row in rows if "epoch" in row), default=0.0)
    seen = f"{curve[-1]['positions']:,.0f} draft positions in {curve[-1]['step'] + 1:,.0f} steps, "
    seen += "less than one pass over the data" if epochs < 1 else f"{epochs:.0f} whole passes over the data"
    seen += f" ({supervised:,} supervised tokens)" if supervised is not None else ""
    best, last = (max(row[TAU] for row in curve) - 1, curve[-1][TAU] - 1)
    if best > 0 and 1 - last / best > OVERFIT:
        lost = 1 - last / best
        found = (
            f"{seen}; the last validation has {lost:.0%} fewer drafts than the best one (a cause above {OVERFIT:.0%})"
        )
        findings.warning("acceptance/training", found, "more conversations, not more passes over these", cost=lost)
        return
    gain = gain_of_doubling(rows, curve)
    if gain is None:
        found = f"{seen}; whether the curve still rises is not judged: fewer than three validations of the last two"
        findings.note("acceptance/training", f"{found} doublings were at a constant learning rate")
        return
    found = f"{seen}; by the validations at a constant learning rate twice as much adds {gain:.0%} drafts"
    if gain > GAIN:
        advice = "a larger optim.max_steps or optim.minutes, and more conversations where there were several passes"
        findings.warning("acceptance/training", f"{found} (a cause above {GAIN:.0%})", advice, cost=gain / (1 + gain))
    else:
        findings.ok("acceptance/training", f"{found} (a cause above {GAIN:.0%})")


def gain_of_doubling(rows: "Sequence[Row]", curve: "Sequence[Row]") -> float | None:
    """The share of drafts that twice the positions add: the slope of drafts over log2(positions), of the validations
    before the learning rate falls, within their last two doublings, over the drafts there. None with fewer than three.
    """
    rates = [(row["step"], row["train/lr"]) for row in rows if "train/lr" in row]
    top = max((rate for _, rate in rates), default=0.0)
    end = max((step for step, rate in rates if rate >= CONSTANT * top), default=-1.0)
    flat = [row for row in curve if row["step"] <= end]
    flat = [row for row in flat if row["positions"] >= flat[-1]["positions"] / 4]
    if len(flat) < 3 or flat[-1][TAU] <= 1:
        return None
    line = statistics.linear_regression([math.log2(row["positions"]) for row in flat], [row[TAU] - 1 for row in flat])
    return line.slope / (flat[-1][TAU] - 1)
