# Transformer pieces of our own draft layers (Qwen3 shape: RMSNorm, grouped-query attention with q/k norm, SwiGLU,
# rotary, no biases; that is what every engine serves). Modules hold float32 parameters under the names engines know;
# the computing is done by `LayerWeights`, cast and joined once per step in training and once per session in decoding,
# so that both run the same code.

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from drafters.heads.dense import finish
from drafters.heads.norms import norm_rope, rms_norm, rope_table, rotate
from drafters.spec import TargetSpec

__all__ = [
    "LAYER_OUTPUTS",
    "DraftLayer",
    "GatedMLP",
    "LayerWeights",
    "RMSNorm",
    "compute_dtype",
    "join",
    "norm_rope",
    "rms_norm",
    "rope_table",
    "rotate",
]


# What a layer adds to the residual stream goes through these.
LAYER_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype of products: that of the surrounding `torch.autocast`, float32 outside of one."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else torch.float32


def join(dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """The rows of all `weights` in one matrix of `dtype`; one pass over each, forward and backward. Weights that are
    not plain tensors know how they are joined."""
    if has_torch_function(weights):
        own: Tensor = handle_torch_function(join, weights, dtype, *weights)
        return own
    joined: Tensor = _Join.apply(dtype, *weights)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.sizes = [len(weight) for weight in weights]
        ctx.dtype = weights[0].dtype
        joined = weights[0].new_empty(sum(ctx.sizes), weights[0].shape[1], dtype=dtype)
        for part, weight in zip(joined.split(ctx.sizes), weights, strict=True):
            part.copy_(weight)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(part.to(ctx.dtype, copy=True) for part in grads[0].split(ctx.sizes))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The normed input, as `dtype`."""
        return rms_norm(x, self.weight, self.eps, dtype=dtype)


class _Attention(nn.Module):
    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        hidden, head_dim, eps = spec.hidden_size, spec.head_dim, spec.rms_norm_eps
        self.q_proj = nn.Linear(hidden, spec.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, spec.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, spec.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=eps)
        self.k_norm = RMSNorm(head_dim, eps=eps)


class GatedMLP(nn.Module):
    """The parameters of down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """The parameters of one draft layer; `weights` makes them ready to compute with."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.spec = spec
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = GatedMLP(spec)

    def weights(self, dtype: torch.dtype) -> "LayerWeights":
        """Cast and joined weights; differentiable, so gradients reach the parameters."""
        attn, mlp, spec = self.self_attn, self.mlp, self.spec
        return LayerWeights(
            qkv=join(dtype, attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight),
            o=attn.o_proj.weight.to(dtype),
            gate_up=join(dtype, mlp.gate_proj.weight, mlp.up_proj.weight),
            down=mlp.down_proj.weight.to(dtype),
            input_gain=self.input_layernorm.weight,
            mlp_gain=self.post_attention_layernorm.weight,
            # The attention scale goes into the query gain.
            q_gain=attn.q_norm.weight * spec.head_dim**-0.5,
            k_gain=attn.k_norm.weight,
            spec=spec,
        )


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's weights in the compute dtype, gains in float32. M rows, N query heads, K key/value heads."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_gain: Tensor
    mlp_gain: Tensor
    q_gain: Tensor
    k_gain: Tensor
    spec: TargetSpec

    @property
    def kv(self) -> Tensor:
        """Rows of the joint projection that make keys and values."""
        return self.qkv[self.spec.num_heads * self.spec.head_dim :]

    @cached_property
    def qk_gain(self) -> Tensor:
        """Gains [N + K, H] of all query and key heads."""
        num_heads, num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        return torch.cat((self.q_gain.expand(num_heads, -1), self.k_gain.expand(num_kv_heads, -1)))

    def context(self, kv_MC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [M, K, H] of projected context rows (`context_MD @ kv.T`)."""
        keys, values = kv_MC.unflatten(-1, (2, self.spec.num_kv_heads, self.spec.head_dim)).unbind(-3)
        return norm_rope(keys, self.k_gain, (cos, sin), self.spec.rms_norm_eps), values

    def project(self, x_MD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [M, N, H] (scaled), keys and values [M, K, H] of block states."""
        spec = self.spec
        normed = rms_norm(x_MD, self.input_gain, spec.rms_norm_eps, dtype=self.qkv.dtype)
        heads = F.linear(normed, self.qkv).unflatten(-1, (-1, spec.head_dim))
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated = norm_rope(heads[:, :num_rotated], self.qk_gain, (cos, sin), spec.rms_norm_eps)
        return rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], heads[:, num_rotated:]

    def finish(self, x_MD: Tensor, attended_MC: Tensor) -> Tensor:
        """Residual stream after the output projection and the MLP."""
        weights = (self.o, self.mlp_gain, self.gate_up, self.down)
        return finish(x_MD, attended_MC, weights, self.spec.rms_norm_eps)
