# The formulas, on rounds and costs small enough to count by hand.

import math
from statistics import NormalDist

import pytest
import torch

from drafters.decoding import metrics
from drafters.decoding.records import Round, RoundCost


def rounds_of(*accepted, proposed=3):
    return [Round(proposed, a, a + 1, True, 10) for a in accepted]


CUT = [Round(3, 3, 1, False, 10), Round(1, 1, 2, False, 10)]


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


def test_shorter_drafts_are_foretold_from_longer_ones_as_they_were():
    """Of rounds that found nothing to draft, nothing more is gained: conditional acceptances would leave them out."""
    rounds = [*rounds_of(3, 1, 0, 2), *rounds_of(0, 0, proposed=0), *rounds_of(1, proposed=1), *CUT]
    assert [metrics.accepted_length(rounds, most) for most in range(4)] == pytest.approx([1, 11 / 7, 13 / 7, 14 / 7])
    assert metrics.accepted_length(rounds, 3) == metrics.accepted_length(rounds)
    assert metrics.expected_length(metrics.conditional_acceptance(rounds, 3)) > metrics.accepted_length(rounds)
    same = rounds_of(3, 1, 0, 2)
    for most in range(4):
        expected = metrics.expected_length(metrics.conditional_acceptance(same, most))
        assert metrics.accepted_length(same, most) == pytest.approx(expected)


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
    rounds = [RoundCost(1, 8, 8 * 0.001, 0.030, 0.0)] * 3
    costs = metrics.costs_from(rounds, [RoundCost(1, 0, 0.0, 0.020, 0.0)] * 5)
    accepted = metrics.conditional_acceptance(rounds_of(8, 8, 8, proposed=8), 8)
    assert accepted == [1.0] * 8
    assert metrics.expected_length(accepted) == 9
    assert 8 * costs.step_s == pytest.approx(0.160)
    assert costs.round_s(8) == pytest.approx(0.038)
    assert costs.speedup(8, 8) == pytest.approx(4.21, abs=0.005)
    assert costs.speedup(8, metrics.expected_length(accepted)) == pytest.approx(4.74, abs=0.005)


def test_the_loop_s_own_time_counts_on_both_sides():
    costs = metrics.costs_from([RoundCost(1, 2, 0.1, 1.0, 0.4)], [RoundCost(1, 0, 0.0, 0.8, 0.2)])
    assert costs.speedup(2, 3.0) == pytest.approx(1.0 * 3.0 / 1.5)


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
    # One prompt says nothing about others, however many there are that count nothing.
    for few in ([], [(10.0, 5.0)], [(10.0, 5.0), (0.0, 0.0)]):
        assert all(math.isnan(bound) for bound in metrics.bootstrap_ci(few, seed=0))
    assert metrics.bootstrap_ci([(10.0, 5.0)] * 2, seed=0) == (2.0, 2.0)


def naive_interval(prompts, statistic, *, seed, num_resamples=2000):
    """Resample whole prompts by hand; numbers of a small share from either end, interpolated."""
    generator = torch.Generator().manual_seed(seed)
    values = []
    for row in torch.randint(len(prompts), (num_resamples, len(prompts)), generator=generator).tolist():
        value = statistic([prompts[i] for i in row])
        values += [] if math.isnan(value) else [value]
    values.sort()

    def at(share):
        place = share * (len(values) - 1)
        low = math.floor(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (values[high] - values[low]) * (place - low)

    tail = metrics.tail_share(len(prompts))
    return at(tail), at(1 - tail)


@pytest.mark.parametrize(("num", "quantile"), [(4, 3.182), (6, 2.571), (11, 2.228), (21, 2.086), (101, 1.984)])
def test_few_prompts_widen_an_interval_by_student(num, quantile):
    expected = NormalDist().cdf(-math.sqrt(num / (num - 1)) * quantile)
    assert metrics.tail_share(num) == pytest.approx(expected, rel=0.12)
    assert metrics.tail_share(10**6) == pytest.approx(0.025, rel=1e-3)


@pytest.mark.parametrize("num", [6, 10])
def test_intervals_of_few_prompts_cover_the_truth(num):
    generator = torch.Generator().manual_seed(1)
    hits, trials = 0, 300
    for trial in range(trials):
        pairs = [(float(x), 1.0) for x in 2 + 0.5 * torch.randn(num, generator=generator)]
        low, high = metrics.bootstrap_ci(pairs, seed=trial, num_resamples=600)
        hits += low <= 2 <= high
    assert 0.9 <= hits / trials <= 0.99


PROMPTS = [
    [*rounds_of(0, 1, 3), *CUT],
    rounds_of(3, 3, 2, 3, 3),
    rounds_of(0, 0),
    [*rounds_of(1, proposed=1), *rounds_of(2, 1)],
    rounds_of(3),
]


def test_intervals_equal_those_of_resampling_by_hand():
    def length(prompts):
        return metrics.accepted_length(r for rounds in prompts for r in rounds)

    found = metrics.accepted_length_ci([*PROMPTS, CUT, []], seed=4)
    assert found == pytest.approx(naive_interval(PROMPTS, length, seed=4))
    assert found[0] < length(PROMPTS) < found[1]
    many = [(i % 7 + 0.1 * i, 1.0) for i in range(30)]
    assert metrics.bootstrap_ci(many, seed=4) != metrics.bootstrap_ci(many, seed=5)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_intervals_by_position_resample_the_prompts_that_came_so_far(k):
    def acceptance(prompts):
        return metrics.conditional_acceptance([r for rounds in prompts for r in rounds], k)[-1]

    reached = [rounds for rounds in PROMPTS if not math.isnan(acceptance([rounds]))]
    found = metrics.conditional_acceptance_ci(PROMPTS, 3, seed=4)[k - 1]
    assert found == pytest.approx(naive_interval(reached, acceptance, seed=4))
    assert found[0] <= acceptance(PROMPTS) <= found[1]


def test_positions_that_no_round_reached_have_no_interval():
    intervals = metrics.conditional_acceptance_ci([rounds_of(0, 0), rounds_of(0)], 3, seed=0)
    assert intervals[0] == (0.0, 0.0)
    assert all(math.isnan(bound) for interval in intervals[1:] for bound in interval)


def test_the_interval_of_the_speed_up_resamples_both_loops_of_a_unit_together():
    units = [(30.0, 1.0, 30.0, 2.0), (40.0, 2.5, 40.0, 2.6), (10.0, 0.4, 12.0, 1.4), (50.0, 2.0, 50.0, 3.0)]

    def speedup(units):
        drafted, drafted_s, plain, plain_s = map(sum, zip(*units, strict=True))
        return (drafted / drafted_s) / (plain / plain_s)

    found = metrics.speedup_ci(units, seed=2)
    assert found == pytest.approx(naive_interval(units, speedup, seed=2))
    assert found[0] < speedup(units) < found[1]
    # A machine that is twice as slow for one unit is so for both loops: the interval does not see it.
    slow = [(n, t * (1 + i), m, u * (1 + i)) for i, (n, t, m, u) in enumerate([(30.0, 1.0, 30.0, 2.0)] * 4)]
    assert metrics.speedup_ci(slow, seed=2) == pytest.approx((2.0, 2.0))
    assert all(math.isnan(bound) for few in ([], units[:1]) for bound in metrics.speedup_ci(few, seed=0))
    assert all(math.isnan(bound) for bound in metrics.speedup_ci([(0.0, 0.0, 0.0, 0.0)] * 2, seed=0))


def test_the_interval_of_a_lead_takes_both_sides_of_the_same_prompts():
    left = [(30.0, 10.0), (44.0, 40.0), (90.0, 20.0), (0.0, 0.0), (60.0, 25.0), (12.0, 10.0)]
    right = [(29.0, 10.0), (52.0, 48.0), (80.0, 18.0), (0.0, 0.0), (58.0, 26.0), (0.0, 0.0)]

    def length(rows):
        tokens, rounds = map(sum, zip(*rows, strict=True))
        return tokens / rounds if rounds else math.nan

    def lead(pairs):
        return length([a for a, _ in pairs]) - length([b for _, b in pairs])

    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a[1] or b[1]]
    found = metrics.paired_difference_ci(left, right, seed=6)
    assert found == pytest.approx(naive_interval(pairs, lead, seed=6))
    assert found[0] < lead(pairs) < found[1]
    back = metrics.paired_difference_ci(right, left, seed=6)
    assert back == pytest.approx((-found[1], -found[0]))
    assert metrics.paired_difference_ci(left, left, seed=6) == (0.0, 0.0)
    for few in ([], left[:1]):
        assert all(math.isnan(bound) for bound in metrics.paired_difference_ci(few, few, seed=0))


def test_the_lead_over_plain_decoding_is_the_speed_up_less_one():
    units = [(30.0, 1.0, 30.0, 2.0), (40.0, 2.5, 40.0, 2.6), (10.0, 0.4, 12.0, 1.4), (50.0, 2.0, 50.0, 3.0)]
    plain = [unit[2:] * 2 for unit in units]
    low, high = metrics.speedup_ci(units, seed=2)
    found = metrics.paired_difference_ci(units, plain, metrics.ratio_of_rates, seed=2)
    assert found == pytest.approx((low - 1, high - 1))


def test_context_buckets_cover_every_length_once():
    buckets = [metrics.context_bucket(n) for n in range(5000)]
    assert all(low <= n <= high for n, (low, high) in enumerate(buckets))
    assert list(dict.fromkeys(buckets)) == [
        (0, 127),
        (128, 255),
        (256, 511),
        (512, 1023),
        (1024, 2047),
        (2048, 4095),
        (4096, 8191),
    ]


def test_costs_are_means_of_the_fullest_batches_without_the_slowest_tenth():
    rounds = [RoundCost(2, 1, d, 10.0, 1.0) for d in (1.0, 2.0, 90.0)]
    rounds += [RoundCost(1, 1, 0.1, 5.0, 0.1), RoundCost(2, 3, 4.0, 14.0, 1.0)]
    baseline = [RoundCost(2, 0, 0.0, 7.0, 1.0), RoundCost(1, 0, 0.0, 3.0, 1.0)]
    costs = metrics.costs_from(rounds, baseline)
    assert costs.draft_s == {1: 1.5, 3: 4.0}
    assert costs.round_s(1) == 12.5
    assert costs.step_s == 8


@pytest.mark.parametrize(
    ("acceptances", "verify_of_a_token", "best"),
    [
        ([0.9, 0.9, 0.9], 0.01, 3),
        ([0.9, 0.1, 0.1], 0.3, 1),
        ([0.8, 0.8, 0.0], 0.05, 2),
        ([0.0, 0.0, 0.0], 0.5, 1),
        ([0.0, 0.0, 0.0], 0.0, 1),
    ],
)
def test_choose_length_weighs_acceptance_against_cost(acceptances, verify_of_a_token, best):
    lengths = (3, 1, 2, 0)
    costs = metrics.Costs(
        step_s=1.0,
        draft_s=dict.fromkeys(lengths, 0.1),
        verify_s={k: 1 + verify_of_a_token * k for k in lengths},
        overhead_s=dict.fromkeys(lengths, 0.0),
    )
    taus = {k: metrics.expected_length(acceptances[:k]) for k in lengths}
    naive = max(sorted(set(lengths) - {0}), key=lambda k: taus[k] / (0.1 + 1 + verify_of_a_token * k))
    assert metrics.choose_length(costs, taus) == naive == best
    # What was not foretold, or not timed, cannot be chosen.
    assert metrics.choose_length(costs, {1: 1.0}) == 1
    assert metrics.choose_length(costs, {**taus, 9: 99.0}) == best
