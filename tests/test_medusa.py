# Medusa heads: a naive twin in value and gradient, how they start, what is refused. Their sessions: against training with
# settings that no shipped config has, row by row, and trees against chains.
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from drafters.decoding.sampling import Draws
from drafters.decoding.tree import chain_tree, static_tree
from drafters.errors import ConfigError
from drafters.heads.anchors import sample_anchors
from drafters.heads.medusa import MedusaDrafter
from drafters.losses import LossWeights
from drafters.types import Sampling
from tests.block_doubles import make_batch
from tests.contract_cases import Reading, shaken, tiny_world
from tests.tiny import tiny_target


def naive_loss(drafter, batch, head):
    """Cross-entropy of every head after every anchor, one at a time."""
    total, ids = 0.0, drafter.vocab.ids_V
    anchors = sample_anchors(batch, num_anchors=1000, block_size=drafter.block_size)
    for a, (row, position) in enumerate(zip(anchors.rows_A.tolist(), anchors.positions_A.tolist(), strict=True)):
        for k in range(drafter.block_size):
            label = (ids == anchors.labels_AG[a, k]).nonzero()
            if not anchors.counted_AG[a, k] or len(label) == 0:
                continue
            state_D, one = batch.last_BTD[row, position - 1], drafter.heads[k]
            for block in one.blocks:
                state_D = state_D + F.silu(block.linear.weight @ state_D + block.linear.bias)
            weight_VD = head.lm_head_VD[ids] if one.lm_head is None else one.lm_head.weight
            total = total + F.cross_entropy(weight_VD @ state_D, label[0, 0])
    return total


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_loss_equals_the_naive_twin(own, num_layers):
    world = tiny_world()
    weights = LossWeights(ce=1.0, l1=0.0, kl=0.0, gamma=None)
    settings = {"own_projection": own, "num_layers": num_layers, "num_anchors": 1000, "loss": vars(weights)}
    drafter = shaken(world.drafter("medusa", **settings))
    batch = make_batch(world.target, [18, 9])
    assert (anchors := sample_anchors(batch, num_anchors=1000, block_size=1).positions_A).min() > 0, anchors
    parameters = dict(drafter.named_parameters())
    found, naive = drafter.loss(batch, world.target.head).total, naive_loss(drafter, batch, world.target.head)
    torch.testing.assert_close(found, naive, rtol=1e-4, atol=1e-3)
    pairs = (torch.autograd.grad(total, list(parameters.values())) for total in (found, naive))
    for name, one, other in zip(parameters, *pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()), msg=name)
        assert other.abs().max() > 0, name


def test_every_head_starts_as_the_target_s_own():
    """So its first draft is the token of the anchor, again."""
    world = tiny_world()
    drafter = world.drafter("medusa", draft_vocab_size=None).eval()
    reading = Reading(drafter, world.target, [example.tokens_T[:12] for example in world.examples[:3]])
    tokens_BS = reading.propose(drafter.block_size).tokens_BS
    assert (tokens_BS == reading.session.anchor_B[:, None]).all()


@pytest.mark.parametrize("own", [True, False])
def test_a_tree_that_is_a_chain_is_the_chain(own):
    world = tiny_world()
    drafter = shaken(world.drafter("medusa", own_projection=own))
    session = Reading(drafter, world.target, [example.tokens_T[:12] for example in world.examples[:3]]).session
    chain = session.propose(3, Draws(Sampling()))
    assert torch.equal(session.propose_tree(chain_tree(3), Draws(Sampling())).tokens_BS, chain.tokens_BS)
    wide = session.propose_tree(static_tree([2, 2]), Draws(Sampling())).tokens_BS
    assert torch.equal(wide[:, 2:4], wide[:, 4:6]), "slots of one depth have one distribution"


def test_a_projection_of_its_own_needs_a_target_without_a_softcap():
    spec = replace(tiny_target().spec, logit_softcap=30.0)
    with pytest.raises(ConfigError, match=r"drafter\.own_projection: got true .* caps its logits at 30.0.*: false"):
        MedusaDrafter(MedusaDrafter.Config(), spec)
    assert not MedusaDrafter(MedusaDrafter.Config(own_projection=False), spec).projections


@pytest.mark.parametrize("name", ["block_size", "num_layers", "num_anchors", "draft_vocab_size"])
def test_wrong_settings_are_named(name):
    with pytest.raises(ValueError, match=f"{name}: got 0; accepted: 1 or more"):
        MedusaDrafter.Config(**{name: 0})
