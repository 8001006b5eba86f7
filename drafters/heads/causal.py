# Causal attention of draft layers that read their own past, in training over whole conversations and in decoding with
# keys and values of their own in a `TargetCache`: holes and rollback are the same as the target's.

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.kv_cache import TargetCache

__all__ = ["CachedPass", "causal_attention", "next_tokens", "own_cache"]


def causal_attention(query_BTNH: Tensor, keys_BTKH: Tensor, values_BTKH: Tensor) -> Tensor:
    """Attention output [B, T, N * H] of right-padded rows over themselves; queries are scaled, N is a multiple of K.

    What valid positions get does not depend on the padding to their right.
    """
    query, keys, values = (x.transpose(1, 2) for x in (query_BTNH, keys_BTKH, values_BTKH))
    out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def own_cache(batch_size: int, device: torch.device) -> TargetCache:
    """An empty cache for the layers of a drafter."""
    return TargetCache(batch_size=batch_size, sliding=False, device=device)


def next_tokens(tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The token [B, T] after each of right-padded `tokens_BT` that was verified, the anchor after the last one of a
    row, and the index (rows, columns) of these last ones. All on the device of the lengths."""
    newest = (torch.arange(len(lengths_B), device=lengths_B.device), lengths_B - 1)
    return tokens_BT.to(lengths_B.device).roll(-1, dims=1).index_put(newest, anchor_B), newest


class CachedPass:
    """One pass of S new slots a row (right-padded, `lengths_B` valid; None = all) over layers that share `cache`.

    `positions_BS` go on from the cache's lengths. Make it once a pass, then call it for every layer, in order.
    """

    def __init__(self, cache: TargetCache, width: int, lengths_B: Tensor | None = None) -> None:
        device = cache.lengths_B.device
        self.cache = cache
        self.positions_BS = cache.lengths_B[:, None] + torch.arange(width, device=device)
        cache.append(lengths_B, width)
        past = cache.num_slots - width
        causal_SS = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen_SS = F.pad(causal_SS, (past, 0), value=True)
        # Every slot sees itself, or padding would make a softmax empty, and what is not a number spreads.
        own_SS = F.pad(torch.eye(width, dtype=torch.bool, device=device), (past, 0))
        self.allowed_B1SS = ((seen_SS & cache.valid_BS[:, None]) | own_SS)[:, None]

    def attend(self, layer: int, query_BSNH: Tensor, keys_BSKH: Tensor, values_BSKH: Tensor) -> Tensor:
        """Store keys and values of layer number `layer`; attention output [B, S, N * H]. Queries are scaled."""
        query, keys, values = (x.transpose(1, 2) for x in (query_BSNH, keys_BSKH, values_BSKH))
        keys, values = self.cache.hf.update(keys, values, layer)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self.allowed_B1SS, scale=1.0, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)
