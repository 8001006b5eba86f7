# Pictures of what rounds cost and of what schedules make of it, in the look of the report's pictures.

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from drafters.decoding.pictures import COLOURS, GREY, MARKERS, SMALL, tidy
from drafters.decoding.render import shorten
from drafters.scheduling.simulate import NO_DRAFTER, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from drafters.scheduling.profile import CostProfile, VerifyPoint

__all__ = ["draw_frontier", "draw_profile"]

Style = dict[str, Any]


def draw_profile(profile: "CostProfile") -> "Figure":
    """Two panels by tokens in a target step: its milliseconds, medians with quartiles as measured and the monotone fit
    as a thin line; steps per second by the fit. One curve for each number of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    raw, fitted = _curves(profile), _curves(profile.fit())
    for i, (rows, points) in enumerate(raw.items()):
        colour, marker = _look(i)
        tokens = [p.tokens for p in points]
        lows = [1000 * (p.seconds if p.low is None else p.low) for p in points]
        highs = [1000 * (p.seconds if p.high is None else p.high) for p in points]
        left.vlines(tokens, lows, highs, color=colour, alpha=0.5, lw=1.4)
        dots: Style = {"color": colour, "marker": marker, "ms": 4.5, "lw": 0}
        left.plot(tokens, [1000 * p.seconds for p in points], label=_rows_text(rows), **dots)
        smooth = [p.seconds for p in fitted[rows]]
        left.plot(tokens, [1000 * seconds for seconds in smooth], color=colour, lw=1)
        line: Style = {"color": colour, "marker": marker, "ms": 4.5, "lw": 1.4}
        right.plot(tokens, [1 / seconds for seconds in smooth], **line)
    for axes, title in ((left, "A target step in ms (line: never falling)"), (right, "Target steps per second")):
        tidy(axes, title=title)
        _token_axis(axes, raw)
    lines, names = left.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=6, frameon=False, fontsize=SMALL)
    return figure


def draw_frontier(found: Sequence[Simulation]) -> "Figure":
    """Two panels, one line for each name in `found`, "no drafter" grey: tokens per second of all requests against those
    of one request, each point at one concurrency; drafts verified for a request and step, by concurrency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_name: dict[str, list[Simulation]] = {}
    for one in sorted(found, key=lambda one: one.concurrency):
        by_name.setdefault(one.name, []).append(one)
    drafting = [name for name in by_name if name != NO_DRAFTER]
    for name, line in by_name.items():
        colour, marker = (GREY, "x") if name == NO_DRAFTER else _look(drafting.index(name))
        style: Style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.6, "label": shorten(name)}
        users = [one.tokens_per_second_per_user.value for one in line]
        left.plot(users, [one.tokens_per_second.value for one in line], **style)
        if name == NO_DRAFTER:
            _note_ends(left, line)
        else:
            right.plot([one.concurrency for one in line], [one.drafts_per_row.value for one in line], **style)
    tidy(left, title="Tokens per second of all, by those of one")
    tidy(right, title="Drafts verified for a request, a step")
    users = [one.tokens_per_second_per_user.value for one in found]
    most = max((rate for rate in users if math.isfinite(rate)), default=1.0)
    left.set(xlabel="tokens per second of one request", xlim=(0, 1.2 * most), ylim=(0, None))
    right.set(xlabel="requests at once, at most", ylim=(0, None))
    _powers_of_two(right, [one.concurrency for one in found])
    lines, names = left.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL)
    return figure


def _note_ends(axes: "Axes", line: Sequence[Simulation]) -> None:
    """The concurrency of the first and the last point."""
    for one in {line[0].concurrency: line[0], line[-1].concurrency: line[-1]}.values():
        place = one.tokens_per_second_per_user.value, one.tokens_per_second.value
        style: Style = {"textcoords": "offset points", "va": "bottom", "color": GREY, "fontsize": SMALL - 1}
        axes.annotate(f"{one.concurrency} at once", place, (6, 1), **style)


def _curves(profile: "CostProfile") -> "dict[int, list[VerifyPoint]]":
    """The points of each number of rows (0: whatever the rows), by tokens."""
    points = sorted(profile.verify, key=lambda point: (point.rows or 0, point.tokens))
    return {rows: list(group) for rows, group in groupby(points, key=lambda point: point.rows or 0)}


def _rows_text(rows: int) -> str:
    return "any rows" if rows == 0 else f"{rows} row" + ("s" if rows > 1 else "")


def _token_axis(axes: "Axes", curves: "dict[int, list[VerifyPoint]]") -> None:
    """Heights from zero, so that they compare."""
    axes.set(xlabel="tokens in the step, anchors included", ylim=(0, None))
    _powers_of_two(axes, [point.tokens for points in curves.values() for point in points])


def _powers_of_two(axes: "Axes", values: Sequence[int]) -> None:
    """Where counts span many."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    if max(values) > 16 * min(values):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())


def _look(i: int) -> tuple[str, str]:
    return COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
