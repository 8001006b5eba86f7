# Reports as files and as tables: what is written reads back, what is foreign is refused, every table fits its place.

import importlib.util
import io
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from drafters.decoding.render import number, ranged, render, sampling_text, scaled, shorten, to_markdown
from drafters.decoding.report import CONTRACT_KEYS, Report
from drafters.errors import DataError
from tests.report_cases import LONG, NAN, case, cost, odd_cases, same, unmeasured

ROOT = Path(__file__).resolve().parent.parent
CASES = odd_cases()


def shown(report, width=80):
    console = Console(width=width, file=io.StringIO())
    console.print(render(report))
    return console.file.getvalue()


def cells(text, first):
    """The columns of the row that begins with `first`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{first}  ")]
    return line.split()


def test_the_report_holds_what_it_promises():
    assert {field.name for field in fields(Report)} >= CONTRACT_KEYS
    assert case().schema == 2


@pytest.mark.parametrize("name", CASES)
def test_saved_reports_read_back(name, tmp_path):
    report = CASES[name]
    report.save(tmp_path)
    assert same(Report.load(tmp_path / "report.json"), report)
    names = {"acceptance.png", "report.json", "report.md", "speed.png"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_page_shows_the_tables_the_pictures_that_are_there_and_where_it_comes_from(tmp_path):
    (tmp_path / "training.png").write_bytes(b"")
    report = replace(case(), by_source={"a|b": next(iter(case().by_source.values()))})
    report.save(tmp_path)
    page = (tmp_path / "report.md").read_text()
    for needle in ("| accepted length (bonus included) | 3.26 [3.11, 3.41] of 5 at most |", '"command": "evaluate.py"'):
        assert needle in page
    assert [line.partition("](")[2] for line in page.splitlines() if line.startswith("![")] == [
        "acceptance.png)",
        "speed.png)",
        "training.png)",
    ]
    assert "training.png" not in to_markdown(report, folder=tmp_path / "elsewhere")
    # Every row of a table has the columns of its header, also where a name holds a bar.
    for table in page.split("## ")[1:5]:
        bars = {line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(bars) == 1, table


def test_numbers_that_nobody_measured_are_null_and_shown_as_dashes(tmp_path):
    report = unmeasured(case())
    values = report.to_dict()
    json.dumps(values, allow_nan=False)
    assert values["acceptance_by_position"] == [0.0, None, None, None]
    assert values["acceptance_by_position_ci95"][1] == [None, None]
    assert values["prediction"]["speedup"] is None
    for text in (shown(report), to_markdown(report, folder=tmp_path)):
        assert not re.search(r"\bnan\b", text)
    assert "| 2 | - | 0.00 |" in to_markdown(report, folder=tmp_path)


def test_reports_of_an_earlier_version_are_refused(tmp_path):
    path = tmp_path / "report.json"
    old = {key: value for key, value in case().to_dict().items() if key != "by_turn"} | {"schema": 1}
    path.write_text(json.dumps(old))
    for read in (lambda: Report.from_dict(old), lambda: Report.load(path)):
        with pytest.raises(DataError, match=r"schema 1 is written by an earlier version.*run the evaluation again"):
            read()
    with pytest.raises(DataError, match="schema 99 is not known here; accepted: schema 2"):
        Report.from_dict({**old, "schema": 99})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"costs": None}, "report.costs: got null; accepted: a list"),
        ({"accepted_length_ci95": None}, "report.accepted_length_ci95: got null; accepted: a list of 2"),
        ({"accepted_length_ci95": [1, 2, 3]}, "accepted: a list of 2"),
        ({"acceptance_by_position": ["high"]}, 'report.acceptance_by_position.0: got "high"; accepted: a number'),
        ({"prompts": 2.5}, "report.prompts: got 2.5; accepted: int"),
        ({"by_source": {"maths": {"prompts": 1}}}, "report.by_source.maths: missing or unknown fields"),
        ({"per_unit": [{"unit": 1}]}, "report.per_unit.0: missing or unknown fields"),
        ({"colour": "red"}, r"missing or unknown fields \['colour'\]"),
    ],
)
def test_damaged_reports_are_refused_by_the_name_of_the_value(change, said, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**case().to_dict(), **change}))
    with pytest.raises(DataError, match=rf"report\.json: .*{said}.*; run the evaluation again"):
        Report.load(path)


def test_files_that_are_no_reports_are_refused(tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(DataError, match=r"report\.json.*run the evaluation again"):
        Report.load(path)
    for text in ("{", "[1]", "null"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"report\.json.*run the evaluation again"):
            Report.load(path)


@pytest.mark.parametrize("name", CASES)
def test_no_row_is_cut_or_wrapped_at_80_columns(name):
    narrow, wide = shown(CASES[name]), shown(CASES[name], 200)
    # A terminal that is wider shows the same lines: nothing had to give way.
    assert [line.rstrip() for line in narrow.splitlines()] == [line.rstrip() for line in wide.splitlines()]
    assert max(map(len, wide.splitlines())) <= 80


def test_long_names_are_shortened_in_the_terminal_and_whole_on_the_page(tmp_path):
    report = CASES["12 sources, block 16"]
    assert f"{LONG}-11" not in shown(report)
    assert f"| {LONG}-11 | " in to_markdown(report, folder=tmp_path)
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert shorten("abcde", 5) == "abcde"


def test_the_settings_that_act_are_named_and_no_others():
    assert sampling_text(case(top_k=50, top_p=0.9, min_p=0.1)) == "greedy (temperature 0)"
    assert sampling_text(case(repetition_penalty=1.1)) == "greedy (temperature 0), repetition penalty 1.1"
    assert sampling_text(case(temperature=0.7)) == "temperature 0.7"
    assert sampling_text(CASES["12 sources, block 16"]) == (
        "temperature 0.75, top-k 50, top-p 0.95, min-p 0.05, repetition penalty 1.15"
    )


def test_the_summary_names_the_share_of_drafts_that_stood(tmp_path):
    report = case(verify_rate=0.4567)
    assert "verify rate (accepted / proposed)   0.46" in shown(report)
    assert "| verify rate (accepted / proposed) | 0.46 |" in to_markdown(report, folder=tmp_path)
    assert "| verify rate (accepted / proposed) | - |" in to_markdown(case(verify_rate=NAN), folder=tmp_path)


def test_the_summary_says_what_was_foretold_and_where_texts_part():
    text = shown(CASES["turns and contexts"])
    assert "1.58x, error -1.3 %" in text
    assert "in 2 of 20, median margin 0.025" in text
    assert "in none of 20" in shown(case())
    assert "text differs" not in shown(case(divergences=None))
    assert "a tree of 5, 2 deep" in shown(CASES["tree"])


def test_turns_and_contexts_are_shown_where_there_are_several():
    assert "By turn" in shown(CASES["turns and contexts"])
    assert cells(shown(CASES["turns and contexts"]), "256-1023")[1:] == ["10", "400", "2.50", "[2.40,", "2.60]", "0.80"]
    assert "By turn" not in shown(case())
    assert "By context" not in shown(case())


def test_the_worked_example_stands_in_the_table_as_users_know_it():
    """A single step 20 ms, K = 8, drafting 8 x 1 ms, verify 30 ms, all accepted: 160 ms of single steps become 38 ms,
    4.21x counting the drafts, 4.74x with the bonus token."""
    row = cost(8, step=20.0, draft=1.0, verify=30.0, loop=0.0, tokens=9.0)
    text = shown(case(block_size=8, first=1.0, draft_length=8, costs=[row]))
    table = text.partition("What a round costs")[2].partition("By source")[0]
    assert cells(table, "8") == ["8", "160.0", "8.0", "30.0", "0.0", "38.0", "9.00", "180.0", "4.74x"]
    note = " ".join(table.split())
    assert "9 x 20.0 / 38.0 = 4.74x with the bonus token, 8 x 20.0 / 38.0 = 4.21x without it" in note


def test_trees_have_no_single_steps_to_compare_with():
    _, _, table = shown(CASES["tree"]).partition("What a round costs")
    assert cells(table, "5")[:3] == ["5", "-", "5.0"]
    assert "were every draft accepted" not in table


def test_formats_of_numbers():
    assert (number(NAN, ".1f", " ms"), number(2.0, ".1f", " ms")) == ("-", "2.0 ms")
    assert ranged(1.5, (1.25, 1.75), "x") == "1.50x [1.25, 1.75]"
    assert ranged(1.5, (NAN, NAN)) == "1.50"
    assert [scaled(n) for n in (0, 999, 11_500_000, 7e9)] == ["0", "999", "11.5 M", "7.0 B"]
    assert [scaled(n, "B") for n in (0, 23_000_000, 7e9)] == ["0 B", "23.0 MB", "7.0 GB"]


@pytest.fixture(scope="module")
def check_report():
    """The script that CI checks a report with, as a module."""
    spec = importlib.util.spec_from_file_location("check_report", ROOT / ".ci" / "check_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_of_ci_passes_a_good_report_and_names_nulls(check_report, tmp_path, capsys):
    case().save(tmp_path)
    path = tmp_path / "report.json"
    assert check_report.main(path) == 0
    floats = ("tokens_per_second", "baseline_tokens_per_second", "speedup", "baseline_step_ms", "accepted_length")
    assert set(floats) - {"accepted_length"} < set(check_report.POSITIVE)
    bad = {**dict.fromkeys(floats), "rounds": 0, "acceptance_by_position": []}
    path.write_text(json.dumps({**case().to_dict(), **bad}))
    capsys.readouterr()
    assert check_report.main(path) == 1
    said = capsys.readouterr().out.splitlines()
    for key in bad:
        assert any(line.startswith(f"{key} ") for line in said), key
    path.write_text("{")
    assert check_report.main(path) == 1
