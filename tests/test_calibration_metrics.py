# Histograms of confidence give the error and the AUC of all drafts, however these came in.

import math

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from drafters.heads.calibration_metrics import ACCEPTANCE, CONFIDENCE, NUM_BINS, auc_of, ece_of, histogram
from drafters.scheduling import calibration
from drafters.training.module import confidence_figures


def drafts(*, seed, num=500, num_slots=4):
    """(confidences, acceptance rates, slots); the first slot has the most drafts."""
    generator = torch.Generator().manual_seed(seed)
    confidence_N = torch.rand(num, generator=generator) ** 0.5
    accept_N = (confidence_N * 0.7 + 0.3 * torch.rand(num, generator=generator)).clamp(0, 1)
    slot_N = (torch.rand(num, generator=generator) ** 2 * num_slots).long()
    return confidence_N, accept_N, slot_N


def measured(confidence_N, accept_N, slot_N, num_slots=4):
    found = histogram(confidence_N, accept_N, slot_N=slot_N, num_slots=num_slots)
    return ece_of(found[CONFIDENCE], found[ACCEPTANCE]), auc_of(found[ACCEPTANCE])


def plain_auc(confidences, accepts):
    """Over all pairs, a draft with itself included."""
    total = won = 0.0
    for c, a in zip(confidences, accepts, strict=True):
        for other, b in zip(confidences, accepts, strict=True):
            total += a * (1 - b)
            won += a * (1 - b) * (1.0 if c > other else 0.5 if c == other else 0.0)
    return won / total


@pytest.mark.parametrize("seed", range(4))
def test_the_error_is_that_of_all_drafts_of_a_position(seed):
    confidence_N, accept_N, slot_N = drafts(seed=seed)
    ece_G, _ = measured(confidence_N, accept_N, slot_N)
    assert NUM_BINS == calibration.NUM_BINS
    for k in range(4):
        mine_N = slot_N == k
        expected = calibration.calibration_error(confidence_N[mine_N].double(), accept_N[mine_N])
        assert float(ece_G[k]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_auc_is_that_of_all_pairs(seed):
    confidence_N, accept_N, slot_N = drafts(seed=seed, num=300)
    # In the middles of the bins, where bins tie what is equal and nothing else.
    confidence_N = ((confidence_N * 300).floor() + 0.5) / 300
    _, auc_G = measured(confidence_N, accept_N, slot_N)
    for k in range(4):
        mine_N = slot_N == k
        expected = plain_auc(confidence_N[mine_N].tolist(), accept_N[mine_N].tolist())
        assert float(auc_G[k]) == pytest.approx(expected, abs=1e-6)


def test_hard_labels_give_the_library_s_auc_up_to_the_width_of_a_bin():
    confidence_N, accept_N, _ = drafts(seed=0, num=4000)
    label_N = torch.rand(4000, generator=torch.Generator().manual_seed(9)) < accept_N
    _, auc_G = measured(confidence_N, label_N, torch.zeros(4000, dtype=torch.int64), num_slots=1)
    assert float(auc_G[0]) == pytest.approx(float(binary_auroc(confidence_N, label_N.long())), abs=2e-3)


def test_soft_labels_foretell_sampled_outcomes():
    confidence_N, accept_N, slot_N = drafts(seed=1)
    many = [values_N.repeat(400) for values_N in (confidence_N, accept_N, slot_N)]
    label_N = torch.rand(len(many[1]), generator=torch.Generator().manual_seed(9)) < many[1]
    soft, sampled = measured(confidence_N, accept_N, slot_N), measured(many[0], label_N, many[2])
    for one, other in zip(soft, sampled, strict=True):
        torch.testing.assert_close(one, other, atol=0.01, rtol=0)


def test_batches_add_up():
    confidence_N, accept_N, slot_N = drafts(seed=2)
    whole = histogram(confidence_N, accept_N, slot_N=slot_N, num_slots=4)
    parts = [
        histogram(confidence_N[rows], accept_N[rows], slot_N=slot_N[rows], num_slots=4)
        for rows in (slice(0, 100), slice(100, 100), slice(100, None))
    ]
    assert set(whole) == {CONFIDENCE, ACCEPTANCE}
    for name, pair in whole.items():
        for i in range(2):
            assert pair[i].shape == (4, 300)
            torch.testing.assert_close(sum(part[name][i] for part in parts), pair[i])


def test_certainty_counts_and_empty_positions_are_nan():
    one = torch.tensor([0.0, 1.0, 1.0])
    ece_G, auc_G = measured(one, torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 0, 2]), num_slots=4)
    assert ece_G.tolist() == pytest.approx([0.0, math.nan, 0.5, math.nan], nan_ok=True)
    assert auc_G.tolist() == pytest.approx([1.0, math.nan, 0.5, math.nan], nan_ok=True)
    sure_G = measured(one, torch.ones(3), torch.zeros(3, dtype=torch.int64), num_slots=1)[1]
    assert sure_G.isnan().all()


def test_no_gradient_is_kept():
    confidence_N = torch.tensor([0.2, 0.9], requires_grad=True)
    found = histogram(confidence_N, confidence_N * 0.5, slot_N=torch.tensor([0, 0]), num_slots=1)
    assert not any(part.requires_grad for pair in found.values() for part in pair)
    assert found[CONFIDENCE][0].sum() == pytest.approx(1.1)


def test_low_precision_confidences_are_counted_where_they_are():
    confidence_N = torch.tensor([0.25, 0.75, 1.0], dtype=torch.bfloat16)
    found = histogram(confidence_N, torch.tensor([0.25, 0.75, 1.0]), slot_N=torch.zeros(3).long(), num_slots=1)
    assert found[CONFIDENCE][1][0].nonzero().flatten().tolist() == [75, 225, 299]


def test_the_trainer_turns_histograms_into_figures_of_the_positions_that_have_some():
    generator = torch.Generator().manual_seed(3)
    confidence_N, accept_N = torch.rand(2, 400, generator=generator)
    slot_N = torch.arange(400) % 2
    sums = histogram(confidence_N, accept_N, slot_N=slot_N, num_slots=3)
    total = {name: torch.stack(pair) for name, pair in sums.items()} | {"loss": torch.tensor([2.0, 4.0])}
    found = confidence_figures(total)
    assert set(total) == {"loss"}
    assert set(found) == {f"val/confidence_{name}@{k}" for name in ("ece", "auc") for k in (1, 2)}
    assert found["val/confidence_ece@2"] == pytest.approx(float(ece_of(sums[CONFIDENCE], sums[ACCEPTANCE])[1]))
    assert found["val/confidence_auc@1"] == pytest.approx(float(auc_of(sums[ACCEPTANCE])[0]))
    assert confidence_figures({"loss": torch.tensor([2.0, 4.0])}) == {}
