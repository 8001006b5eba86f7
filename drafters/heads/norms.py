# Norms and rotary positions of draft layers, with gradients by hand: plain autograd takes three times the passes over
# memory.

from typing import Any

import torch
from torch import Tensor

__all__ = ["norm_rope", "rms_norm", "rope_table", "rotate"]


def rms_norm(x: Tensor, gain: Tensor, eps: float, *, dtype: torch.dtype) -> Tensor:
    """x / rms(x) * gain over the last dim, as `dtype`; computed in float32 or wider. `gain` broadcasts."""
    if not torch.is_grad_enabled():
        return _norm_rope(x, gain, None, eps, dtype)[0]
    normed: Tensor = _NormRope.apply(x, gain, None, eps, dtype)
    return normed


def norm_rope(x: Tensor, gain: Tensor, table: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """`rms_norm` of heads [..., heads, H], then rotated by cos and sin [..., H / 2], in the dtype of `x`."""
    if not torch.is_grad_enabled():
        return _norm_rope(x, gain, table, eps, x.dtype)[0]
    rotated: Tensor = _NormRope.apply(x, gain, table, eps, x.dtype)
    return rotated


def _norm_rope(
    x: Tensor, gain: Tensor, table: tuple[Tensor, Tensor] | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result, and 1 / rms(x)."""
    wide = _wide(x)
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True).add_(eps))
    normed = (wide * scale).mul_(gain)
    return (normed if table is None else rotate(normed, *table)).to(dtype), scale


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, table: tuple[Tensor, Tensor] | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        out, scale = _norm_rope(x, gain, table, eps, dtype)
        ctx.save_for_backward(x, gain, scale)
        ctx.table = table
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, scale = ctx.saved_tensors
        grad = _wide(grads[0])
        if ctx.table is not None:
            cos, sin = ctx.table
            grad = rotate(grad, cos, -sin)
        unit = _wide(x) * scale
        along = grad * unit
        gain_grad = along.sum_to_size(gain.shape)
        mean = along.mul_(gain).mean(-1, keepdim=True)
        x_grad = (grad * gain).addcmul_(unit, mean, value=-1.0).mul_(scale)
        return x_grad.to(x.dtype), gain_grad.to(gain.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rope_table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., H / 2] in float32 (float64 when `inv_freq` is)."""
    angles = positions[..., None].to(inv_freq.dtype) * inv_freq
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, H] by tables [..., H / 2]; the halves of a head are its pairs, as in Llama and Qwen. Not
    differentiable."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out
