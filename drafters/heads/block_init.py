# How a block drafter may start: layers copied from the target, and bigram statistics in the Markov factors.

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.layers import DraftLayer, rms_norm
from drafters.spec import TargetSpec
from drafters.types import Batch
from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.heads.block import BlockDrafter

__all__ = ["HEAD_NORMS", "PROJECTIONS", "bigram_factors", "copy_layer", "copy_target_layers", "layer_mismatch"]

PROJECTIONS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


@torch.no_grad()
def copy_target_layers(drafter: "BlockDrafter", tensors: Mapping[str, Tensor], sample: Batch | None) -> None:
    """Copy the target's last layers and final norm; `fc` passes the last aux layer through.

    `hidden_norm` takes the input norm of the first copied layer, so that the context's keys and values are what that
    layer made of them where the last aux layer is its input. A target without q/k norm gets gains equal to the
    root mean square of its own queries and keys (measured on `sample`, else expected), which keeps the scale of the
    attention logits. Warns and changes nothing when names or shapes are not those of a Llama-like layer.
    """
    num_layers, spec = len(drafter.layers), drafter.spec
    first = spec.num_layers - num_layers
    names = [f"model.layers.{first + i}." for i in range(num_layers)]
    reason = "the drafter has more layers than the target" if first < 0 else layer_mismatch(spec, tensors, names)
    if reason is not None:
        warnings.warn(f"drafter.init: 'target' is not possible: {reason}; the layers start random", stacklevel=3)
        return
    drafter.norm.weight.copy_(tensors["model.norm.weight"])
    drafter.hidden_norm.weight.copy_(tensors[names[0] + "input_layernorm.weight"])
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -spec.hidden_size :].fill_diagonal_(1.0)
    states_MD = None
    if sample is not None and sample.aux_BTLD is not None:
        valid_BT = torch.arange(sample.tokens_BT.shape[1]) < sample.lengths_B[:, None].cpu()
        states_MD = sample.aux_BTLD[:, :, sample.layer_ids.index(drafter.config.layer_ids[-1])][valid_BT].float()
    for layer, prefix in zip(drafter.layers, names, strict=True):
        assert isinstance(layer, DraftLayer)
        copy_layer(layer, tensors, prefix, states_MD)


@torch.no_grad()
def copy_layer(layer: DraftLayer, tensors: Mapping[str, Tensor], prefix: str, states_MD: Tensor | None = None) -> None:
    """Copy one layer of the target, whose names begin with `prefix`; `states_MD` are inputs to measure scales on."""
    state = dict(layer.named_parameters())
    for name in PROJECTIONS:
        state[name].copy_(tensors[prefix + name])
    for name, projection in zip(HEAD_NORMS, PROJECTIONS[:2], strict=True):
        if prefix + name in tensors:
            state[name].copy_(tensors[prefix + name])
        else:
            state[name].fill_(_rms_of(layer, state[projection], states_MD))


def _rms_of(layer: DraftLayer, projection: Tensor, states_MD: Tensor | None) -> float:
    """Root mean square of a projection's outputs; without states, for inputs of independent unit entries."""
    gain = layer.input_layernorm.weight
    if states_MD is None:
        return float((projection * gain).square().sum(1).mean().sqrt())
    normed_MD = rms_norm(states_MD.to(gain.device), gain, layer.spec.rms_norm_eps, dtype=gain.dtype)
    return float((normed_MD @ projection.T).square().mean().sqrt())


def layer_mismatch(spec: TargetSpec, tensors: Mapping[str, Tensor], prefixes: list[str]) -> str | None:
    """Why the target's layers of these name prefixes cannot be copied into draft layers, or None."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in DraftLayer(spec).named_parameters()}
    for prefix in prefixes:
        for name in PROJECTIONS:
            if prefix + name not in tensors:
                return f"the target has no '{prefix + name}' (fused or expert weights?)"
            if tensors[prefix + name].shape != shapes[name]:
                return f"'{prefix + name}' has shape {list(tensors[prefix + name].shape)}, wanted {list(shapes[name])}"
        known = re.compile(re.escape(prefix) + "(" + "|".join(map(re.escape, PROJECTIONS + HEAD_NORMS)) + ")")
        foreign = [name for name in tensors if name.startswith(prefix) and not known.fullmatch(name)]
        if foreign:
            return f"the target has '{sorted(foreign)[0]}', which draft layers lack"
    return None if "model.norm.weight" in tensors else "the target has no 'model.norm.weight'"


@torch.no_grad()
def bigram_factors(
    pairs_P2: Tensor, *, vocab: DraftVocab | None, vocab_size: int, rank: int, clip: float = 6.0
) -> tuple[Tensor, Tensor]:
    """W_1 [V, R] and W_2 [V', R] whose product approximates max(0, log p(v | u) - log p(v)) of observed pairs (u, v).

    Ratios are discounted (one count is taken off each pair) and clipped; a truncated randomised singular value
    decomposition of the sparse matrix gives the factors, scaled alike.
    """
    before, after = pairs_P2.unbind(1)
    if vocab is not None:
        after = vocab.to_draft(after)
        before, after = before[after >= 0], after[after >= 0]
    size = (vocab_size, vocab_size if vocab is None else vocab.size)
    index = torch.stack([before, after])
    counts = torch.sparse_coo_tensor(index, torch.ones(len(before)), size, check_invariants=True).coalesce()
    (u, v), number = counts.indices(), counts.values()
    of_u = torch.zeros(size[0]).index_add_(0, u, number)
    of_v = torch.zeros(size[1]).index_add_(0, v, number)
    ratio = (number - 1.0).clamp(min=1e-6) * number.sum() / (of_u[u] * of_v[v])
    logs = ratio.log().clamp(0.0, clip)
    matrix = torch.sparse_coo_tensor(counts.indices(), logs, size, check_invariants=True).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(matrix, q=min(rank, *size), niter=4)
    root = values.sqrt()
    spare = (0, rank - len(root))  # a rank above the vocabulary leaves columns unused
    return F.pad(left * root, spare), F.pad(right * root, spare)
