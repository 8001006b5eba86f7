# Which context a block sees, and the attention over it. A block attends to the context strictly before its anchor
# (all of it, or the `window` newest positions) and to itself in both directions, never to another block. On the CPU no
# mask of [all block slots, context + all block slots] is ever made; flex attention keeps one bit per tile of it.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.heads.attention import attend

__all__ = ["BlockLayout", "block_attention", "flex_block_attention"]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Blocks of G slots drafted after anchors of B conversations of up to T context positions.

    Anchor a lies in conversation `rows_A[a]` (ascending) at `positions_A[a]`.
    """

    rows_A: Tensor
    positions_A: Tensor
    num_rows: int
    num_context: int
    block_size: int
    window: int | None = None

    def slots(self) -> Tensor:
        """True positions [A, G] of the block slots."""
        return self.positions_A[:, None] + torch.arange(self.block_size, device=self.positions_A.device)


def block_attention(
    query_MNH: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], layout: BlockLayout
) -> Tensor:
    """Attention output [M, N * H] of M = A * G block slots.

    `query_MNH` are scaled; `context` holds keys and values [B * T, K, H], `block` [M, K, H]; N is a multiple of K.
    On a CUDA device flex attention computes the same.
    """
    if query_MNH.device.type == "cuda":
        return flex_block_attention(query_MNH, context, block, layout)
    if layout.window is None:
        return _full_attention(query_MNH, context, block, layout)
    num_kv, head_dim = block[0].shape[1:]
    num_anchors, block_size = len(layout.rows_A), layout.block_size
    index_AW, allowed_AW = _windows(layout, min(layout.window, layout.num_context))
    # Rows of [K * B * T, H], so that one gather yields the layout that the products want.
    heads = torch.arange(num_kv, device=index_AW.device) * (layout.num_rows * layout.num_context)
    index = (index_AW[:, None, :] + heads[:, None]).flatten()
    gathered = [
        t.transpose(0, 1).reshape(-1, head_dim).index_select(0, index).view(num_anchors, num_kv, -1, head_dim)
        for t in context
    ]
    # [A * G, K, r, H] -> [A, K, r * G, H]
    query = query_MNH.view(num_anchors, block_size, num_kv, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    own = [t.view(num_anchors, block_size, num_kv, head_dim).transpose(1, 2)[:, :, None] for t in block]
    out = attend(query, (gathered[0], gathered[1]), allowed_AW[:, None], (own[0], own[1]))
    return out.unflatten(2, (-1, block_size)).permute(0, 3, 1, 2, 4).reshape(num_anchors * block_size, -1)


def _windows(layout: BlockLayout, window: int) -> tuple[Tensor, Tensor]:
    """Rows of the flat context [A, W], oldest first, and whether they exist."""
    back_W = torch.arange(-window, 0, device=layout.positions_A.device)
    positions_AW = layout.positions_A[:, None] + back_W
    index_AW = layout.rows_A[:, None] * layout.num_context + positions_AW.clamp(min=0)
    return index_AW, positions_AW >= 0


def _full_attention(
    query_MNH: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], layout: BlockLayout
) -> Tensor:
    """Blocks of one conversation score its whole context in one product; anchors are padded to the longest list."""
    num_kv, head_dim = block[0].shape[1:]
    block_size, num_rows, num_context = layout.block_size, layout.num_rows, layout.num_context
    place_A, num_anchors = _padded_places(layout)
    position_BA = torch.zeros(num_rows * num_anchors, dtype=torch.int64, device=place_A.device)
    position_BA[place_A] = layout.positions_A

    def pad(x: Tensor) -> Tensor:  # [A * G, heads, H] -> [B, A', G, heads, H]
        padded = x.new_zeros(num_rows * num_anchors, block_size, *x.shape[1:])
        padded = padded.index_copy(0, place_A, x.unflatten(0, (-1, block_size)))
        return padded.unflatten(0, (num_rows, num_anchors))

    # [B, A', G, K, r, H] -> [B, K, A' * r * G, H]
    query = pad(query_MNH).unflatten(3, (num_kv, -1)).permute(0, 3, 1, 4, 2, 5).flatten(2, 4)
    keys, values = (t.view(num_rows, num_context, num_kv, head_dim).transpose(1, 2) for t in context)
    own_keys, own_values = (pad(t).permute(0, 3, 1, 2, 4) for t in block)
    positions_T = torch.arange(num_context, device=place_A.device)
    allowed_BAT = positions_T < position_BA.view(num_rows, num_anchors, 1)
    out = attend(query, (keys, values), allowed_BAT, (own_keys, own_values))
    out = out.unflatten(2, (num_anchors, -1, block_size)).permute(0, 2, 4, 1, 3, 5)
    return out.flatten(0, 1)[place_A].reshape(len(place_A) * block_size, -1)


def _padded_places(layout: BlockLayout) -> tuple[Tensor, int]:
    """Index of each anchor in [B * A'], and A', the longest list of anchors of a conversation."""
    counts_B = torch.bincount(layout.rows_A, minlength=layout.num_rows)
    num_anchors = int(counts_B.max())
    first_B = counts_B.cumsum(0) - counts_B
    order_A = torch.arange(len(layout.rows_A), device=layout.rows_A.device) - first_B[layout.rows_A]
    return layout.rows_A * num_anchors + order_A, num_anchors


_compiled_flex: Any = None


def flex_block_attention(
    query_MNH: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], layout: BlockLayout
) -> Tensor:
    """`block_attention` by flex attention: keys of a conversation are its context, then its blocks' slots.

    Compiled on CUDA; elsewhere it runs uncompiled, which is slow and meant for tests.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    global _compiled_flex
    block_size, num_rows, num_context = layout.block_size, layout.num_rows, layout.num_context
    place_A, num_anchors = _padded_places(layout)
    # Padding blocks see themselves only, so that no softmax is empty.
    position_BA = torch.zeros(num_rows * num_anchors, dtype=torch.int64, device=place_A.device)
    position_BA[place_A] = layout.positions_A
    position_BA = position_BA.view(num_rows, num_anchors)
    oldest_BA = torch.zeros_like(position_BA) if layout.window is None else position_BA - layout.window

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor = q // block_size
        in_context = (kv < position_BA[b, anchor]) & (kv >= oldest_BA[b, anchor]) & (kv < num_context)
        return in_context | ((kv >= num_context) & ((kv - num_context) // block_size == anchor))

    def pad(x: Tensor) -> Tensor:  # [A * G, heads, H] -> [B, heads, A' * G, H]
        padded = x.new_zeros(num_rows * num_anchors, block_size, *x.shape[1:])
        padded = padded.index_copy(0, place_A, x.unflatten(0, (-1, block_size)))
        return padded.view(num_rows, num_anchors * block_size, *x.shape[1:]).transpose(1, 2)

    def keys_of(part: int) -> Tensor:
        shared = context[part].view(num_rows, num_context, *context[part].shape[1:]).transpose(1, 2)
        return torch.cat((shared, pad(block[part])), dim=2)

    query, num_slots = pad(query_MNH), num_anchors * block_size
    mask = create_block_mask(visible, num_rows, None, num_slots, num_context + num_slots, device=query.device)
    compute = flex_attention
    if query.device.type == "cuda":
        if _compiled_flex is None:
            _compiled_flex = torch.compile(flex_attention, dynamic=True)
        compute = _compiled_flex
    grouped = query.shape[1] != block[0].shape[1]
    out = compute(query, keys_of(0), keys_of(1), block_mask=mask, scale=1.0, enable_gqa=grouped)
    out = out.transpose(1, 2).unflatten(1, (num_anchors, block_size)).flatten(0, 1)
    return out[place_A].reshape(len(place_A) * block_size, -1)
