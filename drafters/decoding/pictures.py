# Pictures of reports, in one restrained look: the drafter blue, plain decoding grey, intervals as thin lines. Drawn
# with matplotlib's Figure alone: no window system, no global state.

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drafters.decoding.render import number, ranged, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from drafters.decoding.report import Part, Report

__all__ = ["BLUE", "GREY", "RED", "draw_acceptance", "draw_comparison", "draw_speed", "tidy"]

BLUE, GREY, RED, LIGHT, TEXT = "#2457a6", "#9aa4b2", "#c8553d", "#e6e9ee", "#333333"
# Told apart by people of every colour vision (after Okabe and Ito), and by marker where there are more than these.
COLOURS = (BLUE, "#e08214", "#009e73", "#b2459b", "#56a8d8", "#8c6d31", "#444444")
MARKERS = "osD^vPX"
SMALL = 9

Style = dict[str, Any]


def tidy(axes: "Axes", *, title: str, grid: str = "y") -> None:
    """The look that all panels share; `grid` names the axis whose values are read off."""
    axes.set_title(title, loc="left", fontsize=11, color=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(axis="y" if grid == "y" else "x", color=LIGHT)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT, labelsize=SMALL)
    axes.xaxis.label.set(color=TEXT, size=SMALL + 1)


def draw_acceptance(report: "Report") -> "Figure":
    """Two panels: acceptance by position, conditional with its interval and surviving; tokens per round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_positions(left, report)
    _draw_histogram(right, report)
    return figure


def draw_speed(report: "Report") -> "Figure":
    """Two panels: tokens per second with and without the drafter, by source; what a round costs by draft length."""
    from matplotlib.figure import Figure

    rows = _speed_rows(report)
    figure = Figure(figsize=(9.6, max(3.9, 1.6 + 0.42 * len(rows))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_rates(left, rows)
    _draw_costs(right, report)
    return figure


def draw_comparison(reports: Mapping[str, "Report"]) -> "Figure":
    """Two panels for several drafters: conditional acceptance by position, and speed-up, each with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, max(4.2, 2.4 + 0.36 * len(reports))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curves(left, reports)
    _draw_speedups(right, reports)
    lines, names = left.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL)
    return figure


def _legend_on_top(axes: "Axes", *, columns: int = 2) -> None:
    """Between the title and the panel, where no curve runs."""
    place: Style = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.985), "borderaxespad": 0.2}
    axes.legend(ncols=columns, frameon=False, fontsize=SMALL, handlelength=1.4, columnspacing=1.4, **place)
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=11, color=TEXT, pad=24)


def _position_axis(axes: "Axes", last: int, label: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set(xlabel=label, ylim=(0, 1.03), xlim=(0.5, last + 0.5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))


def _draw_positions(axes: "Axes", report: "Report") -> None:
    positions = list(range(1, report.block_size + 1))
    low, high = (list(side) for side in zip(*report.acceptance_by_position_ci95, strict=True))
    axes.fill_between(positions, low, high, color=BLUE, alpha=0.14, lw=0)
    axes.vlines(positions, low, high, color=BLUE, alpha=0.45, lw=1)
    grey: Style = {"color": GREY, "marker": "s", "ms": 4, "lw": 1.6}
    known = "when all before were (95% interval)"
    axes.plot(positions, report.acceptance_by_position, color=BLUE, marker="o", ms=5, lw=2, zorder=3, label=known)
    axes.plot(positions, report.survival_by_position, label="all up to it", **grey)
    kind = "draft position" if report.tree is None else "depth in the tree"
    _position_axis(axes, report.block_size, kind)
    tidy(axes, title=f"Drafts accepted, by {kind}")
    _legend_on_top(axes)


def _draw_histogram(axes: "Axes", report: "Report") -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    counts = range(1, report.block_size + 2)
    shares = [n / max(report.rounds, 1) for n in report.accepted_histogram]
    bars = axes.bar(counts, shares, color=BLUE, width=0.74)
    is_tight = len(shares) > 9
    labels = [f"{100 * share:.0f}" + ("" if is_tight else "%") for share in shares]
    axes.bar_label(bars, labels=labels, fontsize=7 if is_tight else 8, color=TEXT, padding=2)
    mean = f"mean {ranged(report.accepted_length, report.accepted_length_ci95)}"
    # Above the bars, where it hides no label; heights as shares of the panel.
    above: Style = {"color": RED, "transform": axes.get_xaxis_transform()}
    low, high = report.accepted_length_ci95
    axes.hlines([0.94], [low], [high], lw=1.4, **above)
    axes.plot([report.accepted_length], [0.94], marker="D", ms=5, lw=1.4, label=mean, **above)
    axes.set(xlabel="tokens per round, bonus included", xlim=(0.4, report.block_size + 1.6))
    axes.set_ylim(0, max([*shares, 0.1]) * 1.22)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=18, min_n_ticks=1))
    axes.set_yticks([share for share in axes.get_yticks() if share <= 1])
    tidy(axes, title="Tokens that a round yields")
    _legend_on_top(axes)


def _speed_rows(report: "Report") -> list[tuple[str, "Part | Report"]]:
    sources = [(shorten(name), part) for name, part in report.by_source.items()]
    return [("all", report), *sources] if len(sources) != 1 else [(sources[0][0], report)]


def _draw_rates(axes: "Axes", rows: Sequence[tuple[str, "Part | Report"]]) -> None:
    tidy(axes, title="Speed, and speed-up", grid="x")
    places = list(range(len(rows)))
    sides = [
        ("with the drafter", BLUE, -0.19, [part.tokens_per_second for _, part in rows]),
        ("plain decoding", GREY, 0.19, [part.baseline_tokens_per_second for _, part in rows]),
    ]
    known = [rate for *_, rates in sides for rate in rates if math.isfinite(rate)]
    if not known:
        _say_empty(axes)
        return
    for label, colour, shift, rates in sides:
        axes.barh([place + shift for place in places], rates, height=0.36, color=colour, label=label)
    for place, (_, part) in zip(places, rows, strict=True):
        _note_rate(axes, place - 0.19, part.tokens_per_second, number(part.speedup, ".2f", "x"))
        _note_rate(axes, place + 0.19, part.baseline_tokens_per_second, "")
    axes.set_yticks(places, [name for name, _ in rows])
    margin = 0.5 if len(rows) > 1 else 0.9
    axes.set(xlabel="tokens per second", xlim=(0, max(known) * 1.32), ylim=(len(rows) - 1 + margin, -margin))
    axes.tick_params(axis="y", length=0)
    _legend_on_top(axes)


def _note_rate(axes: "Axes", place: float, rate: float, speedup: str) -> None:
    """The rate behind its bar, and the speed-up in bold."""
    style: Style = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    start = (rate if math.isfinite(rate) else 0.0, place)
    text = axes.annotate(number(rate, ",.1f"), start, (4, 0), color=TEXT, **style)
    if math.isfinite(rate) and speedup:
        axes.annotate(speedup, (1, 0.5), (5, 0), xycoords=text, color=BLUE, weight="bold", **style)


def _draw_costs(axes: "Axes", report: "Report") -> None:
    """Bars of a round's parts by draft length, against single steps of the target for as many tokens."""
    tidy(axes, title="A round in ms, and the speed-up foretold")
    costs = [c for c in report.costs if math.isfinite(c.draft_ms + c.verify_ms + c.overhead_ms + c.single_steps_ms)]
    if not costs:
        _say_empty(axes)
        return
    # Side by side whatever the lengths: those of trees may be 4, 8, 64.
    places = list(range(len(costs)))
    parts = [
        ("verify", "#7ba0d4", [cost.verify_ms for cost in costs]),
        ("draft", BLUE, [cost.draft_ms for cost in costs]),
        ("loop", RED, [cost.overhead_ms for cost in costs]),
    ]
    bottom = [0.0] * len(costs)
    for label, colour, heights in parts:
        axes.bar(places, heights, bottom=bottom, color=colour, width=0.74, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    steps = [cost.single_steps_ms for cost in costs]
    axes.plot(places, steps, color=TEXT, marker="D", ms=4.5, lw=1.2, label="single steps instead")
    tops = [max(pair) for pair in zip(bottom, steps, strict=True)]
    is_tight = len(costs) > 9
    form, unit, size = (".1f", "", 7) if is_tight else (".2f", "x", 8)
    style: Style = {"textcoords": "offset points", "ha": "center", "color": TEXT, "fontsize": size}
    for place, cost in zip(places, costs, strict=True):
        weight = "bold" if cost.length == report.draft_length else "normal"
        text = number(cost.predicted_speedup, form, unit)
        axes.annotate(text, (place, tops[place]), (0, 6), weight=weight, **style)
    margin = 0.6 if len(costs) > 2 else 1.2
    axes.set(xlabel="drafts in a round (bold: in the speed runs)", xlim=(-margin, len(costs) - 1 + margin))
    axes.set_xticks(places, [str(cost.length) for cost in costs])
    axes.set_ylim(0, max(tops) * 1.15)
    _legend_on_top(axes, columns=4)


def _say_empty(axes: "Axes") -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GREY, fontsize=SMALL + 1)
    axes.set(xticks=[], yticks=[])


def _look(i: int) -> tuple[str, str]:
    return COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]


def _draw_curves(axes: "Axes", reports: Mapping[str, "Report"]) -> None:
    for i, (name, report) in enumerate(reports.items()):
        colour, marker = _look(i)
        # Side by side, so that no interval hides another.
        shift = 0.07 * (i - (len(reports) - 1) / 2)
        positions = [k + shift for k in range(1, report.block_size + 1)]
        low, high = (list(side) for side in zip(*report.acceptance_by_position_ci95, strict=True))
        axes.vlines(positions, low, high, color=colour, alpha=0.55, lw=1.2)
        style: Style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.7}
        axes.plot(positions, report.acceptance_by_position, label=shorten(name), **style)
    _position_axis(axes, max(report.block_size for report in reports.values()), "draft position")
    tidy(axes, title="Drafts accepted when all before were")


def _draw_speedups(axes: "Axes", reports: Mapping[str, "Report"]) -> None:
    ends = [1.0]
    for place, report in enumerate(reports.values()):
        speedup, (low, high) = report.speedup, report.speedup_ci95
        axes.barh([place], [speedup], height=0.6, color=_look(place)[0], alpha=0.9)
        axes.hlines([place], [low], [high], color=TEXT, lw=1.4)
        ends.append(max((x for x in (speedup, high) if math.isfinite(x)), default=0.0))
        text = number(speedup, ".2f", "x")
        style: Style = {"va": "center", "fontsize": SMALL, "color": TEXT, "weight": "bold"}
        axes.annotate(text, (ends[-1], place), (5, 0), textcoords="offset points", **style)
    axes.axvline(1, color=TEXT, lw=1, ls=(0, (4, 2)))
    axes.set_yticks(range(len(reports)), [shorten(name) for name in reports])
    axes.set(
        xlabel="times plain decoding (dashed)", xlim=(0, max(ends) * 1.16), ylim=(max(len(reports), 3) - 0.5, -0.5)
    )
    tidy(axes, title="Speed-up (95% interval)", grid="x")
    axes.tick_params(axis="y", length=0)
