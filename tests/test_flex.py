# Flex attention of block drafters beyond one tile: the same function as the CPU's own path, one mask for all layers,
# and few kernels for batches of many lengths.

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from drafters.heads import block, masks
from drafters.heads.masks import BlockLayout, block_attention, flex_block_attention
from tests.block_doubles import make_batch, make_drafter
from tests.tiny import tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def layout_of(*counts, num_context, block_size=5, window=None):
    """Random anchors, so many in each conversation."""
    generator = torch.Generator().manual_seed(0)
    picked = [torch.randperm(num_context - 1, generator=generator)[:n].sort().values + 1 for n in counts]
    return BlockLayout(
        rows_A=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        positions_A=torch.cat(picked),
        num_rows=len(counts),
        num_context=num_context,
        block_size=block_size,
        window=window,
    )


def inputs_of(layout, *, num_heads=4, num_kv=2, head_dim=8):
    torch.manual_seed(1)
    num_slots, num_keys = len(layout.rows_A) * layout.block_size, layout.num_rows * layout.num_context
    sizes = (num_slots, num_heads), (num_keys, num_kv), (num_keys, num_kv), (num_slots, num_kv), (num_slots, num_kv)
    return [torch.randn(*size, head_dim, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("window", [None, 40])
def test_many_tiles_and_uneven_rows(window):
    layout = layout_of(40, 1, 27, num_context=150, window=window)
    found = []
    for function in (flex_block_attention, block_attention):
        query, keys, values, own_keys, own_values = inputs_of(layout)
        with torch.no_grad():
            out = function(query, (keys, values), (own_keys, own_values), layout)
        found.append(out)
    torch.testing.assert_close(*found)
    assert layout.flex.num_slots > 128 < layout.flex.num_context


def test_lengths_share_kernels(monkeypatch):
    counter = CompileCounter()
    kernels = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=counter)
    monkeypatch.setattr(masks, "_flex_attention", lambda *, compiled: kernels)
    for count, num_context in ((5, 130), (9, 177), (7, 200), (4, 255), (5, 131)):
        layout = layout_of(count, num_context=num_context)
        query, keys, values, own_keys, own_values = inputs_of(layout)
        with torch.no_grad():
            found = flex_block_attention(query, (keys, values), (own_keys, own_values), layout)
            torch.testing.assert_close(found, block_attention(query, (keys, values), (own_keys, own_values), layout))
    assert counter.frame_count == 1


def test_a_step_makes_one_mask(monkeypatch):
    made, of = [], masks._flex_of
    monkeypatch.setattr(masks, "_flex_of", lambda layout: made.append(layout) or of(layout))
    monkeypatch.setattr(block, "block_attention", flex_block_attention)
    target = tiny_target()
    drafter, batch = make_drafter(target, num_layers=3), make_batch(target, [20, 16])
    with torch.no_grad():
        drafter.loss(batch, target.head)
    assert len(made) == 1
