# Reliability: figures equal those of the libraries and of plain loops, intervals and the floor tell chance from error,
# folds keep prompts apart, tables fit the terminal, and the picture holds the numbers.

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from drafters.decoding import metrics
from drafters.errors import ConfigError, DataError
from drafters.scheduling.calibration import calibrate, calibration_error, fit
from drafters.scheduling.reliability import (
    calibration_error_ci,
    chance_errors,
    cross_validated,
    draw_reliability,
    measure_reliability,
    reliability_sections,
    reliability_tables,
    reliability_to_markdown,
)
from tests.test_calibration import drawn, few
from tests.test_pictures import check_texts

BENT = (2.5, 1.8, 0.6, 1.0)


def bent(*, seed=0, num_rounds=1200, num_prompts=30, shortest=2):
    return drawn(BENT, (0.0,) * 4, seed=seed, num_rounds=num_rounds, num_prompts=num_prompts, shortest=shortest)


def plain_judged(seen, confidence_NG, kind, k):
    """(probabilities, labels) of position k = 1.., round by round."""
    found = []
    for row, accepted, proposed in zip(
        confidence_NG.tolist(), seen.accepted_N.tolist(), seen.proposed_N.tolist(), strict=True
    ):
        if proposed < k or (kind == "conditional" and accepted < k - 1):
            continue
        found.append((math.prod(row[:k]) if kind == "cumulative" else row[k - 1], float(accepted >= k)))
    return [torch.tensor(side, dtype=torch.float64) for side in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", ["conditional", "cumulative"])
def test_figures_are_those_of_plain_loops_and_of_the_library(kind):
    seen = bent()
    calibrated_NG = cross_validated(seen, method="temperature")
    found = measure_reliability(seen, calibrated_NG)
    for name, confidence_NG in (("raw", seen.confidence_NG), ("calibrated", calibrated_NG)):
        for k, one in enumerate(found[kind][name], start=1):
            p_N, y_N = plain_judged(seen, confidence_NG, kind, k)
            base = float(y_N.mean())
            brier = float(((p_N - y_N) ** 2).mean())
            ece = binary_calibration_error(p_N, y_N.long(), n_bins=15, norm="l1")
            expected = {
                "rounds": len(p_N),
                "base_rate": base,
                "mean_confidence": float(p_N.mean()),
                "ece": pytest.approx(float(ece), abs=1e-6),
                "brier": brier,
                "brier_skill": 1 - brier / float(((y_N - base) ** 2).mean()),
                "auc": float(binary_auroc(p_N, y_N.long())),
            }
            assert {name: one[name] for name in expected} == pytest.approx(expected)


def test_base_rates_are_the_shares_of_decoding():
    seen = bent()
    found = measure_reliability(seen, seen.confidence_NG)
    rounds = [
        metrics.Round(p, a, a + 1, True, 1)
        for p, a in zip(seen.proposed_N.tolist(), seen.accepted_N.tolist(), strict=True)
    ]
    rates = [one["base_rate"] for one in found["conditional"]["raw"]]
    assert rates == pytest.approx(metrics.conditional_acceptance(rounds, 4))
    assert [one["rounds"] for one in found["cumulative"]["raw"]][:2] == [len(rounds)] * 2
    assert found["rounds"] == len(rounds)
    assert found["prompts"] == 30


def test_calibration_lowers_the_error_and_the_floor_says_how_far_it_can_go():
    seen = bent(num_rounds=8000, num_prompts=100, shortest=4)
    found = measure_reliability(seen, cross_validated(seen, method="temperature"))["cumulative"]
    for raw, calibrated in zip(found["raw"], found["calibrated"], strict=True):
        assert raw["ece"] > 0.04 > 0.02 > calibrated["ece"]
        assert calibrated["ece"] < 2 * calibrated["ece_floor"]
        assert raw["ece_ci95"][0] > calibrated["ece_ci95"][1]
        assert calibrated["brier"] < raw["brier"]


def labelled(shift, *, seed, num_rounds, num_prompts):
    """Confidences, and labels of probability sigmoid(logit(c) + shift)."""
    generator = torch.Generator().manual_seed(seed)
    logit_N = torch.randn(num_rounds, generator=generator, dtype=torch.float64)
    draws_N = torch.rand(num_rounds, generator=generator, dtype=torch.float64)
    prompt_N = torch.arange(num_rounds) * num_prompts // num_rounds
    return logit_N.sigmoid(), draws_N < (logit_N + shift).sigmoid(), prompt_N


def interval(probability_N, label_N, prompt_N, *, seed=0):
    chance_C = chance_errors(probability_N, seed=seed)
    return calibration_error_ci(probability_N, label_N, prompt_N, chance_C=chance_C, seed=seed)


@pytest.mark.parametrize("shift", [0.0, 0.2, 1.0])
def test_intervals_hold_the_true_error(shift):
    """A plain percentile interval never would where the error is small."""
    many_N, labels_N, _ = labelled(shift, seed=99, num_rounds=400_000, num_prompts=1)
    truth = 0.0 if shift == 0.0 else calibration_error(many_N, labels_N)
    bounds = [interval(*labelled(shift, seed=seed, num_rounds=1000, num_prompts=40)) for seed in range(40)]
    assert sum(low <= truth <= high for low, high in bounds) >= 33
    num_above = sum(low > 0 for low, _ in bounds)
    assert num_above <= 4 if shift == 0.0 else num_above >= (30 if shift == 1.0 else 1)


def test_one_prompt_has_no_interval_and_prompts_that_agree_have_one_without_width():
    probability_N, label_N, prompt_N = labelled(1.0, seed=0, num_rounds=600, num_prompts=20)
    assert all(math.isnan(bound) for bound in interval(probability_N, label_N, prompt_N * 0))
    same = probability_N[:30].repeat(20), label_N[:30].repeat(20)
    error = calibration_error(*same)
    assert interval(*same, torch.arange(600) // 30) == pytest.approx((error, error))


def test_prompts_are_numbered_by_no_matter_what():
    probability_N, label_N, prompt_N = labelled(0.5, seed=0, num_rounds=300, num_prompts=10)
    plain = interval(probability_N, label_N, prompt_N, seed=3)
    assert interval(probability_N, label_N, prompt_N * 7 + 100, seed=3) == plain
    assert interval(probability_N, label_N, prompt_N, seed=4) != plain


def test_chance_is_the_error_of_true_confidences():
    probability_N, _, _ = labelled(0.0, seed=0, num_rounds=500, num_prompts=1)
    # Another seed than that of the confidences, or the first draw would know them.
    samples = []
    for seed in range(100, 300):
        draws_N = torch.rand(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        samples.append(calibration_error(probability_N, draws_N < probability_N))
    found_C = chance_errors(probability_N, seed=7)
    assert float(found_C.mean()) == pytest.approx(sum(samples) / len(samples), rel=0.06)
    assert float(found_C.std()) == pytest.approx(float(torch.tensor(samples).std()), rel=0.15)
    # Four times the rounds, half the noise.
    assert float(chance_errors(probability_N.repeat(4), seed=7).mean()) == pytest.approx(
        float(found_C.mean()) / 2, rel=0.1
    )
    assert not chance_errors(torch.tensor([0.0, 1.0], dtype=torch.float64), seed=7).any()


def test_every_round_is_judged_by_a_fit_to_other_prompts():
    seen = bent(num_rounds=300, num_prompts=7)
    found_NG = cross_validated(seen, method="affine", folds=3, seed=1)
    assert torch.equal(found_NG.isnan(), seen.confidence_NG.isnan())
    # A change of one prompt's outcomes leaves that prompt's own confidences as they were, and changes others'.
    mine_N = seen.prompt_N == 4
    changed = replace(seen, accepted_N=torch.where(mine_N, 0, seen.accepted_N))
    again_NG = cross_validated(changed, method="affine", folds=3, seed=1)
    torch.testing.assert_close(again_NG[mine_N], found_NG[mine_N], rtol=0, atol=0, equal_nan=True)
    assert (again_NG[~mine_N, 0] != found_NG[~mine_N, 0]).any()
    assert not torch.equal(cross_validated(seen, method="affine", folds=3, seed=2)[:, 0], found_NG[:, 0])


def test_as_many_folds_as_prompts_leave_one_out():
    seen = bent(num_rounds=60, num_prompts=3)
    found_NG = cross_validated(seen, method="affine", folds=5)
    for prompt in range(3):
        mine_N = seen.prompt_N == prompt
        expected_NG = calibrate(seen.confidence_NG[mine_N], fit(seen.where(~mine_N), method="affine"))
        torch.testing.assert_close(found_NG[mine_N], expected_NG, equal_nan=True)


def test_what_cannot_be_cross_validated_is_refused():
    with pytest.raises(ConfigError, match="folds: got 1; accepted: 2 or more"):
        cross_validated(bent(num_rounds=30), method="affine", folds=1)
    with pytest.raises(DataError, match="one prompt"):
        cross_validated(bent(num_rounds=30, num_prompts=1), method="affine")


def odd_cases():
    nan = math.nan
    return {
        "usual": bent(num_rounds=400),
        "one slot": drawn((2.0,), (0.0,), seed=0, num_rounds=60, num_prompts=4),
        "two slots": drawn((2.0, 1.0), (0.0, 0.0), seed=0, num_rounds=60, num_prompts=4),
        "never accepted": few([[0.9, 0.5, 0.2, 0.1]] * 6, [0] * 6),
        "always accepted": few([[1.0, 0.9]] * 6, [2] * 6),
        "one round": few([[0.9, 0.5]], [1]),
        "late slots never proposed": few([[0.9, nan, nan]] * 3, [1, 0, 1], [1] * 3),
        "many rounds": drawn((2.0,) * 8, (0.0,) * 8, seed=0, num_rounds=10_000, num_prompts=10),
    }


CASES = odd_cases()


@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_are_measured_shown_and_drawn(name):
    seen = CASES[name]
    found = measure_reliability(seen, seen.confidence_NG)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert all(
        len(found[kind][which]) == seen.num_slots
        for kind in ("conditional", "cumulative")
        for which in ("raw", "calibrated")
    )
    stream = io.StringIO()
    Console(file=stream, width=80).print(reliability_tables(found))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "nan" not in text
    assert "| draft |" in reliability_to_markdown(found)
    check_texts(draw_reliability(seen, seen.confidence_NG))


def test_one_outcome_has_no_auc_and_no_skill():
    for name in ("never accepted", "always accepted"):
        one = measure_reliability(CASES[name], CASES[name].confidence_NG)["cumulative"]["raw"][0]
        assert one["auc"] is one["brier_skill"] is None
    unseen = measure_reliability(CASES["never accepted"], CASES["never accepted"].confidence_NG)["conditional"]["raw"][
        1
    ]
    assert unseen["rounds"] == 0
    assert all(value is None for name, value in unseen.items() if name != "rounds")


def test_tables_show_the_figures():
    seen = bent()
    found = measure_reliability(seen, cross_validated(seen, method="temperature"))
    cumulative, conditional = reliability_sections(found)
    assert [row[0] for row in cumulative.rows] == ["1", "2", "3", "4"]
    raw, calibrated = (found["conditional"][name][1] for name in ("raw", "calibrated"))
    row = conditional.rows[1]
    assert row[1:5] == [f"{raw['rounds']:,}", *(f"{100 * raw[n]:.1f}" for n in ("base_rate", "mean_confidence", "ece"))]
    assert row[5].startswith(f"{100 * calibrated['ece']:.1f} [")
    assert row[7:] == [f"{calibrated[name]:.2f}" for name in ("brier_skill", "auc")]


def test_the_picture_holds_the_bins():
    seen = bent()
    calibrated_NG = calibrate(seen.confidence_NG, fit(seen, method="temperature"))
    figure = draw_reliability(seen, calibrated_NG)
    assert len(figure.axes) == 6
    for k, (diagram, counts) in enumerate(zip(figure.axes[:3], figure.axes[3:], strict=True), start=1):
        lines = {line.get_label(): line for line in diagram.get_lines()}
        for start, (name, confidence_NG) in enumerate((("raw", seen.confidence_NG), ("calibrated", calibrated_NG))):
            p_N, y_N = plain_judged(seen, confidence_NG, "cumulative", k)
            used = [b for b in range(15) if (p_N * 15).long().eq(b).any()]
            inside = [(p_N * 15).long() == b for b in used]
            assert lines[name].get_xdata() == pytest.approx([float(p_N[i].mean()) for i in inside])
            assert lines[name].get_ydata() == pytest.approx([float(y_N[i].mean()) for i in inside])
            heights = [bar.get_height() for bar in counts.containers[start]]
            assert [heights[b] for b in used] == [int(i.sum()) for i in inside]
            assert sum(heights) == len(p_N)
