# EAGLE-3's one decoder layer: Llama's shape (no q/k norm), but its attention reads [embedding ; state], twice as wide,
# and its residual stream is the state. `Unroll` runs draft steps with it, for anchors in training and for rows and tree
# slots in decoding, so that both are the same function.

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.heads.attention import attend
from drafters.heads.dense import finish
from drafters.heads.layers import GatedMLP, RMSNorm, join, rms_norm, rope_table, rotate
from drafters.spec import TargetSpec

__all__ = ["Eagle3Layer", "Eagle3Weights", "Unroll"]


class _Attention(nn.Module):
    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        width, kv_width = 2 * spec.hidden_size, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(width, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)


class Eagle3Layer(nn.Module):
    """The parameters; `weights` makes them ready to compute with. `norm_before_residual`: the residual stream begins
    with the normed state instead of the state."""

    def __init__(self, spec: TargetSpec, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.spec, self.norm_before_residual = spec, norm_before_residual
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = GatedMLP(spec)

    def weights(self, dtype: torch.dtype) -> "Eagle3Weights":
        """Cast and joined weights; differentiable, so gradients reach the parameters."""
        attn, mlp = self.self_attn, self.mlp
        return Eagle3Weights(
            qkv=join(dtype, attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight),
            o=attn.o_proj.weight.to(dtype),
            gate_up=join(dtype, mlp.gate_proj.weight, mlp.up_proj.weight),
            down=mlp.down_proj.weight.to(dtype),
            input_gain=self.input_layernorm.weight,
            hidden_gain=self.hidden_norm.weight,
            mlp_gain=self.post_attention_layernorm.weight,
            norm_before_residual=self.norm_before_residual,
            spec=self.spec,
        )


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    """The layer's weights in the compute dtype, gains in float32. States [..., D] are float32, N query heads, K
    key/value heads."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_gain: Tensor
    hidden_gain: Tensor
    mlp_gain: Tensor
    norm_before_residual: bool
    spec: TargetSpec

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2D], and the residual stream [..., D]."""
        eps, dtype = self.spec.rms_norm_eps, self.qkv.dtype
        normed = rms_norm(state, self.hidden_gain, eps, dtype=state.dtype)
        both = torch.cat([rms_norm(embedded, self.input_gain, eps, dtype=dtype), normed.to(dtype)], dim=-1)
        return both, normed if self.norm_before_residual else state

    def context(self, embedded: Tensor, state: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, H] of rows that are only read."""
        kv = self.qkv[self.spec.num_heads * self.spec.head_dim :]
        heads = F.linear(self.enter(embedded, state)[0], kv)
        keys, values = heads.unflatten(-1, (2, self.spec.num_kv_heads, self.spec.head_dim)).unbind(-3)
        return _rotated(keys, table), values

    def project(self, both: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., N, H] (scaled), keys and values [..., K, H] of what `enter` gave."""
        spec = self.spec
        heads = F.linear(both, self.qkv).unflatten(-1, (-1, spec.head_dim))
        query, keys, values = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=-2)
        return _rotated(query, table) * spec.head_dim**-0.5, _rotated(keys, table), values

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from the residual stream and attention output [..., N * H]."""
        weights = (self.o, self.mlp_gain, self.gate_up, self.down)
        return finish(residual, attended, weights, self.spec.rms_norm_eps)


@dataclass(kw_only=True)
class Unroll:
    """Draft steps of X groups of Y blocks: a step of a block attends to what `allowed_XYS` shows it of its group's
    context (keys and values [X, K, S, H]) and to the block's own steps so far, this one included. `positions_XY` are
    those of step 0; the context that a block sees ends before."""

    layer: Eagle3Weights
    context: tuple[Tensor, Tensor]
    allowed_XYS: Tensor
    positions_XY: Tensor
    inv_freq: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values [X, Y, K, H] of each step

    def step(self, embedded_XYD: Tensor, state_XYD: Tensor) -> Tensor:
        """The layer's output [X, Y, D] for the next input token of each block and the state that goes with it."""
        num_kv = self.layer.spec.num_kv_heads
        both, residual_XYD = self.layer.enter(embedded_XYD, state_XYD)
        table = rope_table(self.positions_XY + len(self.own), self.inv_freq)
        query, keys, values = self.layer.project(both, table)
        self.own.append((keys, values))
        own_keys, own_values = (torch.stack(part, dim=3).transpose(1, 2) for part in zip(*self.own, strict=True))
        # [X, Y, K * r, H] -> [X, K, Y * r, H] and back
        query = query.unflatten(2, (num_kv, -1)).transpose(1, 2).flatten(2, 3)
        out = attend(query, self.context, self.allowed_XYS, (own_keys, own_values))
        out = out.unflatten(2, (embedded_XYD.shape[1], -1)).transpose(1, 2).flatten(2)
        return self.layer.finish(residual_XYD, out)

    def pick(self, origins_Y: Tensor) -> None:
        """Go on with blocks `origins_Y`, repeated where they branch."""
        self.own = [(keys[:, origins_Y], values[:, origins_Y]) for keys, values in self.own]


def _rotated(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    rotated: Tensor = _Rotate.apply(x, *table)
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.table = cos, sin
        return rotate(x.to(cos.dtype), cos, sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.table
        return rotate(grads[0].to(cos.dtype), cos, -sin).to(grads[0].dtype), None, None
