# Which tensors of which drafter are quantized, and that what engines join into one matrix is treated alike.

import pytest

from export.quantize import float_reason, fused_groups, is_quantized
from tests.contract_cases import SHOWN, TRAINED, tiny_world

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYER = {f"self_attn.{part}" for part in ATTENTION} | {f"mlp.{part}" for part in MLP}


def expected_of(name, drafter):
    """Modules, listed by hand."""
    if name in ("parallel", "markov", "gated", "rnn"):
        return {f"layers.{i}.{part}" for i in range(drafter.config.num_layers) for part in LAYER}
    if name == "eagle3":
        return {f"midlayer.{part}" for part in LAYER}
    if name == "mtp":
        return {f"depths.{i}.block.{part}" for i in range(len(drafter.depths)) for part in LAYER}
    if name == "exit":
        return {f"adapter.{part}" for part in MLP}
    assert name in ("medusa", SHOWN), f"say here what of '{name}' is quantized"
    return set()


@pytest.mark.parametrize("name", TRAINED)
def test_projections_of_layers_and_nothing_else(name):
    drafter = tiny_world().drafter(name)
    tensors = drafter.state_dict()
    expected = {f"{module}.weight" for module in expected_of(name, drafter)}
    assert {one for one in tensors if is_quantized(one)} == expected
    for one, tensor in tensors.items():
        assert (float_reason(one) is None) == (one in expected)
        assert one not in expected or tensor.ndim == 2


def test_projections_of_a_target_block_too():
    tensors = tiny_world().drafter("mtp", block="target").state_dict()
    expected = {f"depths.0.block.{part}.weight" for part in LAYER}
    assert {one for one in tensors if is_quantized(one) and one.startswith("depths.0.")} == expected
    assert is_quantized("depths.0.block.self_attn.kv_a_proj_with_mqa.weight")
    assert is_quantized("depths.0.block.mlp.experts.3.down_proj.weight")
    assert not is_quantized("depths.0.block.mlp.gate.weight")  # a router


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fc.weight", "plain float layer"),
        ("depths.1.input_proj.weight", "plain float layer"),
        ("hidden_norm.weight", "a norm's gain"),
        ("layers.0.self_attn.q_norm.weight", "a norm's gain"),
        ("layers.0.post_attention_layernorm.weight", "a norm's gain"),
        ("markov_head.markov_w1.weight", "embedding"),
        ("markov_head.markov_w2.weight", "logits"),
        ("markov_head.gate_proj.weight", "logits"),  # a gate of another kind
        ("markov_head.gate_proj.bias", "a bias"),
        ("confidence_head.proj.weight", "float32"),
        ("lm_head.weight", "output projection"),
        ("heads.0.lm_head.weight", "output projection"),
        ("heads.0.blocks.0.linear.weight", "Medusa"),
        ("embed_tokens.weight", "look-up"),
        ("vocab.d2t", "ids"),
        ("layers.0.self_attn.q_proj.bias", "a bias"),
        ("something.weight", "no projection of a draft layer"),
        ("other.layers.0.mlp.up_proj.weight", "no projection of a draft layer"),
    ],
)
def test_what_stays_float_says_why(name, reason):
    assert not is_quantized(name)
    assert reason in float_reason(name)


@pytest.mark.parametrize("name", TRAINED)
def test_what_engines_join_is_treated_alike(name):
    tensors = tiny_world().drafter(name).state_dict()
    groups = fused_groups(tensors)
    for group in groups:
        assert len({is_quantized(one) for one in group}) == 1
        assert len({tensors[one].shape[1] for one in group}) == 1
    # Whatever is called q, k, v, gate or up and is quantized is in a group, once.
    grouped = [one for group in groups for one in group if is_quantized(one)]
    joined = [one for one in tensors if is_quantized(one) and not one.endswith(("o_proj.weight", "down_proj.weight"))]
    assert sorted(grouped) == sorted(joined)


def test_groups_with_and_without_the_suffix():
    names = [f"layers.0.self_attn.{part}" for part in ATTENTION] + ["layers.0.mlp.up_proj", "layers.0.mlp.gate_proj"]
    assert fused_groups(names) == [
        ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    ]
    assert fused_groups(["a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight"]) == [
        ("a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight")
    ]
    assert fused_groups(["markov_head.gate_proj.weight", "mlp.up_proj.weight"]) == []
    assert fused_groups(["a.q_proj.weight", "a.k_proj.bias", "b.v_proj.weight"]) == []
    assert fused_groups(["a.my_q_proj", "a.my_k_proj", "a.my_v_proj"]) == []
