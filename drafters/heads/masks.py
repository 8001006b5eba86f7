# Which context a block sees, and the attention over it. A block attends to the context strictly before its anchor
# (all of it, or the `window` newest positions) and to itself in both directions, never to another block. On the CPU no
# mask of [all block slots, context + all block slots] is ever made; flex attention keeps one bit per tile of it.

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from drafters.heads.attention import attend

__all__ = ["BlockLayout", "block_attention", "flex_block_attention"]

TILE = 128  # queries and keys of a tile of flex attention
MOST_KERNELS = 64  # of flex attention in a process


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

    @cached_property
    def flex(self) -> "_Flex":
        """Made once, for all layers: it waits for the GPU and looks at every query and key."""
        return _flex_of(self)


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
    order_A, num_anchors = _order(layout)
    return layout.rows_A * num_anchors + order_A, num_anchors


def _order(layout: BlockLayout) -> tuple[Tensor, int]:
    """Place of each anchor in the list of its conversation, and the length of the longest list."""
    counts_B = torch.bincount(layout.rows_A, minlength=layout.num_rows)
    first_B = counts_B.cumsum(0) - counts_B
    order_A = torch.arange(len(layout.rows_A), device=layout.rows_A.device) - first_B[layout.rows_A]
    return order_A, int(counts_B.max())


def flex_block_attention(
    query_MNH: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], layout: BlockLayout
) -> Tensor:
    """`block_attention` by flex attention: keys of a conversation are its context, then its blocks' slots.

    Compiled on CUDA; elsewhere it runs uncompiled, which is slow and meant for tests.
    """
    num_rows, flex = layout.num_rows, layout.flex

    def pad(x: Tensor) -> Tensor:  # [A * G, heads, H] -> [B, heads, slots, H]
        padded = x.new_zeros(num_rows * flex.num_slots, *x.shape[1:])
        return padded.index_copy(0, flex.place_M, x).unflatten(0, (num_rows, -1)).transpose(1, 2)

    def keys_of(part: int) -> Tensor:
        shared = context[part].unflatten(0, (num_rows, -1)).transpose(1, 2)
        beyond = shared.new_zeros(*shared.shape[:2], flex.num_context - shared.shape[2], shared.shape[3])
        return torch.cat((shared, beyond, pad(block[part])), dim=2)

    compute = _flex_attention(compiled=query_MNH.device.type == "cuda")
    grouped = query_MNH.shape[1] != block[0].shape[1]
    out = compute(pad(query_MNH), keys_of(0), keys_of(1), block_mask=flex.mask, scale=1.0, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)[flex.place_M].flatten(1)


@cache
def _flex_attention(*, compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    # Past its limit torch would compute all scores of all slots without a word; `fullgraph` makes that an error.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_KERNELS)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@dataclass(frozen=True, kw_only=True)
class _Flex:
    """What flex attention needs of a layout: the places of its A * G slots among the padded ones of all rows, the
    padded number of slots and of context positions a row, and the mask."""

    place_M: Tensor
    num_slots: int
    num_context: int
    mask: Any


def _flex_of(layout: BlockLayout) -> _Flex:
    from torch.nn.attention.flex_attention import create_block_mask

    size, num_rows = layout.block_size, layout.num_rows
    order_A, num_anchors = _order(layout)
    num_context, num_slots, device = _padded(layout.num_context), _padded(num_anchors * size), order_A.device
    slots_G = torch.arange(size, device=device)
    place_M = ((layout.rows_A * num_slots + order_A * size)[:, None] + slots_G).flatten()
    # Slots beyond the last block see their own block only, so that no softmax is empty.
    position_BA = torch.zeros(num_rows, -(-num_slots // size), dtype=torch.int64, device=device)
    position_BA[layout.rows_A, order_A] = layout.positions_A
    oldest_BA = torch.zeros_like(position_BA) if layout.window is None else position_BA - layout.window
    keys = torch.arange(num_context + num_slots, device=device)
    position_Y = keys.masked_fill(keys >= layout.num_context, torch.iinfo(keys.dtype).max)
    block_Y = torch.where(keys < num_context, -1, (keys - num_context) // size)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor = q // size
        in_context = (position_Y[kv] < position_BA[b, anchor]) & (position_Y[kv] >= oldest_BA[b, anchor])
        return in_context | (block_Y[kv] == anchor)

    mask = create_block_mask(visible, num_rows, None, num_slots, len(keys), device=device)
    return _Flex(place_M=place_M, num_slots=num_slots, num_context=num_context, mask=mask)


def _padded(length: int) -> int:
    """The next power of two, of a tile at least: each pair of lengths is a kernel of its own, and tiles that nobody
    sees cost nothing."""
    return max(TILE, 1 << (length - 1).bit_length())
