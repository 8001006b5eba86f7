# Temperature, top-k, top-p and drawing, against definitions written out by hand.

import math

import pytest
import torch

from drafters.decoding.sampling import Draws, RowStreams, check_sampling, draw, penalised, probs, sample
from drafters.errors import ConfigError
from drafters.types import Sampling


def naive_probs(logits, sampling):
    """One row, a loop a rule."""
    weights = [math.exp(v / sampling.temperature) for v in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: sampling.top_k] if sampling.top_k else order
    total, nucleus, mass = sum(weights[i] for i in kept), [], 0.0
    for i in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    nucleus = [i for i in nucleus if weights[i] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[i] for i in nucleus)
    return torch.tensor([weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.3, top_k=4),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=2.0, top_k=6, top_p=0.5),
        Sampling(temperature=1.0, top_k=1000),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1),
        Sampling(temperature=1.0, min_p=1.0),
    ],
)
def test_probs_equal_the_naive_twin(sampling):
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)) * 2
    expected = torch.stack([naive_probs(row, sampling) for row in logits])
    torch.testing.assert_close(probs(logits, sampling), expected)
    torch.testing.assert_close(probs(logits.view(5, 1, 12), sampling)[:, 0], expected)
    assert probs(logits.bfloat16(), sampling).dtype == torch.float32


def test_temperature_zero_is_one_hot():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert probs(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert sample(logits, Sampling()).tolist() == [1, 0]


def test_draw_follows_the_weights_and_never_takes_zero():
    weights = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0]) * 7
    num = 40_000
    uniforms = torch.rand(num, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = draw(weights.expand(num, -1), uniforms)
    counts = torch.bincount(ids, minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    expected = weights / 7 * num
    live = expected > 0
    chi2 = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert chi2 < 18.4  # 2 degrees of freedom, p = 1e-4
    assert torch.equal(ids, draw(weights.expand(num, -1), uniforms))
    assert draw(weights.expand(2, -1), torch.tensor([0.0, 1 - 2**-53]).double()).tolist() == [1, 4]


def test_warpers_are_those_of_transformers():
    from transformers.generation import logits_process as hf

    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.15, repetition_penalty=1.3)
    logits = torch.randn(6, 14, generator=torch.Generator().manual_seed(2)) * 2
    text = torch.randint(14, (6, 4), generator=torch.Generator().manual_seed(3))
    seen = torch.zeros(6, 14, dtype=torch.bool).scatter_(1, text, True)
    warped = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, logits.clone())
    torch.testing.assert_close(penalised(logits, seen, sampling), warped)
    for warper in (
        hf.TemperatureLogitsWarper(sampling.temperature),
        hf.TopKLogitsWarper(sampling.top_k),
        hf.TopPLogitsWarper(sampling.top_p),
        hf.MinPLogitsWarper(sampling.min_p),
    ):
        warped = warper(text, warped)
    torch.testing.assert_close(probs(penalised(logits, seen, sampling), sampling), warped.softmax(-1))


def test_a_row_has_the_same_numbers_in_any_batch():
    cpu = torch.device("cpu")
    alone, many = RowStreams([7], cpu), RowStreams([5, 7, 9], cpu)
    assert torch.equal(alone.numbers(3)[0], many.numbers(3)[1])
    many.keep([1])
    many.join(RowStreams([9], cpu))
    first = many.round(2)
    assert torch.equal(torch.cat([first.draft_BS[0], first.accept_BS[0], first.last_B[:1]]), alone.numbers(5)[0])
    everything = torch.cat([RowStreams(range(4000), cpu).numbers(5).flatten(), RowStreams([1], cpu).numbers(20_000)[0]])
    counts = torch.histc(everything.float(), bins=50, min=0, max=1)
    expected = len(everything) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 103  # 49 degrees of freedom, p = 1e-5
    rounds = RowStreams([3], cpu)
    assert len({float(rounds.numbers(1)) for _ in range(500)}) == 500


def test_drafted_tokens_count_as_seen():
    """With a penalty that forbids repeats, greedy drafts run down the ranks, each on the support."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    support = torch.tensor([10, 20, 30, 40])
    seen = torch.zeros(1, 50, dtype=torch.bool)
    seen[0, 20] = True
    draws = Draws(Sampling(repetition_penalty=1e6), None, seen)
    assert [int(draws.draft(logits, support)[0]) for _ in range(3)] == [10, 30, 40]
    assert seen.sum() == 1
    assert [int(Draws(Sampling()).draft(logits, support)[0]) for _ in range(2)] == [10, 10]


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        (Sampling(temperature=-1.0), "sampling.temperature"),
        (Sampling(temperature=math.nan), "sampling.temperature"),
        (Sampling(top_k=-1), "sampling.top_k"),
        (Sampling(top_p=0.0), "sampling.top_p"),
        (Sampling(top_p=1.1), "sampling.top_p"),
        (Sampling(min_p=-0.1), "sampling.min_p"),
        (Sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    ],
)
def test_settings_out_of_range_are_named(sampling, key):
    with pytest.raises(ConfigError, match=key):
        check_sampling(sampling)
