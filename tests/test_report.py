# A whole measurement on tiny models: every key is there, numbers agree with each other, files can be read back.

import importlib.util
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from drafters.decoding.dispatch import dispatch_share
from drafters.decoding.divergence import first_difference, logit_margin
from drafters.decoding.measure import MeasureConfig, _batches, measure
from drafters.decoding.report import Report, draw_acceptance, render, to_markdown
from drafters.errors import ConfigError, DataError
from drafters.types import Needs, Sampling
from tests.copy_drafter import CopyDrafter, sharp_target

ROOT = Path(__file__).resolve().parent.parent
GAMMA = 3
CONTRACT = {
    "schema",
    "accepted_length",
    "accepted_length_ci95",
    "acceptance_by_position",
    "rounds",
    "tokens",
    "draft_length",
    "accepted_length_at_draft_length",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "draft_ms",
    "verify_ms",
    "baseline_step_ms",
    "predicted_speedup",
    "temperature",
    "batch_size",
    "by_source",
    "divergences",
    "provenance",
}


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=64, scale=30)


@pytest.fixture(scope="module")
def drafter():
    return CopyDrafter(sharp_target(vocab_size=64, scale=30, noise=0.3), block_size=GAMMA)


def prompts_of(num):
    generator = torch.Generator().manual_seed(3)
    return [
        ("maths" if i < num - 2 else "chat", torch.randint(3, 64, (4 + i,), generator=generator)) for i in range(num)
    ]


CONFIG = MeasureConfig(max_new_tokens=24, stop_ids=(), profile_rounds=4)


@pytest.fixture(scope="module")
def report(target, drafter):
    return measure(target, drafter, prompts_of(6), CONFIG, provenance={"command": "evaluate.py"})


def test_the_report_holds_the_contract_and_agrees_with_itself(report):
    values = report.to_dict()
    assert set(values) >= CONTRACT
    assert report.schema == 1
    assert report.accepted_length == pytest.approx(report.tokens / report.rounds)
    low, high = report.accepted_length_ci95
    assert 1 <= low < report.accepted_length < high <= GAMMA + 1
    assert len(report.acceptance_by_position) == GAMMA
    assert sum(report.accepted_histogram) == report.rounds
    assert 1 <= report.draft_length <= GAMMA
    assert report.speedup == pytest.approx(report.tokens_per_second / report.baseline_tokens_per_second)
    best = max(report.costs, key=lambda cost: cost.predicted_speedup)
    assert (report.draft_length, report.predicted_speedup) == (best.length, best.predicted_speedup)
    assert report.divergences == {"prompts": 0, "compared": 6, "first": []}
    assert 0 < report.dispatch_share < 1
    assert report.provenance["command"] == "evaluate.py"
    assert {"drafters", "python", "torch", "transformers"} == set(report.provenance["versions"])


def test_sources_add_up(report):
    parts = report.by_source
    assert {name: part.prompts for name, part in parts.items()} == {"maths": 4, "chat": 2}
    assert sum(part.rounds for part in parts.values()) == report.rounds
    assert sum(part.tokens for part in parts.values()) == report.tokens


def test_acceptance_repeats_and_does_not_depend_on_the_batch(target, drafter, report):
    again = measure(target, drafter, prompts_of(6), replace(CONFIG, batch_size=2, length=2))
    assert again.draft_length == 2
    assert again.accepted_histogram == report.accepted_histogram
    assert again.accepted_length == report.accepted_length


def test_sampled_measurements_are_seeded_and_claim_no_divergences(target, drafter):
    sampling = Sampling(temperature=1.0, top_p=0.95)
    config = replace(CONFIG, sampling=sampling, num_speed_prompts=1, profile_rounds=1)
    first, second = (measure(target, drafter, prompts_of(3), config) for _ in range(2))
    assert first.divergences is None
    assert first.accepted_histogram == second.accepted_histogram
    assert (first.temperature, first.top_p) == (1.0, 0.95)
    other = measure(target, drafter, prompts_of(3), replace(config, seed=1))
    assert other.accepted_histogram != first.accepted_histogram


def test_progress_tells_the_running_accepted_length(target, drafter):
    seen = []
    report = measure(target, drafter, prompts_of(3), CONFIG, progress=lambda *told: seen.append(told))
    phases = [told[0] for told in seen]
    assert phases == sorted(phases, key=["acceptance", "costs", "speed"].index)
    last = [told for told in seen if told[0] == "acceptance"][-1]
    assert last == ("acceptance", 3, 3, pytest.approx(report.accepted_length))


def test_saved_reports_read_back(report, tmp_path):
    report.save(tmp_path)
    assert Report.load(tmp_path / "report.json") == report
    assert (tmp_path / "acceptance.png").stat().st_size > 10_000
    text = (tmp_path / "report.md").read_text()
    for needle in ("accepted length", "| chat | 2 |", "acceptance.png", '"command": "evaluate.py"'):
        assert needle in text
    console = Console(width=80, file=io.StringIO())
    console.print(render(report))
    summary = console.file.getvalue().split("Acceptance by")[0].splitlines()
    assert f"{report.speedup:.2f}x" in "".join(summary)
    assert "6, first turn only" in "".join(summary)
    # The title, two rules, and no row of the eleven on two lines.
    assert len(summary) == 14


def test_numbers_that_nobody_measured_are_null(report, tmp_path):
    holes = replace(report, acceptance_by_position=[0.0, math.nan, math.nan], predicted_speedup=math.nan)
    holes.save(tmp_path)
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["acceptance_by_position"] == [0.0, None, None]
    assert math.isnan(Report.load(tmp_path / "report.json").predicted_speedup)
    page = to_markdown(holes)
    assert "| nan" not in page
    assert "| when all before stood | 0.00 | - | - |" in page
    assert "(predicted -)" in page
    draw_acceptance(holes)


def test_foreign_and_damaged_reports_are_refused(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("{")
    with pytest.raises(DataError, match="report"):
        Report.load(path)
    with pytest.raises(DataError, match="missing"):
        Report.load(tmp_path / "missing.json")
    for damaged in ([1], {**report.to_dict(), "costs": None}, {**report.to_dict(), "accepted_length_ci95": None}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(DataError, match=r"report .*report\.json: .*run the evaluation again"):
            Report.load(path)
    path.write_text(json.dumps({**report.to_dict(), "schema": 99}))
    with pytest.raises(DataError, match="schema 99"):
        Report.load(path)


@pytest.mark.parametrize(
    ("changes", "error", "key"),
    [
        ({"length": "best"}, ConfigError, "length"),
        ({"length": GAMMA + 1}, ConfigError, "length"),
        ({"length": 0}, ConfigError, "length"),
        ({"profile_rounds": 0}, ConfigError, "profile_rounds"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"max_new_tokens": 2}, ConfigError, "max_new_tokens: got 2; accepted: 5 or more"),
    ],
)
def test_bad_settings_are_named(target, drafter, changes, error, key):
    with pytest.raises(error, match=key):
        measure(target, drafter, prompts_of(3), replace(CONFIG, **changes))


def test_no_prompts_is_an_error(target, drafter):
    with pytest.raises(DataError, match="prompts"):
        measure(target, drafter, [], CONFIG)


def test_batches_hold_one_source_and_take_turns():
    batches = _batches(prompts_of(7), 2)
    assert [(b.source, b.start, len(b.prompts)) for b in batches] == [
        ("maths", 0, 2),
        ("chat", 2, 2),
        ("maths", 4, 2),
        ("maths", 6, 1),
    ]


def test_first_difference_and_margin(target):
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    prompt = prompts_of(1)[0][1]
    text = torch.cat([prompt, torch.tensor([7, 8])])
    last = target.states(text[None], needs=Needs(last=True)).last_BTD[0, -1:]
    best = target.head.logits(last)[0].sort(descending=True).values
    assert logit_margin(target, prompt, [7, 8]) == pytest.approx(float(best[0] - best[1]), rel=1e-4)


def test_divergences_are_found(target, drafter, monkeypatch):
    """A loop that changes one drafted text must show in the report, with its place and margin."""
    from drafters.decoding import measure as module

    honest = module.decode

    def lying(target, drafter, prompts, config, **rest):
        rows = honest(target, drafter, prompts, config, **rest)
        if drafter is not None and len(prompts[0]) == 5:
            rows[0].tokens[4] = 63 - rows[0].tokens[4]
        return rows

    monkeypatch.setattr(module, "decode", lying)
    found = measure(target, drafter, prompts_of(3), CONFIG).divergences
    assert (found["prompts"], found["compared"]) == (1, 3)
    assert (found["first"][0]["prompt"], found["first"][0]["position"]) == (1, 4)
    assert found["first"][0]["logit_margin"] > 0


def test_dispatch_share_falls_when_the_arithmetic_grows():
    small = sharp_target(vocab_size=64, scale=1)
    large = sharp_target(vocab_size=64, scale=1, hidden_size=512, intermediate_size=2048)
    prompt = torch.arange(3, 9)
    assert dispatch_share(small, prompt) > dispatch_share(large, prompt) + 0.1


@pytest.fixture(scope="module")
def check_report():
    """The script that CI checks a report with, as a module."""
    spec = importlib.util.spec_from_file_location("check_report", ROOT / ".ci" / "check_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_of_ci_passes_a_good_report_and_names_nulls(report, check_report, tmp_path, capsys):
    report.save(tmp_path)
    path = tmp_path / "report.json"
    assert check_report.KEYS == CONTRACT
    assert check_report.main(path) == 0
    nulls = dict.fromkeys((*check_report.POSITIVE, "accepted_length", "acceptance_by_position"))
    path.write_text(json.dumps({**report.to_dict(), **nulls}))
    assert check_report.main(path) == 1
    said = capsys.readouterr().out
    for key in nulls:
        assert f"\n{key} " in said
    path.write_text("{")
    assert check_report.main(path) == 1
