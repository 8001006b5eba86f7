# Drafting a chain slot after slot, for any head that gives logits after the tokens drafted so far.

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.types import Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws

__all__ = ["NextLogits", "draft_chain"]

# (k, tokens_B) -> logits [B, V'] of draft k (from 0), whose previous token, the anchor at first, is `tokens_B`.
NextLogits = Callable[[int, Tensor], Tensor]


def draft_chain(
    length: int, draws: "Draws", next_logits: NextLogits, *, anchor_B: Tensor, support_V: Tensor | None = None
) -> Proposal:
    """`length` drafts after each row's anchor; logits are over `support_V` (ids), or the whole vocabulary.

    It says how probable the most probable token of each slot was; heads that know more of a draft add it.
    """
    tokens: list[Tensor] = []
    dists, sure = [], []
    for k in range(length):
        logits_BV = next_logits(k, tokens[-1] if tokens else anchor_B)
        token_B, dist_BV = draws.draft(logits_BV, support_V)
        tokens.append(token_B)
        if dist_BV is None:
            # Wider than bfloat16, in which a log-sum-exp of 20 has steps of 0.125.
            wide_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
            sure.append((wide_BV.amax(-1) - wide_BV.logsumexp(-1)).exp())
        else:
            sure.append(dist_BV.amax(-1))
            dists.append(dist_BV)
    return Proposal(
        tokens_BS=torch.stack(tokens, dim=1),
        lengths_B=torch.full_like(anchor_B, length),
        probs_BSV=torch.stack(dists, dim=1) if dists else None,
        support_V=support_V,
        likeliest_BS=torch.stack(sure, dim=1),
    )
