# What every drafter keeps to in training and as an artefact: sums, gradients, causality, files. No family is named
# here: a new YAML is tested by being there. How they draft is in test_contract_decoding.py.

from dataclasses import replace

import pytest
import torch

from drafters.checkpoint import load_drafter, save_drafter
from drafters.heads.anchors import sample_anchors
from drafters.heads.base import Session
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from tests.contract_cases import NAMES, TRAINED, Reading, shaken, taught, tiny_world

pytestmark = pytest.mark.usefixtures("one_thread")
every = pytest.mark.parametrize("name", NAMES)
trained = pytest.mark.parametrize("name", TRAINED)
OFF = {"ce": 0.0, "l1": 0.0, "kl": 0.0, "lk": 0.0, "confidence": 0.0, "gamma": None}


@pytest.fixture(scope="module")
def world():
    return tiny_world()


def gradients(drafter, *batches, head):
    """Of the sum of the losses, by name."""
    drafter.zero_grad(set_to_none=True)
    for batch in batches:
        drafter.loss(batch, head).total.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.requires_grad}


def test_there_are_drafters_of_both_kinds():
    assert {"markov", "ngram"} <= set(NAMES)
    assert 0 < len(TRAINED) < len(NAMES)


@trained
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_two_steps_of_training(world, name, precision):
    drafter = world.drafter(name)
    module = DistillModule(drafter, world.target.head, OptimConfig(max_steps=2, warmup_steps=0, precision=precision))
    optimizer = module.configure_optimizers()["optimizer"]
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    batch = world.batch(drafter.needs, [0, 1, 2])
    means = []
    for _ in range(2):
        losses = module.losses(batch)
        assert losses.count > 0
        optimizer.zero_grad()
        (losses.total / losses.count).backward()
        missing = [key for key, p in drafter.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, f"no gradient reaches {missing}"
        assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.requires_grad)
        optimizer.step()
        means.append(float(losses.total.detach() / losses.count))
    assert means[1] != means[0]
    changed = [key for key, value in drafter.state_dict().items() if not torch.equal(before[key], value)]
    assert changed
    assert "vocab.d2t" not in changed


@trained
def test_training_learns(name):
    _, losses = taught(name)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@trained
def test_a_batch_without_an_anchor_gives_zero(world, name):
    drafter = world.drafter(name)
    batch = world.batch(drafter.needs, [0, 1])
    batch = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    losses = drafter.loss(batch, world.target.head)
    assert (float(losses.total.detach()), float(losses.count)) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in gradients(drafter, batch, head=world.target.head).values())


@trained
def test_losses_and_metrics_are_sums(world, name):
    """Two conversations together give what both give one by one, in value and gradient, with all anchors taken."""
    drafter = shaken(world.drafter(name, num_anchors=1000))
    head = world.target.head
    both, *single = (world.batch(drafter.needs, indices) for indices in ([0, 1], [0], [1]))
    found, *parts = (drafter.loss(batch, head) for batch in (both, *single))
    assert min(float(part.count) for part in parts) > 0
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.total, sum(part.total for part in parts), **close)
    assert found.count == sum(part.count for part in parts)
    assert set(found.metrics) >= {"acceptance", "accepted_length", "accepted_length_greedy"}
    for key in found.terms:
        torch.testing.assert_close(found.terms[key], sum(part.terms[key] for part in parts), **close)
    for key, pair in found.metrics.items():
        for at, value in enumerate(pair):
            torch.testing.assert_close(value, sum(part.metrics[key][at] for part in parts), **close)
    whole, added = gradients(drafter, both, head=head), gradients(drafter, *single, head=head)
    for key in whole:
        torch.testing.assert_close(whole[key], added[key], rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


@trained
def test_equal_batches_give_equal_losses_and_seeds_choose_anchors(world, name):
    drafter = shaken(world.drafter(name, num_anchors=2))
    batch = world.batch(drafter.needs, [0, 1, 2], seed=7)
    totals = [float(drafter.loss(one, world.target.head).total.detach()) for one in (batch, batch)]
    for first in (800, 900, 1000):
        other = replace(batch, seeds=tuple(range(first, first + len(batch.seeds))))
        totals.append(float(drafter.loss(other, world.target.head).total.detach()))
    assert totals[0] == totals[1]
    assert len(set(totals)) > 1


@trained
def test_padding_changes_nothing(world, name):
    drafter = shaken(world.drafter(name, num_anchors=1000))
    batch = world.batch(drafter.needs, [1, 2])
    changed = padded(batch, by=4)
    found, other = (drafter.loss(one, world.target.head) for one in (batch, changed))
    torch.testing.assert_close(found.total, other.total, rtol=1e-5, atol=1e-4)
    assert found.count == other.count
    mine, others = (gradients(drafter, one, head=world.target.head) for one in (batch, changed))
    for key in mine:
        torch.testing.assert_close(mine[key], others[key], rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def padded(batch, *, by):
    """Wider, and with noise instead of zeros wherever no token is."""
    width = batch.tokens_BT.shape[1] + by
    padding_BT = torch.arange(width) >= batch.lengths_B[:, None]
    generator = torch.Generator().manual_seed(1)

    def widen(values, noise):
        wide = values.new_zeros((len(values), width, *values.shape[2:]))
        wide[:, :-by] = values
        wide[padding_BT] = noise(wide[padding_BT])
        return wide

    def loud(values):
        return 3 * torch.randn(values.shape, generator=generator)

    return replace(
        batch,
        tokens_BT=widen(batch.tokens_BT, lambda values: torch.full_like(values, 77)),
        loss_mask_BT=widen(batch.loss_mask_BT, torch.zeros_like),
        aux_BTLD=None if batch.aux_BTLD is None else widen(batch.aux_BTLD, loud),
        last_BTD=widen(batch.last_BTD, loud),
        lse_BT=widen(batch.lse_BT, loud),
    )


@every
def test_what_is_saved_is_loaded_to_the_bit_and_drafts_the_same(world, name, tmp_path):
    drafter = shaken(world.drafter(name))
    save_drafter(drafter, tmp_path / "drafter", spec=world.target.spec)
    loaded = load_drafter(tmp_path / "drafter", spec=world.target.spec)
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    assert (loaded.needs, loaded.block_size) == (drafter.needs, drafter.block_size)
    mine, others = drafter.state_dict(), loaded.state_dict()
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[key], others[key]) for key in mine)
    prompts = [example.tokens_T[:20] for example in world.examples[:3]]
    readings = [Reading(one, world.target, prompts) for one in (drafter, loaded)]
    for uniforms_BS in (None, readings[0].uniforms(drafter.block_size)):
        first, second = (reading.propose(drafter.block_size, uniforms_BS) for reading in readings)
        assert torch.equal(first.tokens_BS, second.tokens_BS)
        assert torch.equal(first.lengths_B, second.lengths_B)
        for one, other in ((first.probs_BSV, second.probs_BSV), (first.likeliest_BS, second.likeliest_BS)):
            assert (one is None and other is None) or torch.equal(one, other)


# Causality. Supervising tokens p to p + k of one row, with one anchor that falls on p, leaves the labels p+1 .. p+k of
# that anchor: the loss is the sum of its first k slots, and slot k may know the tokens up to p + k - 1 and the target's
# states before p. The target's side of the loss hides what a drafter reads, so it is taken out of the way:
#  - cross-entropy alone reads labels, but no target state: then no state from p on may matter;
#  - KL alone reads target states, but no label: then no token from p + k on may matter, its own label included.
# A drafter whose sessions run the target's own layers (they take its cache, `share`) makes the states of those
# layers up to p + k - 1 itself; from there on none may matter.
P = 22
TOLERANCE, ACTS = 1e-5, 1e-2


def states_that_matter(drafter, world, *, first):
    """How much the loss (cross-entropy alone) moves when the states from p + first(k) on are others, for each k."""
    return [matters(drafter, world, batch, other_states, P + first(k)) for k, batch in single_anchors(drafter, world)]


def tokens_that_matter(drafter, world, *, first):
    """How much the loss (KL alone) moves when the tokens from p + first(k) on are others, for each k."""
    return [matters(drafter, world, batch, other_tokens, P + first(k)) for k, batch in single_anchors(drafter, world)]


def matters(drafter, world, batch, other, place):
    """The most of a few changes: the slots of one could cancel out."""
    loss = loss_of(drafter, world, batch)
    return max(abs(loss - loss_of(drafter, world, other(batch, place, seed))) for seed in range(1, 4))


def single_anchors(drafter, world):
    """For k = 1 to the block size: k, and a batch with k labels after one anchor at P, and text before and after."""
    batch = world.batch(drafter.needs, [0])
    places_T = torch.arange(batch.tokens_BT.shape[1])
    for k in range(1, drafter.block_size + 1):
        masked = replace(batch, loss_mask_BT=((places_T >= P) & (places_T <= P + k))[None])
        drawn = (replace(masked, seeds=(seed,)) for seed in range(999))
        yield k, next(one for one in drawn if anchor_of(one) == [P])


def anchor_of(batch):
    return sample_anchors(batch, num_anchors=1, block_size=1).positions_A.tolist()


def loss_of(drafter, world, batch):
    losses = drafter.train().loss(batch, world.target.head)
    assert losses.count == batch.loss_mask_BT.sum() - 1, "more is supervised than the labels of one anchor"
    return float(losses.total.detach())


def other_states(batch, place, seed):
    generator = torch.Generator().manual_seed(seed)

    def other(values):
        values = values.clone()
        values[:, place:] += 3 * torch.randn(values[:, place:].shape, generator=generator)
        return values

    aux_BTLD = None if batch.aux_BTLD is None else other(batch.aux_BTLD)
    return replace(batch, aux_BTLD=aux_BTLD, last_BTD=other(batch.last_BTD), lse_BT=other(batch.lse_BT))


def other_tokens(batch, place, seed):
    tokens_BT = batch.tokens_BT.clone()
    tokens_BT[:, place:] = 4 + (tokens_BT[:, place:] + 31 * seed) % 100
    return replace(batch, tokens_BT=tokens_BT)


def state_reader(world, name):
    return shaken(world.drafter(name, num_anchors=1, loss={**OFF, "ce": 1.0}))


def token_reader(world, name):
    return shaken(world.drafter(name, num_anchors=1, loss={**OFF, "kl": 1.0}))


def runs_target_layers(drafter, world):
    return type(drafter.session(world.target, 1)).share is not Session.share


@trained
def test_no_draft_sees_a_state_that_is_not_there_yet(world, name):
    drafter = state_reader(world, name)
    own = runs_target_layers(drafter, world)
    assert max(states_that_matter(drafter, world, first=lambda k: k if own else 0)) < TOLERANCE
    assert min(states_that_matter(drafter, world, first=lambda k: -1)) > ACTS, "it reads no state: nothing was tested"


@trained
def test_no_draft_sees_its_own_token_or_a_later_one(world, name):
    drafter = token_reader(world, name)
    assert max(tokens_that_matter(drafter, world, first=lambda k: k)) < TOLERANCE


@trained
@pytest.mark.parametrize("shift", [1, 2])
def test_a_drafter_that_reads_states_too_early_is_found(world, name, shift, monkeypatch):
    """The twin of the test of states: every state moved up by `shift`, so that a head sees that of the anchor."""
    drafter = state_reader(world, name)
    honest, first = type(drafter).loss, drafter.block_size if runs_target_layers(drafter, world) else 0

    def leaky(self, batch, head):
        aux_BTLD = None if batch.aux_BTLD is None else batch.aux_BTLD.roll(-shift - first, 1)
        return honest(self, replace(batch, aux_BTLD=aux_BTLD, last_BTD=batch.last_BTD.roll(-shift - first, 1)), head)

    monkeypatch.setattr(type(drafter), "loss", leaky)
    assert min(states_that_matter(drafter, world, first=lambda k: k if first else 0)) > ACTS


def test_a_drafter_that_reads_its_labels_is_found(world, monkeypatch):
    """The twin of the test of tokens, for a head that reads the tokens before its drafts: it is fed the labels."""
    drafter = token_reader(world, "markov")

    def leaky(batch, **sizes):
        anchors = sample_anchors(batch, **sizes)
        return replace(anchors, tokens_AG=anchors.labels_AG)

    monkeypatch.setattr("drafters.heads.block.sample_anchors", leaky)
    assert min(tokens_that_matter(drafter, world, first=lambda k: k)) > ACTS
