# What every drafter keeps to when it drafts: proposals are what they say, the text is the target's own
# at temperature 0 and follows its law above, the same in any batch. No family is named here. Training and files are in
# test_contract.py.

from dataclasses import replace
from functools import cache

import pytest
import torch

from drafters.decoding.loop import DecodeConfig, decode
from drafters.types import SIGNALS, Sampling
from tests.contract_cases import NAMES, TRAINED, Reading, shaken, small_world, taught, tiny_world, tree_of
from tests.laws import ALPHA, chi_square_p, law_of, sample_texts
from tests.test_lossless import generate

pytestmark = pytest.mark.usefixtures("one_thread")
every = pytest.mark.parametrize("name", NAMES)
PLAIN = Sampling(temperature=1.0)
NUM_TOKENS = 18
law = cache(lambda: law_of(small_world().target, PLAIN))


@pytest.fixture(scope="module")
def world():
    return tiny_world()


def prompts(world):
    """Of different lengths: beginnings of the texts, and one that is none."""
    begun = [example.tokens_T[:length] for example, length in zip(world.examples, (14, 6, 11, 17), strict=False)]
    return [*begun, torch.tensor([50, 60])]


@cache
def truth():
    world = tiny_world()
    return [generate(world.target, prompt, NUM_TOKENS) for prompt in prompts(world)]


@every
def test_proposals_are_what_they_say(world, name):
    drafter = shaken(world.drafter(name))
    reading, most = Reading(drafter, world.target, prompts(world)[:3]), drafter.block_size
    for uniforms_BS in (None, reading.uniforms(most)):
        proposal = reading.propose(most, uniforms_BS)
        width = proposal.tokens_BS.shape[1]
        assert proposal.parents_S is None
        assert proposal.tokens_BS.dtype == torch.int64
        assert proposal.lengths_B.shape == (3,)
        assert 0 <= int(proposal.lengths_B.min()) <= int(proposal.lengths_B.max()) <= width <= most
        assert 0 <= int(proposal.tokens_BS.min()) <= int(proposal.tokens_BS.max()) < world.target.spec.vocab_size
        if name in TRAINED:
            assert proposal.lengths_B.tolist() == [most] * 3
            assert (proposal.probs_BSV is None) == (uniforms_BS is None)
        if proposal.probs_BSV is not None:
            assert_drawn_from(proposal, world.target.spec.vocab_size)
        for said_BS in map(proposal.signal, SIGNALS):
            assert said_BS.shape == proposal.tokens_BS.shape
            assert 0 <= float(said_BS.min()) <= float(said_BS.max()) <= 1


def assert_drawn_from(proposal, vocab_size):
    ids_V = torch.arange(vocab_size) if proposal.support_V is None else proposal.support_V
    num_rows, width = proposal.tokens_BS.shape
    assert proposal.probs_BSV.shape == (num_rows, width, len(ids_V))
    torch.testing.assert_close(proposal.probs_BSV.sum(-1), torch.ones(num_rows, width))
    at_BSV = proposal.tokens_BS[..., None] == ids_V
    assert at_BSV.any(-1).all(), "a draft outside of the support"
    assert (proposal.probs_BSV[at_BSV] > 0).all()


@every
def test_a_second_proposal_is_the_first_and_a_shorter_one_its_beginning(world, name):
    drafter = shaken(world.drafter(name))
    reading, most = Reading(drafter, world.target, prompts(world)[:3]), drafter.block_size
    for uniforms_BS in (None, reading.uniforms(most)):
        whole, short, again = (reading.propose(length, uniforms_BS) for length in (most, 1, most))
        assert torch.equal(again.tokens_BS, whole.tokens_BS)
        assert torch.equal(short.tokens_BS, whole.tokens_BS[:, :1])
        assert torch.equal(short.lengths_B, whole.lengths_B.clamp(max=1))
        for signal in SIGNALS:
            torch.testing.assert_close(short.signal(signal), whole.signal(signal)[:, :1])


@every
def test_confidence_of_a_slot_does_not_know_its_draft(world, name):
    """Draws that agree before slot k and differ there have the same confidence up to k: a schedule that reads it must
    not look at what it decides on."""
    drafter = shaken(world.drafter(name))
    reading, most = Reading(drafter, world.target, prompts(world)[:3]), drafter.block_size
    for k in range(most):
        uniforms_BS = reading.uniforms(most)
        found = []
        for number in (0.03, 0.5, 0.97):
            uniforms_BS[:, k] = number
            found.append(reading.propose(most, uniforms_BS.clone()))
        if found[0].probs_BSV is None:
            assert name not in TRAINED
            assert torch.equal(found[0].tokens_BS, found[-1].tokens_BS), "points must not depend on chance"
            continue
        assert (found[0].tokens_BS[:, k] != found[-1].tokens_BS[:, k]).any()
        for one in found[1:]:
            assert torch.equal(one.tokens_BS[:, :k], found[0].tokens_BS[:, :k])
            for signal in SIGNALS:
                assert torch.equal(one.signal(signal)[:, : k + 1], found[0].signal(signal)[:, : k + 1])


def shapes(drafter):
    return [None, tree_of(drafter)] if drafter.drafts_trees else [None]


@every
def test_greedy_text_is_the_targets_own(world, name):
    drafter, _ = taught(name)
    for tree in shapes(drafter):
        config = DecodeConfig(max_new_tokens=NUM_TOKENS, tree=tree, batch_size=3, stop_ids=())
        rows = decode(world.target, drafter, prompts(world), config)
        assert [row.tokens for row in rows] == truth(), f"tree: {tree}"
        accepted = {r.accepted for row in rows for r in row.rounds if r.full}
        assert max(accepted) > 0, "no draft stood: nothing was tested"


@every
def test_what_is_read_late_is_read_the_same(world, name, monkeypatch):
    """Rounds without drafts are read together, before the next that drafts; rows come and go between them."""
    drafter = shaken(world.drafter(name))
    config = DecodeConfig(
        max_new_tokens=NUM_TOKENS, length=(0, 0, drafter.block_size, 0, 0, 0, 1), stop_ids=(), batch_size=2
    )
    seen = []
    for most in (1, 2, 64):
        monkeypatch.setattr("drafters.decoding.batch.MAX_UNREAD", most)
        seen.append([])
        decode(world.target, drafter, prompts(world), config, on_round=lambda *drafts: seen[-1].append(drafts))
    assert any(r.proposed for _, r, _, _ in seen[0])
    assert seen[0] == seen[1] == seen[2]


@every
@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "sampled"])
def test_a_row_is_the_same_in_any_batch(world, name, sampling):
    drafter, _ = taught(name)
    for tree in shapes(drafter):
        found = []
        for batch_size in (1, 3):
            config = DecodeConfig(
                max_new_tokens=NUM_TOKENS, sampling=sampling, tree=tree, batch_size=batch_size, stop_ids=()
            )
            rows = decode(world.target, drafter, prompts(world), config)
            found.append([(row.tokens, [(r.proposed, r.accepted) for r in row.rounds]) for row in rows])
        assert found[0] == found[1], f"tree: {tree}"


@every
def test_sampled_text_follows_the_targets_law(name):
    world = small_world()
    drafter = shaken(world.drafter(name))
    for tree in shapes(drafter):
        counts, accepted = sample_texts(world.target, drafter, sampling=PLAIN, num=3000, batch_size=1500, tree=tree)
        p = chi_square_p(counts, law())
        assert p > ALPHA, f"the texts do not follow the target: p = {p:.2g}, tree: {tree}"
        if name in TRAINED:
            assert accepted == set(range(drafter.block_size + 1))
        assert max(accepted) > 0, "no draft stood: nothing was tested"


# The twins: drafters that break what the tests above hold.


def proposing(monkeypatch, drafter, world, broken):
    """Sessions of the drafter's class that hand out what `broken` makes of their proposals."""
    cls = type(drafter.session(world.target, 1))
    honest = cls.propose
    monkeypatch.setattr(cls, "propose", lambda self, length, draws: broken(honest(self, length, draws)))


@pytest.mark.parametrize("name", TRAINED)
def test_a_drafter_that_lies_about_its_law_is_found(name, monkeypatch):
    world = small_world()
    drafter = shaken(world.drafter(name))

    def flattened(proposal):
        return replace(proposal, probs_BSV=torch.full_like(proposal.probs_BSV, 1 / proposal.probs_BSV.shape[2]))

    proposing(monkeypatch, drafter, world, flattened)
    counts, _ = sample_texts(world.target, drafter, sampling=PLAIN, num=3000, batch_size=1500)
    assert chi_square_p(counts, law()) < ALPHA


@pytest.mark.parametrize("name", TRAINED)
def test_a_confidence_that_knows_the_draft_is_found(world, name, monkeypatch):
    def knowing(proposal):
        return replace(proposal, confidence_BS=proposal.tokens_BS / world.target.spec.vocab_size)

    proposing(monkeypatch, world.drafter(name), world, knowing)
    with pytest.raises(AssertionError):
        test_confidence_of_a_slot_does_not_know_its_draft(world, name)


@pytest.mark.parametrize("name", TRAINED)
def test_a_session_that_confuses_its_rows_is_found(world, name, monkeypatch):
    """Rows that leave take the wrong states along: the text is still the target's, but rows depend on the batch."""
    cls = type(world.drafter(name).session(world.target, 1))
    honest = cls.keep
    monkeypatch.setattr(cls, "keep", lambda self, rows: honest(self, rows.flip(0)))

    def checked():
        for sampling in (Sampling(), PLAIN):
            test_a_row_is_the_same_in_any_batch(world, name, sampling)

    with pytest.raises((AssertionError, IndexError)):
        checked()
