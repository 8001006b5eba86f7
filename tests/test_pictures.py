# Pictures are drawn for whatever shape a run has, show the numbers of the report, and hold no text that overlaps.

import math
from itertools import combinations, product

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from drafters.decoding.pictures import draw_acceptance, draw_comparison, draw_speed
from tests.report_cases import around, case, cost, odd_cases, unmeasured

CASES = odd_cases()


def texts(figure):
    """(text, its box in pixels) of all that can be read in a drawn picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = [one for one in figure.findobj(Text) if one.get_text().strip() and one.get_visible()]
    axes = {one.axes for one in found if one.axes is not None}
    # Ticks outside the limits of their axis are not drawn.
    hidden = {
        label
        for ax in axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not axis.get_view_interval().min() <= tick.get_loc() <= axis.get_view_interval().max()
    }
    return [(one.get_text(), one.get_window_extent(canvas.get_renderer())) for one in found if one not in hidden]


def check_texts(figure):
    """No two texts overlap, and none is cut by the edge."""
    found = texts(figure)
    assert found
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in found:
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -1, f"cut: {text}"
    for (left, a), (right, b) in combinations(found, 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert not (overlap[0] > 1 and overlap[1] > 1), f"{left!r} over {right!r}"


@pytest.mark.parametrize(("name", "draw"), [*product(CASES, (draw_acceptance, draw_speed))])
def test_odd_shapes_are_drawn_without_overlapping_texts(name, draw):
    check_texts(draw(CASES[name]))


def test_overlaps_would_be_seen():
    figure = draw_acceptance(case())
    figure.axes[0].text(0.5, 0.5, "one thing", transform=figure.axes[0].transAxes)
    figure.axes[0].text(0.52, 0.5, "another", transform=figure.axes[0].transAxes)
    with pytest.raises(AssertionError, match="over"):
        check_texts(figure)


def test_acceptance_shows_the_numbers_of_the_report():
    report = case()
    left, right = draw_acceptance(report).axes
    lines = [list(line.get_ydata()) for line in left.get_lines()]
    assert report.acceptance_by_position in lines
    assert report.survival_by_position in lines
    heights = [bar.get_height() for bar in right.patches]
    assert heights == [n / report.rounds for n in report.accepted_histogram]
    # One token at least: the bonus.
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in right.patches] == [1, 2, 3, 4, 5]
    assert [list(line.get_xdata()) for line in right.get_lines()] == [[report.accepted_length]]


def test_speed_shows_every_source_beside_all_of_them():
    left, right = draw_speed(case()).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["all", "maths", "chat"]
    assert [label.get_text() for label in draw_speed(case(sources=("x",))).axes[0].get_yticklabels()] == ["x"]
    assert "1.60x" in {text.get_text() for text in left.texts}
    bold = [text.get_text() for text in right.texts if text.get_weight() == "bold"]
    assert bold == [f"{case().costs[-1].predicted_speedup:.2f}x"]


def test_stacked_costs_reach_the_whole_round():
    row = cost(8, step=20.0, draft=1.0, verify=30.0, loop=0.5, tokens=9.0)
    axes = draw_speed(case(block_size=8, costs=[row])).axes[1]
    assert max(bar.get_y() + bar.get_height() for bar in axes.patches) == pytest.approx(38.5)
    assert list(axes.get_lines()[0].get_ydata()) == [180.0]


@pytest.mark.parametrize(("count", "block_size"), [(1, 1), (2, 4), (6, 10), (8, 16)])
def test_comparisons_are_drawn_without_overlapping_texts(count, block_size):
    reports = {
        f"a-drafter-with-a-long-name-{i}": case(
            block_size=block_size, first=0.95 - 0.05 * i, speedup=2 - 0.2 * i, speedup_ci95=around(2 - 0.2 * i)
        )
        for i in range(count)
    }
    reports["ngram"] = unmeasured(case(block_size=block_size))
    figure = draw_comparison(reports)
    check_texts(figure)
    curves, bars = figure.axes
    assert len(curves.get_lines()) == count + 1
    assert [bar.get_width() for bar in bars.patches][:count] == [pytest.approx(2 - 0.2 * i) for i in range(count)]
    assert math.isnan(bars.patches[-1].get_width())
