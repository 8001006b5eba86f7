# Several drafters measured in one interleaved run: one table, one picture, one file. All answer the same prompts, so
# they are compared in pairs, prompt by prompt; a lead that may be chance is not shown as a win.

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from drafters.decoding import metrics
from drafters.decoding.pictures import draw_comparison
from drafters.decoding.render import Section, markdown, number, ranged, sampling_text, scaled, tables
from drafters.decoding.report import Report, check_schema, plain, read_json, write_json
from drafters.errors import DataError

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Comparison", "Verdict", "verdict"]

SCHEMA = 1
PLAIN, LENGTH, SPEEDUP = "plain decoding", "accepted length", "speed-up"
KEYS = {LENGTH: "accepted_length", SPEEDUP: "speedup"}  # as comparison.json and the reports name them
# What the reports of one run have in common; with other settings their numbers say nothing about each other.
SHARED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "batch_size",
    "processes",
    "seed",
)
BEST, TIED = "★", "≈"
FEWEST = 6  # common prompts or units for a win: of fewer, all agree by chance too often (2 * 0.5 ** 6 = 3 %)
LINE = 5  # acceptances on a line of a cell

Interval = tuple[float, float]
Sums = Mapping[Any, tuple[float, ...]]  # by prompt or unit: what it adds to each sum of a statistic


@dataclass(frozen=True)
class Verdict:
    """`best`: who has the highest value, None when none is known. `leads`: by the names of the others, the paired 95 %
    interval of best - other, NaN where too little was paired."""

    best: str | None
    leads: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def tied(self) -> tuple[str, ...]:
        """Those over whom the lead may be chance: its interval does not lie above 0."""
        return tuple(name for name, (low, _) in self.leads.items() if not low > 0)

    def mark(self, name: str) -> str:
        """BEST behind a clear winner, TIED behind all that cannot be told apart from the highest value."""
        if name in self.tied or (name == self.best and self.tied):
            return TIED
        return BEST if name == self.best else ""


def verdict(
    values: Mapping[str, float], sums: Mapping[str, Sums], statistic: metrics.Statistic, *, seed: int
) -> Verdict:
    """Who has the highest of `values`, and the intervals of the leads over the others, from what `sums` says of the
    prompts (or units) that both have (see metrics.paired_difference_ci); NaN of fewer than FEWEST."""
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    if not known:
        return Verdict(None)
    best = max(known, key=lambda name: known[name])

    def lead(other: str) -> Interval:
        common = sorted(sums[best].keys() & sums[other].keys())
        if len(common) < FEWEST:
            return math.nan, math.nan
        left, right = ([sums[name][key] for key in common] for name in (best, other))
        return metrics.paired_difference_ci(left, right, statistic, seed=seed)

    return Verdict(best, {name: lead(name) for name in known if name != best})


@dataclass(frozen=True)
class Comparison:
    """Reports by the names of the drafters, in the order of the table. Raises DataError when there is none, or when
    they differ in target or in one of SHARED."""

    reports: dict[str, Report]

    def __post_init__(self) -> None:
        if not self.reports:
            raise DataError("compare: there are no reports; name the runs to compare")
        first, expected = next(iter(self.reports)), self.settings
        for name, report in self.reports.items():
            found = _settings(report)
            for key in expected:
                if found[key] != expected[key]:
                    raise DataError(
                        f"compare: '{name}' was measured with {key} {found[key]}, '{first}' with {expected[key]}; "
                        "accepted: reports of one run; measure them again together"
                    )

    @property
    def settings(self) -> dict[str, Any]:
        """What all reports share."""
        return _settings(next(iter(self.reports.values())))

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Of the accepted length and of the speed-up; plain decoding competes in speed."""
        reports, first = self.reports, next(iter(self.reports.values()))
        lengths = {name: r.accepted_length for name, r in reports.items()}
        speeds = {PLAIN: 1.0} | {name: r.speedup for name, r in reports.items()}
        counts = {name: _counts(r) for name, r in reports.items()}
        units = {PLAIN: _plain_units(reports.values())} | {name: _units(r) for name, r in reports.items()}
        return {
            LENGTH: verdict(lengths, counts, metrics.ratio, seed=first.seed),
            SPEEDUP: verdict(speeds, units, metrics.ratio_of_rates, seed=first.seed),
        }

    def render(self) -> "Group":
        """The table for a terminal of 120 columns, as one rich renderable."""
        return tables([self._section()], width=120)

    def to_markdown(self) -> str:
        """The table as a Markdown page, with the picture and the settings."""
        settings = json.dumps(self.settings, indent=1, default=str)
        picture = "![Acceptance by position and speed-up of every drafter](comparison.png)\n"
        parts = ["# Drafters compared by real decoding\n", markdown(self._section()), picture]
        return "\n".join([*parts, f"## Settings of all\n\n```json\n{settings}\n```\n"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values: schema, names, settings that all share, who leads over whom, and the report of each."""
        reports = {name: report.to_dict() for name, report in self.reports.items()}
        leads = {KEYS[of]: {"best": found.best, "over": plain(found.leads)} for of, found in self.verdicts.items()}
        return {
            "schema": SCHEMA,
            "names": list(reports),
            "settings": self.settings,
            "leads": leads,
            "reports": reports,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Comparison":
        """Inverse of `to_dict`: the leads follow from the reports. Raises DataError for another schema or a report that
        does not fit."""
        check_schema(values, SCHEMA, what="comparison")
        reports = values.get("reports")
        if not isinstance(reports, Mapping):
            raise DataError("comparison: holds no reports; run the comparison again")
        return cls({name: Report.from_dict(report) for name, report in reports.items()})

    @classmethod
    def load(cls, path: Path) -> "Comparison":
        """Read comparison.json. Raises DataError when it is missing, damaged, or of another schema."""
        return read_json(cls.from_dict, path)

    def save(self, folder: Path) -> None:
        """Write comparison.png, comparison.md and, last, comparison.json into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        draw_comparison(self.reports).savefig(folder / "comparison.png", dpi=150)
        (folder / "comparison.md").write_text(self.to_markdown(), encoding="utf-8")
        write_json(self.to_dict(), folder / "comparison.json")

    def _section(self) -> Section:
        reports = self.reports.values()
        most = max(report.block_size for report in reports)
        header = ["", f"{LENGTH}\n[95 %]", f"acceptance\n@1 .. @{most}", "drafts", "draft +\nverify ms", "tokens/s"]
        step = _middle(report.baseline_step_ms for report in reports)
        rate = _middle(report.baseline_tokens_per_second for report in reports)
        last = [PLAIN, "1.00", "-", "-", number(step, ".1f"), number(rate, ".1f")]
        last += [f"1.00x{self.verdicts[SPEEDUP].mark(PLAIN)}", "-"]
        return Section(
            title=f"Drafters compared: {sampling_text(next(iter(reports)))}",
            header=[*header, f"{SPEEDUP}\n[95 %]", "parameters,\nbytes"],
            rows=[*(self._row(name) for name in self.reports), last],
            notes=self._notes(),
            left=(0, 2),
        )

    def _row(self, name: str) -> list[str]:
        r = self.reports[name]
        length, speedup = (self.verdicts[key].mark(name) for key in (LENGTH, SPEEDUP))
        shares = [number(a, ".2f").removeprefix("0").replace("1.00", "1.0") for a in r.acceptance_by_position]
        lines = [" ".join(share.center(3) for share in shares[i : i + LINE]) for i in range(0, len(shares), LINE)]
        return [
            name,
            ranged(r.accepted_length, r.accepted_length_ci95, length, gap="\n"),
            "\n".join(lines),
            str(r.draft_length) if r.tree is None else f"{r.draft_length}\n(tree)",
            f"{number(r.draft_ms, '.1f')} +\n{number(r.verify_ms, '.1f')}",
            number(r.tokens_per_second, ".1f"),
            ranged(r.speedup, r.speedup_ci95, f"x{speedup}", gap="\n"),
            f"{scaled(r.drafter_parameters)},\n{scaled(r.drafter_bytes, 'B')}",
        ]

    def _notes(self) -> list[str]:
        first = next(iter(self.reports.values()))
        counts = sorted({report.prompts for report in self.reports.values()})
        prompts = " or ".join(map(str, counts))
        settings = f"{prompts} prompts, at most {first.max_new_tokens:,} new tokens, batch size {first.batch_size}."
        marks = {found.mark(found.best) for found in self.verdicts.values() if found.best is not None}
        legend = {BEST: f"{BEST} best", TIED: f"{TIED} not to be told apart: the paired interval of the lead reaches 0"}
        shown = "; ".join(text for mark, text in legend.items() if mark in marks)
        told = [_sentence(key, found) for key, found in self.verdicts.items() if found.best is not None]
        return [f"{shown}. The accepted length counts the bonus token. {settings}", *told]


def _sentence(of: str, found: Verdict) -> str:
    """A verdict in words."""
    won = [f"{_bounds(bounds)}over {name}" for name, bounds in found.leads.items() if name not in found.tied]
    tied = [f"{_bounds(found.leads[name])}over {name}" for name in found.tied]
    said = f"{of.capitalize()}: {found.best} is {'highest' if tied else 'best'}"
    said += f"; the paired 95 % interval of its lead is {', '.join(won)}" if won else ""
    return said + (f"; its lead {', '.join(tied)} is no win." if tied else ".")


def _bounds(bounds: Interval) -> str:
    """Two digits, so that an interval near 0 is seen to reach it or not; nothing for one that is not known."""
    return f"[{bounds[0]:.2g}, {bounds[1]:.2g}] " if math.isfinite(sum(bounds)) else ""


def _settings(report: Report) -> dict[str, Any]:
    return {key: getattr(report, key) for key in SHARED} | {"target": report.provenance.get("target")}


def _counts(report: Report) -> Sums:
    return {(one.prompt, one.source, one.turn): (one.tokens, one.rounds) for one in report.per_prompt}


def _units(report: Report) -> Sums:
    return {u.unit: (u.tokens, u.seconds, u.baseline_tokens, u.baseline_seconds) for u in report.per_unit}


def _plain_units(reports: Iterable[Report]) -> Sums:
    """Plain decoding against itself: a speed-up of 1 on every unit."""
    return {u.unit: (u.baseline_tokens, u.baseline_seconds) * 2 for report in reports for u in report.per_unit}


def _middle(values: Iterable[float]) -> float:
    """The median of those that were measured."""
    return median([value for value in values if math.isfinite(value)] or [math.nan])
