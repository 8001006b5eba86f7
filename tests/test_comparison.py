# Several drafters in one table: who wins by more than chance, what it costs, and that only what was measured alike is
# compared.

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from drafters.decoding.comparison import BEST, TIED, Comparison, Verdict, verdict
from drafters.errors import DataError
from tests.report_cases import LONG, NAN, around, case, same, unmeasured


def measured(speedup, *, width=0.1, **changes):
    return case(speedup=speedup, speedup_ci95=around(speedup, width), **changes)


def shown(comparison, width=120):
    console = Console(width=width, file=io.StringIO())
    console.print(comparison.render())
    return console.file.getvalue()


@pytest.fixture(scope="module")
def six():
    names = [LONG, "gated", "rnn", "parallel", "ngram", "draft_model"]
    return Comparison(
        {
            name: measured(2.0 - 0.2 * i, block_size=10, first=1.0 - 0.1 * i, drafter_parameters=i * 45_500_000)
            for i, name in enumerate(names)
        }
    )


def test_the_winner_is_clear_only_where_no_interval_reaches_its_own():
    alone = verdict({"a": (2.0, (1.9, 2.1)), "b": (1.7, (1.6, 1.89))})
    assert (alone, alone.mark("a"), alone.mark("b")) == (Verdict("a"), BEST, "")
    close = verdict({"a": (2.0, (1.9, 2.1)), "b": (1.8, (1.6, 1.95)), "c": (1.0, (0.9, 1.1))})
    assert close == Verdict("a", ("b",))
    assert [close.mark(name) for name in "abc"] == [TIED, TIED, ""]
    # An interval that nobody knows may lie anywhere.
    assert verdict({"a": (2.0, (NAN, NAN)), "b": (1.0, (0.9, 1.1))}).tied == ("b",)
    assert verdict({"a": (2.0, (1.9, 2.1)), "b": (1.0, (NAN, NAN))}).tied == ("b",)
    assert verdict({"a": (NAN, (NAN, NAN)), "b": (1.0, (0.9, 1.1))}) == Verdict("b")
    assert verdict({"a": (NAN, (NAN, NAN))}) == Verdict(None)


def test_the_table_holds_every_number_and_marks_the_best(six):
    page = six.to_markdown()
    rows = {line.split(" | ")[0][2:]: line for line in page.splitlines() if line.startswith("| ")}
    assert list(rows)[2:] == [*six.reports, "plain decoding"]
    length = six.reports["gated"].accepted_length
    assert rows["gated"] == (
        f"| gated | {length:.2f} [{length - 0.15:.2f}, {length + 0.15:.2f}] | .90 .85 .81 .77 .73 .70 .66 .63 .60 .57 "
        "| 10 | 4.1 + 24.3 | 64.2 | 1.80x≈ [1.70, 1.90] | 45.5 M, 23.0 MB |"
    )
    assert rows["plain decoding"] == "| plain decoding | 1.00 | - | - | 20.2 | 40.1 | 1.00x | - |"
    assert BEST in rows[LONG].split(" | ")[1]
    assert TIED in rows[LONG].split(" | ")[6]
    assert f"Speed-up: {LONG} is highest, but its interval and that of gated overlap: no winner." in page


def test_the_table_fits_120_columns(six):
    narrow, wide = shown(six), shown(six, 300)
    assert max(map(len, wide.splitlines())) <= 120
    assert [line.rstrip() for line in narrow.splitlines()] == [line.rstrip() for line in wide.splitlines()]
    for needle in (".90 .85 .81 .77 .73", ".70 .66 .63 .60 .57", "plain decoding", "45.5 M"):
        assert needle in narrow
    assert max(map(len, shown(Comparison({"a": case(block_size=16), "b": case()}), 300).splitlines())) <= 120


def test_no_drafter_wins_over_plain_decoding_by_chance():
    text = Comparison({"a": measured(1.05), "b": measured(0.8)}).to_markdown()
    assert "Speed-up: a is highest, but its interval and that of plain decoding overlap: no winner." in text
    text = Comparison({"a": measured(0.8), "b": measured(0.7)}).to_markdown()
    assert "Speed-up: plain decoding is best" in text
    text = Comparison({"a": measured(1.5), "b": measured(1.1)}).to_markdown()
    assert "Speed-up: a is best" in text


def test_one_prompt_gives_no_winner():
    few = {name: measured(s, width=0.0, prompts=1, first=s / 2) for name, s in (("a", 1.9), ("b", 1.2))}
    page = Comparison(few).to_markdown()
    assert "Speed-up: a is highest, but its interval and that of plain decoding, b overlap" in page
    assert "Accepted length: a is highest, but its interval and that of b overlap" in page
    many = {name: replace(report, prompts=20, accepted_length_ci95=(3.0, 3.0)) for name, report in few.items()}
    # All of twenty prompts alike: that is known.
    assert (
        "Accepted length: a is best"
        in Comparison({**many, "b": replace(many["b"], accepted_length_ci95=(1, 1))}).to_markdown()
    )


def test_comparisons_are_saved_and_read_back(six, tmp_path):
    six.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.json", "comparison.md", "comparison.png"}
    values = json.loads((tmp_path / "comparison.json").read_text())
    assert (values["schema"], values["names"]) == (1, list(six.reports))
    assert values["settings"]["target"] == {"name": "tiny"}
    assert values["settings"]["temperature"] == 0
    assert values["reports"]["gated"] == six.reports["gated"].to_dict()
    assert same(Comparison.load(tmp_path / "comparison.json").reports, six.reports)
    for bad, said in (({"schema": 2}, "schema 2"), ({"reports": 3}, "holds no reports"), ({"reports": {}}, "compare")):
        with pytest.raises(DataError, match=said):
            Comparison.from_dict({**values, **bad})
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(DataError, match=r"comparison\.json"):
        Comparison.load(tmp_path / "comparison.json")


def test_what_was_not_measured_is_a_dash(tmp_path):
    comparison = Comparison({"markov": case(), "ngram": unmeasured(case())})
    comparison.save(tmp_path)
    for text in (shown(comparison), comparison.to_markdown()):
        assert not re.search(r"\bnan\b", text)
    assert Comparison.load(tmp_path / "comparison.json").reports["ngram"].accepted_length == 1.0
    assert math.isnan(Comparison.load(tmp_path / "comparison.json").reports["ngram"].speedup)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"batch_size": 1}, "batch_size"),
        ({"provenance": {"target": {"name": "other"}}}, "target"),
    ],
)
def test_only_what_was_measured_alike_is_compared(change, key):
    with pytest.raises(DataError, match=rf"'b' was measured with {key} .*, 'a' with .*measure them again together"):
        Comparison({"a": case(), "b": replace(case(), **change)})
