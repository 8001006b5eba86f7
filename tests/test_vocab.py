# The draft vocabulary: counting, ties, forced ids, the two maps, and what is refused.

import copy

import pytest
import torch

from drafters.errors import ConfigError
from drafters.vocab import DraftVocab, count_vocab, coverage
from tests.block_doubles import make_batch, make_drafter
from tests.tiny import tiny_target

TOKENS = [torch.tensor([5, 5, 5, 7, 7, 1]), torch.tensor([[9, 9], [9, 7]])]


def test_the_most_frequent_ids_ascending():
    assert count_vocab(TOKENS, size=2, vocab_size=12).ids_V.tolist() == [5, 7]
    assert count_vocab(TOKENS, size=3, vocab_size=12).ids_V.tolist() == [5, 7, 9]


def test_ties_and_unseen_ids_go_by_id():
    assert count_vocab(TOKENS, size=6, vocab_size=12).ids_V.tolist() == [0, 1, 2, 5, 7, 9]


def test_forced_ids_are_in():
    vocab = count_vocab(TOKENS, size=3, vocab_size=12, always=(11, 2, 11))
    assert vocab.ids_V.tolist() == [2, 5, 11]


def test_maps_round_trip():
    vocab = count_vocab(TOKENS, size=4, vocab_size=12)
    assert vocab.size == 4
    assert torch.equal(vocab.d2t[vocab.to_draft(vocab.d2t)], vocab.d2t)
    assert vocab.t2d.nonzero().flatten().tolist() == vocab.d2t.tolist()
    assert vocab.to_draft(torch.tensor([[2, 9], [0, 7]])).tolist() == [[-1, 3], [-1, 2]]


def test_coverage():
    vocab = count_vocab(TOKENS, size=2, vocab_size=12)
    assert coverage(TOKENS, vocab) == pytest.approx(6 / 10)
    assert coverage([], vocab) == 0.0


class Holder(torch.nn.Module):
    def __init__(self, ids):
        super().__init__()
        self.vocab = DraftVocab(torch.tensor(ids), num_full=12)


def test_it_is_stored_with_the_module_that_holds_it():
    """As its ids alone, which no cast changes; what is loaded is looked up, in a copy too."""
    first, second = Holder([5, 7]).half(), Holder([0, 1])
    assert {name: t.tolist() for name, t in first.state_dict().items()} == {"vocab.d2t": [5, 7]}
    assert not list(first.parameters())
    second.load_state_dict(first.state_dict())
    for vocab in (second.vocab, copy.deepcopy(second).vocab):
        assert vocab.ids_V.tolist() == [5, 7]
        assert vocab.to_draft(torch.tensor([0, 5, 7])).tolist() == [-1, 0, 1]
    assert first.vocab.to("meta").id_to_draft_V.is_meta


def test_what_was_gathered_by_the_old_ids_is_gathered_anew():
    """A loss keeps the vocabulary's rows between calls; loading other ids must reach it."""
    target = tiny_target()
    first, other = make_drafter(target).eval(), make_drafter(target)
    batch, size = make_batch(target, [12, 9]), target.spec.vocab_size
    stale = first.loss(batch, target.head).total
    tensors = {**other.state_dict(), "vocab.d2t": torch.arange(1, size, 2)}
    first.load_state_dict(tensors)
    other.load_state_dict(tensors)
    found = first.loss(batch, target.head).total
    assert torch.equal(found, other.loss(batch, target.head).total)
    assert not torch.allclose(found, stale)


@pytest.mark.parametrize("size", [0, 1, 12, 13])
def test_sizes_that_do_not_fit_are_refused(size):
    with pytest.raises(ConfigError, match=f"draft_vocab_size: got {size}; accepted: 2 to 11, or null for all 12"):
        count_vocab(TOKENS, size=size, vocab_size=12, always=(3, 4))


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 2], [2, 12]])
def test_ids_that_are_no_vocabulary_are_refused(ids):
    with pytest.raises(ConfigError, match="draft vocabulary"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), num_full=12)
