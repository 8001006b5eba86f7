# Decoding with EAGLE-3: keys and values of all rows that hold true states are kept; a round unrolls from the newest row
# and keeps its own steps to itself, so that nothing has to be rolled back.

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.heads.base import Session
from drafters.heads.causal import next_tokens, own_cache
from drafters.heads.chain import draft_chain
from drafters.heads.eagle3_layer import Unroll
from drafters.heads.layers import rope_table
from drafters.heads.tree_growth import grow
from drafters.types import Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.decoding.tree import Tree
    from drafters.heads.eagle3 import Eagle3Drafter
    from drafters.target import TargetHead

__all__ = ["Eagle3Session"]


class Eagle3Session(Session):
    """Rows of different lengths: `cache` holds their context, `state_BD` the fused states before each anchor."""

    @torch.inference_mode()
    def __init__(self, drafter: "Eagle3Drafter", head: "TargetHead", batch_size: int) -> None:
        self.drafter, self.head = drafter, head
        dtype, self.device = head.embedding_VD.dtype, head.embedding_VD.device
        self.layer = drafter.midlayer.weights(dtype)
        self.fc = drafter.fc.weight.to(dtype)
        self.lm_head_VD = drafter.lm_head.weight.to(dtype)
        self.support_V = None if drafter.vocab is None else drafter.vocab.ids_V
        self.cache = own_cache(batch_size, self.device)
        self.anchor_B = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.state_BD = torch.zeros(batch_size, drafter.spec.hidden_size, device=self.device)

    @torch.inference_mode()
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Keys and values of the new rows, each of which reads the token after it: the anchor after the last."""
        assert aux_BTLD is not None
        lengths_B, self.anchor_B = lengths_B.to(self.device), anchor_B.to(self.device)
        width = tokens_BT.shape[1]
        next_BT, newest = next_tokens(tokens_BT, lengths_B, self.anchor_B)
        fused_BTD = self.drafter.fuse(aux_BTLD, self.fc)
        positions_BT = self.cache.lengths_B[:, None] + torch.arange(width, device=self.device)
        table = rope_table(positions_BT, self.drafter.inv_freq)
        keys, values = self.layer.context(self.head.embed(next_BT), fused_BTD, table)
        self.cache.append(lengths_B, width)
        self.cache.hf.update(keys.transpose(1, 2), values.transpose(1, 2), 0)
        self.cache.rollback(self.cache.lengths_B)  # takes nothing back, but closes holes when they are many
        self.state_BD = fused_BTD[newest]

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        rows = rows.to(self.device)
        self.cache.keep(rows)
        self.anchor_B, self.state_BD = self.anchor_B[rows], self.state_BD[rows]

    @torch.inference_mode()
    def join(self, other: Session) -> None:
        """Take in other rows."""
        assert isinstance(other, Eagle3Session)
        self.cache.join(other.cache)
        self.anchor_B = torch.cat([self.anchor_B, other.anchor_B])
        self.state_BD = torch.cat([self.state_BD, other.state_BD])

    @torch.inference_mode()
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """Step after step, each on the token drafted last and the layer's own output."""
        unroll, state_BYD = self._unroll(), self.state_BD[:, None]

        def next_logits(k: int, previous_B: Tensor) -> Tensor:
            nonlocal state_BYD
            state_BYD = unroll.step(self.head.embed(previous_B[:, None]), state_BYD)
            return self.logits(state_BYD[:, 0])

        length = min(length, self.drafter.block_size)
        return draft_chain(length, draws, next_logits, anchor_B=self.anchor_B, support_V=self.support_V)

    @torch.inference_mode()
    def propose_tree(self, tree: "Tree", draws: "Draws") -> Proposal:
        """A pass for each level of the tree; a slot sees the context and its own ancestors."""
        unroll, state_BYD = self._unroll(), self.state_BD[:, None]

        def level_logits(depth: int, origins_P: Tensor, tokens_BP: Tensor) -> Tensor:
            nonlocal state_BYD
            unroll.pick(origins_P)
            state_BYD = unroll.step(self.head.embed(tokens_BP), state_BYD[:, origins_P])
            return self.logits(state_BYD)

        return grow(tree, draws, level_logits, anchor_B=self.anchor_B, support_V=self.support_V)

    def logits(self, state_XD: Tensor) -> Tensor:
        """Float32 draft logits [..., V'] of the layer's outputs."""
        hidden_XD = self.drafter.norm(state_XD, dtype=self.lm_head_VD.dtype)
        return (hidden_XD @ self.lm_head_VD.T).float()

    def _unroll(self) -> Unroll:
        """From the newest row, which the first step makes again as its own, over the rows before it."""
        cache, layer = self.cache, self.cache.hf.layers[0]
        before_BS = cache.valid_BS & (cache.valid_BS.cumsum(1) < cache.lengths_B[:, None])
        return Unroll(
            layer=self.layer,
            context=(layer.keys, layer.values),
            allowed_XYS=before_BS[:, None],
            positions_XY=cache.lengths_B[:, None] - 1,
            inv_freq=self.drafter.inv_freq,
        )
