# The dense end of a draft layer: output projection and gated MLP on the residual stream. In training it holds most of a
# layer's activations; a run may have them computed again in the backward pass, and may have the whole compiled.

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.computing import computing
from drafters.heads.norms import rms_norm

__all__ = ["finish"]

Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # output projection, gain of the norm, gate and up, down
Finish = Callable[[Tensor, Tensor, Weights, float], Tensor]


def finish(x: Tensor, attended: Tensor, weights: Weights, eps: float) -> Tensor:
    """The residual stream [..., D] after attention [..., N * H] and the MLP."""
    how = computing()
    function = _compiled() if how.compile else _finish
    if how.recompute and torch.is_grad_enabled():
        again: Tensor = checkpoint(function, x, attended, weights, eps, use_reentrant=False)
        return again
    return function(x, attended, weights, eps)


def _finish(x: Tensor, attended: Tensor, weights: Weights, eps: float) -> Tensor:
    o, gain, gate_up, down = weights
    x = x + F.linear(attended, o)
    normed = rms_norm(x, gain, eps, dtype=down.dtype)
    gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


@cache
def _compiled() -> Finish:
    compiled: Finish = torch.compile(_finish, dynamic=True)
    return compiled
