# Several drafters in one table: who wins by more than chance, what it costs, and that only what was measured alike is
# compared.

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from drafters.decoding import metrics
from drafters.decoding.comparison import BEST, TIED, Comparison, Verdict, verdict
from drafters.errors import DataError
from tests.report_cases import LONG, NAN, around, case, prompts_of, same, units_of, unmeasured

WAVE = [0.5 * math.sin(i) for i in range(20)]  # how much easier each prompt is than most, for every drafter


def measured(speedup, *, width=0.1, num=20, noise=0.0, **changes):
    """A report of prompts that differ by WAVE, as in every report, and by `noise`, up and down, in this one alone."""
    made = case(speedup=speedup, speedup_ci95=around(speedup, width), **changes)
    own = [easy + noise * (-1) ** i for i, easy in enumerate(WAVE[:num])]
    lengths, speedups = ([value + each for each in own] for value in (made.accepted_length, speedup))
    return replace(made, prompts=num, per_prompt=prompts_of(lengths), per_unit=units_of(speedups))


def shown(comparison, width=120):
    console = Console(width=width, file=io.StringIO())
    console.print(comparison.render())
    return console.file.getvalue()


@pytest.fixture(scope="module")
def six():
    """Every next one is slower and accepts less on every prompt, but the second differs from the others by chance."""
    names = [LONG, "gated", "rnn", "parallel", "ngram", "draft_model"]
    rest = dict(block_size=10, width=0.01)
    return Comparison(
        {
            name: measured(2 - 0.2 * i, noise=i == 1, first=1 - 0.1 * i, drafter_parameters=i * 45_500_000, **rest)
            for i, name in enumerate(names)
        }
    )


def decided(lengths, **more):
    """The verdict on accepted lengths that are given by prompt; None = the drafter lacks the prompt."""
    sums = {
        name: {i: (100 * length, 100) for i, length in enumerate(row) if length is not None}
        for name, row in lengths.items()
    }
    values = {name: sum(t for t, _ in rows.values()) / (100 * len(rows) or NAN) for name, rows in sums.items()}
    return verdict({**values, **more}, sums, metrics.ratio, seed=0)


def test_a_lead_on_the_same_prompts_wins_where_own_intervals_overlap():
    easy = [2 + each for each in WAVE]
    better = [length + (0.06 if i % 2 else 0.02) for i, length in enumerate(easy)]
    alone = [metrics.bootstrap_ci([(one, 1) for one in row], seed=0) for row in (easy, better)]
    assert alone[0][1] > alone[1][0]
    found = decided({"a": easy, "b": better})
    assert (found.best, found.tied, found.mark("b"), found.mark("a")) == ("b", (), BEST, "")
    assert 0.02 < found.leads["a"][0] < 0.04 < found.leads["a"][1] < 0.06
    # As far ahead, but now on some prompts and behind on others.
    chance = [length + (1.04 if i % 2 else -0.96) for i, length in enumerate(easy)]
    found = decided({"a": easy, "c": chance})
    assert (found.best, found.tied, found.mark("c"), found.mark("a")) == ("c", ("a",), TIED, TIED)
    assert found.leads["a"][0] < 0 < found.leads["a"][1]


def test_the_best_is_told_apart_from_some_and_not_from_others():
    easy = [2 + each for each in WAVE]
    lower = [length - 0.3 for length in easy]
    near = [length + (0.2 if i % 2 else -0.21) for i, length in enumerate(easy)]
    found = decided({"a": easy, "near": near, "lower": lower, "twin": easy})
    assert (found.best, found.tied) == ("a", ("near", "twin"))
    assert found.leads["twin"] == (0, 0)
    assert [found.mark(name) for name in ("a", "near", "lower", "twin")] == [TIED, TIED, "", TIED]


def test_only_prompts_that_both_have_are_paired():
    first = [3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 9.0]
    found = decided({"a": first, "b": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, None]})
    assert found.leads["b"] == pytest.approx((1, 1))
    assert found.tied == ()
    # Five in common say too little, and one or none nothing.
    for other in ([2.0, 2.1, 2.2, 2.3, 2.4, None, None], [2.0, *[None] * 6], [*[None] * 7, 1.0]):
        found = decided({"a": first, "b": other})
        assert found.tied == ("b",)
        assert all(map(math.isnan, found.leads["b"]))
    # Whose value is not known takes no part.
    assert decided({"a": [3.0, 3.1], "b": [2.0, 2.1]}, a=NAN) == Verdict("b")
    assert decided({"a": [3.0]}, a=NAN) == Verdict(None)


def test_the_table_holds_every_number_and_marks_the_best(six):
    page = six.to_markdown()
    rows = {line.split(" | ")[0][2:]: line for line in page.splitlines() if line.startswith("| ")}
    assert list(rows)[2:] == [*six.reports, "plain decoding"]
    length = six.reports["gated"].accepted_length
    assert rows["gated"] == (
        f"| gated | {length:.2f} [{length - 0.15:.2f}, {length + 0.15:.2f}] | .90 .85 .81 .77 .73 .70 .66 .63 .60 .57 "
        "| 10 | 4.1 + 24.3 | 64.2 | 1.80x≈ [1.79, 1.81] | 45.5 M, 23.0 MB |"
    )
    assert rows["plain decoding"] == "| plain decoding | 1.00 | - | - | 20.2 | 40.1 | 1.00x | - |"
    assert BEST in rows[LONG].split(" | ")[1]
    assert TIED in rows[LONG].split(" | ")[6]
    assert "≈ not to be told apart: the paired interval of the lead reaches 0." in page


def test_leads_are_said_below_the_table(six):
    leads = six.verdicts["speed-up"].leads
    said = {name: f"[{low:.2g}, {high:.2g}] over {name}" for name, (low, high) in leads.items()}
    assert list(said) == ["plain decoding", "gated", "rnn", "parallel", "ngram", "draft_model"]
    assert leads["plain decoding"] == pytest.approx(_interval([2 + easy for easy in WAVE], less=1))
    won = ", ".join(said[name] for name in said if name != "gated")
    tied = said["gated"]
    text = f"Speed-up: {LONG} is highest; the paired 95 % interval of its lead is {won}; its lead {tied} is no win."
    assert f"\n{text}\n" in six.to_markdown()
    assert text in " ".join(shown(six).split())
    assert f"Accepted length: {LONG} is best; the paired 95 % interval of its lead is [" in six.to_markdown()


def _interval(speedups, *, less):
    """Of a speed-up less a number, from units of as many seconds."""
    low, high = metrics.speedup_ci([(round(1000 * s), 25, 1000, 25) for s in speedups], seed=0)
    return low - less, high - less


def test_the_table_fits_120_columns(six):
    narrow, wide = shown(six), shown(six, 300)
    assert max(map(len, wide.splitlines())) <= 120
    assert [line.rstrip() for line in narrow.splitlines()] == [line.rstrip() for line in wide.splitlines()]
    for needle in (".90 .85 .81 .77 .73", ".70 .66 .63 .60 .57", "plain decoding", "45.5 M"):
        assert needle in narrow
    assert max(map(len, shown(Comparison({"a": case(block_size=16), "b": case()}), 300).splitlines())) <= 120


def test_no_drafter_wins_over_plain_decoding_by_chance():
    text = Comparison({"a": measured(1.05), "b": measured(0.6)}).to_markdown()
    low, high = _interval([1.05 + easy for easy in WAVE], less=1)
    assert low < 0 < high
    assert f"; its lead [{low:.2g}, {high:.2g}] over plain decoding is no win." in text
    assert [line.split(" | ")[6] for line in text.splitlines()[6:9]] == [
        "1.05x≈ [0.95, 1.15]",
        "0.60x [0.50, 0.70]",
        "1.00x≈",
    ]
    assert "Speed-up: plain decoding is best" in Comparison({"a": measured(0.6), "b": measured(0.5)}).to_markdown()
    assert "Speed-up: a is best" in Comparison({"a": measured(1.5), "b": measured(1.1)}).to_markdown()


def test_one_prompt_gives_no_winner():
    few = Comparison({name: measured(s, num=1, first=s / 2) for name, s in (("a", 1.9), ("b", 1.2))})
    page = few.to_markdown()
    assert "Speed-up: a is highest; its lead over plain decoding, over b is no win." in page
    assert "Accepted length: a is highest; its lead over b is no win." in page
    assert few.to_dict()["leads"]["accepted_length"] == {"best": "a", "over": {"b": [None, None]}}
    # All of twenty prompts alike: that is known.
    assert (
        "Accepted length: a is best"
        in Comparison({n: case(first=f) for n, f in (("a", 0.9), ("b", 0.6))}).to_markdown()
    )


def test_comparisons_are_saved_and_read_back(six, tmp_path):
    six.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.json", "comparison.md", "comparison.png"}
    values = json.loads((tmp_path / "comparison.json").read_text())
    assert (values["schema"], values["names"]) == (1, list(six.reports))
    assert values["settings"]["target"] == {"name": "tiny"}
    assert values["settings"]["temperature"] == 0
    assert values["reports"]["gated"] == six.reports["gated"].to_dict()
    leads = values["leads"]
    assert leads.keys() == {"accepted_length", "speedup"}
    assert leads["speedup"]["best"] == LONG
    assert leads["speedup"]["over"] == {name: list(lead) for name, lead in six.verdicts["speed-up"].leads.items()}
    loaded = Comparison.load(tmp_path / "comparison.json")
    assert same(loaded.reports, six.reports)
    assert loaded.to_dict() == values
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
