# Decoding with an early exit of the target: every draft is a pass of its first layers over the shared key/value cache,
# so that nothing of the context is computed or stored twice. The cache is left as it was found.

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.heads.base import Session
from drafters.heads.chain import draft_chain
from drafters.heads.output import DraftOutput
from drafters.types import Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.heads.exit import ExitDrafter
    from drafters.kv_cache import TargetCache
    from drafters.target import FrozenTarget

__all__ = ["ExitSession"]


class ExitSession(Session):
    """Rows know their anchors; all else is in the target's cache. With an adapter the final norm is the drafter's copy,
    as in training; without one it is the target's own module."""

    @torch.inference_mode()
    def __init__(self, drafter: "ExitDrafter", target: "FrozenTarget", batch_size: int) -> None:
        self.drafter, self.target = drafter, target
        self.output = DraftOutput(target.head, drafter.vocab, drafter.output_rows)
        dtype = target.head.embedding_VD.dtype
        self.weights = None if drafter.adapter is None else drafter.adapter.weights(dtype)
        self.final_norm = target.final_norm if drafter.adapter is None else None
        self.anchor_B = torch.zeros(batch_size, dtype=torch.int64, device=target.device)
        self.cache: TargetCache | None = None

    def share(self, cache: "TargetCache") -> None:
        """Draft on this cache from now on."""
        self.cache = cache

    @torch.inference_mode()
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Note the anchors; the tokens are in the target's cache."""
        self.anchor_B = anchor_B.to(self.anchor_B.device)

    @torch.inference_mode()
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """One pass of the first layers a draft: over the anchor, then over each draft but the last."""
        assert self.cache is not None, "no cache was shared"
        length = min(length, self.drafter.block_size)
        with self.cache.draft():
            return draft_chain(length, draws, self.next_logits, anchor_B=self.anchor_B, support_V=self.output.support_V)

    def next_logits(self, k: int, previous_B: Tensor) -> Tensor:
        """Logits [B, V'] of draft k after `previous_B`, which the cache takes in: within `cache.draft()` only."""
        assert self.cache is not None
        exit_layer = self.drafter.exit_layer
        state_BD = self.target.first_layers(previous_B[:, None], self.cache, exit_layer=exit_layer)[:, 0]
        if self.weights is not None:
            return self.output(self.drafter.hidden(state_BD, self.weights))
        assert self.final_norm is not None
        return self.output(self.final_norm(state_BD).to(state_BD.device))

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        self.anchor_B = self.anchor_B[rows.to(self.anchor_B.device)]

    @torch.inference_mode()
    def join(self, other: Session) -> None:
        """Take in the rows of `other`; the joined cache is shared next."""
        assert isinstance(other, ExitSession)
        self.anchor_B = torch.cat([self.anchor_B, other.anchor_B])
