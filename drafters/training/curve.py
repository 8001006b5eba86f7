# How training went, as one picture: accepted length against time and against data, read from the csv logs of a run. A
# run that was stopped and resumed has several; what a later one did again counts once.

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.decoding.render import TRAINING_PICTURE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Row", "draw_curve", "read_curve", "read_logs", "save_curve"]

# Column, name in the picture, how it is drawn.
SERIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("val/accepted_length", "teacher-forced, probabilistic", {"color": "#2457a6", "lw": 2, "marker": "o", "ms": 4}),
    ("val/accepted_length_greedy", "teacher-forced, greedy", {"color": "#9aa4b2", "lw": 2, "marker": "o", "ms": 4}),
    ("probe/accepted_length", "real decoding", {"color": "#c8553d", "lw": 0, "marker": "D", "ms": 6}),
)
AXES = (("minutes", "minutes of training"), ("positions", "draft positions trained on"))

Row = dict[str, float]


def save_curve(run: Path) -> None:
    """Write TRAINING_PICTURE into the folder of a run, if it logged a validation in csv files."""
    rows = read_curve(run)
    if rows:
        draw_curve(rows).savefig(run / TRAINING_PICTURE, dpi=150)


def read_logs(run: Path) -> list[Row]:
    """The finite numbers of the rows of `logs/version_N/metrics.csv`, in order, without steps that a later version did
    again."""
    rows: list[Row] = []
    for path in sorted(run.glob("logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with path.open(newline="", errors="replace") as file:
            new = [row for row in map(_numbers, csv.DictReader(file)) if "step" in row]
        begin = min((row["step"] for row in new), default=math.inf)
        rows = [row for row in rows if row["step"] < begin] + new
    return rows


def read_curve(run: Path) -> list[Row]:
    """The rows of `read_logs` that SERIES are drawn from."""
    rows = read_logs(run)
    wanted = {column for column, _, _ in SERIES}
    return [_own(row) for row in rows if wanted & row.keys() and all(axis in row for axis, _ in AXES)]


def draw_curve(rows: Sequence[Row]) -> "Figure":
    """Two panels with the same lines: against minutes, and against positions."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (axis, title) in zip(panels, AXES, strict=True):
        for column, name, style in SERIES:
            points = [(row[axis], row[column]) for row in rows if column in row]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, **style)
        panel.set(xlabel=title)
        panel.set_xlim(left=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color("#9aa4b2")
        panel.grid(axis="y", color="#e6e9ee")
        panel.set_axisbelow(True)
        panel.tick_params(colors="#444", labelsize=9)
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].legend(frameon=False, loc="lower right", fontsize=9)
    panels[0].set_title("Accepted length (bonus included) over training", loc="left", fontsize=11)
    return figure


def _own(row: Row) -> Row:
    """A row without what a probe repeats of the validation before it."""
    return row if "probe/accepted_length" not in row else {k: v for k, v in row.items() if not k.startswith("val/")}


def _numbers(row: Mapping[str, str | None]) -> Row:
    """The finite numbers of a row; a run that was killed may have left half a line."""
    found = {}
    for name, text in row.items():
        try:
            value = float(text or "nan")
        except (TypeError, ValueError):
            continue
        if math.isfinite(value):
            found[name] = value
    return found
