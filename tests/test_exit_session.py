# Drafting with the target's first layers against a twin that knows nothing of it: these layers as a model of their own,
# run on the whole text for every draft. The target's cache shows no trace of a draft.

import copy

import pytest
import torch

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import Draws, probs
from drafters.heads.anchors import sample_anchors
from drafters.target import FrozenTarget
from drafters.types import Needs
from tests.block_doubles import make_batch
from tests.exit_doubles import (
    EXIT,
    GREEDY,
    SAMPLED,
    World,
    assert_unchanged,
    draws_of,
    fed,
    layer_skip,
    make_drafter,
    naive_logits,
    photograph,
    shortened,
    world_of,
)
from tests.test_families import FAMILIES, WINDOWED, family_model
from tests.test_lossless import generate
from tests.tiny import tiny_llama, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, FrozenTarget.from_model(family_model(request.param), mask_token_id=3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_those_of_the_first_layers_run_alone(family, sampling):
    name, target = family
    model, windowed, compacted = shortened(target), name in WINDOWED, []

    def check(world):
        before = photograph(world.cache)
        if windowed:
            # Holes are closed, as the target's next pass would; nothing beyond that.
            twin = copy.deepcopy(world.cache)
            if not twin._right_aligned():
                compacted.append(True)
                twin.compact()
            before = photograph(twin)
        found = world.session.propose(4, draws_of(sampling, len(world.texts)))
        assert_unchanged(world.cache, before)
        texts, draws = [list(text) for text in world.texts], draws_of(sampling, len(world.texts))
        for k in range(4):
            logits_BV = naive_logits(model, texts)
            token_B, dist_BV = draws.draft(logits_BV, None)
            assert torch.equal(found.tokens_BS[:, k], token_B), name
            if sampling.temperature:
                torch.testing.assert_close(found.probs_BSV[:, k], dist_BV, rtol=1e-3, atol=1e-4)
            texts = [[*text, token] for text, token in zip(texts, token_B.tolist(), strict=True)]
        again = world.session.propose(2, draws_of(sampling, len(world.texts)))
        assert torch.equal(again.tokens_BS, found.tokens_BS[:, :2])
        assert again.lengths_B.tolist() == [2] * len(world.texts)

    world_of(target, layer_skip(target)).run(check)
    assert bool(compacted) == windowed


def test_logits_are_those_of_the_layers_run_by_hand(target):
    model, world = target.model.model, World(target, layer_skip(target), [6])
    with torch.inference_mode():
        x_BTD = model.embed_tokens(torch.tensor([world.texts[0]]))
        positions = torch.arange(x_BTD.shape[1])[None]
        rotary = model.rotary_emb(x_BTD, positions)
        for layer in model.layers[: EXIT + 1]:
            x_BTD = layer(x_BTD, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        expected_BV = target.model.lm_head(model.norm(x_BTD))[:, -1]
        with world.cache.draft():
            got_BV = world.session.next_logits(0, torch.tensor([world.texts[0][-1]]))
    torch.testing.assert_close(got_BV, expected_BV)


def test_the_last_layer_is_the_target_and_accepts_everything(family):
    name, target = family
    rows = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in (13, 1, 7, 4)]
    drafter = layer_skip(target, exit_layer=3)
    for sampling in (GREEDY, SAMPLED):
        config = DecodeConfig(max_new_tokens=16, batch_size=3, stop_ids=(), sampling=sampling)
        drafted = decode(target, drafter, rows, config)
        assert all(r.accepted == r.proposed for row in drafted for r in row.rounds), name
        if sampling == GREEDY:
            assert [row.tokens for row in drafted] == [generate(target, row, 16) for row in rows]


def test_greedy_decoding_is_exact_while_rows_come_and_go(family):
    name, target = family
    rows = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in (13, 1, 7, 4, 9)]
    truth = [generate(target, row, 16) for row in rows]
    for exit_layer in (0, EXIT):
        config = DecodeConfig(max_new_tokens=16, batch_size=3, stop_ids=())
        drafted = decode(target, layer_skip(target, exit_layer), rows, config)
        assert [row.tokens for row in drafted] == truth, name
        assert min(r.accepted for row in drafted for r in row.rounds) == 0


def test_later_layers_do_not_run_and_nothing_is_read_twice(target):
    world = world_of(target, layer_skip(target, exit_layer=1))
    ran = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, n=n: ran.append((n, args[0].shape[1])))
        for n, layer in enumerate(target.decoder.layers)
    ]
    world.session.propose(3, Draws(GREEDY))
    for hook in hooks:
        hook.remove()
    assert ran == [(0, 1), (1, 1)] * 3


def test_a_pass_that_fails_leaves_the_target_and_its_cache_as_they_were(target):
    world = world_of(target, layer_skip(target))
    world.advance([1, 2, 3], reject=1)
    before = photograph(world.cache)

    def fail(module, args):
        raise RuntimeError("in the middle")

    hook = target.decoder.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        world.session.propose(3, Draws(GREEDY))
    hook.remove()
    assert_unchanged(world.cache, before)
    whole = target.states(torch.tensor([world.texts[0]]), needs=Needs(last=True)).last_BTD
    assert whole.shape[1] == len(world.texts[0])


def test_a_draft_outgrows_the_buffers(target):
    """Sixteen drafts after one token: the first layers' buffers grow, the others' do not."""
    world = World(target, layer_skip(target, block_size=16), [1])
    before = photograph(world.cache)
    found = world.session.propose(16, Draws(GREEDY))
    assert_unchanged(world.cache, before)
    text = list(world.texts[0])
    for token in found.tokens_BS[0].tolist():
        assert naive_logits(shortened(target), [text]).argmax() == token
        text.append(token)


@pytest.mark.parametrize("reduced", [True, False])
def test_session_equals_training_after_ragged_reading(target, reduced):
    drafter = make_drafter(target, reduced=reduced).eval()
    batch = make_batch(target, [60, 48, 55], prompt=1)
    support = None if drafter.vocab is None else drafter.vocab.ids_V
    anchors = sample_anchors(batch, num_anchors=1000, block_size=4)
    trained_AGV = target.head.logits(drafter.states(batch, anchors, torch.float32), support_V=support)
    at = [9, 2, 5]
    cache, session = target.new_cache(3), drafter.session(target, 3)
    session.share(cache)
    # Reading goes a few tokens a row beyond what stands, so that holes stay.
    for step in ([9, 2, 5], [1, 4, 2], [5, 1, 1], [2, 2, 9], [1, 1, 3]):
        at = step if cache.num_slots == 0 else [a + n for a, n in zip(at, step, strict=True)]
        index_BT = (cache.lengths_B[:, None] + torch.arange(max(step) + 1)).clamp(max=59)
        target.step(batch.tokens_BT.gather(1, index_BT), cache, lengths_B=torch.tensor(step) + 1, logits="none")
        cache.rollback(torch.tensor(at))
        session.extend(batch.tokens_BT.gather(1, index_BT), torch.tensor(step), torch.tensor([0] * 3), None, None)
        with torch.inference_mode(), cache.draft():
            for k in range(4):
                logits_BV = session.next_logits(k, batch.tokens_BT[torch.arange(3), torch.tensor(at) + k])
                for row in range(3):
                    where = (anchors.rows_A == row) & (anchors.positions_A == at[row])
                    (expected_V,) = trained_AGV[where, k]
                    torch.testing.assert_close(logits_BV[row], expected_V, rtol=1e-4, atol=1e-4)


def test_sampled_proposals_carry_the_distributions_they_were_drawn_from(target):
    drafter = make_drafter(target, reduced=True).eval()

    def check(world):
        found = world.session.propose(3, draws_of(SAMPLED, len(world.texts)))
        assert torch.equal(found.support_V, drafter.vocab.ids_V)
        world.texts, texts = (
            [[*text, *tokens[:-1]] for text, tokens in zip(world.texts, found.tokens_BS.tolist(), strict=True)],
            world.texts,
        )
        torch.testing.assert_close(found.probs_BSV, probs(fed(world, 3), SAMPLED), rtol=1e-3, atol=1e-5)
        world.texts = texts

    world_of(target, drafter).run(check)


def test_decoding_with_an_adapter_is_exact(target):
    rows = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in (13, 1, 7, 4, 9)]
    config = DecodeConfig(max_new_tokens=16, batch_size=3, stop_ids=())
    drafted = decode(target, make_drafter(target, reduced=True).eval(), rows, config)
    assert [row.tokens for row in drafted] == [generate(target, row, 16) for row in rows]


def test_bfloat16_session_stays_close():
    exact, rough = tiny_target(), FrozenTarget.from_model(tiny_llama().bfloat16(), mask_token_id=3)
    one, other = (fed(World(t, make_drafter(t).eval(), [9]), 1) for t in (exact, rough))
    assert other.dtype == torch.float32
    assert (one - other).norm() < 0.05 * one.norm()


def test_ragged_passes_within_a_draft_leave_no_trace_either(target):
    world = World(target, layer_skip(target), [4, 4])
    before = photograph(world.cache)
    assert before.dense
    with world.cache.draft():
        target.step(torch.tensor([[5, 6], [7, 0]]), world.cache, lengths_B=torch.tensor([2, 1]))
        assert not world.cache.dense
    assert_unchanged(world.cache, before)
