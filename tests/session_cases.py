# Sessions that read ragged text in several steps, rows leaving and joining, against the loss of the very same text: the
# probabilities of a session's drafts must be those that cross-entropy is made of.

from dataclasses import replace

import pytest
import torch

from drafters.batches import collate
from drafters.decoding.sampling import Draws
from drafters.heads.anchors import sample_anchors
from drafters.types import Example, Sampling
from tests.contract_cases import World

CE_ALONE = {"ce": 1.0, "l1": 0.0, "kl": 0.0, "lk": 0.0, "confidence": 0.0, "gamma": None}
# Tokens that each row reads before each proposal. The shortest texts have fewer tokens than a drafter has depths.
STEPS = [[1, 2, 6], [1, 1, 3], [3, 1, 1], "keep", [2, 4], [1, 3], "join", [2, 1, 4], [1, 2, 1]]


class Reader:
    """A session that reads conversations as decoding would show them, some tokens a row at a time."""

    def __init__(self, drafter, target, texts):
        self.drafter, self.target, self.texts, self.at = drafter, target, list(texts), [0] * len(texts)
        self.cache, self.session = target.new_cache(len(texts)), drafter.session(target, len(texts))
        self.session.share(self.cache)

    @torch.inference_mode()
    def read(self, counts):
        parts = [text[at : at + count] for text, at, count in zip(self.texts, self.at, counts, strict=True)]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        lengths_B = torch.tensor(counts)
        out = self.target.step(tokens_BT, self.cache, lengths_B=lengths_B, needs=self.drafter.needs, logits="none")
        self.at = [at + count for at, count in zip(self.at, counts, strict=True)]
        anchor_B = torch.stack([text[at] for text, at in zip(self.texts, self.at, strict=True)])
        self.session.extend(tokens_BT, lengths_B, anchor_B, out.aux_BSLD, out.last_BSD)

    @torch.inference_mode()
    def propose(self, uniforms_BS):
        return self.session.propose(self.drafter.block_size, Draws(Sampling(temperature=1.0), uniforms_BS))

    def keep(self, rows):
        self.cache.keep(torch.tensor(rows))
        self.session.keep(torch.tensor(rows))
        self.texts, self.at = [self.texts[row] for row in rows], [self.at[row] for row in rows]

    def join(self, other):
        self.cache.join(other.cache)
        self.session.join(other.session)
        self.session.share(self.cache)
        self.texts, self.at = self.texts + other.texts, self.at + other.at


def trained_loss(world: World, drafter, tokens_T, at: int, num_labels: int) -> float:
    """Cross-entropy of the tokens after the anchor at `at`, as training computes it."""
    mask_T = (torch.arange(len(tokens_T)) >= at) & (torch.arange(len(tokens_T)) <= at + num_labels)
    example = Example(id="", source="", tokens_T=tokens_T, loss_mask_T=mask_T)
    alone = replace(world, examples=(example,))
    batch = collate(alone.read([0], drafter.needs), layer_ids=drafter.needs.layer_ids, seeds=[0])
    seeds = (replace(batch, seeds=(seed,)) for seed in range(999))
    batch = next(one for one in seeds if sample_anchors(one, num_anchors=1, block_size=1).positions_A.tolist() == [at])
    losses = drafter.loss(batch, world.target.head)
    assert losses.count == num_labels
    return float(losses.total.detach())


def steps_of(drafter, world):
    reader = Reader(drafter, world.target, [example.tokens_T for example in world.examples[:3]])
    for step in STEPS:
        if step == "keep":
            reader.keep([2, 0])
        elif step == "join":
            newcomer = Reader(drafter, world.target, [world.examples[3].tokens_T])
            newcomer.read([17])
            reader.join(newcomer)
        else:
            reader.read(step)
        yield reader


def check_session(drafter, world):
    """Fails unless a session's probabilities are those of training, after each of the steps."""
    depth = drafter.block_size
    for number, reader in enumerate(steps_of(drafter, world)):
        uniforms_BS = torch.rand(len(reader.at), depth, generator=torch.Generator().manual_seed(number))
        proposal = reader.propose(uniforms_BS)
        support_V = torch.arange(128) if proposal.support_V is None else proposal.support_V
        for b, (text, at) in enumerate(zip(reader.texts, reader.at, strict=True)):
            drafts = proposal.tokens_BS[b]
            places = (support_V[None] == drafts[:, None]).long().argmax(1)
            logs = proposal.probs_BSV[b].gather(1, places[:, None])[:, 0].log()
            full = torch.cat([text[: at + 1], drafts, torch.tensor([5])])
            for k in (1, depth):
                want = trained_loss(world, drafter, full, at, k)
                assert float(-logs[:k].sum()) == pytest.approx(want, rel=1e-3, abs=1e-3), (number, b, k)
