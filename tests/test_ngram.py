# Prompt look-up: the index against a scan of the whole text, ragged batches, rows that leave and join, and decoding
# that equals plain decoding.

import random

import pytest
import torch

from drafters.checkpoint import load_drafter, save_drafter
from drafters.config import build_config
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import Draws
from drafters.errors import ConfigError
from drafters.heads.draft_model import DraftModel
from drafters.heads.ngram import NgramDrafter
from drafters.types import Needs, Sampling
from tests.copy_drafter import sharp_target
from tests.tiny import tiny_target

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def drafter_of(target, **settings):
    return NgramDrafter(NgramDrafter.Config(**settings), target.spec)


def scanned(text, *, length, max_ngram, min_ngram):
    """Naive twin: look through the whole text, from its end, for the longest suffix first."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return text[end : end + length]
    return []


def extend(session, rows, anchors):
    """`rows`: the tokens of each row."""
    lengths_B = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    session.extend(padded, lengths_B, torch.tensor(anchors), None, None)


def drafts(session, length):
    proposal = session.propose(length, Draws(GREEDY))
    assert proposal.probs_BSV is None
    assert proposal.parents_S is None
    assert proposal.support_V is None
    assert proposal.tokens_BS.dtype == proposal.lengths_B.dtype == torch.int64
    lengths = proposal.lengths_B.tolist()
    assert proposal.tokens_BS.shape == (len(lengths), max(lengths))
    return [tokens[:n] for tokens, n in zip(proposal.tokens_BS.tolist(), lengths, strict=True)]


def test_the_worked_example(target):
    session = drafter_of(target, max_ngram=2).session(target, 3)
    # Row 0: [7, 8] stood twice, the later place counts. Row 1: [5, 9] is new, so 9 alone. Row 2: 4 is new.
    extend(session, [[7, 8, 1, 7, 8, 2, 3, 7], [9, 6, 5], [1, 2, 3]], [8, 9, 4])
    assert drafts(session, 3) == [[2, 3, 7], [6, 5, 9], []]
    assert drafts(session, 1) == [[2], [6], []]
    # The last place may be so near that fewer tokens follow it than were asked for.
    session = drafter_of(target).session(target, 1)
    extend(session, [[1, 5, 5]], [5])
    assert drafts(session, 4) == [[5]]


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (1, 1), (4, 2), (3, 3)])
def test_the_index_finds_what_a_scan_finds(target, max_ngram, min_ngram):
    dice = random.Random(max_ngram)
    session = drafter_of(target, max_ngram=max_ngram, min_ngram=min_ngram).session(target, 3)
    texts, lengths = [[], [], []], (1, 2, 30)
    found = []
    for turn in range(60):
        if turn == 20:
            session.keep(torch.tensor([2, 0]))
            texts = [texts[2], texts[0]]
        if turn == 30:
            other = drafter_of(target, max_ngram=max_ngram, min_ngram=min_ngram).session(target, 2)
            extend(other, [[1, 2, 1], [3]], [2, 3])
            session.join(other)
            texts += [[1, 2, 1, 2], [3, 3]]
        news = [[dice.randrange(5) for _ in range(dice.choice((1, 1, 2, 5)))] for _ in texts]
        if turn == 0:
            news = [[dice.randrange(5) for _ in range(n)] for n in lengths]
        anchors = [dice.randrange(5) for _ in texts]
        # Every call but the first begins with the anchor of the one before.
        fed = [[*text[-1:], *new] for text, new in zip(texts, news, strict=True)]
        extend(session, fed, anchors)
        texts = [[*text, *new, anchor] for text, new, anchor in zip(texts, news, anchors, strict=True)]
        length = dice.randrange(1, 7)
        wanted = [scanned(text, length=length, max_ngram=max_ngram, min_ngram=min_ngram) for text in texts]
        assert drafts(session, length) == wanted
        found += wanted
    assert any(found)
    assert len({len(draft) for draft in found}) > 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_is_the_target_s(target, temperature):
    # A narrow target repeats itself, so that copies are accepted and rejected.
    target = sharp_target(vocab_size=16, scale=30, bos_token_id=None, eos_token_id=None)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(16, (n,), generator=generator) for n in (12, 1, 30, 5)]
    sampling = Sampling(temperature=temperature)
    drafter = drafter_of(target, block_size=4)
    config = DecodeConfig(max_new_tokens=40, batch_size=3, stop_ids=(), sampling=sampling)
    rows = decode(target, drafter, prompts, config)
    rounds = [r for row in rows for r in row.rounds]
    assert {r.proposed for r in rounds} >= {0, 1, 4}
    assert {r.accepted for r in rounds} >= {0, 1, 4}
    assert all(len(row.tokens) == 40 for row in rows)
    if temperature == 0:
        assert [row.tokens for row in rows] == [row.tokens for row in decode(target, None, prompts, config)]


def test_it_needs_and_holds_nothing(target):
    drafter = drafter_of(target)
    assert drafter.needs == Needs()
    assert drafter.block_size == 10
    assert drafter.state_dict() == {}
    assert drafter.size(target) == (0, 0)
    assert not drafter.drafts_trees


@pytest.mark.parametrize(
    ("cls", "settings"), [(NgramDrafter, {"max_ngram": 4}), (DraftModel, {"weights": "some/model", "block_size": 3})]
)
def test_drafters_without_weights_save_and_load(target, tmp_path, cls, settings):
    drafter = cls(cls.Config(**settings), target.spec)
    again = load_drafter(save_drafter(drafter, tmp_path / "drafter", spec=target.spec), spec=target.spec)
    assert type(again) is cls
    assert again.config == drafter.config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_ngram": 1, "min_ngram": 2}, "drafter.max_ngram: got 1; accepted: 2"),
        ({"min_ngram": 0}, "drafter.min_ngram: got 0"),
        ({"block_size": 0}, "drafter.block_size: got 0"),
        ({"max_ngrams": 2}, "drafter.max_ngrams: unknown"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config({"_target_": "drafters.heads.ngram.NgramDrafter", **settings}, key="drafter")
