# One pass over a tree, on every tiny family: each slot's logits and states are those of its path as plain text, after
# ragged caches, holes and windows; and what the cache keeps of it goes on like plain text.

import pytest
import torch

from drafters.decoding.tree import Tree
from drafters.errors import ConfigError
from drafters.target import FrozenTarget
from drafters.tree_pass import layer_patterns, tree_masks
from drafters.types import Needs
from tests.test_families import FAMILIES, WINDOWED, family_model, prompts
from tests.tiny import tiny_llama, tiny_target

PARENTS = (-1, -1, 0, 0, 1, 2, 3, 5, 7, 8)  # deeper than the tiny families' window of 6 with the anchor
NEEDS = Needs(layer_ids=(0, 2), last=True)


def path_to(slot):
    path = []
    while slot >= 0:
        path.insert(0, slot)
        slot = PARENTS[slot]
    return path


def filled_cache(target, generator):
    """Three rows of 14, 2 and 9 tokens with holes between them, and their texts."""
    rows = [row.tolist() for row in prompts(13, 1, 7)]
    lengths_B = torch.tensor([13, 1, 7])
    cache = target.new_cache(3)
    padded_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    target.step(padded_BT, cache, lengths_B=lengths_B, logits="none")
    more_BS = torch.randint(3, 128, (3, 2), generator=generator)
    target.step(more_BS, cache, logits="none")
    gained = [1, 1, 2]
    cache.rollback(lengths_B + torch.tensor(gained))
    return cache, [row + more_BS[b, : gained[b]].tolist() for b, row in enumerate(rows)]


def plain(target, text):
    """Logits and states after the last token, without a cache."""
    states = target.states(torch.tensor([text]), needs=NEEDS)
    with torch.inference_mode():
        logits = target.model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return logits.float(), states.aux_BTLD[0, -1], states.last_BTD[0, -1]


def assert_tree_pass_is_plain(target):
    generator = torch.Generator().manual_seed(5)
    cache, rows = filled_cache(target, generator)
    for turn in range(3):
        tokens_BS = torch.randint(3, 128, (3, 1 + len(PARENTS)), generator=generator)
        out = target.step(tokens_BS, cache, parents_S=PARENTS, needs=NEEDS)
        for b, row in enumerate(rows):
            for slot in range(-1, len(PARENTS)):
                text = row + [int(tokens_BS[b, 1 + s]) for s in [-1, *path_to(slot)]]
                got = out.logits_BSV[b, 1 + slot], out.aux_BSLD[b, 1 + slot], out.last_BSD[b, 1 + slot]
                for mine, expected in zip(got, plain(target, text), strict=True):
                    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
        kept = [path_to(slot) for slot in ((9, -1, 4), (0, 6, 3), (-1, 1, 9))[turn]]
        kept_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
        for b, path in enumerate(kept):
            kept_BS[b, [0, *(1 + slot for slot in path)]] = True
            rows[b] = rows[b] + tokens_BS[b, kept_BS[b]].tolist()
        cache.keep_path(kept_BS)
        assert cache.lengths_B.tolist() == cache.valid_BS.sum(1).tolist() == list(map(len, rows))
        more_BS = torch.randint(3, 128, (3, 2), generator=generator)
        out = target.step(more_BS, cache)
        rows = [row + more_BS[b].tolist() for b, row in enumerate(rows)]
        for b, row in enumerate(rows):
            torch.testing.assert_close(out.logits_BSV[b, 1], plain(target, row)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_slot_is_its_path_and_what_is_kept_goes_on(name):
    assert_tree_pass_is_plain(FrozenTarget.from_model(family_model(name), mask_token_id=3))


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_must_be_heeded_by_the_tree_pass(name, monkeypatch):
    target = FrozenTarget.from_model(family_model(name), mask_token_id=3)
    monkeypatch.setattr(target, "_patterns", [("full_attention", 0)] * 4)
    with pytest.raises(AssertionError):
        assert_tree_pass_is_plain(target)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_both_attentions_take_the_mask(kind):
    model = tiny_llama()
    model.set_attn_implementation(kind)
    assert_tree_pass_is_plain(FrozenTarget.from_model(model))


def test_rows_may_use_the_first_slots_only():
    target = tiny_target()
    cache = target.new_cache(2)
    target.step(torch.tensor([[3, 4, 5], [6, 7, 8]]), cache)
    tokens_BS = torch.randint(3, 128, (2, 1 + len(PARENTS)), generator=torch.Generator().manual_seed(0))
    out = target.step(tokens_BS, cache, parents_S=PARENTS, lengths_B=torch.tensor([4, 1]))
    assert out.logits_BSV.isfinite().all()
    torch.testing.assert_close(out.logits_BSV[1, 0], plain(target, [6, 7, 8, int(tokens_BS[1, 0])])[0])
    kept_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
    kept_BS[:, [0, 1, 3, 6]] = True  # of which slot 6 is none of row 0's, and only the anchor is row 1's
    cache.keep_path(kept_BS)
    assert cache.lengths_B.tolist() == [6, 4]
    out = target.step(torch.tensor([[9], [9]]), cache)
    text = [3, 4, 5, *tokens_BS[0, [0, 1, 3]].tolist(), 9]
    torch.testing.assert_close(out.logits_BSV[0, 0], plain(target, text)[0])


def naive_allows(pattern, query, key):
    kind, size = pattern
    if kind == "sliding_attention":
        return query - key < size
    return kind == "full_attention" or query // size == key // size


def test_masks_equal_the_naive_twin():
    valid_BS = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    tree = Tree.of((-1, 0, -1))
    positions_BS = torch.tensor([[3, 4, 5, 4], [3, 4, 5, 4]])
    keys = [[0, 1, None, 2, 3, 4, 5, 4], [None, 0, 1, 2, 3, 4, 5, 4]]
    sees = {0: {0}, 1: {0, 1}, 2: {0, 1, 2}, 3: {0, 3}}
    patterns = {("full_attention", 0), ("sliding_attention", 3), ("chunked_attention", 2)}
    masks = tree_masks(patterns, valid_BS, positions_BS, tree.parents, dtype=torch.float32)
    for pattern, mask in masks.items():
        for b in range(2):
            for y in range(4):
                for s, key in enumerate(keys[b]):
                    seen = key is not None and (s < 4 or s - 4 in sees[y])
                    seen = seen and naive_allows(pattern, int(positions_BS[b, y]), key)
                    assert (mask[b, 0, y, s] == 0) == seen, (pattern, b, y, s)


def test_patterns_come_from_either_kind_of_config():
    mistral, gemma3 = (family_model(name).config for name in ("mistral", "gemma3"))
    assert layer_patterns(mistral, 4) == [("sliding_attention", 6)] * 4
    assert layer_patterns(gemma3, 4) == [("sliding_attention", 6), ("full_attention", 0)] * 2
    assert layer_patterns(family_model("llama").config, 4) == [("full_attention", 0)] * 4


def test_a_target_that_ignores_the_mask_is_refused():
    model = tiny_llama()
    for layer in model.model.layers:
        straight = layer.forward
        layer.forward = lambda *args, straight=straight, **kwargs: straight(*args, **{**kwargs, "attention_mask": None})
    target = FrozenTarget(model, tokenizer=None, spec=tiny_target().spec)
    cache = target.new_cache(1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tree: this target cannot verify trees .*differ by"):
            target.step(torch.tensor([[3, 4]]), cache, parents_S=(-1,))
    assert cache.num_slots == 0


def test_a_target_that_fails_on_the_mask_is_refused():
    target = tiny_target()

    def fail(module, args, kwargs):
        if kwargs["attention_mask"] is not None and kwargs["attention_mask"].is_floating_point():
            raise RuntimeError("no such mask")

    target.decoder.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(
        ConfigError, match=r"tree: this target cannot verify trees .*no such mask.*decode without a tree"
    ):
        target.check_trees()
