# The formulas, on rounds and costs small enough to count by hand.

import math

import pytest
import torch

from drafters.decoding import metrics
from drafters.decoding.loop import Round, RoundCost


def rounds_of(*accepted, proposed=3):
    return [Round(proposed, a, a + 1, True) for a in accepted]


CUT = [Round(3, 3, 1, False), Round(1, 1, 2, False)]


def test_acceptance_is_counted_on_full_rounds():
    rounds = [*rounds_of(0, 1, 3, 3, 0), *CUT]
    assert metrics.accepted_length(rounds) == pytest.approx((1 + 2 + 4 + 4 + 1) / 5)
    assert metrics.conditional_acceptance(rounds, 3) == pytest.approx([3 / 5, 2 / 3, 2 / 2])
    assert metrics.survival(rounds, 3) == pytest.approx([3 / 5, 2 / 5, 2 / 5])
    assert metrics.verify_rate(rounds) == pytest.approx(7 / 15)
    assert metrics.accepted_histogram(rounds, 3) == [2, 1, 0, 2]


def test_accepted_length_is_one_plus_the_products_of_conditional_acceptance():
    generator = torch.Generator().manual_seed(0)
    rounds = rounds_of(*torch.randint(0, 4, (200,), generator=generator).tolist())
    acceptances = metrics.conditional_acceptance(rounds, 3)
    assert metrics.expected_length(acceptances) == pytest.approx(metrics.accepted_length(rounds))
    assert metrics.survival(rounds, 3) == pytest.approx(torch.tensor(acceptances).cumprod(0).tolist(), rel=1e-5)


def test_rows_that_drafted_less_do_not_count_against_later_positions():
    rounds = [*rounds_of(1, proposed=1), *rounds_of(2, 1, proposed=3)]
    assert metrics.conditional_acceptance(rounds, 3) == pytest.approx([1.0, 1 / 2, 0.0])


def test_positions_that_no_round_reached_are_nan_and_end_the_expectation():
    acceptances = metrics.conditional_acceptance(rounds_of(0, 0), 3)
    assert acceptances[0] == 0
    assert all(math.isnan(a) for a in acceptances[1:])
    assert metrics.expected_length(acceptances) == 1
    assert math.isnan(metrics.accepted_length(CUT))
    assert math.isnan(metrics.verify_rate([]))
    assert all(math.isnan(s) for s in metrics.survival([], 2))


def test_worked_example_of_the_cost_model():
    """Single step 20 ms, K = 8, drafting 8 x 1 ms, verify 30 ms, all accepted: 160 ms become 38 ms, 4.2x; with the
    bonus token 9 tokens and 4.74x."""
    step, draft, verify = 0.020, 8 * 0.001, 0.030
    assert 8 * step == pytest.approx(0.160)
    assert draft + verify == pytest.approx(0.038)
    assert metrics.expected_length([1.0] * 8) == 9
    costs = metrics.Costs(step_s=step, draft_s={8: draft}, verify_s={8: verify}, overhead_s={8: 0.0})
    assert 8 * costs.step_s / costs.round_s(8) == pytest.approx(4.21, abs=0.005)
    assert costs.speedup(8, [1.0] * 8) == pytest.approx(4.74, abs=0.005)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits, trials = 0, 200
    for trial in range(trials):
        weights = torch.randint(5, 30, (40,), generator=generator)
        means = 2 + 0.5 * torch.randn(40, generator=generator)
        pairs = [(float(m * w), float(w)) for m, w in zip(means, weights, strict=True)]
        low, high = metrics.bootstrap_ci(pairs, seed=trial, num_resamples=400)
        hits += low <= 2 <= high
    assert 0.88 <= hits / trials <= 0.99


def test_bootstrap_is_seeded_by_prompt_and_knows_its_edges():
    pairs = [(10.0, 5.0), (9.0, 3.0), (4.0, 4.0), (0.0, 0.0)]
    assert metrics.bootstrap_ci(pairs, seed=1) == metrics.bootstrap_ci(pairs, seed=1)
    low, high = metrics.bootstrap_ci(pairs, seed=1)
    assert 1 <= low < 23 / 12 < high <= 3
    assert metrics.bootstrap_ci([(10.0, 5.0)], seed=0) == (2.0, 2.0)
    assert all(math.isnan(bound) for bound in metrics.bootstrap_ci([], seed=0))


def test_costs_are_medians_of_the_fullest_batches():
    rounds = [RoundCost(2, 1, d, 10.0, 1.0) for d in (1.0, 2.0, 90.0)]
    rounds += [RoundCost(1, 1, 0.1, 5.0, 0.1), RoundCost(2, 3, 4.0, 14.0, 1.0)]
    baseline = [RoundCost(2, 0, 0.0, 7.0, 1.0), RoundCost(1, 0, 0.0, 3.0, 1.0)]
    costs = metrics.costs_from(rounds, baseline)
    assert costs.draft_s == {1: 2.0, 3: 4.0}
    assert costs.round_s(1) == 13
    assert costs.step_s == 8


@pytest.mark.parametrize(
    ("acceptances", "verify_of_a_token", "best"),
    [([0.9, 0.9, 0.9], 0.01, 3), ([0.9, 0.1, 0.1], 0.3, 1), ([0.8, 0.8, 0.0], 0.05, 2), ([0.0, 0.0, 0.0], 0.5, 1)],
)
def test_choose_length_weighs_acceptance_against_cost(acceptances, verify_of_a_token, best):
    lengths = (1, 2, 3)
    costs = metrics.Costs(
        step_s=1.0,
        draft_s=dict.fromkeys(lengths, 0.1),
        verify_s={k: 1 + verify_of_a_token * k for k in lengths},
        overhead_s=dict.fromkeys(lengths, 0.0),
    )
    assert metrics.choose_length(costs, acceptances) == best
