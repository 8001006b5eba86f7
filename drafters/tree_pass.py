# One pass of a target over a draft tree: which slots each slot sees, at which positions. Windows are counted in
# positions, for every layer by its own pattern, so the masks do not depend on how a family makes its own; `check_trees`
# proves on the model that it heeds them.

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.decoding.tree import ancestors
from drafters.errors import ConfigError
from drafters.target_probe import TOLERANCE

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["CANNOT", "Pattern", "check_trees", "layer_patterns", "tree_depths", "tree_masks"]

CANNOT = "tree: this target cannot verify trees ({}); decode without a tree"

# How a layer attends ("full_attention", "sliding_attention", "chunked_attention") and its window or chunk in tokens.
Pattern = tuple[str, int]


def layer_patterns(config: Any, num_layers: int) -> list[Pattern]:
    """The pattern of every layer, from the config of a transformers model."""
    sizes = {
        "full_attention": 0,
        "sliding_attention": getattr(config, "sliding_window", None) or 0,
        "chunked_attention": getattr(config, "attention_chunk_size", None) or 0,
    }
    windowed = [kind for kind, size in sizes.items() if size]
    kinds = getattr(config, "layer_types", None) or [windowed[0] if windowed else "full_attention"] * num_layers
    return [(kind, sizes[kind]) if sizes[kind] else ("full_attention", 0) for kind in kinds]


def tree_depths(parents_S: tuple[int, ...]) -> Tensor:
    """Depths [1 + S] of the anchor (0) and of each tree slot."""
    return F.pad(ancestors(parents_S).sum(1), (1, 0))


def tree_masks(
    patterns: set[Pattern], valid_BS: Tensor, positions_BS: Tensor, parents_S: tuple[int, ...], *, dtype: torch.dtype
) -> dict[Pattern, Tensor]:
    """Additive masks [B, 1, 1 + S, slots] of a pass over the anchor and its tree, by pattern of the layer.

    `valid_BS` are the cache's slots, those of the pass last; `positions_BS` [B, 1 + S] the pass's positions. A slot
    sees itself even where it is not valid, since softmax over nothing is NaN.
    """
    width = positions_BS.shape[1]
    past_BS = valid_BS[:, : valid_BS.shape[1] - width]
    own_SS = F.pad(ancestors(parents_S), (1, 0, 1, 0))
    own_SS[:, 0] = True
    own_BSS = own_SS.to(valid_BS.device).expand(len(valid_BS), -1, -1)
    seen_BYS = torch.cat([past_BS[:, None].expand(-1, width, -1), own_BSS], dim=2)
    key_BS = torch.cat([past_BS.long().cumsum(1) - 1, positions_BS], dim=1)
    masks = {}
    for kind, size in patterns:
        allowed_BYS = seen_BYS
        if kind == "sliding_attention":
            allowed_BYS = seen_BYS & (positions_BS[:, :, None] - key_BS[:, None] < size)
        elif kind == "chunked_attention":
            allowed_BYS = seen_BYS & (positions_BS[:, :, None] // size == key_BS[:, None] // size)
        mask_BYS = torch.zeros(allowed_BYS.shape, dtype=dtype, device=valid_BS.device)
        masks[kind, size] = mask_BYS.masked_fill_(~allowed_BYS, torch.finfo(dtype).min)[:, None]
    return masks


@torch.inference_mode()
def check_trees(target: "FrozenTarget") -> None:
    """Compare the logits of a small tree after a ragged cache with those of its paths as plain text.

    Raises ConfigError when they differ, or when the model fails on the mask.
    """
    parents_S, context_B = (-1, -1, 0, 1, 1), torch.tensor([3, 1])
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(target.spec.vocab_size, (2, 9), generator=generator)
    cache = target.new_cache(2)
    target.step(tokens_BT[:, :3], cache, lengths_B=context_B, logits="none")
    try:
        got_BSV = target.step(tokens_BT[:, 3:], cache, parents_S=parents_S).logits_BSV
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(CANNOT.format(f"it fails on a 4-D attention mask: {error}")) from error
    table_SS = ancestors(parents_S)
    for row, context in enumerate(context_B.tolist()):
        for slot in range(len(parents_S)):
            path = torch.cat([torch.tensor([3]), 4 + table_SS[slot].nonzero()[:, 0]])
            text_BT = torch.cat([tokens_BT[row, :context], tokens_BT[row, path]])[None]
            expected_V = target.step(text_BT, target.new_cache(1), logits="last").logits_BSV[0, 0]
            gap = float((got_BSV[row, 1 + slot] - expected_V).norm() / expected_V.norm().clamp_min(1e-6))
            # Not `gap > tolerance`, which NaN would pass.
            if not gap <= TOLERANCE[target.head.embedding_VD.dtype]:
                raise ConfigError(CANNOT.format(f"a slot's logits and those of its path differ by {gap:.1e}"))
