# A draft model against a twin that recomputes everything: the same drafts, the same distributions, no token run twice.
# The target that drafts for itself accepts everything; foreign vocabularies are refused.

import pytest
import torch

from drafters.config import build_config
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import Draws, RowStreams
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.draft_model import DraftModel, DraftModelSession
from drafters.target import FrozenTarget
from drafters.types import Needs, Sampling
from tests.copy_drafter import sharp_target
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

GAMMA, NUM_IDS = 4, 64
SAMPLED = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=NUM_IDS, scale=30)


@pytest.fixture(scope="module")
def noisy():
    return sharp_target(vocab_size=NUM_IDS, scale=30, noise=0.3)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("chatml")


def own(target, **settings):
    return DraftModel(DraftModel.Config(**settings), target.spec)


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, NUM_IDS, (n,), generator=generator) for n in lengths]


class Rows:
    """A session driven by hand, with the texts that it should know."""

    def __init__(self, session, prompts, anchors):
        self.session, self.texts = session, [[*p, a] for p, a in zip(prompts, anchors, strict=True)]
        self.extend([list(p) for p in prompts], anchors)

    def extend(self, tokens, anchors):
        lengths_B = torch.tensor([len(row) for row in tokens])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
        self.session.extend(padded, lengths_B, torch.tensor(anchors), None, None)

    def advance(self, accepted, drafts, anchors):
        """What the target made of a round: the first `accepted` drafts of each row stood."""
        stood = [row[:n] for row, n in zip(drafts, accepted, strict=True)]
        self.extend([[text[-1], *row] for text, row in zip(self.texts, stood, strict=True)], anchors)
        self.texts = [[*t, *row, a] for t, row, a in zip(self.texts, stood, anchors, strict=True)]


def recomputed(model, texts, length, draws, support=None):
    """Naive twin of a proposal: one pass over the whole text for every draft of every row."""
    texts, tokens, dists = [list(text) for text in texts], [], []
    for _ in range(length):
        last = [model.states(torch.tensor([t]), needs=Needs(last=True)).last_BTD[:, -1] for t in texts]
        logits_BV = model.head.logits(torch.cat(last))
        token_B, dist_BV = draws.draft(logits_BV if support is None else logits_BV[:, support], support)
        tokens.append(token_B)
        dists.append(dist_BV)
        texts = [[*t, token] for t, token in zip(texts, token_B.tolist(), strict=True)]
    return torch.stack(tokens, 1), None if dists[0] is None else torch.stack(dists, 1)


def same_proposal(rows, model, length, sampling, seed):
    uniforms_BS = None
    if sampling.temperature > 0:
        uniforms_BS = RowStreams([seed + i for i in range(len(rows.texts))], torch.device("cpu")).numbers(length)
    proposal = rows.session.propose(length, Draws(sampling, uniforms_BS))
    tokens_BS, probs_BSV = recomputed(model, rows.texts, length, Draws(sampling, uniforms_BS))
    assert torch.equal(proposal.tokens_BS, tokens_BS)
    assert proposal.lengths_B.tolist() == [length] * len(rows.texts)
    assert (proposal.probs_BSV is None) == (probs_BSV is None)
    if probs_BSV is not None:
        torch.testing.assert_close(proposal.probs_BSV, probs_BSV, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(proposal.likeliest_BS, probs_BSV.amax(-1), rtol=1e-4, atol=1e-5)
    return proposal.tokens_BS.tolist()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_proposals_equal_those_of_a_session_that_recomputes_everything(noisy, sampling):
    dice = torch.Generator().manual_seed(0)
    rows = Rows(DraftModelSession(noisy, NUM_IDS, 3), [p.tolist() for p in prompts_of([9, 1, 4])], [5, 6, 7])
    for turn in range(24):
        if turn == 8:
            rows.session.keep(torch.tensor([2, 0]))
            rows.texts = [rows.texts[2], rows.texts[0]]
        if turn == 12:
            new = Rows(DraftModelSession(noisy, NUM_IDS, 2), [p.tolist() for p in prompts_of([30, 2])], [8, 9])
            rows.session.join(new.session)
            rows.texts += new.texts
        count = len(rows.texts)
        length = 1 + turn % GAMMA
        if turn % 6 == 5:
            # Rounds without a draft, as a schedule may ask for: the session only reads.
            drafts, length = [[] for _ in range(count)], 0
        else:
            drafts = same_proposal(rows, noisy, length, sampling, seed=10 * turn)
        if turn % 5 == 4 and length:
            # Asked again, it answers the same.
            assert drafts == same_proposal(rows, noisy, length, sampling, seed=10 * turn)
        if turn % 7 == 6:
            # The text may go on with tokens that were not drafted.
            drafts = torch.randint(NUM_IDS, (count, length), generator=dice).tolist()
        accepted = torch.randint(length + 1, (count,), generator=dice).tolist()
        accepted = [length] * count if turn % 4 == 3 else accepted
        rows.advance(accepted, drafts, torch.randint(NUM_IDS, (count,), generator=dice).tolist())


def test_no_token_is_run_twice(noisy, monkeypatch):
    passes = []
    step = FrozenTarget.step

    def counted(self, tokens_BS, cache, *, lengths_B=None, **options):
        width = tokens_BS.shape[1]
        passes.append([width] * len(tokens_BS) if lengths_B is None else lengths_B.tolist())
        return step(self, tokens_BS, cache, lengths_B=lengths_B, **options)

    monkeypatch.setattr(FrozenTarget, "step", counted)
    rows = Rows(DraftModelSession(noisy, NUM_IDS, 2), [[4, 5, 6], [7]], [8, 9])
    assert passes == [[3, 1]]
    for accepted, first in (((4, 2), [1, 1]), ((4, 4), [2, 1]), ((0, 1), [2, 2]), ((3, 3), [1, 1])):
        passes.clear()
        drafts = rows.session.propose(4, Draws(Sampling())).tokens_BS.tolist()
        rows.advance(accepted, drafts, [3, 3])
        # The last draft of a row that kept them all waits for the next anchor: one pass a draft, whatever happened.
        assert passes == [first, [1, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_accepts_all_of_its_own_drafts(target, batch_size, temperature):
    config = DecodeConfig(
        max_new_tokens=41, sampling=Sampling(temperature=temperature), batch_size=batch_size, stop_ids=()
    )
    rows = decode(target, own(target, block_size=GAMMA), prompts_of([4, 9, 2, 7]), config)
    assert all(r.accepted == r.proposed == GAMMA for row in rows for r in row.rounds)
    assert [len(row.rounds) for row in rows] == [8] * 4


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_decoding_is_the_target_s(target, tmp_path, tokenizer, batch_size):
    drafter = loaded(tmp_path, tokenizer, sharp(noise=0.3), block_size=GAMMA)
    big = FrozenTarget.from_model(sharp(), tokenizer=tokenizer)
    prompts = prompts_of([9, 3, 17, 1, 6])
    config = DecodeConfig(max_new_tokens=40, batch_size=batch_size, stop_ids=())
    drafted = decode(big, drafter, prompts, config)
    assert [row.tokens for row in drafted] == [row.tokens for row in decode(big, None, prompts, config)]
    assert {r.accepted for row in drafted for r in row.rounds} == set(range(GAMMA + 1))


def sharp(*, vocab_size=420, **noise):
    return sharp_target(vocab_size=vocab_size, scale=30, **noise).model


def loaded(tmp_path, tokenizer, model, **settings):
    """A drafter whose weights are `model`, saved with `tokenizer`."""
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    config = {"_target_": "drafters.heads.draft_model.DraftModel", "weights": str(tmp_path / "small"), **settings}
    cls, config = build_config(config, key="drafter")
    return cls(config, FrozenTarget.from_model(tiny_llama(vocab_size=420), tokenizer=tokenizer).spec)


@pytest.mark.parametrize("own_size", [448, 430])
def test_padding_of_the_output_layer_may_differ(tmp_path, tokenizer, own_size):
    assert len(tokenizer.get_vocab()) <= 430
    big = FrozenTarget.from_model(sharp(vocab_size=440), tokenizer=tokenizer)
    drafter = loaded(tmp_path, tokenizer, sharp(vocab_size=own_size, noise=0.2), block_size=3)
    model, size = drafter.model(big), min(own_size, 440)
    # A padding id of the target, which the smaller one has not, may stand in the text.
    rows = Rows(drafter.session(big, 2), [[5, 439, 7], [8]], [9, 10])
    proposal = rows.session.propose(3, Draws(SAMPLED, torch.rand(2, 3, dtype=torch.float64)))
    assert proposal.probs_BSV.shape == (2, 3, size)
    torch.testing.assert_close(proposal.probs_BSV.sum(-1), torch.ones(2, 3))
    assert (proposal.support_V is None) == (own_size == 448)
    if proposal.support_V is not None:
        assert proposal.support_V.tolist() == list(range(430))
    assert model.spec.vocab_size == own_size
    config = DecodeConfig(max_new_tokens=20, sampling=SAMPLED, batch_size=2, stop_ids=())
    assert all(len(row.tokens) == 20 for row in decode(big, drafter, prompts_of([3, 5]), config))


def test_the_model_is_no_part_of_the_module(tmp_path, tokenizer):
    big = FrozenTarget.from_model(tiny_llama(vocab_size=420), tokenizer=tokenizer)
    small = tiny_llama(1, vocab_size=420, num_hidden_layers=1)
    drafter = loaded(tmp_path, tokenizer, small)
    count = sum(p.numel() for p in small.parameters())
    assert drafter.size(big) == (count, 4 * count)
    assert drafter.model(big) is drafter.model(big)
    assert drafter.state_dict() == {}
    assert list(drafter.parameters()) == []
    assert drafter.needs == Needs()
    assert own(big).size(big) == (0, 0)
    half = loaded(tmp_path, tokenizer, small, dtype="bfloat16")
    assert half.size(big) == (count, 2 * count)
    assert half.model(big).spec.dtype == "bfloat16"


def test_another_vocabulary_is_refused(tmp_path, tokenizer):
    big = FrozenTarget.from_model(tiny_llama(vocab_size=420), tokenizer=tokenizer)
    drafter = loaded(tmp_path, tiny_tokenizer("chatml", kind="spaces"), tiny_llama(vocab_size=420))
    sizes = len(tiny_tokenizer("chatml", kind="spaces").get_vocab()), len(tokenizer.get_vocab())
    with pytest.raises(
        ConfigError,
        match=rf"baselines.draft_model.weights: .*small.*{sizes[0]} and {sizes[1]} tokens.*absent.*accepted",
    ):
        drafter.session(big, 1)
    with pytest.raises(ConfigError, match=r"baselines.draft_model.weights: .*need a tokenizer"):
        drafter.session(FrozenTarget.from_model(tiny_llama(vocab_size=420)), 1)


def test_wrong_settings_are_named(tmp_path, tokenizer, target):
    path = "drafters.heads.draft_model.DraftModel"
    for settings, message in (
        ({"block_size": 0}, "drafter.block_size: got 0"),
        ({"dtype": "float8"}, "drafter.dtype: got 'float8'; accepted: bfloat16"),
        ({"weight": "a"}, "drafter.weight: unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_config({"_target_": path, **settings}, key="drafter")
    with pytest.raises(ConfigError, match=r"baselines.draft_model.weights: 'nowhere' cannot draft"):
        own(target, weights="nowhere").session(target, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"baselines.draft_model.weights: .*config.json"):
        own(target, weights=str(tmp_path / "empty")).session(target, 1)
    with pytest.warns(UserWarning, match="baselines.draft_model.dtype is ignored"):
        own(target, dtype="float32")
    big = FrozenTarget.from_model(tiny_llama(vocab_size=420), tokenizer=tokenizer)
    short = loaded(tmp_path, tokenizer, tiny_llama(vocab_size=420, max_position_embeddings=128))
    with pytest.warns(UserWarning, match="knows 128 positions, the target 512"):
        short.session(big, 1)
