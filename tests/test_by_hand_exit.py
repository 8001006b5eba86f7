# Self-speculation worked by hand: the adapter on one state, and a target of two layers whose first layer counts on
# around a circle of four tokens while the second knows one exception.

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.decoding.loop import DecodeConfig, decode
from drafters.heads.exit import AdapterConfig, ExitDrafter
from drafters.target import FrozenTarget
from tests.tiny import tiny_spec


def put(weight, rows):
    with torch.no_grad():
        weight.copy_(torch.tensor(rows))


def test_the_adapter_on_one_state():
    spec = replace(tiny_spec(hidden_size=8), hidden_size=2, rms_norm_eps=0.0)
    config = ExitDrafter.Config(adapter=AdapterConfig(size=1))
    drafter = ExitDrafter(config, spec, gain_D=torch.tensor([5.0, 10.0]))
    a = math.log(3)
    put(drafter.adapter.gate_proj.weight, [[a, 0.0]])
    put(drafter.adapter.up_proj.weight, [[0.0, -4.0]])
    put(drafter.adapter.down_proj.weight, [[2 / a], [2 / (3 * a)]])
    # x = (1, -1) has rms 1, so n = x. gate = log 3, and silu(log 3) = log 3 / (1 + 1/3) = 3/4 log 3; up = 4.
    # Their product is 3 log 3, so down gives (6, 2) and the repaired state is (7, 1), of rms sqrt(50 / 2) = 5.
    # Over its rms (7/5, 1/5), times the gain (5, 10): (7, 2).
    x_D = torch.tensor([1.0, -1.0])
    weights = drafter.adapter.weights(torch.float32)
    torch.testing.assert_close(drafter.adapter(x_D, weights), torch.tensor([7.0, 1.0]))
    torch.testing.assert_close(drafter.hidden(x_D, weights), torch.tensor([7.0, 2.0]))
    # Another input gain: n = (1, -3), so up = 12, three times as much: (1 + 18, -1 + 6) = (19, 5).
    put(drafter.adapter.norm.weight, [1.0, 3.0])
    torch.testing.assert_close(drafter.adapter(x_D, weights), torch.tensor([19.0, 5.0]))


@pytest.fixture(scope="module")
def circle():
    """Token t stands at t quarters of a circle, its row of the head at t - 1 quarters, so a state that is where it was
    embedded gives t + 1. The first layer changes nothing. The second adds (0, -9) to token 2, at (-1, 0), only: that
    is the place of token 3, so the target says 0 after 2, not 3."""
    sizes = dict(vocab_size=4, hidden_size=2, intermediate_size=1, num_hidden_layers=2, num_attention_heads=1)
    config = LlamaConfig(**sizes, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval().float()
    places = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]
    put(model.model.embed_tokens.weight, places)
    put(model.lm_head.weight, [places[-1], *places[:-1]])
    for layer in model.model.layers:
        put(layer.self_attn.o_proj.weight, [[0.0, 0.0]] * 2)
        put(layer.mlp.down_proj.weight, [[0.0], [0.0]])
    # n = sqrt(2) (-1, 0) at token 2: gate = up = 10 sqrt(2), silu of that is the same but for 1e-5, their product 200.
    # At token 0 silu(-14.1) is -1e-5, and at the others gate is 0.
    put(model.model.layers[1].mlp.gate_proj.weight, [[-10.0, 0.0]])
    put(model.model.layers[1].mlp.up_proj.weight, [[-10.0, 0.0]])
    put(model.model.layers[1].mlp.down_proj.weight, [[0.0], [-9 / 200]])
    return FrozenTarget.from_model(model, mask_token_id=0)


def rounds_of(target, drafter):
    """Seven tokens after the text (3,), drafts of each round, and how many stood."""
    seen = []
    config = DecodeConfig(max_new_tokens=7, stop_ids=())
    (row,) = decode(
        target, drafter, [torch.tensor([3])], config, on_round=lambda p, r, made, drafts: seen.append((drafts, r))
    )
    return row.tokens, [drafts for drafts, _ in seen], [r.accepted for _, r in seen]


def test_layer_skip_draft_by_draft(circle):
    drafter = ExitDrafter(ExitDrafter.Config(exit_layer=0, block_size=3), circle.spec)
    # The target goes 3 -> 0 -> 1 -> 2 -> 0 -> 1 -> 2 -> 0. Each anchor is 0: the first layer counts 1, 2, 3 from there,
    # and 3 is where it is wrong. Two stand, and the target's own 0 after them is the next anchor; then there is room
    # for two drafts and the 0.
    tokens, drafts, accepted = rounds_of(circle, drafter)
    assert tokens == [0, 1, 2, 0, 1, 2, 0]
    assert drafts == [[1, 2, 3], [1, 2]]
    assert accepted == [2, 2]


def test_an_adapter_that_is_the_second_layer_makes_no_mistake(circle):
    config = ExitDrafter.Config(exit_layer=0, block_size=3, adapter=AdapterConfig(size=1))
    drafter = ExitDrafter(config, circle.spec)
    second = circle.model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        put(getattr(drafter.adapter, name).weight, getattr(second, name).weight.tolist())
    tokens, drafts, accepted = rounds_of(circle, drafter)
    assert tokens == [0, 1, 2, 0, 1, 2, 0]
    # 0, then 1 2 0 and the bonus 1, then with room for two more the draft 2 and the bonus 0.
    assert drafts == [[1, 2, 0], [2]]
    assert accepted == [3, 1]
