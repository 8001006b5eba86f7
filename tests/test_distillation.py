# From blocks to losses, for every family: one output projection or one for each slot, weights of slots, schedules.

from dataclasses import replace

import pytest
import torch

from drafters.heads.anchors import sample_anchors
from drafters.heads.distillation import Blocks, Distillation, no_anchors
from drafters.losses import LossWeights
from drafters.vocab import DraftVocab
from tests.block_doubles import make_batch
from tests.tiny import tiny_target

WEIGHTS = LossWeights(ce=0.3, l1=1.0, kl=0.5, lk=0.2, gamma=3.0, chunk=16)
SLOTS = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def given(target):
    """A batch, its anchors, and random states [A, G, D]."""
    batch = make_batch(target, [16, 9])
    anchors = sample_anchors(batch, num_anchors=6, block_size=SLOTS)
    generator = torch.Generator().manual_seed(0)
    shape = (len(anchors.rows_A), SLOTS, target.spec.hidden_size)
    return batch, anchors, torch.randn(shape, generator=generator).requires_grad_()


def projections(target, count, vocab):
    generator = torch.Generator().manual_seed(1)
    size = target.spec.vocab_size if vocab is None else vocab.size
    return [torch.randn(size, target.spec.hidden_size, generator=generator).requires_grad_() for _ in range(count)]


def vocab_of(target, reduced):
    size = target.spec.vocab_size
    return DraftVocab(torch.arange(0, size, 3), num_full=size) if reduced else None


def loss(given, target, blocks, vocab=None, weights=WEIGHTS, progress=1.0):
    batch, anchors, _ = given
    distill = Distillation(weights, vocab)
    return distill(replace(batch, progress=progress), anchors, blocks, target.head, want_metrics=True)


def slot_by_slot(given, target, projection_of, vocab):
    """The same loss from one-slot blocks, each with its own weight."""
    batch, anchors, hidden_AGD = given
    total = 0.0
    for k in range(SLOTS):
        one = {name: values[:, k : k + 1] for name, values in vars(anchors).items() if name.endswith("_AG")}
        weight = torch.exp(torch.tensor([-k / WEIGHTS.gamma]))
        blocks = Blocks(hidden_AGD=hidden_AGD[:, k : k + 1], own=projection_of(k), weights_G=weight)
        distill = Distillation(WEIGHTS, vocab)
        total = total + distill(batch, replace(anchors, **one), blocks, target.head, want_metrics=False).total
    return total


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("count", [0, 1, SLOTS])
def test_the_slots_of_a_block_add_up(given, target, count, reduced):
    """With the target's projection (0), one of the drafter's own, and one for each slot; in value and gradient."""
    vocab = vocab_of(target, reduced)
    own = projections(target, count, vocab)
    leaves = [given[2], *own]
    found = loss(given, target, Blocks(hidden_AGD=given[2], own=own), vocab)
    naive = slot_by_slot(given, target, lambda k: own if count < 2 else [own[k]], vocab)
    torch.testing.assert_close(found.total, naive, rtol=1e-4, atol=1e-4)
    for one, other in zip(torch.autograd.grad(found.total, leaves), torch.autograd.grad(naive, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert other.abs().max() > 0


@pytest.mark.parametrize("reduced", [True, False])
def test_equal_projections_for_each_slot_are_one(given, target, reduced):
    vocab = vocab_of(target, reduced)
    one = projections(target, 1, vocab)
    shared, each = (loss(given, target, Blocks(hidden_AGD=given[2], own=own), vocab) for own in (one, one * SLOTS))
    torch.testing.assert_close(shared.total, each.total, rtol=1e-4, atol=1e-4)
    assert shared.count == each.count
    assert shared.metrics.keys() == each.metrics.keys()
    for name, pair in shared.metrics.items():
        torch.testing.assert_close(pair, each.metrics[name], rtol=1e-4, atol=1e-4)
    for name, term in shared.terms.items():
        torch.testing.assert_close(term, each.terms[name], rtol=1e-4, atol=1e-4)


def test_weights_of_slots_take_the_place_of_the_decay(given, target):
    hidden_AGD = given[2]
    decay = torch.exp(-torch.arange(SLOTS) / WEIGHTS.gamma)
    plain, same = (loss(given, target, Blocks(hidden_AGD=hidden_AGD, weights_G=w)) for w in (None, decay))
    assert torch.equal(plain.total, same.total)
    first = loss(given, target, Blocks(hidden_AGD=hidden_AGD, weights_G=torch.tensor([1.0, 0.0, 0.0])))
    (gradient,) = torch.autograd.grad(first.total, hidden_AGD)
    assert gradient[:, 0].abs().max() > 0
    assert not gradient[:, 1:].any()


def test_terms_follow_the_schedule(given, target):
    blocks = Blocks(hidden_AGD=given[2])
    weights = replace(WEIGHTS, ce=0.0, kl=0.0, lk=0.0, first={"ce": 1.0, "l1": 0.0}, first_share=0.5)
    begin, middle, end = (loss(given, target, blocks, weights=weights, progress=p) for p in (0.0, 0.25, 0.75))
    assert (set(begin.terms), set(middle.terms), set(end.terms)) == ({"ce"}, {"ce", "l1"}, {"l1"})
    torch.testing.assert_close(middle.total, 0.5 * begin.total + 0.5 * end.total)


def test_without_anchors_everything_is_zero(target):
    module = torch.nn.Linear(3, 2)
    found = no_anchors(module, torch.device("cpu"))
    found.total.backward()
    assert (float(found.total.detach()), float(found.count)) == (0.0, 0.0)
    assert all(not p.grad.any() for p in module.parameters())
