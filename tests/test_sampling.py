# Temperature, top-k, top-p and drawing, against definitions written out by hand.

import math

import pytest
import torch

from drafters.decoding.sampling import check_sampling, draw, probs, sample
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
    ids = draw(weights.expand(num, -1), torch.Generator().manual_seed(1))
    counts = torch.bincount(ids, minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    expected = weights / 7 * num
    live = expected > 0
    chi2 = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert chi2 < 18.4  # 2 degrees of freedom, p = 1e-4
    assert torch.equal(ids, draw(weights.expand(num, -1), torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        (Sampling(temperature=-1.0), "sampling.temperature"),
        (Sampling(temperature=math.nan), "sampling.temperature"),
        (Sampling(top_k=-1), "sampling.top_k"),
        (Sampling(top_p=0.0), "sampling.top_p"),
        (Sampling(top_p=1.1), "sampling.top_p"),
    ],
)
def test_settings_out_of_range_are_named(sampling, key):
    with pytest.raises(ConfigError, match=key):
        check_sampling(sampling)
