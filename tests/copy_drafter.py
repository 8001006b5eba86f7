# A drafter for decoding tests: it runs a (perturbed) copy of the target, one token at a time, with a cache of its own.
# It may hide part of the vocabulary or give up early in some rows, as real drafters do.

import torch

from drafters.decoding.sampling import draw, probs
from drafters.heads.base import Drafter, Session
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
    """Drafts with `copy`. `support`: ids it can draft. `ragged`: row b proposes `length - b % 3` tokens. It asks for
    states of the target only to check their shapes."""

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

    def propose(self, length, sampling, generator=None):
        tokens, dists, token_B = [], [], self.anchor_B
        for _ in range(length):
            logits_BV = self.copy.step(token_B[:, None], self.cache).logits_BSV[:, 0]
            if self.drafter.support is not None:
                logits_BV = logits_BV[:, self.drafter.support]
            dists.append(probs(logits_BV, sampling))
            token_B = draw(dists[-1], generator)
            if self.drafter.support is not None:
                token_B = self.drafter.support[token_B]
            tokens.append(token_B)
        self.cache.rollback(self.context_B)
        rows_B = torch.arange(len(self.context_B), device=self.copy.device)
        lengths_B = length - rows_B % 3 if self.drafter.ragged else torch.full_like(rows_B, length)
        return Proposal(
            tokens_BS=torch.stack(tokens, 1),
            lengths_B=lengths_B.clamp(min=0),
            probs_BSV=torch.stack(dists, 1) if sampling.temperature > 0 else None,
            support_V=self.drafter.support,
        )

    def keep(self, rows):
        self.cache.keep(rows)
        self.context_B, self.anchor_B = self.context_B[rows], self.anchor_B[rows]
