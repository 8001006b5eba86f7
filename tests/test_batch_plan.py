# Which conversations make a step: every one once an epoch, within the budget, as many steps in each epoch, and parts
# for ranks that are even. The twin of the buckets is written another way: rows one by one, into an open step.

from itertools import chain, permutations

import pytest
import torch

from drafters.batch_plan import NEAR, EvenSteps, LengthBuckets, batch_seed, parts_of, share
from drafters.errors import ConfigError


def lengths_of(num, *, seed=0, longest=600):
    generator = torch.Generator().manual_seed(seed)
    return (40 + (longest - 40) * torch.rand(num, generator=generator) ** 2).int().tolist()


def steps_of(epoch):
    return [list(epoch.order[a:b]) for a, b in zip(epoch.cuts, epoch.cuts[1:], strict=False)]


def naive(lengths, max_tokens):
    """The unshuffled epoch before its end is evened out."""
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets = []
    while left:
        near = [i for i in left if lengths[i] >= NEAR / 100 * lengths[left[0]]]
        buckets.insert(0, near)
        left = left[len(near) :]
    steps, step = [], []
    for bucket in buckets:
        longest = max(lengths[i] for i in bucket)
        while step and len(step) * longest >= max_tokens - longest + 1:
            most = max(1, max_tokens // longest)
            steps.append(step[:most])
            step = step[most:]
        for i in bucket:
            step.append(i)
            if (len(step) + 1) * longest > max_tokens:
                steps.append(step)
                step = []
    return [*steps, step] if step else steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_tokens", [300, 640, 2000, 9000])
def test_buckets_are_those_of_the_naive_twin(seed, max_tokens):
    lengths = lengths_of(150, seed=seed)
    found, expected = steps_of(LengthBuckets(lengths, max_tokens).epoch(None)), naive(lengths, max_tokens)
    assert found[:-2] == expected[:-2]
    assert sorted(chain(*found[-2:])) == sorted(chain(*expected[-2:]))
    small, large = sorted(map(len, expected[-2:]))
    assert small <= min(map(len, found[-2:])) <= (small + large) / 2


@pytest.mark.parametrize("num", [1, 2, 3, 40, 301])
@pytest.mark.parametrize("max_tokens", [1, 300, 640, 2000, 9000, 10**6])
def test_an_epoch_has_every_conversation_once_within_the_budget(num, max_tokens):
    lengths = lengths_of(num)
    plan = LengthBuckets(lengths, max_tokens)
    for seed in (0, 1, 2):
        steps = steps_of(plan.epoch(seed))
        assert sorted(i for step in steps for i in step) == list(range(num))
        assert len(steps) == plan.num_steps
        assert min(map(len, steps)) == plan.smallest > 0
        for step in steps:
            assert len(step) == 1 or len(step) * max(lengths[i] for i in step) <= max_tokens


def test_an_epoch_depends_on_its_seed_and_on_nothing_else():
    lengths = lengths_of(200)
    plan = LengthBuckets(lengths, 2000)
    one, other = steps_of(plan.epoch(1)), steps_of(plan.epoch(2))
    assert one == steps_of(LengthBuckets(list(lengths), 2000).epoch(1))
    together, again = ({frozenset(step) for step in steps} for steps in (one, other))
    assert len(together & again) < len(together) / 4  # others meet
    longest = [max(lengths[i] for i in step) for step in one]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))
    assert plan.epoch(1).order[:5] == [148, 177, 33, 87, 19]  # on every machine


def test_similar_lengths_waste_little():
    lengths = lengths_of(1500)

    def waste(steps):
        return 1 - sum(lengths) / sum(len(step) * max(lengths[i] for i in step) for step in steps)

    bucketed, mixed = LengthBuckets(lengths, 2000), EvenSteps(1500, 9)
    assert waste(steps_of(bucketed.epoch(0))) < 0.05
    assert waste(steps_of(mixed.epoch(0))) > 0.4


def test_too_small_a_budget_for_the_ranks_says_what_is_enough():
    for num_ranks in (2, 3, 5):
        for num in range(num_ranks, 40):
            lengths = lengths_of(num, seed=num)
            enough = 2 * num_ranks * max(lengths)
            LengthBuckets(lengths, enough).check(num_ranks)
            with pytest.raises(
                ConfigError, match=rf"data.max_tokens: got 50 for {num_ranks} .*accepted is {enough} or"
            ):
                LengthBuckets(lengths, 50).check(num_ranks)
    LengthBuckets([500], 50).check(1)


def test_even_steps_are_a_cut_permutation():
    plan = EvenSteps(14, 3)
    assert steps_of(plan.epoch(None)) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]
    expected = torch.randperm(14, generator=torch.Generator().manual_seed(batch_seed("order", 0, 1))).tolist()
    assert plan.epoch(batch_seed("order", 0, 1)).order == expected


def test_parts_are_even_and_balanced():
    for num_ranks in (1, 2, 3, 4):
        for num in range(num_ranks, 30):
            lengths = lengths_of(num, seed=num)
            parts = parts_of(lengths, num_ranks)
            assert sorted(chain(*parts)) == list(range(num))
            assert all(part == sorted(part) for part in parts)
            assert {len(part) for part in parts} <= {num // num_ranks, num // num_ranks + 1}
            sums = [sum(lengths[i] for i in part) for part in parts]
            assert max(sums) - min(sums) <= max(lengths)


def test_parts_of_a_small_step_are_near_the_best_there_are():
    for seed in range(20):
        lengths = lengths_of(6, seed=seed)
        best = min(max(sum(lengths[i] for i in p[:3]), sum(lengths[i] for i in p[3:])) for p in permutations(range(6)))
        assert max(sum(lengths[i] for i in part) for part in parts_of(lengths, 2)) <= 1.25 * best


def test_shares_are_even():
    for total in range(1, 30):
        for parts in range(1, total + 1):
            ends = [share(total, part, parts) for part in range(parts)]
            assert [a for a, _ in ends] == [0, *[b for _, b in ends[:-1]]]
            assert ends[-1][1] == total
            assert {b - a for a, b in ends} <= {total // parts, total // parts + 1}
