# A drafter for decoding tests: it runs a (perturbed) copy of the target, one token at a time, with a cache of its own
# (of a tree, every path by itself). It may hide part of the vocabulary or give up early in some rows, as real ones do.

from dataclasses import replace

import torch

from drafters.heads.base import Drafter, Session
from drafters.heads.tree_growth import grow
from drafters.target import FrozenTarget
from drafters.types import Needs, Proposal
from tests.tiny import tiny_llama


def sharp_target(*, vocab_size, scale, noise=0.0, noise_seed=1, **sizes):
    """A tiny target whose logits are `scale` times those of a random model: peaked, as trained models are. `noise`
    perturbs the output projection relative to its own size."""
    model = tiny_llama(0, vocab_size=vocab_size, tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        generator = torch.Generator().manual_seed(noise_seed)
        bump = torch.randn(model.lm_head.weight.shape, generator=generator)
        model.lm_head.weight.add_(noise * model.lm_head.weight.std() * bump)
    return FrozenTarget.from_model(model, mask_token_id=0)


class CopyDrafter(Drafter):
    """Drafts with `copy`. `support`: ids it drafts. `ragged`: after anchor a it proposes a % 3 tokens less than asked.
    It asks for states of the target only to check their shapes."""

    def __init__(self, copy, *, block_size, support=None, ragged=False, needs=None):
        super().__init__()
        self._copy, self._block_size, self.support, self.ragged = copy, block_size, support, ragged
        self._needs = needs or Needs()

    @property
    def needs(self):
        return self._needs

    @property
    def block_size(self):
        return self._block_size

    @property
    def drafts_trees(self):
        return True

    def session(self, target, batch_size):
        return CopySession(self, self._copy, batch_size)


class CopySession(Session):
    def __init__(self, drafter, copy, batch_size):
        self.drafter, self.copy = drafter, copy
        self.cache = copy.new_cache(batch_size)
        self.context_B = torch.zeros(batch_size, dtype=torch.int64, device=copy.device)

    def extend(self, tokens_BT, lengths_B, anchor_B, aux_BTLD, last_BTD):
        needs = self.drafter.needs
        assert (last_BTD is not None) == needs.last
        if needs.last:
            assert last_BTD.shape[:2] == tokens_BT.shape
        if needs.layer_ids:
            assert aux_BTLD.shape[:3] == (*tokens_BT.shape, len(needs.layer_ids))
        self.copy.step(tokens_BT, self.cache, lengths_B=lengths_B, logits="none")
        self.context_B = self.context_B + lengths_B
        assert torch.equal(self.cache.lengths_B, self.context_B)
        self.anchor_B = anchor_B

    def propose(self, length, draws):
        tokens, dists, token_B = [], [], self.anchor_B
        for _ in range(length):
            token_B, dist_BV = draws.draft(self.logits(token_B[:, None]), self.drafter.support)
            tokens.append(token_B)
            dists.append(dist_BV)
        self.cache.rollback(self.context_B)
        return Proposal(
            tokens_BS=torch.stack(tokens, 1),
            lengths_B=self.lengths(self.drafter.block_size).clamp(max=length),
            probs_BSV=None if dists[0] is None else torch.stack(dists, 1),
            support_V=self.drafter.support,
        )

    def propose_tree(self, tree, draws):
        paths = [self.anchor_B.new_zeros(len(self.anchor_B), 0)]

        def level_logits(depth, origins_P, tokens_BP):
            nonlocal paths
            paths = [torch.cat([paths[o], tokens_BP[:, p, None]], 1) for p, o in enumerate(origins_P.tolist())]
            logits = []
            for path_BS in paths:
                logits.append(self.logits(path_BS))
                self.cache.rollback(self.context_B)
            return torch.stack(logits, 1)

        proposal = grow(tree, draws, level_logits, anchor_B=self.anchor_B, support_V=self.drafter.support)
        return replace(proposal, lengths_B=self.lengths(tree.size))

    def lengths(self, most):
        return (most - self.anchor_B % 3 * self.drafter.ragged).clamp(min=0)

    def logits(self, tokens_BS):
        """After reading `tokens_BS`, over the ids that can be drafted."""
        logits_BV = self.copy.step(tokens_BS, self.cache).logits_BSV[:, -1]
        return logits_BV if self.drafter.support is None else logits_BV[:, self.drafter.support]

    def keep(self, rows):
        self.cache.keep(rows)
        self.context_B, self.anchor_B = self.context_B[rows], self.anchor_B[rows]

    def join(self, other):
        self.cache.join(other.cache)
        self.context_B = torch.cat([self.context_B, other.context_B])
        self.anchor_B = torch.cat([self.anchor_B, other.anchor_B])
