# Decoding with a block drafter: the context's keys and values are kept per row and layer, a proposal is one pass over
# the block, then the sequential loop. Weights are cast, joined and restricted to the draft vocabulary once.

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.attention import attend
from drafters.heads.base import Session
from drafters.heads.chain import draft_chain
from drafters.heads.layers import rope_table
from drafters.heads.output import DraftOutput
from drafters.heads.tree_growth import grow
from drafters.types import Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.decoding.tree import Tree
    from drafters.heads.block import BlockDrafter
    from drafters.target import TargetHead

__all__ = ["BlockSession"]


class BlockSession(Session):
    """Rows of different lengths; row b holds `filled_B[b]` context positions in its buffers, the newest last, and
    has read `lengths_B[b]` tokens. With a window, buffers keep little more than what can be seen."""

    @torch.inference_mode()
    def __init__(self, drafter: "BlockDrafter", head: "TargetHead", batch_size: int) -> None:
        spec, config = drafter.spec, drafter.config
        self.drafter, self.head, self.spec = drafter, head, spec
        self.window = config.window
        self.dtype = head.embedding_VD.dtype
        self.device = head.embedding_VD.device
        self.layers = drafter.layer_weights(self.dtype)
        self.fc = drafter.fc.weight.to(self.dtype)
        self.all_kv = torch.cat([layer.kv for layer in self.layers])
        self.output = DraftOutput(head, drafter.vocab, drafter.output_rows)
        self.bias_weight_VR: Tensor | None = None
        if drafter.markov_head is not None:
            self.bias_weight_VR = drafter.markov_head.markov_w2.weight.to(self.dtype)
        self.mask_embedding_D = head.embed(torch.tensor([spec.mask_token_id], device=self.device)).float()
        self.lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.filled_B = torch.zeros_like(self.lengths_B)
        self.anchor_B = torch.zeros_like(self.lengths_B)
        empty = torch.empty(len(self.layers), 2, batch_size, spec.num_kv_heads, 0, spec.head_dim, device=self.device)
        self.kv_LXBNSH = empty.to(self.dtype)

    @torch.inference_mode()
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Project the new positions (with a window, only those that can still be seen) and append them."""
        assert aux_BTLD is not None
        lengths_B = lengths_B.to(self.device)
        offset_T = torch.arange(tokens_BT.shape[1], device=self.device)
        fresh_BT = offset_T < lengths_B[:, None]
        dropped_B = torch.zeros_like(lengths_B)
        if self.window is not None:
            dropped_B = (lengths_B - self.window).clamp(min=0)
            fresh_BT &= offset_T >= dropped_B[:, None]
        rows_M, steps_M = fresh_BT.nonzero(as_tuple=True)
        fused_MD = self.drafter.context_states(aux_BTLD[rows_M, steps_M], self.fc)
        cos, sin = rope_table(self.lengths_B[rows_M] + steps_M, self.drafter.inv_freq)
        # Where a row skips positions, what it held before is out of sight as well.
        self.filled_B = torch.where(dropped_B > 0, 0, self.filled_B)
        added_B = lengths_B - dropped_B
        self._make_room(int((self.filled_B + added_B).max()), int(added_B.max()))
        slots_M = self.filled_B[rows_M] + steps_M - dropped_B[rows_M]
        projected = F.linear(fused_MD, self.all_kv).chunk(len(self.layers), dim=-1)
        for layer, kv, held_XBNSH in zip(self.layers, projected, self.kv_LXBNSH, strict=True):
            for new_MNH, held_BNSH in zip(layer.context(kv, cos, sin), held_XBNSH, strict=True):
                held_BNSH[rows_M, :, slots_M] = new_MNH
        self.filled_B = self.filled_B + added_B
        self.lengths_B = self.lengths_B + lengths_B
        self.anchor_B = anchor_B.to(self.device)

    def _make_room(self, needed: int, added: int) -> None:
        """Buffers with at least `needed` slots a row: windowed rows first drop what is out of sight."""
        capacity = self.kv_LXBNSH.shape[4]
        if needed <= capacity:
            return
        window = self.window
        if window is not None and capacity >= window + added:
            shift_B = (self.filled_B - window).clamp(min=0)
            index = (shift_B[:, None] + torch.arange(window, device=self.device)).clamp(max=capacity - 1)
            shape = (*self.kv_LXBNSH.shape[:4], window, self.spec.head_dim)
            index_LXBNSH = index[None, None, :, None, :, None].expand(shape)
            self.kv_LXBNSH[..., :window, :] = self.kv_LXBNSH.gather(4, index_LXBNSH)
            self.filled_B = self.filled_B - shift_B
            return
        room = max(needed, 2 * capacity, 0 if window is None else 4 * window + added)
        grown = self.kv_LXBNSH.new_zeros((*self.kv_LXBNSH.shape[:4], room, self.spec.head_dim))
        grown[..., :capacity, :] = self.kv_LXBNSH
        self.kv_LXBNSH = grown

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        rows = rows.to(self.device)
        self.lengths_B, self.filled_B, self.anchor_B = self.lengths_B[rows], self.filled_B[rows], self.anchor_B[rows]
        self.kv_LXBNSH = self.kv_LXBNSH[:, :, rows]

    @torch.inference_mode()
    def join(self, other: Session) -> None:
        """Take in other rows; both buffers get the room of the larger one."""
        assert isinstance(other, BlockSession)
        room = max(self.kv_LXBNSH.shape[4], other.kv_LXBNSH.shape[4])
        buffers = [F.pad(one.kv_LXBNSH, (0, 0, 0, room - one.kv_LXBNSH.shape[4])) for one in (self, other)]
        self.kv_LXBNSH = torch.cat(buffers, dim=2)
        self.lengths_B = torch.cat([self.lengths_B, other.lengths_B])
        self.filled_B = torch.cat([self.filled_B, other.filled_B])
        self.anchor_B = torch.cat([self.anchor_B, other.anchor_B])

    @torch.inference_mode()
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """The first `length` drafts of a whole block: a shorter draft is a prefix of a longer one."""
        length = min(length, self.drafter.block_size)
        hidden_BSD = self.hidden()[:, :length]
        logits_BSV = self.output(hidden_BSD)
        head, confidence = self.drafter.markov_head, self.drafter.confidence_head
        state = None if head is None else head.start(len(hidden_BSD))
        embedded: list[Tensor] = []

        def next_logits(k: int, previous_B: Tensor) -> Tensor:
            nonlocal state
            if head is None or self.bias_weight_VR is None:
                return logits_BSV[:, k]
            embedded.append(head.markov_w1(previous_B))
            state, factor_BR = head.step(state, embedded[-1], hidden_BSD[:, k])
            return logits_BSV[:, k] + factor_BR.to(self.dtype) @ self.bias_weight_VR.T

        proposal = draft_chain(length, draws, next_logits, anchor_B=self.anchor_B, support_V=self.output.support_V)
        if confidence is None:
            return proposal
        logits_BS = confidence(hidden_BSD, torch.stack(embedded, dim=1) if embedded else None)
        return replace(proposal, confidence_BS=logits_BS.sigmoid())

    @torch.inference_mode()
    def propose_tree(self, tree: "Tree", draws: "Draws") -> Proposal:
        """A tree from the same pass over the block: slots of one depth share the backbone's logits, and the sequential
        head tells them apart by their parents."""
        hidden_BSD = self.hidden()[:, : tree.max_depth]
        logits_BSV = self.output(hidden_BSD)
        head = self.drafter.markov_head
        num_rows = len(hidden_BSD)
        state = None if head is None else head.start(num_rows)

        def level_logits(depth: int, origins_P: Tensor, tokens_BP: Tensor) -> Tensor:
            nonlocal state
            shape = tokens_BP.shape
            logits_BPV = logits_BSV[:, depth, None].expand(*shape, -1)
            if head is None or self.bias_weight_VR is None:
                return logits_BPV
            if state is not None:
                state = state.unflatten(0, (num_rows, -1))[:, origins_P].flatten(0, 1)
            hidden_MD = hidden_BSD[:, depth, None].expand(*shape, -1).flatten(0, 1)
            state, factor_MR = head.step(state, head.markov_w1(tokens_BP.flatten()), hidden_MD)
            return logits_BPV + (factor_MR.to(self.dtype) @ self.bias_weight_VR.T).unflatten(0, shape)

        return grow(tree, draws, level_logits, anchor_B=self.anchor_B, support_V=self.output.support_V)

    @torch.inference_mode()
    def hidden(self) -> Tensor:
        """Backbone states [B, G, D] of the slots that draft, after the final norm."""
        num_rows, block_size, spec = len(self.anchor_B), self.drafter.num_slots, self.spec
        anchors_BD = self.head.embed(self.anchor_B).float()
        masks = self.mask_embedding_D.expand(num_rows, block_size - 1, -1)
        x_MD = torch.cat([anchors_BD[:, None], masks], dim=1).flatten(0, 1)
        slots = self.lengths_B[:, None] + torch.arange(block_size, device=self.device)
        cos, sin = rope_table(slots.flatten(), self.drafter.inv_freq)
        seen, allowed_BYS = self._visible()
        for layer, held in zip(self.layers, self.kv_LXBNSH, strict=True):
            query, keys, values = layer.project(x_MD, cos, sin)
            # [B * G, K * r, H] -> [B, K, r * G, H]
            query = query.view(num_rows, block_size, spec.num_kv_heads, -1, spec.head_dim)
            query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
            own_keys, own_values = (
                t.view(num_rows, block_size, -1, spec.head_dim).transpose(1, 2)[:, :, None] for t in (keys, values)
            )
            out = attend(query, (held[0, :, :, seen], held[1, :, :, seen]), allowed_BYS, (own_keys, own_values))
            out = out.unflatten(2, (-1, block_size)).permute(0, 3, 1, 2, 4).reshape(num_rows * block_size, -1)
            x_MD = layer.finish(x_MD, out)
        drafting_BGD = x_MD.unflatten(0, (num_rows, block_size))[:, block_size - self.drafter.block_size :]
        return self.drafter.norm(drafting_BGD, dtype=self.dtype)

    def _visible(self) -> tuple[slice, Tensor | None]:
        """Buffer slots that some row sees, and which of them each row does; None when every row sees all."""
        oldest_B = torch.zeros_like(self.filled_B)
        if self.window is not None:
            oldest_B = (self.filled_B - self.window).clamp(min=0)
        first, last = int(oldest_B.min()), int(self.filled_B.max())
        if len(self.filled_B) == 1:
            return slice(first, last), None
        slots_S = torch.arange(first, last, device=self.device)
        allowed_BS = (slots_S >= oldest_B[:, None]) & (slots_S < self.filled_B[:, None])
        return slice(first, last), allowed_BS[:, None]
