# How people read a report: the same tables for a terminal of 80 columns and as a Markdown page. The formats of numbers
# and names stand here once, for every table and picture.

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

    from drafters.decoding.report import LengthCost, Part, Report

__all__ = [
    "TRAINING_PICTURE",
    "Section",
    "markdown",
    "number",
    "ranged",
    "render",
    "sampling_text",
    "scaled",
    "shorten",
    "tables",
    "to_markdown",
]

TRAINING_PICTURE = "training.png"  # stands beside the report of a run; drafters.training.curve draws it
NAME_WIDTH = 20
LABEL_WIDTH = 34
BONUS = "bonus included"
PICTURES = {
    "acceptance.png": "Acceptance by position, and tokens per round",
    "speed.png": "Tokens per second with and without the drafter, and what a round costs",
    TRAINING_PICTURE: "Accepted length over training",
}

Row = list[str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table; a header of empty texts is not shown. A newline in a cell or header breaks the line in a terminal, and
    is a space in Markdown. `notes`: paragraphs below the table. `left`: columns of words; the others are numbers."""

    title: str
    header: Row
    rows: list[Row]
    notes: Sequence[str] = ()
    left: Sequence[int] = (0,)


def number(value: float, form: str, unit: str = "") -> str:
    """`value` in a format, or "-" where it was not measured."""
    return f"{value:{form}}{unit}" if math.isfinite(value) else "-"


def ranged(value: float, bounds: tuple[float, float], unit: str = "", *, gap: str = " ") -> str:
    """A value with its 95 % interval, two decimals."""
    text = number(value, ".2f", unit)
    return f"{text}{gap}[{bounds[0]:.2f}, {bounds[1]:.2f}]" if math.isfinite(sum(bounds)) else text


def scaled(count: float, unit: str = "") -> str:
    """A count in thousands, millions or billions: 11.5 M, 23.0 MB."""
    for factor, letter in ((1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.1f} {letter}{unit}"
    return f"{count:.0f} {unit}".rstrip()


def shorten(name: str, width: int = NAME_WIDTH) -> str:
    """A name for a place of limited width: its begin and its end."""
    if len(name) <= width:
        return name
    kept = width - 1
    return f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}"


def sampling_text(report: "Report") -> str:
    """The settings that act, and no others: at temperature 0 the most probable token is taken, whatever top-k says."""
    parts = ["greedy (temperature 0)"]
    if report.temperature > 0:
        parts = [f"temperature {report.temperature:g}"]
        parts += [f"top-k {report.top_k}"] if report.top_k > 0 else []
        parts += [f"top-p {report.top_p:g}"] if report.top_p < 1 else []
        parts += [f"min-p {report.min_p:g}"] if report.min_p > 0 else []
    parts += [f"repetition penalty {report.repetition_penalty:g}"] if report.repetition_penalty != 1 else []
    return ", ".join(parts)


def render(report: "Report") -> "Group":
    """The tables for a terminal, as one rich renderable; no row needs more than 80 columns."""
    return tables(_sections(report), width=80)


def to_markdown(report: "Report", *, folder: Path) -> str:
    """The tables as a Markdown page to be put into `folder`, with those PICTURES that are there, and the provenance."""
    parts = ["# Measured by real decoding\n", *(markdown(section) for section in _sections(report))]
    parts += [f"![{text}]({name})\n" for name, text in PICTURES.items() if (folder / name).is_file()]
    provenance = json.dumps(report.to_dict()["provenance"], indent=1, default=str)
    parts.append(f"## Provenance\n\n```json\n{provenance}\n```\n")
    return "\n".join(parts)


def tables(sections: Sequence[Section], *, width: int) -> "Group":
    """Tables with their notes below, for a terminal of `width` columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Table | Text] = []
    for section in sections:
        longest = NAME_WIDTH if any(section.header) else LABEL_WIDTH
        table = Table(
            title=Text(section.title, style="bold not italic"),
            title_justify="left",
            show_header=any(section.header),
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
            leading=int(any("\n" in cell for row in section.rows for cell in row)),
            box=SIMPLE_HEAD,
        )
        for i, name in enumerate(section.header):
            table.add_column(Text(name), justify="left" if i in section.left else "right", no_wrap=True)
        for row in section.rows:
            # Text, since a name may hold what rich would take for its markup.
            table.add_row(*(Text(shorten(cell, longest) if i == 0 else cell) for i, cell in enumerate(row)))
        notes = "".join(f"\n{fill(note, width)}" for note in section.notes)
        shown += [table, Text(notes and f"{notes}\n")]
    return Group(*shown)


def markdown(section: Section) -> str:
    """A table with its notes below, as Markdown."""
    lines = [section.header, ["---"] + ["---:"] * (len(section.header) - 1), *section.rows]
    cells = [" | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in line) for line in lines]
    notes = "".join(f"\n{note}\n" for note in section.notes)
    return f"## {section.title}\n\n" + "\n".join(f"| {line} |" for line in cells) + f"\n{notes}"


def _sections(report: "Report") -> list[Section]:
    found = [
        Section(title=report.name or "Drafter", header=["", ""], rows=_summary_rows(report), left=(0, 1)),
        _positions(report),
        _costs(report),
        _parts("By source", "source", report.by_source),
    ]
    if len(report.by_turn) > 1:
        found.append(_parts("By turn", "turn", report.by_turn))
    if len(report.by_context) > 1:
        found.append(_contexts(report.by_context))
    return [section for section in found if section.rows]


def _summary_rows(r: "Report") -> list[Row]:
    parts = " + ".join(number(ms, ".1f") for ms in (r.draft_ms, r.verify_ms, r.overhead_ms))
    rates = " / ".join(number(rate, ".1f") for rate in (r.tokens_per_second, r.baseline_tokens_per_second))
    error = number(100 * r.prediction.error, "+.1f", " %")
    most = f"of {r.block_size + 1} at most"
    rows = [
        [f"accepted length ({BONUS})", f"{ranged(r.accepted_length, r.accepted_length_ci95)} {most}"],
        ["verify rate (accepted / proposed)", number(r.verify_rate, ".2f")],
        ["speed-up (95 % interval by prompt)", ranged(r.speedup, r.speedup_ci95, "x")],
        ["predicted from other prompts", f"{number(r.prediction.speedup, '.2f', 'x')}, error {error}"],
        ["tokens/s with and without", rates],
        ["speed-up, prefill included", number(r.end_to_end_speedup, ".2f", "x")],
        ["drafted in a round", _drafted(r)],
        ["accepted length at that", number(r.accepted_length_at_draft_length, ".2f")],
        ["a round: draft + verify + loop", f"{parts} ms, loop {number(100 * r.overhead_share, '.1f', ' %')}"],
        ["a single step of the target", _step(r)],
        ["verify pass to single step", number(r.verify_to_step, ".2f")],
    ]
    # Two lines where everything acts: one would not fit.
    sampling = sampling_text(r).split(", ")
    rows += [[label, ", ".join(part)] for label, part in (("sampling", sampling[:3]), ("", sampling[3:])) if part]
    rows += [
        ["batch size, processes", f"{r.batch_size}, {r.processes}"],
        ["drafter", f"{scaled(r.drafter_parameters)} parameters, {scaled(r.drafter_bytes, 'B')}"],
        ["prompts", f"{r.prompts} ({r.rounds:,} rounds, {r.tokens:,} tokens)"],
        ["answers", f"at most {r.max_new_tokens:,} tokens"],
    ]
    return rows if r.divergences is None else [*rows, ["text differs from plain decoding's", _divergences(r)]]


def _drafted(r: "Report") -> str:
    if r.tree is None:
        if r.schedule is not None:
            return f"{r.schedule['drafts_verified']:.2f} verified (of {r.block_size}), {r.schedule['scheduler']}"
        return f"{r.draft_length} in a chain (of {r.block_size})"
    return f"a tree of {r.draft_length}, {r.block_size} deep"


def _step(r: "Report") -> str:
    return f"{number(r.baseline_step_ms, '.1f')} ms, {number(100 * r.dispatch_share, '.0f', ' %')} of it dispatch"


def _divergences(r: "Report") -> str:
    """How often greedy text left the baseline's, and how close the target's two best logits were there."""
    found = r.divergences or {}
    if not found["prompts"]:
        return f"in none of {found['compared']}"
    margins = [d["logit_margin"] for d in found["first"] if d["logit_margin"] is not None]
    margin = number(median(margins), ".3g") if margins else "-"
    return f"in {found['prompts']} of {found['compared']}, median margin {margin}"


def _positions(r: "Report") -> Section:
    known = zip(r.acceptance_by_position, r.acceptance_by_position_ci95, r.survival_by_position, strict=True)
    return Section(
        title="Acceptance by draft position" if r.tree is None else "Acceptance by depth of the tree",
        header=[
            "draft" if r.tree is None else "depth",
            "accepted when all before were [95 %]",
            "all up to it accepted",
        ],
        rows=[[str(k), ranged(a, bounds), number(s, ".2f")] for k, (a, bounds, s) in enumerate(known, start=1)],
    )


def _costs(r: "Report") -> Section:
    """K single steps against one round, which yields fewer tokens than K + 1, but at once."""
    header = ["K", "K single\nsteps", "draft", "+ verify", "+ loop", "= round", "expected\ntokens"]
    return Section(
        title="What a round costs, in ms: K single steps against K drafts + verify + loop",
        header=[*header, "by single\nsteps", "speed-up"],
        rows=[_cost_row(cost, is_tree=r.tree is not None) for cost in r.costs],
        notes=_cost_notes(r),
    )


def _step_ms(cost: "LengthCost") -> float:
    return cost.single_steps_ms / cost.accepted_length


def _round_ms(cost: "LengthCost") -> float:
    return cost.draft_ms + cost.verify_ms + cost.overhead_ms


def _cost_row(c: "LengthCost", *, is_tree: bool) -> Row:
    # A tree's drafts are alternatives: no number of single steps is their like.
    steps = "-" if is_tree else number(c.length * _step_ms(c), ".1f")
    spent = [number(ms, ".1f") for ms in (c.draft_ms, c.verify_ms, c.overhead_ms, _round_ms(c))]
    gained = [number(c.accepted_length, ".2f"), number(c.single_steps_ms, ".1f")]
    return [str(c.length), steps, *spent, *gained, number(c.predicted_speedup, ".2f", "x")]


def _cost_notes(r: "Report") -> list[str]:
    notes = ["Expected tokens count the bonus token; speed-up = their time by single steps / round."]
    shown = next((c for c in r.costs if c.length == r.draft_length and math.isfinite(_round_ms(c))), None)
    if shown is None or r.tree is not None:
        return notes
    k, step, whole = shown.length, _step_ms(shown), _round_ms(shown)
    with_bonus, without = (
        f"{tokens} x {number(step, '.1f')} / {number(whole, '.1f')} = {number(tokens * step / whole, '.2f', 'x')}"
        for tokens in (k + 1, k)
    )
    return [*notes, f"K = {k}, were every draft accepted: {with_bonus} with the bonus token, {without} without it."]


def _parts(title: str, kind: str, parts: Mapping[str, "Part"]) -> Section:
    header = [kind, "prompts", "accepted length\n[95 %]", "tokens/s", "without", "speed-up"]
    return Section(title=title, header=header, rows=[_part_row(name, part) for name, part in parts.items()])


def _part_row(name: str, p: "Part") -> Row:
    rates = [number(rate, ".1f") for rate in (p.tokens_per_second, p.baseline_tokens_per_second)]
    accepted = ranged(p.accepted_length, p.accepted_length_ci95)
    return [name, str(p.prompts), accepted, *rates, number(p.speedup, ".2f", "x")]


def _contexts(parts: Mapping[str, "Part"]) -> Section:
    return Section(
        title="By context length: tokens of text before a round",
        header=["tokens before", "prompts", "rounds", "accepted length\n[95 %]", "draft 1 accepted"],
        rows=[
            [
                name,
                str(p.prompts),
                f"{p.rounds:,}",
                ranged(p.accepted_length, p.accepted_length_ci95),
                number(p.acceptance_by_position[0], ".2f"),
            ]
            for name, p in parts.items()
        ],
    )
