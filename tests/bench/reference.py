# The plain way to train the block drafter, as the published DSpark code does it (2607.05147, its `loss.py` and
# `modeling.py`): a dense mask over whole context and all blocks, draft and target logits of every position at once in
# float32, softmaxes of both for the loss and once more for the acceptance rate, and autograd for the rest. It is what a
# user would otherwise run, and the naive twin of a whole step: it reads the parameters of a `BlockDrafter`.

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.block import BlockDrafter
from drafters.losses import LossWeights, position_weights
from drafters.target import TargetHead
from drafters.types import Batch

__all__ = ["reference_loss"]


def reference_loss(drafter: BlockDrafter, batch: Batch, head: TargetHead) -> tuple[Tensor, Tensor]:
    """Sum over supervised positions of 0.1 CE + 0.9 L1 + confidence (as `drafter.config.loss` weighs them), and their
    number. Products run in the autocast dtype. A draft vocabulary is distilled from the target's distribution on it."""
    config = drafter.config
    anchors = sample_anchors(batch, num_anchors=config.num_anchors, block_size=config.block_size)
    hidden_AGD = _backbone(drafter, batch, anchors, head)
    ids_V = None if drafter.vocab is None else drafter.vocab.ids_V
    rows_VD = head.rows(ids_V)
    target_AGD = batch.last_BTD.flatten(0, 1)[anchors.states_AG]
    with torch.no_grad():
        target_AGV = F.linear(target_AGD, rows_VD).float()
    draft_AGV = F.linear(hidden_AGD, rows_VD).float()
    confidence_AG = None
    if drafter.markov_head is not None:
        embedded_AGR = F.embedding(anchors.tokens_AG, drafter.markov_head.markov_w1.weight)
        draft_AGV = draft_AGV + F.linear(embedded_AGR, drafter.markov_head.markov_w2.weight)
        if drafter.confidence_head is not None:
            features = torch.cat([hidden_AGD, embedded_AGR.to(hidden_AGD.dtype)], dim=-1)
            proj = drafter.confidence_head.proj
            confidence_AG = F.linear(features, proj.weight, proj.bias).squeeze(-1)
    labels_AG = anchors.labels_AG if drafter.vocab is None else drafter.vocab.to_draft(anchors.labels_AG)
    total = _loss(draft_AGV, target_AGV, labels_AG, confidence_AG, anchors.counted_AG, config.loss)
    return total, anchors.counted_AG.sum()


def _loss(
    draft_AGV: Tensor,
    target_AGV: Tensor,
    labels_AG: Tensor,
    confidence_AG: Tensor | None,
    counted_AG: Tensor,
    weights: LossWeights,
) -> Tensor:
    weights_AG = counted_AG.float() * position_weights(counted_AG.shape[1], weights.gamma).to(counted_AG.device)

    def l1() -> Tensor:
        draft, target = draft_AGV.softmax(-1), target_AGV.softmax(-1)
        return (draft - target).abs().sum(-1)

    accept_AG = (1.0 - 0.5 * l1()).clamp(0.0, 1.0)
    ce_N = F.cross_entropy(draft_AGV.flatten(0, 1), labels_AG.flatten(), reduction="none", ignore_index=-1)
    total = weights.ce * (ce_N * weights_AG.flatten()).sum() + weights.l1 * (l1() * weights_AG).sum()
    if confidence_AG is not None:
        bce = F.binary_cross_entropy_with_logits(confidence_AG.float(), accept_AG.detach(), reduction="none")
        total = total + weights.confidence * (bce * weights_AG).sum()
    return total


def _backbone(drafter: BlockDrafter, batch: Batch, anchors: Anchors, head: TargetHead) -> Tensor:
    """States [A, G, D] after the final norm; blocks are padded to `num_anchors` a conversation, as there."""
    config, num_rows, width = drafter.config, *batch.tokens_BT.shape
    counts_B = torch.bincount(anchors.rows_A, minlength=num_rows)
    most, size = config.num_anchors, config.block_size
    place_A = torch.cat([row * most + torch.arange(int(count)) for row, count in enumerate(counts_B)])
    place_A = place_A.to(anchors.rows_A.device)
    positions_BA = anchors.positions_A.new_zeros(num_rows * most)
    positions_BA[place_A] = anchors.positions_A
    positions_BA = positions_BA.view(num_rows, most)
    slots = torch.full((num_rows * most, size), drafter.spec.mask_token_id, device=place_A.device)
    slots[place_A, 0] = anchors.tokens_AG[:, 0]
    x = head.embed(slots).view(num_rows, most * size, -1).float()
    assert batch.aux_BTLD is not None
    context = _norm(F.linear(batch.aux_BTLD.flatten(2), drafter.fc.weight), drafter.hidden_norm)
    offsets = torch.arange(size, device=place_A.device)
    positions = torch.cat(
        [
            torch.arange(width, device=place_A.device).expand(num_rows, -1),
            (positions_BA[..., None] + offsets).flatten(1),
        ],
        dim=1,
    )
    angles = positions[..., None].float() * drafter.inv_freq
    table = (torch.cat([angles, angles], -1).cos()[:, None], torch.cat([angles, angles], -1).sin()[:, None])
    mask = _dense_mask(positions_BA, width, size, config.window)
    for layer in drafter.layers:
        x = _layer(layer, x, context, table, mask, drafter.spec.head_dim)
    return _norm(x, drafter.norm).view(num_rows * most, size, -1)[place_A]


def _dense_mask(positions_BA: Tensor, width: int, size: int, window: int | None) -> Tensor:
    """[B, 1, A * G, T + A * G]: the context before the anchor, and the own block."""
    num_slots = positions_BA.shape[1] * size
    query_block = torch.arange(num_slots, device=positions_BA.device) // size
    keys_T = torch.arange(width, device=positions_BA.device)
    anchor = positions_BA[:, query_block, None]
    seen = keys_T < anchor
    if window is not None:
        seen = seen & (keys_T >= anchor - window)
    own = (query_block[:, None] == query_block).expand(len(positions_BA), -1, -1)
    return torch.cat([seen, own], dim=2)[:, None]


def _layer(
    layer: nn.Module, x: Tensor, context: Tensor, table: tuple[Tensor, Tensor], mask: Tensor, head_dim: int
) -> Tensor:
    attn, mlp = layer.self_attn, layer.mlp
    normed, cos, sin = _norm(x, layer.input_layernorm), *table

    def heads(states: Tensor, linear: nn.Linear) -> Tensor:
        return F.linear(states, linear.weight).unflatten(-1, (-1, head_dim))

    query = _norm(heads(normed, attn.q_proj), attn.q_norm).transpose(1, 2)
    keys = torch.cat([heads(context, attn.k_proj), heads(normed, attn.k_proj)], dim=1)
    keys = _norm(keys, attn.k_norm).transpose(1, 2)
    values = torch.cat([heads(context, attn.v_proj), heads(normed, attn.v_proj)], dim=1).transpose(1, 2)
    num_slots, groups = query.shape[2], query.shape[1] // keys.shape[1]
    query = _rotate(query, cos[:, :, -num_slots:], sin[:, :, -num_slots:]).to(values.dtype)
    keys = _rotate(keys, cos, sin).to(values.dtype).repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(query, keys, values.repeat_interleave(groups, dim=1), attn_mask=mask)
    x = x + F.linear(out.transpose(1, 2).flatten(2), attn.o_proj.weight)
    normed = _norm(x, layer.post_attention_layernorm)
    gated = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
    return x + F.linear(gated, mlp.down_proj.weight)


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
