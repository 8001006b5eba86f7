# The plain training step that benchmarks compare with trains the same drafter: the same sum and the same gradients.

import pytest
import torch

from drafters.losses import LossWeights
from tests.bench.reference import reference_loss
from tests.block_doubles import make_batch, make_drafter
from tests.tiny import tiny_target


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_reference_is_the_same_step(window, block_size):
    target = tiny_target()
    weights = LossWeights(ce=0.1, l1=0.9, kl=0.0, confidence=1.0)
    drafter = make_drafter(target, reduced=False, window=window, block_size=block_size, loss=weights)
    batch = make_batch(target, [40, 23, 9])
    ours = drafter.loss(batch, target.head)
    total, count = reference_loss(drafter, batch, target.head)
    assert count == ours.count > 0
    torch.testing.assert_close(total, ours.total, rtol=1e-5, atol=1e-5)
    parameters = dict(drafter.named_parameters())
    got = torch.autograd.grad(ours.total, parameters.values())
    want = torch.autograd.grad(total, parameters.values())
    for name, one, other in zip(parameters, got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)
