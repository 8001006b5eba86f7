"""Draws the sample prompts from the templates and writes them as JSON lines.

Run as `python -m data.samples.prompts`. The same seed and scale give the same file. The split is by template: the
templates named in VALIDATION are used for validation prompts only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.samples.templates import ALL_TEMPLATES
from data.samples.templates.base import Template

Row = dict[str, Any]
TOTAL = 2400
VALIDATION_SHARE = 0.08
SHARES = {
    "word-problem": 0.30,
    "python": 0.28,
    "explanation": 0.12,
    "rewriting": 0.06,
    "lists-planning": 0.06,
    "writing": 0.06,
    "everyday": 0.06,
    "reasoning": 0.04,
    "extraction": 0.02,
}
TWO_TURNS = {"word-problem": 0.02, "python": 0.05}
TWO_TURNS_ELSEWHERE = 0.15
VALIDATION = frozenset(
    {
        "wp_phone_plan",
        "wp_reading",
        "wp_bus_passengers",
        "wp_machine_rate",
        "py_drop_repeats",
        "py_minutes_between",
        "py_running_totals",
        "py_robot_position",
        "py_by_first_letter",
        "py_next_prime",
        "py_add_counts",
        "py_other_idiomatic",
        "explain_origin",
        "explain_myth",
        "rewrite_kinder",
        "list_packing",
        "write_speech",
        "ask_cooking",
        "reason_cause",
        "sort_into_groups",
    }
)
OUT = Path(__file__).with_name("prompts.jsonl")
TRIES = 60


def draw_one(template: Template, *, rng: random.Random, seen: set[str]) -> list[str] | None:
    """The turns of a prompt whose first turn is new, or None if the template has run dry."""
    for _ in range(TRIES):
        text = template.make(rng).strip()
        text = text[0].upper() + text[1:]
        if text not in seen:
            seen.add(text)
            second = rng.random() < TWO_TURNS.get(template.category, TWO_TURNS_ELSEWHERE)
            return [text, rng.choice(template.followups)] if second and template.followups else [text]
    return None


def draw_group(templates: Sequence[Template], *, count: int, rng: random.Random, seen: set[str]) -> list[Row]:
    """About `count` prompts spread over the templates by weight, fewer only when all of them have run dry."""
    rows: list[Row] = []
    drawn: Counter[str] = Counter()
    live = list(templates)
    while live and len(rows) < count:
        template = min(live, key=lambda t: (drawn[t.name] + 0.5) / t.weight)
        turns = draw_one(template, rng=rng, seen=seen)
        if turns is None:
            live.remove(template)
            continue
        drawn[template.name] += 1
        rows.append({"category": template.category, "template": template.name, "turns": turns})
    return rows


def build(seed: int = 0, *, scale: float = 1.0) -> list[Row]:
    """All rows, in random order, with the checks that every file must pass."""
    rng = random.Random(seed)
    seen: set[str] = set()
    rows: list[Row] = []
    for category, share in SHARES.items():
        number = 0
        for split in ("train", "validation"):
            part = VALIDATION_SHARE if split == "validation" else 1 - VALIDATION_SHARE
            count = max(1, round(TOTAL * scale * share * part))
            chosen = [
                t for t in ALL_TEMPLATES if t.category == category and (t.name in VALIDATION) == (split == "validation")
            ]
            for row in draw_group(chosen, count=count, rng=rng, seen=seen):
                number += 1
                rows.append(
                    {
                        "id": f"{category}-{number:04d}",
                        "category": row["category"],
                        "template": row["template"],
                        "split": split,
                        "turns": row["turns"],
                    }
                )
    check(rows)
    rng.shuffle(rows)
    return rows


def check(rows: Sequence[Row]) -> None:
    """Assert that the split is by template, that every category is in both parts and that no prompt repeats."""
    names = [template.name for template in ALL_TEMPLATES]
    assert len(names) == len(set(names)), "two templates share a name"
    assert set(names) >= VALIDATION, f"unknown templates: {sorted(VALIDATION - set(names))}"
    parts = {split: [row for row in rows if row["split"] == split] for split in ("train", "validation")}
    train, validation = ({row["template"] for row in part} for part in parts.values())
    assert not train & validation, f"templates in both parts: {sorted(train & validation)}"
    for split, part in parts.items():
        assert {row["category"] for row in part} == set(SHARES), f"a category is missing from {split}"
    assert len({row["turns"][0] for row in rows}) == len(rows), "a prompt repeats"
    assert len({row["id"] for row in rows}) == len(rows), "an id repeats"


def summary(rows: Sequence[Row]) -> str:
    """Counts per category and split, and the mean length of the prompts."""
    counts = Counter((row["category"], row["split"]) for row in rows)
    lines = [f"{name:15} train {counts[name, 'train']:5}  validation {counts[name, 'validation']:4}" for name in SHARES]
    words = sum(len(turn.split()) for row in rows for turn in row["turns"]) / len(rows)
    two = sum(len(row["turns"]) > 1 for row in rows) / len(rows)
    templates = len({row["template"] for row in rows})
    return "\n".join(
        [*lines, f"{len(rows)} prompts, {templates} templates, {two:.1%} with two turns, {words:.0f} words on average"]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and print what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="where to write the rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies how many prompts are drawn")
    arguments = parser.parse_args(argv)
    rows = build(arguments.seed, scale=arguments.scale)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(summary(rows))
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
