# The report of a measurement: what stands in report.json, and how people read it (terminal table, Markdown, picture).

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drafters import __version__
from drafters.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

    from drafters.target import FrozenTarget

__all__ = [
    "SCHEMA",
    "LengthCost",
    "Report",
    "SourceReport",
    "draw_acceptance",
    "render",
    "to_markdown",
    "with_versions",
]

SCHEMA = 1
TRAINING_PICTURE = "training.png"  # stands beside the report of a run; drafters.training.curve draws it


@dataclass(frozen=True, kw_only=True)
class LengthCost:
    """A row of the cost table: measured medians at one draft length, and what they predict. `accepted_length` comes
    from the acceptances of the full block; `single_steps_ms` is what the baseline needs for as many tokens."""

    length: int
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    accepted_length: float
    single_steps_ms: float
    predicted_speedup: float


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """One source's part; the fields mean what they mean in `Report`."""

    prompts: int
    rounds: int
    tokens: int
    accepted_length: float
    accepted_length_ci95: tuple[float, float]
    acceptance_by_position: list[float]
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """One measurement. NaN (null in JSON) where nothing was there to measure.

    Acceptance, at the full block, over full rounds (see metrics.full_rounds): `accepted_length` = `tokens` / `rounds`,
    bonus included, with its bootstrap interval by prompt; `acceptance_by_position` conditional,
    `survival_by_position` marginal; `accepted_histogram[n]` rounds with n accepted drafts; `verify_rate` = accepted /
    proposed drafts.
    Speed, at `draft_length`, of both loops interleaved: tokens per second exclude prefill and the token it gives;
    `end_to_end_speedup` includes both. `draft_ms` (propose and extend), `verify_ms`, `overhead_ms` are medians per
    round, `baseline_step_ms` that of a baseline round; `overhead_share` is the loop's share of all decode seconds;
    `verify_to_step` = verify_ms / baseline_step_ms. `predicted_speedup` comes from `costs`, measured before.
    `dispatch_share`: of a single-token target step, the share that is Python, dispatch and small operators instead
    of matrix products and attention (see dispatch.dispatch_share).
    `divergences`: at temperature 0, prompts whose text differs from the baseline's; else None.
    """

    schema: int = SCHEMA
    accepted_length: float
    accepted_length_ci95: tuple[float, float]
    acceptance_by_position: list[float]
    survival_by_position: list[float]
    accepted_histogram: list[int]
    verify_rate: float
    block_size: int
    prompts: int
    rounds: int
    tokens: int
    draft_length: int
    accepted_length_at_draft_length: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    end_to_end_speedup: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    overhead_share: float
    baseline_step_ms: float
    verify_to_step: float
    predicted_speedup: float
    costs: list[LengthCost]
    dispatch_share: float
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    batch_size: int
    seed: int
    by_source: dict[str, SourceReport]
    divergences: dict[str, Any] | None
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values; NaN becomes None."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """Inverse of `to_dict`. Raises DataError for another schema or other fields."""
        names = {f.name for f in fields(cls)}
        if values.get("schema") != SCHEMA or set(values) != names:
            wrong = sorted(set(values) ^ names)
            raise DataError(
                f"report: schema {values.get('schema')}, differing fields {wrong}; accepted: schema {SCHEMA}"
            )
        filled = _with_nan(dict(values))
        filled["costs"] = [LengthCost(**row) for row in filled["costs"]]
        filled["by_source"] = {
            name: SourceReport(**{**part, "accepted_length_ci95": tuple(part["accepted_length_ci95"])})
            for name, part in filled["by_source"].items()
        }
        filled["accepted_length_ci95"] = tuple(filled["accepted_length_ci95"])
        return cls(**{**filled, "divergences": values["divergences"], "provenance": values["provenance"]})

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read report.json. Raises DataError when it is missing or damaged."""
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise DataError(f"report {path}: {error}; run the evaluation again") from error

    def save(self, folder: Path) -> None:
        """Write report.json, report.md and acceptance.png into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        figure = draw_acceptance(self)
        figure.savefig(folder / "acceptance.png", dpi=150)
        has_curve = (folder / TRAINING_PICTURE).is_file()
        (folder / "report.md").write_text(to_markdown(self, has_curve=has_curve))
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        # Last and by rename: where report.json stands, the measurement is complete.
        unfinished = folder / "report.json.tmp"
        unfinished.write_text(text)
        unfinished.replace(folder / "report.json")


def with_versions(provenance: Mapping[str, Any], target: "FrozenTarget") -> dict[str, Any]:
    """`provenance` with the device and the versions that this process runs."""
    cuda = target.device.type == "cuda"
    return {
        **provenance,
        "device": torch.cuda.get_device_name(target.device) if cuda else f"{platform.machine()} cpu",
        "num_threads": torch.get_num_threads(),
        "dtype": target.spec.dtype,
        "versions": {
            "python": platform.python_version(),
            "drafters": __version__,
            **{name: version(name) for name in ("torch", "transformers")},
        },
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _with_nan(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, Mapping):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return value


def _number(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if math.isfinite(value) else "-"


def _interval(bounds: tuple[float, float]) -> str:
    return f"[{_number(bounds[0], '.2f')}, {_number(bounds[1], '.2f')}]"


def _sections(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """The tables that every rendering shows: (title, header, rows). Short enough for a terminal of 80 columns."""
    return [
        ("Drafter", ["", ""], _summary_rows(report)),
        (
            "Acceptance by draft position",
            ["", *(str(k) for k in range(1, report.block_size + 1))],
            [
                ["when all before stood", *(_number(a, ".2f") for a in report.acceptance_by_position)],
                ["all up to here stood", *(_number(a, ".2f") for a in report.survival_by_position)],
            ],
        ),
        (
            "What a round costs, and what it should gain",
            ["drafts", "draft ms", "verify ms", "loop ms", "tokens", "single steps ms", "speed-up"],
            [_cost_row(cost) for cost in report.costs],
        ),
        (
            "By source",
            ["source", "prompts", "accepted length", "95 %", "tokens/s", "baseline", "speed-up"],
            [_source_row(name, part) for name, part in report.by_source.items()],
        ),
    ]


def _summary_rows(r: Report) -> list[list[str]]:
    parts = " + ".join(_number(ms, ".1f") for ms in (r.draft_ms, r.verify_ms, r.overhead_ms))
    rows = [
        [
            "accepted length (bonus included)",
            f"{_number(r.accepted_length, '.2f')} {_interval(r.accepted_length_ci95)}, {r.block_size} drafts",
        ],
        ["speed-up", f"{_number(r.speedup, '.2f', 'x')}  (predicted {_number(r.predicted_speedup, '.2f', 'x')})"],
        ["tokens/s with and without", " / ".join(_number(t, ".1f") for t in _rates(r))],
        [
            "draft length in the speed runs",
            f"{r.draft_length} (accepted length {_number(r.accepted_length_at_draft_length, '.2f')})",
        ],
        ["a round: draft + verify + loop", f"{parts} ms"],
        [
            "a single step of the target",
            f"{_number(r.baseline_step_ms, '.1f')} ms, {_number(r.dispatch_share, '.0%')} dispatch",
        ],
        ["speed-up with prefill", _number(r.end_to_end_speedup, ".2f", "x")],
        ["settings", f"temperature {r.temperature:g}, top-k {r.top_k}, top-p {r.top_p:g}, batch {r.batch_size}"],
        ["prompts", f"{r.prompts}, first turn only"],
        ["measured on", f"{r.rounds} rounds, {r.tokens} tokens"],
    ]
    if r.divergences is not None:
        differ = f"{r.divergences['prompts']} of {r.divergences['compared']} prompts"
        rows.append(["text differs from the baseline's", differ])
    return rows


def _rates(part: "Report | SourceReport") -> tuple[float, float]:
    return part.tokens_per_second, part.baseline_tokens_per_second


def _cost_row(c: LengthCost) -> list[str]:
    spent = [_number(ms, ".1f") for ms in (c.draft_ms, c.verify_ms, c.overhead_ms)]
    gained = [_number(c.accepted_length, ".2f"), _number(c.single_steps_ms, ".1f")]
    return [str(c.length), *spent, *gained, _number(c.predicted_speedup, ".2f", "x")]


def _source_row(name: str, s: SourceReport) -> list[str]:
    accepted = [_number(s.accepted_length, ".2f"), _interval(s.accepted_length_ci95)]
    rates = [_number(rate, ".1f") for rate in _rates(s)]
    return [name, str(s.prompts), *accepted, *rates, _number(s.speedup, ".2f", "x")]


def render(report: Report) -> "Group":
    """The tables for a terminal, as one rich renderable."""
    from rich.console import Group
    from rich.table import Table

    tables = []
    for title, header, rows in _sections(report):
        table = Table(title=title, title_justify="left", show_header=any(header))
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def to_markdown(report: Report, *, has_curve: bool = False) -> str:
    """The tables as a Markdown page, with the pictures and the provenance."""
    parts = ["# Measured by real decoding\n"]
    for title, header, rows in _sections(report):
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
        parts.append(f"## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
    parts.append("![Acceptance by position and accepted drafts per round](acceptance.png)\n")
    if has_curve:
        parts.append(f"![Accepted length over training]({TRAINING_PICTURE})\n")
    provenance = json.dumps(_without_nan(report.provenance), indent=1, default=str)
    parts.append(f"## Provenance\n\n```json\n{provenance}\n```\n")
    return "\n".join(parts)


def draw_acceptance(report: Report) -> "Figure":
    """Two panels: acceptance by position, conditional and surviving; and how many drafts rounds accepted."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    blue, grey, light = "#2457a6", "#9aa4b2", "#e6e9ee"
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    positions = list(range(1, report.block_size + 1))
    known, reached = "draft k, when all before it stood", "all of drafts 1 to k"
    left.plot(positions, report.acceptance_by_position, color=blue, marker="o", lw=2, label=known)
    left.plot(positions, report.survival_by_position, color=grey, marker="o", lw=2, label=reached)
    left.legend(frameon=False, loc="upper right", fontsize=9)
    left.set(xlabel="draft position k", ylim=(0, 1.02), xlim=(0.6, report.block_size + 0.4))
    left.set_title("Acceptance by position", loc="left", fontsize=11)
    counts = range(report.block_size + 1)
    shares = [n / max(report.rounds, 1) for n in report.accepted_histogram]
    bars = right.bar(counts, shares, color=blue, width=0.72)
    right.bar_label(bars, labels=[f"{s:.0%}" for s in shares], fontsize=8, color="#444", padding=2)
    right.set(xlabel="drafts accepted in a round", ylim=(0, max([*shares, 0.1]) * 1.15))
    title = f"Accepted length {report.accepted_length:.2f} (bonus included)"
    right.set_title(title, loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(grey)
        axes.grid(axis="y", color=light)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(colors="#444", labelsize=9)
    return figure
