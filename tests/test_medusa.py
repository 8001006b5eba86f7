# Medusa heads: a naive twin in value and gradient, how they start, what is refused. Their sessions: against training
# with settings that no shipped config has, row by row, and trees against chains.

import math
from dataclasses import replace

import pytest
import torch

from drafters.decoding.sampling import Draws
from drafters.decoding.tree import Tree, chain_tree, static_tree
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.medusa import MedusaDrafter
from drafters.losses import LossWeights
from drafters.target import FrozenTarget
from drafters.types import Sampling
from drafters.vocab import DraftVocab
from tests.block_doubles import make_batch
from tests.contract_cases import shaken, tiny_world
from tests.session_cases import CE_ALONE, check_session
from tests.test_families import family_model
from tests.tiny import tiny_target

HEADS = 3
WEIGHTS = LossWeights(ce=0.3, l1=1.0, kl=0.5, lk=0.2, gamma=3.0, chunk=16)
every_output = pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
every_vocab = pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "full"])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_medusa(target, *, reduced=True, own=True, **settings):
    """A random drafter whose every part acts."""
    size = target.spec.vocab_size
    vocab = DraftVocab(torch.arange(0, size, 2), num_full=size) if reduced else None
    defaults = dict(block_size=HEADS, num_anchors=1000, own_projection=own, loss=WEIGHTS)
    config = MedusaDrafter.Config(**{**defaults, **settings}, draft_vocab_size=vocab.size if vocab else None)
    torch.manual_seed(0)
    drafter = MedusaDrafter(config, target.spec, vocab=vocab)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.3)
    return drafter.eval()


def naive_logits(drafter, target, last_D, k):
    """What head k (from 0) makes of one state."""
    head, hidden_D = drafter.heads[k], last_D
    for block in head.blocks:
        pre_D = block.linear.weight @ hidden_D + block.linear.bias
        hidden_D = hidden_D + pre_D / (1 + torch.exp(-pre_D))
    if drafter.config.own_projection:
        return head.lm_head.weight @ hidden_D
    return target.head.logits(hidden_D, support_V=None if drafter.vocab is None else drafter.vocab.ids_V)


def naive_loss(drafter, target, batch):
    """Conversation by conversation, anchor by anchor, label by label; the sum and the number of labels."""
    ids = list(range(target.spec.vocab_size)) if drafter.vocab is None else drafter.vocab.ids_V.tolist()
    total, count = torch.zeros(()), 0
    for row, length in enumerate(batch.lengths_B.tolist()):
        tokens, supervised = batch.tokens_BT[row].tolist(), batch.loss_mask_BT[row].tolist()
        for anchor in (p for p in range(1, length) if supervised[p]):
            for k in range(HEADS):
                at = anchor + k + 1
                if at >= length or not all(supervised[anchor : at + 1]):
                    break
                log_d = naive_logits(drafter, target, batch.last_BTD[row, anchor - 1], k).log_softmax(-1)
                p_t = target.head.logits(batch.last_BTD[row, at - 1]).softmax(-1)
                inside, accept = p_t[ids], torch.minimum(log_d.exp(), p_t[ids]).sum()
                q = inside / inside.sum()
                found = WEIGHTS.l1 * 2 * (1 - accept) - WEIGHTS.lk * accept.log()
                found = found + WEIGHTS.kl * (q * (q.log() - log_d)).sum()
                if tokens[at] in ids:
                    found = found - WEIGHTS.ce * log_d[ids.index(tokens[at])]
                total, count = total + math.exp(-k / WEIGHTS.gamma) * found, count + 1
    return total, count


def ragged(target):
    """Three conversations, the last too short for all heads; a gap in one mask; no number at all in the padding."""
    batch = make_batch(target, [14, 9, 6], width=16)
    mask_BT = batch.loss_mask_BT.clone()
    mask_BT[0, 8] = False
    padding_BT = torch.arange(16) >= batch.lengths_B[:, None]
    last_BTD = batch.last_BTD.masked_fill(padding_BT[..., None], torch.nan)
    lse_BT = batch.lse_BT.masked_fill(padding_BT, torch.nan)
    return replace(batch, loss_mask_BT=mask_BT, last_BTD=last_BTD, lse_BT=lse_BT)


@every_vocab
@every_output
@pytest.mark.parametrize("num_layers", [1, 2])
def test_loss_and_gradients_equal_the_naive_twin(target, own, reduced, num_layers):
    drafter, batch = make_medusa(target, own=own, reduced=reduced, num_layers=num_layers), ragged(target)
    found, (total, count) = drafter.loss(batch, target.head), naive_loss(drafter, target, batch)
    assert found.count == count > 30
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    parameters = dict(drafter.named_parameters())
    got = torch.autograd.grad(found.total, list(parameters.values()))
    want = torch.autograd.grad(total, list(parameters.values()))
    for name, one, other in zip(parameters, got, want, strict=True):
        assert other.abs().max() > 0, name
        torch.testing.assert_close(
            one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()), msg=lambda m, name=name: f"{name}: {m}"
        )


@every_output
def test_heads_without_a_label_have_zero_gradients(target, own):
    """One anchor, one label: only the first head learns. The start of a text is no anchor: nothing is before it."""
    drafter, batch = make_medusa(target, own=own), make_batch(target, [8])
    mask_BT = torch.zeros_like(batch.loss_mask_BT)
    mask_BT[0, [0, 1, 4, 5]] = True
    found = drafter.loss(replace(batch, loss_mask_BT=mask_BT), target.head)
    assert found.count == 1
    found.total.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.any() == name.startswith("heads.0."), name
    mask_BT[0, 4:] = False
    assert drafter.loss(replace(batch, loss_mask_BT=mask_BT), target.head).count == 0


@every_vocab
@every_output
def test_every_head_starts_as_the_target_s_own(own, reduced):
    world = tiny_world()
    size = {} if reduced else {"draft_vocab_size": None}
    drafter = world.drafter("medusa", own_projection=own, num_layers=2, **size)
    assert (drafter.vocab is None) != reduced
    last_ND = world.sample(0, drafter.needs).last_TD
    support_V = drafter.vocab.ids_V if reduced else None
    want_NV = world.target.head.logits(last_ND, support_V=support_V)
    proposal = first_proposal(drafter, world.target, last_ND, Sampling(temperature=1.0))
    for k in range(drafter.block_size):
        torch.testing.assert_close(proposal.probs_BSV[:, k], want_NV.softmax(-1), rtol=1e-4, atol=1e-6)


def first_proposal(drafter, target, last_ND, sampling):
    """Drafts of rows that have read one token each, with these states."""
    session, num_rows = drafter.session(target, len(last_ND)), len(last_ND)
    ones = torch.ones(num_rows, dtype=torch.int64)
    session.extend(ones[:, None], ones, ones, None, last_ND[:, None])
    return session.propose(drafter.block_size, draws(sampling, num_rows))


def draws(sampling, num_rows, num=16):
    """Row b has the same numbers in any batch."""
    if sampling.temperature == 0:
        return Draws(sampling)
    rows = [torch.rand(num, generator=torch.Generator().manual_seed(b), dtype=torch.float64) for b in range(num_rows)]
    return Draws(sampling, torch.stack(rows))


def test_projections_are_copies():
    world = tiny_world()
    before = world.target.head.lm_head_VD.clone()
    shaken(world.drafter("medusa", draft_vocab_size=None))
    assert torch.equal(world.target.head.lm_head_VD, before)
    assert len({weight.data_ptr() for weight in world.drafter("medusa").projections}) == 3


def test_a_scaled_target_s_factor_is_in_the_projections():
    target = FrozenTarget.from_model(family_model("granite"), mask_token_id=3)
    assert target.spec.logit_scale == 1 / 8
    world = replace(tiny_world(), target=target)
    last_ND = world.sample(0, world.drafter("medusa").needs).last_TD
    want_NV = target.head.logits(last_ND).softmax(-1)
    for own in (True, False):
        drafter = world.drafter("medusa", draft_vocab_size=None, own_projection=own)
        proposal = first_proposal(drafter, target, last_ND, Sampling(temperature=1.0))
        torch.testing.assert_close(proposal.probs_BSV[:, 1], want_NV, rtol=1e-4, atol=1e-6)


def test_a_capped_target_shares_its_projection():
    target = FrozenTarget.from_model(family_model("gemma2"), mask_token_id=3)
    with pytest.raises(ConfigError, match=r"drafter\.own_projection: got true .* caps its logits at 3\.0"):
        MedusaDrafter(MedusaDrafter.Config(), target.spec)
    drafter, batch = make_medusa(target, own=False), make_batch(target, [12])
    total, _ = naive_loss(drafter, target, batch)
    torch.testing.assert_close(drafter.loss(batch, target.head).total, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"own_projection": False}, {"num_layers": 2, "draft_vocab_size": None}])
def test_session_equals_training(changes):
    """With settings that are not those of the shipped config, which the contract tests read."""
    world = tiny_world()
    check_session(shaken(world.drafter("medusa", num_anchors=1, loss=CE_ALONE, **changes)), world)


def rows_of(target, lengths):
    """Tokens, lengths, anchors and states as decoding gives them, one row after the other; padding is no number."""
    generator = torch.Generator().manual_seed(4)
    width = max(lengths)
    tokens_BT = torch.randint(4, 128, (len(lengths), width), generator=generator)
    last_BTD = torch.randn(len(lengths), width, target.spec.hidden_size, generator=generator)
    lengths_B = torch.tensor(lengths)
    last_BTD[torch.arange(width) >= lengths_B[:, None]] = torch.nan
    return tokens_BT, lengths_B, tokens_BT[:, 0] + 1, last_BTD


@every_output
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_rows_do_not_know_each_other(target, own, sampling):
    drafter, tree = make_medusa(target, own=own), static_tree([3, 2, 1])
    tokens_BT, lengths_B, anchor_B, last_BTD = rows_of(target, [2, 5, 1])
    uniforms = draws(sampling, 3)
    session = drafter.session(target, 3)
    session.extend(tokens_BT, lengths_B, anchor_B, None, last_BTD)
    together = [session.propose(HEADS, uniforms), session.propose_tree(tree, uniforms)]
    for b, length in enumerate(lengths_B.tolist()):
        row, alone = slice(b, b + 1), drafter.session(target, 1)
        alone.extend(tokens_BT[row, :length], lengths_B[row], anchor_B[row], None, last_BTD[row, :length])
        own_draws = uniforms if uniforms.uniforms_BS is None else Draws(sampling, uniforms.uniforms_BS[row])
        singles = [alone.propose(HEADS, own_draws), alone.propose_tree(tree, own_draws)]
        for whole, single in zip(together, singles, strict=True):
            assert torch.equal(whole.tokens_BS[b], single.tokens_BS[0])
            if single.probs_BSV is not None:
                torch.testing.assert_close(whole.probs_BSV[b], single.probs_BSV[0])
    assert len({tuple(row) for row in together[0].tokens_BS.tolist()}) == 3


def test_rows_that_join_and_stay_keep_their_states(target):
    """A proposal may come straight after, with nothing read between."""
    drafter, last_BTD = make_medusa(target), rows_of(target, [1, 1, 1])[3]

    def reading(rows):
        session, ones = drafter.session(target, len(rows)), torch.ones(len(rows), dtype=torch.int64)
        session.extend(ones[:, None], ones, ones, None, last_BTD[rows])
        return session

    session, want = reading([0, 1]), reading([1, 2]).propose(HEADS, Draws(Sampling())).tokens_BS
    session.join(reading([2]))
    session.keep(torch.tensor([1, 2]))
    assert torch.equal(session.propose(HEADS, Draws(Sampling())).tokens_BS, want)
    assert not torch.equal(want[0], want[1])


@every_output
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_tree_that_is_a_chain_is_the_chain(target, own, sampling):
    drafter = make_medusa(target, own=own)
    tokens_BT, lengths_B, anchor_B, last_BTD = rows_of(target, [2, 5])
    session = drafter.session(target, 2)
    session.extend(tokens_BT, lengths_B, anchor_B, None, last_BTD)
    for length in range(1, HEADS + 1):
        chain = session.propose(length, draws(sampling, 2))
        tree = session.propose_tree(chain_tree(length), draws(sampling, 2))
        assert torch.equal(chain.tokens_BS, tree.tokens_BS)
        if sampling.temperature > 0:
            torch.testing.assert_close(chain.probs_BSV, tree.probs_BSV)


@every_output
def test_a_tree_holds_the_best_tokens_of_each_head(target, own):
    drafter = make_medusa(target, own=own)
    tokens_BT, lengths_B, anchor_B, last_BTD = rows_of(target, [3])
    session = drafter.session(target, 1)
    session.extend(tokens_BT, lengths_B, anchor_B, None, last_BTD)
    with torch.no_grad():
        best = [naive_logits(drafter, target, last_BTD[0, 2], k).topk(3).indices for k in range(HEADS)]
    tree = Tree.of([-1, -1, -1, 0, 0, 2, 5, 5])
    found = session.propose_tree(tree, Draws(Sampling()))
    want = [best[depth - 1][rank] for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
    assert found.tokens_BS[0].tolist() == drafter.vocab.ids_V[torch.stack(want)].tolist()


@pytest.mark.parametrize("name", ["block_size", "num_layers", "num_anchors", "draft_vocab_size"])
def test_wrong_settings_are_named(name):
    with pytest.raises(ValueError, match=f"{name}: got 0; accepted: 1 or more"):
        MedusaDrafter.Config(**{name: 0})


@every_vocab
@every_output
def test_stored_tensors_make_the_same_drafter(target, own, reduced):
    drafter = make_medusa(target, own=own, reduced=reduced, num_layers=2)
    tensors = drafter.state_dict()
    again = MedusaDrafter.from_tensors(drafter.config, target.spec, tensors)
    again.load_state_dict(tensors)
    parts = [*(f"blocks.{j}.linear.{what}" for j in range(2) for what in ("weight", "bias"))]
    parts += ["lm_head.weight"] * own
    names = {f"heads.{k}.{part}" for k in range(HEADS) for part in parts}
    assert {name for name, _ in again.named_parameters()} == names
    batch = make_batch(target, [12])
    assert again.loss(batch, target.head).total == drafter.loss(batch, target.head).total
    wrong = replace(drafter.config, draft_vocab_size=None if reduced else 7)
    with pytest.raises(CheckpointError, match=r"vocab\.d2t"):
        MedusaDrafter.from_tensors(wrong, target.spec, tensors)
