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


def naive_of_own(given, target, own, vocab, term):
    """A loss of one term from whole softmaxes in float64, slot k with projection k."""
    batch, anchors, hidden_AGD = given
    size, total = target.spec.vocab_size, 0.0
    ids_V = torch.arange(size) if vocab is None else vocab.ids_V
    for a, k in anchors.counted_AG.nonzero().tolist():
        logits_V = target.head.logits(batch.last_BTD.flatten(0, 1)[anchors.states_AG[a, k]]).double()
        logs_V = (own[k] @ hidden_AGD[a, k]).double().log_softmax(-1)
        p_t, label = logits_V.softmax(-1), int(anchors.labels_AG[a, k])
        p_d = torch.zeros_like(p_t).index_add(0, ids_V, logs_V.exp())
        q = p_t[ids_V] / p_t[ids_V].sum()
        of = {
            "ce": -logs_V[ids_V == label].sum(),
            "l1": (p_d - p_t).abs().sum(),
            "kl": (q * (q.log() - logs_V)).sum(),
            "lk": -torch.minimum(p_d, p_t).sum().log(),
        }
        total = total + torch.exp(torch.tensor(-k / WEIGHTS.gamma)) * of[term]
    return total


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("term", ["ce", "l1", "kl", "lk"])
def test_own_projections_equal_whole_softmaxes(given, target, term, reduced):
    """In value, and in the gradient of every projection and of the states."""
    vocab = vocab_of(target, reduced)
    own = projections(target, SLOTS, vocab)
    weights = replace(WEIGHTS, **{"ce": 0.0, "l1": 0.0, "kl": 0.0, "lk": 0.0, term: 1.0})
    found = loss(given, target, Blocks(hidden_AGD=given[2], own=own), vocab, weights).total
    naive = naive_of_own(given, target, own, vocab, term)
    torch.testing.assert_close(found.double(), naive, rtol=1e-4, atol=1e-4)
    leaves = [given[2], *own]
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(naive, leaves), strict=True):
        scale = float(other.abs().max())
        assert scale > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * scale)


def test_a_slot_that_counts_nowhere_leaves_its_projection_alone(given, target):
    batch, anchors, hidden_AGD = given
    counted_AG = anchors.counted_AG.clone()
    counted_AG[:, 1:] = False
    own = projections(target, SLOTS, None)
    found = loss((batch, replace(anchors, counted_AG=counted_AG), None), target, Blocks(hidden_AGD=hidden_AGD, own=own))
    gradients = torch.autograd.grad(found.total, own)
    assert found.count == counted_AG.sum() > 0
    assert [bool(gradient.any()) for gradient in gradients] == [True, False, False]


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


def test_confidence_follows_the_schedule(given, target):
    """Weight 0 at either end: the other terms stay, and the confidence logits get no gradient there."""
    logits_AG = torch.zeros(given[2].shape[:2], requires_grad=True)
    blocks = Blocks(hidden_AGD=given[2], confidence_AG=logits_AG)
    for last, begin, strong_at in ((2.0, 0.0, 1.0), (0.0, 2.0, 0.0)):
        weights = replace(WEIGHTS, confidence=last, first={"confidence": begin}, first_share=0.5)
        off, half, on = (
            loss(given, target, blocks, weights=weights, progress=p) for p in (1 - strong_at, 0.25, strong_at)
        )
        (silent, middle, full) = (torch.autograd.grad(one.total, logits_AG)[0] for one in (off, half, on))
        assert not silent.any()
        assert full.any()
        torch.testing.assert_close(middle, 0.5 * full)
        torch.testing.assert_close(on.total - off.total, 2.0 * on.terms["confidence"], rtol=1e-4, atol=1e-3)
        assert on.terms.keys() == off.terms.keys() == {"ce", "l1", "kl", "lk", "confidence"}


def test_a_term_that_is_off_at_an_end_is_as_if_it_were_never_named(given, target):
    """In value, gradient and metrics, beside the terms that stay."""
    blocks = Blocks(hidden_AGD=given[2])
    alone = loss(given, target, blocks, weights=replace(WEIGHTS, lk=0.0))
    (gradient,) = torch.autograd.grad(alone.total, given[2])
    starting = replace(WEIGHTS, lk=0.7, first={"lk": 0.0})
    ending = replace(WEIGHTS, lk=0.0, first={"lk": 0.7})
    for weights, progress in ((starting, 0.0), (ending, 1.0), (ending, 0.5)):
        found = loss(given, target, blocks, weights=weights, progress=progress)
        assert torch.equal(found.total, alone.total)
        assert torch.equal(torch.autograd.grad(found.total, given[2])[0], gradient)
        assert found.terms.keys() == alone.terms.keys() == {"ce", "l1", "kl"}
        assert all(torch.equal(found.metrics[name][0], pair[0]) for name, pair in alone.metrics.items())


def test_the_acceptance_is_measured_when_no_term_needs_it(given, target):
    """With cross-entropy alone: metrics outside of training, as with every other weight."""
    own = projections(target, SLOTS, None)
    names = ("acceptance", "accepted_length")
    alone = replace(WEIGHTS, l1=0.0, kl=0.0, lk=0.0)
    for each in ([], own):
        blocks = Blocks(hidden_AGD=given[2], own=each)
        found, whole = (loss(given, target, blocks, weights=weights).metrics for weights in (alone, WEIGHTS))
        assert all(torch.equal(found[name][0], whole[name][0]) for name in names)


def test_without_anchors_everything_is_zero(target):
    module = torch.nn.Linear(3, 2)
    found = no_anchors(module, torch.device("cpu"))
    found.total.backward()
    assert (float(found.total.detach()), float(found.count)) == (0.0, 0.0)
    assert all(not p.grad.any() for p in module.parameters())
