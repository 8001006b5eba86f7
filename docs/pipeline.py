# Draws docs/pipeline.svg and docs/pipeline.png, the picture in README and on the first page: `python docs/pipeline.py`.
# One canvas in units of 1/100 inch; every box is placed by hand, so the script is a list of what stands where.

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

WIDTH, HEIGHT = 1480, 800
INK, SOFT, LINE = "#1f2933", "#52606d", "#7b8794"
# (fill, edge) by the role that a box plays.
STEP = ("#ffffff", "#7b8794")
FROZEN = ("#e3f0fb", "#2b6cb0")
TRAINED = ("#fdebd8", "#c05621")
ARTEFACT = ("#e6f4ea", "#2f855a")
DROPPED = ("#f5f5f5", "#9aa5b1")


def box(ax: Axes, place: tuple[float, float, float, float], colours: tuple[str, str], title: str, lines: str) -> None:
    """A rounded box at (left, bottom, width, height) with a bold title over smaller lines."""
    left, bottom, width, height = place
    style = "round,pad=0,rounding_size=12"
    fill, edge = colours
    ax.add_patch(FancyBboxPatch((left, bottom), width, height, style, fc=fill, ec=edge, lw=1.6))
    middle = left + width / 2
    ax.text(middle, bottom + height - 26, title, ha="center", va="center", fontsize=13, weight="bold", color=INK)
    ax.text(middle, bottom + (height - 44) / 2 + 2, lines, ha="center", va="center", fontsize=10.5, color=SOFT)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], bend: str = "arc3") -> None:
    ax.add_patch(
        FancyArrowPatch(start, end, connectionstyle=bend, arrowstyle="-|>", mutation_scale=16, lw=1.8, color=LINE)
    )


def tokens(ax: Axes, corner: tuple[float, float], words: list[str], colours: list[tuple[str, str]]) -> None:
    """A row of word cells whose lower left corner is `corner`."""
    left, bottom = corner
    for word, (fill, edge) in zip(words, colours, strict=True):
        ax.add_patch(FancyBboxPatch((left, bottom), 84, 40, "round,pad=0,rounding_size=8", fc=fill, ec=edge, lw=1.5))
        ax.text(left + 42, bottom + 20, word, ha="center", va="center", fontsize=11.5, color=INK)
        left += 94


def draw_pipeline(ax: Axes) -> None:
    row, high, wide, gap = 560, 130, 216, 80
    ax.text(40, 755, "From conversations to a measured drafter", fontsize=17, weight="bold", color=INK, va="center")
    steps = (
        (STEP, "data/", "conversations\nchat template\nsupervised tokens"),
        (FROZEN, "target", "frozen language model\none forward pass\nover each answer"),
        (ARTEFACT, "cache", "tokens, hidden states\nof chosen layers\nchecked, resumable"),
        (TRAINED, "train.py", "the drafter learns\nthe target's next-token\nprobabilities"),
        (ARTEFACT, "drafter/", "config.json\nmodel.safetensors"),
    )
    for n, (colours, title, lines) in enumerate(steps):
        left = 40 + n * (wide + gap)
        box(ax, (left, row, wide, high), colours, title, lines)
        if n:
            arrow(ax, (left - gap + 6, row + high / 2), (left - 6, row + high / 2))
    ax.text(592, row + high / 2 + 15, "capture", ha="center", fontsize=10.5, color=SOFT)

    lines = "propose, verify, accept, beside plain decoding\nreport.json, report.md"
    box(ax, (790, 400, 410, 100), STEP, "evaluate.py", lines)
    box(ax, (1280, 400, 160, 100), STEP, "export/", "vLLM, SGLang\nllama.cpp")
    arrow(ax, (1255, row - 4), (1206, 450), "angle,angleA=-90,angleB=0,rad=12")
    arrow(ax, (1365, row - 4), (1365, 506))
    arrow(ax, (444, row - 4), (784, 450), "angle,angleA=-90,angleB=0,rad=12")
    ax.text(620, 465, "the same target verifies the drafts", ha="center", fontsize=10.5, color=SOFT)


def draw_legend(ax: Axes) -> None:
    left = 1000
    for colours, label, wide in (
        (FROZEN, "frozen", 100),
        (TRAINED, "trained", 104),
        (ARTEFACT, "kept on disk", 142),
        (DROPPED, "dropped", 90),
    ):
        style = "round,pad=0,rounding_size=5"
        ax.add_patch(FancyBboxPatch((left, 747), 22, 16, style, fc=colours[0], ec=colours[1], lw=1.4))
        ax.text(left + 31, 755, label, fontsize=10.5, va="center", color=SOFT)
        left += wide


def draw_round(ax: Axes) -> None:
    """The inset: what one round of decoding does to one row."""
    ax.add_patch(
        FancyBboxPatch((40, 30), 1400, 330, "round,pad=0,rounding_size=14", fc="#fafbfc", ec="#cbd2d9", lw=1.2)
    )
    ax.text(66, 330, "One round of speculative decoding", fontsize=15, weight="bold", color=INK, va="center")
    label = {"fontsize": 11.5, "va": "center", "color": INK, "weight": "bold"}
    note = {"fontsize": 10.5, "va": "center", "color": SOFT}
    known, rejected = ("#ffffff", LINE), ("#fde8e8", "#c53030")

    first = 306
    ax.text(66, 275, "known so far", **label)
    ax.text(66, 255, "the last one is the anchor", **note)
    tokens(ax, (first, 245), ["The", "cat", "sat", "on"], [known] * 4)

    ax.text(66, 210, "drafter proposes", **label)
    ax.text(66, 190, "one cheap pass", **note)
    after = first + 4 * 94
    tokens(ax, (after, 180), ["the", "big", "mat", "and"], [TRAINED] * 4)

    ax.text(66, 145, "target verifies", **label)
    ax.text(66, 125, "all drafts in one pass", **note)
    tokens(ax, (after, 115), ["the  ✓", "big  ✓", "mat  ✗", "and"], [ARTEFACT, ARTEFACT, rejected, DROPPED])
    aside = after + 4 * 94 + 16
    ax.text(aside, 145, "Drafts stand while the target agrees. Where it", **note)
    ax.text(aside, 125, "does not, its own token stands instead: “rug”.", **note)

    ax.text(66, 80, "kept", **label)
    ax.text(66, 60, "the target's own text, exactly", **note)
    tokens(ax, (first, 50), ["The", "cat", "sat", "on"], [known] * 4)
    tokens(ax, (after, 50), ["the", "big", "rug"], [TRAINED, TRAINED, FROZEN])
    ax.text(aside, 80, "accepted length 3, bonus included", **label)
    ax.text(aside, 60, "2 drafts + 1 target token, in one target pass", **note)


def main() -> None:
    # A fixed salt and no date keep the SVG the same from run to run.
    mpl.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "drafters", "svg.fonttype": "path"})
    figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    ax.axis("off")
    draw_pipeline(ax)
    draw_legend(ax)
    draw_round(ax)
    here = Path(__file__).parent
    figure.savefig(here / "pipeline.svg", metadata={"Date": None})
    figure.savefig(here / "pipeline.png", dpi=120)


if __name__ == "__main__":
    main()
