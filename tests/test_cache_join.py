# Rows that enter a cache later, what a kept path leaves behind, and that neither costs memory for ever.

import pytest
import torch

from drafters.kv_cache import GrowingLayer, TargetCache
from drafters.target import FrozenTarget
from tests.test_families import family_model
from tests.tiny import tiny_target


def filled(target, *rows):
    cache = target.new_cache(len(rows))
    padded_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    target.step(padded_BT, cache, lengths_B=torch.tensor([len(row) for row in rows]), logits="none")
    return cache


def texts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def assert_goes_on(target, cache, rows):
    """Three more tokens, of which the first one, two or three stay in turn, five times: as without a cache."""
    generator = torch.Generator().manual_seed(9)
    for turn in range(5):
        assert cache.lengths_B.tolist() == cache.valid_BS.sum(1).tolist() == [len(row) for row in rows]
        assert cache.dense == bool(cache.valid_BS.all())
        more_BS = torch.randint(3, 128, (len(rows), 3), generator=generator)
        out = target.step(more_BS, cache)
        for b, row in enumerate(rows):
            with torch.inference_mode():
                expected = target.model(torch.tensor([row + more_BS[b].tolist()]), use_cache=False).logits[0, -3:]
            torch.testing.assert_close(out.logits_BSV[b], expected.float(), rtol=1e-3, atol=1e-4)
        rows = [row + more_BS[b, : 1 + (b + turn) % 3].tolist() for b, row in enumerate(rows)]
        cache.rollback(torch.tensor([len(row) for row in rows]))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("mine", "theirs"), [((9, 2), (4, 12, 1)), ((12,), (3,)), ((3, 5), (5, 3)), ((4,), (4,))])
def test_joined_rows_go_on_as_alone(name, mine, theirs):
    target = FrozenTarget.from_model(family_model(name), mask_token_id=3)
    mine, theirs = texts(*mine), texts(*theirs, seed=1)
    cache, other = filled(target, *[[*row, 5, 6] for row in mine]), filled(target, *theirs)
    cache.rollback(torch.tensor([len(row) for row in mine]))
    cache.join(other)
    assert cache.num_slots == max(map(len, mine + theirs))
    assert_goes_on(target, cache, mine + theirs)


def test_rows_leave_and_others_join():
    target = tiny_target()
    rows = texts(9, 2, 6)
    cache = filled(target, *rows)
    cache.keep(torch.tensor([2, 1]))
    cache.join(filled(target, *texts(7, seed=1)))
    cache.keep(torch.tensor([2, 0]))
    assert_goes_on(target, cache, [*texts(7, seed=1), rows[2]])


def test_joining_no_rows_or_from_none():
    target = tiny_target()
    rows = texts(5, 3)
    cache = filled(target, *rows)
    cache.join(target.new_cache(0))
    assert_goes_on(target, cache, rows)
    cache = filled(target, [4, 5])
    cache.keep(torch.tensor([], dtype=torch.int64))
    assert cache.num_slots == 0
    cache.join(filled(target, *rows))
    assert_goes_on(target, cache, rows)


def capacity(cache):
    return {layer.buffers[0].shape[2] for layer in cache.hf.layers}


def test_joining_leaves_room_to_grow():
    target = tiny_target()
    cache = filled(target, *texts(9, 2))
    cache.join(filled(target, *texts(4)))
    assert capacity(cache) == {18}
    before = cache.hf.layers[0].keys.data_ptr()
    target.step(torch.tensor([[3] * 9] * 3), cache)
    assert cache.hf.layers[0].keys.data_ptr() == before


def naive_path(valid_BS, kept_BS):
    """Per row, which slots' contents stay, in order."""
    past = valid_BS.shape[1] - kept_BS.shape[1]
    return [
        [s for s in range(valid_BS.shape[1]) if valid_BS[b, s] and (s < past or kept_BS[b, s - past])]
        for b in range(len(valid_BS))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_kept_path_equals_the_naive_twin(seed):
    """On a cache whose keys are slot numbers, so that what stays, and where, can be read off it."""
    generator = torch.Generator().manual_seed(seed)
    cache = TargetCache(batch_size=3, sliding=False, device=torch.device("cpu"))
    cache.append(torch.tensor([9, 5, 7]), 9)
    cache.append(torch.tensor([5, 3, 5]) if seed % 2 else None, 5)
    slots = torch.arange(14.0).view(1, 1, 14, 1).expand(3, 2, 14, 4)
    cache.hf.update(slots, -slots, 0)
    kept_BS = torch.rand(3, 5, generator=generator) < 0.5
    kept_BS[:, 0] = True
    expected = naive_path(cache.valid_BS, kept_BS)
    cache.keep_path(kept_BS)
    assert cache.lengths_B.tolist() == [len(row) for row in expected]
    layer = cache.hf.layers[0]
    for b, row in enumerate(expected):
        assert layer.keys[b, 1, cache.valid_BS[b], 0].tolist() == row
        assert layer.values[b, 0, cache.valid_BS[b], 3].tolist() == [-s for s in row]
    assert cache.valid_BS.any(0)[-1]


def test_a_path_of_one_row_leaves_no_holes():
    target = tiny_target()
    cache = filled(target, [3, 4, 5])
    target.step(torch.tensor([[6, 7, 8, 9]]), cache, parents_S=(-1, -1, 1))
    cache.keep_path(torch.tensor([[True, False, True, True]]))
    assert cache.dense
    assert cache.num_slots == 6
    assert_goes_on(target, cache, [[3, 4, 5, 6, 8, 9]])


def test_rejected_trees_cost_no_memory_for_ever():
    target = tiny_target()
    cache = filled(target, *texts(6, 3))
    parents_S = (-1,) * 8
    for turn in range(40):
        target.step(torch.full((2, 9), 7), cache, parents_S=parents_S)
        kept_BS = torch.zeros(2, 9, dtype=torch.bool)
        kept_BS[:, 0] = True
        kept_BS[turn % 2, 5] = True
        cache.keep_path(kept_BS)
        assert cache.num_slots <= 2 + int(cache.lengths_B.max()) / 0.75
    assert cache.lengths_B.tolist() == [66, 63]
    assert max(capacity(cache)) <= 2 * (2 + 66 / 0.75 + 9)


def test_buffers_shrink_when_the_long_row_leaves():
    target = tiny_target()
    rows = texts(300, 5, 4)
    cache = filled(target, *rows)
    assert min(capacity(cache)) >= 300
    cache.keep(torch.tensor([2, 1]))
    assert max(capacity(cache)) <= 10
    assert_goes_on(target, cache, [rows[2], rows[1]])


def test_taking_few_slots_shrinks_a_layer():
    layer = GrowingLayer()
    states = torch.randn(1, 2, 50, 4)
    layer.update(states, states)
    layer.take(torch.tensor([[3, 40]]))
    assert layer.buffers[0].shape[2] == 4
    assert torch.equal(layer.keys, states[:, :, [3, 40]])
