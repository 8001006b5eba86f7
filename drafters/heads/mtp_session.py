# Decoding with multi-token-prediction modules. Rows are counted by tokens here: row j of depth k reads token j and the
# state of depth k - 1 at row j - 1, and there is none before j = k. Every depth has a cache of its own. All depths read
# what was verified; a round then runs depth k on the k - 1 tokens drafted before, and leaves no trace.

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.heads.base import Session
from drafters.heads.causal import next_tokens
from drafters.heads.chain import draft_chain
from drafters.heads.output import DraftOutput
from drafters.types import Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.heads.mtp import MtpDrafter
    from drafters.target import TargetHead

__all__ = ["MtpSession"]


class MtpSession(Session):
    """Row b has read `lengths_B[b]` tokens; its anchor has that number. `newest_KBD` are the outputs of the depths'
    blocks at the anchor."""

    @torch.inference_mode()
    def __init__(self, drafter: "MtpDrafter", head: "TargetHead", batch_size: int) -> None:
        self.drafter, self.head = drafter, head
        self.dtype, self.device = head.embedding_VD.dtype, head.embedding_VD.device
        self.output = DraftOutput(head, drafter.vocab, drafter.output_rows)
        kind, depths = drafter.kind, drafter.block_size
        ready = [kind.prepare(depth.block, self.dtype, training=False) for depth in drafter.modules_in_order]
        self.blocks = ready * depths if drafter.config.share_depths else ready
        self.caches = [kind.new_cache(batch_size, self.device) for _ in range(depths)]
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.anchor_B = torch.zeros_like(self.lengths_B)
        self.newest_KBD = torch.zeros(depths, batch_size, drafter.spec.hidden_size, device=self.device)

    @torch.inference_mode()
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """All depths read the tokens after those that were read before, the new anchor included."""
        assert last_BTD is not None
        lengths_B, self.anchor_B = lengths_B.to(self.device), anchor_B.to(self.device)
        next_BT, newest = next_tokens(tokens_BT, lengths_B, self.anchor_B)
        state_BTD, outputs = last_BTD, []
        for k in range(len(self.caches)):
            output_BTD = self._run(k, next_BT, state_BTD, lengths_B)
            state_BTD = torch.cat([self.newest_KBD[k][:, None], output_BTD[:, :-1]], dim=1)
            outputs.append(output_BTD[newest])
            self.caches[k].rollback(self.caches[k].lengths_B)  # takes nothing back, but closes holes when they are many
        self.lengths_B = self.lengths_B + lengths_B
        self.newest_KBD = torch.stack(outputs)

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        rows = rows.to(self.device)
        for cache in self.caches:
            cache.keep(rows)
        self.lengths_B, self.anchor_B = self.lengths_B[rows], self.anchor_B[rows]
        self.newest_KBD = self.newest_KBD[:, rows]

    @torch.inference_mode()
    def join(self, other: Session) -> None:
        """Take in other rows."""
        assert isinstance(other, MtpSession)
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.join(theirs)
        self.lengths_B = torch.cat([self.lengths_B, other.lengths_B])
        self.anchor_B = torch.cat([self.anchor_B, other.anchor_B])
        self.newest_KBD = torch.cat([self.newest_KBD, other.newest_KBD], dim=1)

    @torch.inference_mode()
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """Depth k consumes the token drafted by depth k - 1."""
        length = min(length, self.drafter.block_size)
        fed: list[Tensor] = []
        output_BSD = self.newest_KBD[0][:, None]

        def next_logits(k: int, previous_B: Tensor) -> Tensor:
            nonlocal output_BSD
            if k > 0:
                fed.append(previous_B)
                state_BSD = torch.cat([self.newest_KBD[k - 1][:, None], output_BSD[:, : k - 1]], dim=1)
                output_BSD = self._run(k, torch.stack(fed, dim=1), state_BSD, torch.full_like(self.lengths_B, k))
            normed_BD = self.drafter.depth(k).final_layernorm(output_BSD[:, -1], dtype=self.dtype)
            return self.output(normed_BD)

        with ExitStack() as undo:
            for cache in self.caches:
                undo.enter_context(cache.draft())
            return draft_chain(length, draws, next_logits, anchor_B=self.anchor_B, support_V=self.output.support_V)

    def _run(self, k: int, tokens_BS: Tensor, state_BSD: Tensor, lengths_B: Tensor) -> Tensor:
        """Outputs [B, S, D] of depth `k` (from 0) for the tokens after the anchor of the last reading; zero where there
        is no row: after a row's length, and before its first one."""
        drafter, depth = self.drafter, self.drafter.depth(k)
        if k > 0:
            state_BSD = drafter.fed_back(k - 1, state_BSD)
        entered_BSD = depth.enter(self.head.embed(tokens_BS), state_BSD, self.dtype)
        offset_S = torch.arange(tokens_BS.shape[1], device=self.device)
        # The first token here is number `lengths_B` + 1, and depth k has rows from token k + 1 on.
        skip_B = (k - self.lengths_B).clamp(min=0)
        index_BS = offset_S + skip_B[:, None]
        positions_BS = self.lengths_B[:, None] + index_BS
        if not skip_B.any():
            output_BSD = self._block(k, entered_BSD, positions_BS, lengths_B)
        else:
            index_BSD = index_BS.clamp(max=len(offset_S) - 1)[..., None].expand_as(entered_BSD)
            moved_BSD = entered_BSD.gather(1, index_BSD)
            output_BSD = self._block(k, moved_BSD, positions_BS, (lengths_B - skip_B).clamp(min=0))
            back_BS = (offset_S - skip_B[:, None]).clamp(min=0)
            output_BSD = output_BSD.gather(1, back_BS[..., None].expand_as(output_BSD))
        real_BS = (offset_S >= skip_B[:, None]) & (offset_S < lengths_B[:, None])
        return torch.where(real_BS[..., None], output_BSD, 0.0)

    def _block(self, k: int, entered_BSD: Tensor, positions_BS: Tensor, lengths_B: Tensor) -> Tensor:
        cache = self.caches[k]
        output_BSD = self.drafter.kind.step(self.blocks[k], entered_BSD, cache, positions_BS, lengths_B)
        return output_BSD.float()
