# Attention of blocks, a few heads at a time and with gradients by hand, against one softmax under autograd.

import pytest
import torch
from torch import Tensor

from drafters.heads import attention
from drafters.heads.attention import attend


def plain(query: Tensor, context, allowed_XYS, block) -> Tensor:
    num_blocks, size = block[0].shape[2:4]
    rows = query.shape[2] // num_blocks
    scores = query @ context[0].transpose(-1, -2)
    if allowed_XYS is not None:
        seen = allowed_XYS[:, None].repeat_interleave(rows, dim=2)
        scores = scores.masked_fill(~seen, float("-inf"))
    queries = query.unflatten(2, (num_blocks, rows))
    own = (queries @ block[0].transpose(-1, -2)).flatten(2, 3)
    weights = torch.cat([scores, own], -1).softmax(-1)
    out = (weights[..., -size:].unflatten(2, (num_blocks, rows)) @ block[1]).flatten(2, 3)
    return weights[..., :-size] @ context[1] + out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4, 2, 7, 3), (1, 1, 1, 1, 1, 1), (3, 2, 1, 5, 6, 2), (2, 2, 3, 1, 0, 2)])
@pytest.mark.parametrize("scores", [1, 60, 2**20])
def test_output_and_gradients_equal_the_plain_way(monkeypatch, masked, shape, scores):
    monkeypatch.setattr(attention, "SCORES", scores)
    groups, heads, blocks, rows, seen, own = shape
    generator = torch.Generator().manual_seed(0)

    def leaf(*sizes: int) -> Tensor:
        return torch.randn(*sizes, 8, dtype=torch.float64, generator=generator).requires_grad_()

    query = leaf(groups, heads, blocks * rows)
    context = leaf(groups, heads, seen), leaf(groups, heads, seen)
    block = leaf(groups, heads, blocks, own), leaf(groups, heads, blocks, own)
    allowed = torch.rand(groups, blocks, seen, generator=generator) < 0.6 if masked else None
    out, want = attend(query, context, allowed, block), plain(query, context, allowed, block)
    torch.testing.assert_close(out, want)
    upstream = torch.randn(want.shape, dtype=torch.float64, generator=generator)
    leaves = (query, *context, *block)
    for got, expected in zip(
        torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        assert torch.equal(attend(query, context, allowed, block), out)
