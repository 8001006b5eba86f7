# Decoding with Medusa heads: of what was read only each row's newest state is kept.

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.heads.base import Session
from drafters.heads.chain import draft_chain
from drafters.heads.output import DraftOutput
from drafters.heads.tree_growth import grow
from drafters.types import Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.decoding.tree import Tree
    from drafters.heads.medusa import MedusaDrafter
    from drafters.target import TargetHead

__all__ = ["MedusaSession"]


class MedusaSession(Session):
    """`last_BD` is the target's last state before each anchor."""

    @torch.inference_mode()
    def __init__(self, drafter: "MedusaDrafter", head: "TargetHead", batch_size: int) -> None:
        self.drafter, self.output = drafter, DraftOutput(head, drafter.vocab, drafter.output_rows)
        dtype, device = head.embedding_VD.dtype, head.embedding_VD.device
        self.projections = [weight.to(dtype) for weight in drafter.projections]
        self.anchor_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.last_BD = torch.zeros(batch_size, drafter.spec.hidden_size, dtype=dtype, device=device)

    @torch.inference_mode()
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Keep each row's newest state."""
        assert last_BTD is not None
        self.last_BD = last_BTD[torch.arange(len(last_BTD), device=last_BTD.device), lengths_B - 1]
        self.anchor_B = anchor_B

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        self.anchor_B, self.last_BD = self.anchor_B[rows], self.last_BD[rows]

    @torch.inference_mode()
    def join(self, other: Session) -> None:
        """Take in other rows."""
        assert isinstance(other, MedusaSession)
        self.anchor_B = torch.cat([self.anchor_B, other.anchor_B])
        self.last_BD = torch.cat([self.last_BD, other.last_BD])

    @torch.inference_mode()
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """The first `length` heads' tokens; none depends on another."""
        length = min(length, self.drafter.block_size)
        logits_BGV = self._logits(length)
        support_V = self.output.support_V
        return draft_chain(length, draws, lambda k, _: logits_BGV[:, k], anchor_B=self.anchor_B, support_V=support_V)

    @torch.inference_mode()
    def propose_tree(self, tree: "Tree", draws: "Draws") -> Proposal:
        """A tree; slots of one depth have one distribution."""
        logits_BGV = self._logits(tree.max_depth)

        def level_logits(depth: int, origins_P: Tensor, tokens_BP: Tensor) -> Tensor:
            return logits_BGV[:, depth, None].expand(-1, tokens_BP.shape[1], -1)

        return grow(tree, draws, level_logits, anchor_B=self.anchor_B, support_V=self.output.support_V)

    def _logits(self, length: int) -> Tensor:
        """Float32 logits [B, S, V'] of the first `length` heads."""
        hidden_BGD = self.drafter.states(self.last_BD)[:, :length]
        if not self.projections:
            return self.output(hidden_BGD)
        pairs = zip(hidden_BGD.unbind(1), self.projections[:length], strict=True)
        return torch.stack([(hidden_BD @ weight_VD.T).float() for hidden_BD, weight_VD in pairs], dim=1)
