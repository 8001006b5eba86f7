# Where blocks are drafted in training: anchors are drawn per conversation, so that short ones are not starved, and
# each block's labels are the supervised tokens that follow without a gap.

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.types import Batch

__all__ = ["Anchors", "sample_anchors", "with_a_row"]


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """A anchors over all conversations, ordered by conversation, then by position.

    `tokens_AG` holds x_0 (the anchor) to x_{G-1}: the input token of the sequential head at each slot;
    `labels_AG` holds x_1 to x_G, `counted_AG` whether label k belongs to the unbroken supervised run after the
    anchor, and `states_AG` the flat index [B * T] of the target state that predicts it.
    """

    rows_A: Tensor
    positions_A: Tensor
    tokens_AG: Tensor
    labels_AG: Tensor
    counted_AG: Tensor
    states_AG: Tensor


def sample_anchors(batch: Batch, *, num_anchors: int, block_size: int) -> Anchors:
    """Up to `num_anchors` anchors of each conversation, without replacement, by its seed alone.

    A position can be an anchor when it and its next token are supervised (2607.05147).
    """
    mask_BT = batch.loss_mask_BT
    width = mask_BT.shape[1]
    valid_BT = torch.zeros_like(mask_BT)
    valid_BT[:, :-1] = mask_BT[:, :-1] & mask_BT[:, 1:]
    keys_BT = _keys(batch).masked_fill(~valid_BT, -1.0)
    kept = min(num_anchors, width)
    floor_B = keys_BT.topk(kept, dim=1).values[:, -1:]
    rows_A, positions_A = ((keys_BT >= floor_B) & valid_BT).nonzero(as_tuple=True)
    ahead_AG = positions_A[:, None] + torch.arange(1, block_size + 1, device=mask_BT.device)
    inside_AG = ahead_AG < batch.lengths_B[rows_A][:, None]
    safe_AG = ahead_AG.clamp(max=width - 1)
    supervised_AG = mask_BT[rows_A[:, None], safe_AG] & inside_AG
    return Anchors(
        rows_A=rows_A,
        positions_A=positions_A,
        tokens_AG=batch.tokens_BT[rows_A[:, None], (ahead_AG - 1).clamp(max=width - 1)],
        labels_AG=batch.tokens_BT[rows_A[:, None], safe_AG],
        counted_AG=supervised_AG.cumprod(1).bool(),
        states_AG=rows_A[:, None] * width + safe_AG - 1,
    )


def _keys(batch: Batch) -> Tensor:
    """Random numbers [B, T], those of a row by its seed and length alone; 0 on padding."""
    keys_BT = torch.zeros(batch.loss_mask_BT.shape)
    for row, (seed, length) in enumerate(zip(batch.seeds, batch.lengths_B.tolist(), strict=True)):
        keys_BT[row, :length] = torch.rand(length, generator=torch.Generator().manual_seed(seed % 2**63))
    return keys_BT.to(batch.loss_mask_BT.device)


def with_a_row(anchors: Anchors) -> Anchors:
    """All but those at position 0, before which there is no state."""
    kept_A = anchors.positions_A > 0
    return Anchors(**{name: values[kept_A] for name, values in vars(anchors).items()})
