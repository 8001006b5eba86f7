"""The sample prompts: what the script draws, and the file that is checked in."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter

import pytest

from data.samples import prompts
from data.samples.templates import ALL_TEMPLATES


@pytest.fixture(scope="module")
def rows() -> list[prompts.Row]:
    return prompts.build(0)


def test_same_seed_gives_the_same_rows(rows):
    assert prompts.build(0) == rows
    assert prompts.build(1, scale=0.1) != prompts.build(2, scale=0.1)


def test_the_file_is_what_the_script_draws(rows):
    stored = [json.loads(line) for line in prompts.OUT.read_text(encoding="utf-8").splitlines()]
    assert stored == rows


def test_number_of_prompts_and_mix(rows):
    assert len(rows) >= 1500
    for category, share in prompts.SHARES.items():
        assert sum(row["category"] == category for row in rows) / len(rows) == pytest.approx(share, abs=0.01)
    assert sum(row["split"] == "validation" for row in rows) / len(rows) == pytest.approx(0.08, abs=0.01)
    assert 0.05 <= sum(len(row["turns"]) == 2 for row in rows) / len(rows) <= 0.12


def test_scale_multiplies_the_number_of_prompts(rows):
    assert len(prompts.build(0, scale=0.25)) == pytest.approx(len(rows) / 4, abs=10)


def test_there_are_many_templates():
    counts = Counter(template.category for template in ALL_TEMPLATES)
    assert counts.total() >= 110
    assert counts["word-problem"] >= 35
    assert counts["python"] >= 90


def test_split_is_by_template_and_covers_every_category(rows):
    parts = {split: [row for row in rows if row["split"] == split] for split in ("train", "validation")}
    assert {row["template"] for row in parts["validation"]} == prompts.VALIDATION
    assert not prompts.VALIDATION & {row["template"] for row in parts["train"]}
    for part in parts.values():
        assert {row["category"] for row in part} == set(prompts.SHARES)


def test_no_prompt_or_id_repeats(rows):
    assert len({row["turns"][0] for row in rows}) == len(rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_rows_are_valid(rows):
    for row in rows:
        assert list(row) == ["id", "category", "template", "split", "turns"]
        assert re.fullmatch(rf"{row['category']}-\d{{4,}}", row["id"])
        assert row["split"] in ("train", "validation")
        assert 1 <= len(row["turns"]) <= 2
        for turn in row["turns"]:
            assert turn == turn.strip()
            assert 10 <= len(turn) <= 1200
            assert turn.count("```") in (0, 2)


def test_no_slot_is_left_open_and_articles_fit(rows):
    for row in rows:
        text = " ".join(row["turns"])
        if row["category"] != "python":
            assert not re.search(r"[{}]", text.replace(r"\boxed{}", "").replace(r"\boxed{answer}", "")), text
            wrong = r"\b[Aa] [aeio]\w+|\b[Aa]n [bcdfgjklmnpqrstvwxyz]\w+"
            assert not re.search(wrong, text.replace("a one-", "")), text
            assert not re.search(r" {2}|(?<!\.)\.\.(?!\.)| \.(?!\.)", text), text


def test_python_tasks_hold_code_that_parses(rows):
    for row in rows:
        if row["template"].startswith("py_other"):
            continue
        for block in re.findall(r"```python\n(.*?)```", row["turns"][0], flags=re.S):
            ast.parse(block)


def test_main_writes_the_rows(tmp_path, capsys):
    out = tmp_path / "some" / "prompts.jsonl"
    prompts.main(["--out", str(out), "--seed", "3", "--scale", "0.05"])
    stored = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert stored == prompts.build(3, scale=0.05)
    assert f"{len(stored)} prompts" in capsys.readouterr().out


def test_a_template_with_mixed_parts_is_refused(rows):
    wrong = [dict(row) for row in rows]
    next(row for row in wrong if row["split"] == "train")["split"] = "validation"
    with pytest.raises(AssertionError, match="both parts"):
        prompts.check(wrong)
