# What an import refuses: everything that our classes cannot be, by name and all at once; copies of the target's rows
# that are not the target's; files that are missing, damaged or may run code.

import json

import pytest
import torch

from drafters.errors import CheckpointError, ConfigError
from export.importing import import_draft
from tests.published_doubles import saved_target
from tests.published_folders import DEEPSPEC, EAGLE3, dspark_tensors, eagle3_tensors, published


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    return saved_target(folder)


REFUSED = [
    ({"hidden_size": 64}, "hidden_size is 64, but our drafters take the target's 32"),
    ({"intermediate_size": 48}, "intermediate_size is 48, but our drafters take the target's 64"),
    ({"num_key_value_heads": 4}, "num_key_value_heads is 4, but our drafters take the target's 2"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, but"),
    ({"vocab_size": 130}, "vocab_size is 130, but"),
    ({"num_target_layers": 5}, "num_target_layers is 5, but"),
    ({"rope_theta": 1e6}, r"rotary embedding \(rope_theta 1e\+06, scaling None\) is not the target's"),
    (
        {"rope_parameters": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)},
        "rotary scaling 'yarn' of 1 of a head",
    ),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary settings cannot be read: .*factor"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of 0.5 of a head"),
    ({"attention_bias": True}, "attention_bias is True, which our drafters cannot be"),
    ({"hidden_act": "gelu"}, r"hidden_act is gelu, which our drafters cannot be \(accepted: silu, swish\)"),
    ({"is_neox_style": False}, "is_neox_style is False"),
    ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
    ({"dflash_config": {"attention_value_scale": 0.7}}, "attention_value_scale is 0.7"),
    ({"dflash_config": {"conv_kernel_size": 4}}, "conv_kernel_size is 4"),
    ({"dflash_config": {"causal": True}}, "its block is causal"),
    ({"dflash_config": {"target_layer_ids": [0, 1]}}, r"says two things of target_layer_ids: .*\[0, 1\].*\[0, 2\]"),
    ({"dflash_config": {"projector_type": "domino"}}, "projector_type is domino"),
    ({"mask_token_id": 7}, "mask_token_id is 7, the target's 3; give target.mask_token=7"),
    ({"target_layer_ids": [-1, 2]}, "reads the target's embedding"),
    ({"target_layer_ids": [0, 4]}, r"reads layers \[0, 4\]; accepted: ascending, distinct, of 0 to 3"),
    ({"target_layer_ids": None}, "are missing .*give \\+given.layer_ids="),
    ({"block_size": None}, "block_size is missing; give \\+given.block_size="),
    (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "is_causal": False},
        "one window for",
    ),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "its block is causal"),
    ({"markov_rank": 8}, "markov_rank is 8, but its Markov head has rank 6"),
    ({"markov_head_type": "gated"}, "markov_head_type is gated, but its tensors are of the type vanilla"),
    ({"draft_vocab_size": 64}, "draft_vocab_size is 64, but it holds no d2t"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, but the target's is None"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5, but the target's logits are scaled by 1.0"),
    (
        {"architectures": ["DFlash2DraftModel"]},
        "is a DFlash2DraftModel; our drafters do not have DFlash2's convolutions",
    ),
    ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'; accepted: compressed-tensors"),
]


# Values of another kind than their key's, wherever they stand.
KINDS = [
    ({"architectures": 5}, "architectures is 5, accepted: a list of texts"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', accepted: a whole number from 1 on"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but it holds"),
    ({"block_size": 0}, "block_size is 0, accepted: a whole number from 1 on"),
    ({"block_size": True}, "block_size is True, accepted"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', accepted: a number above 0"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta is -1, accepted: a number above 0"),
    ({"dflash_config": "none"}, "dflash_config is 'none', accepted: an object"),
    (
        {"dflash_config": {"target_layer_ids": ["a"]}},
        r"dflash_config.target_layer_ids is \['a'\], accepted: a list of wh",
    ),
    ({"sample_from_anchor": 0}, "sample_from_anchor is 0, accepted: true or false"),
    ({"markov_head_type": "deep"}, "markov_head_type is 'deep', accepted: vanilla, gated, rnn"),
    (
        {"quantization_config": {"config_groups": {"all": 5}}},
        "quantization_config.config_groups.all is 5, accepted: an o",
    ),
    (
        {"block_size": -1, "speculators_config": {"proposal_methods": [{"speculative_tokens": "x"}]}},
        r"block_size is -1.*; speculators_config.proposal_methods\[0\].speculative_tokens is 'x'",
    ),
]


@pytest.mark.parametrize(("change", "says"), [*REFUSED, *KINDS])
def test_what_our_classes_cannot_be_is_refused_by_name(change, says, target, tmp_path):
    out = published(tmp_path / "out", {**DEEPSPEC, **change}, dspark_tensors())
    with pytest.raises(CheckpointError, match=says) as caught:
        import_draft(out, spec=target.spec)
    assert str(out) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True"),
        ({"fc_norm": True}, "fc_norm is True"),
        ({"norm_output": True}, "norm_output is True"),
        ({"pard_token": 5}, "pard_token is 5"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but our drafters take the target's 1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "should be one less each"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "reads the target's embedding"),
        ({"draft_vocab_size": 60}, "draft_vocab_size is 60, but d2t holds 64 ids"),
        ({"speculators_model_type": "dflash"}, "'dflash', but its tensors are of the kind eagle3"),
        ({"speculators_model_type": "eagle3"}, r"norm_before_residual is missing; give \+given.norm_before_residual="),
    ],
)
def test_what_an_eagle3_of_ours_cannot_be(change, says, target, tmp_path):
    config = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **change}
    out = published(tmp_path / "out", config, eagle3_tensors())
    with pytest.raises(CheckpointError, match=says):
        import_draft(out, spec=target.spec)


def test_all_that_is_wrong_is_said_at_once(target, tmp_path):
    config = {**DEEPSPEC, "hidden_size": 64, "attention_bias": True, "rope_theta": 1e6}
    out = published(tmp_path / "out", config, dspark_tensors())
    with pytest.raises(CheckpointError) as caught:
        import_draft(out, spec=target.spec)
    assert all(part in str(caught.value) for part in ("hidden_size", "attention_bias", "rope_theta"))


def test_missing_unknown_and_ill_shaped_tensors_are_all_named(target, tmp_path):
    tensors = dspark_tensors(
        **{"layers.0.self_attn.attention_sink_bias": torch.zeros(4), "extra.weight": torch.zeros(2)}
    )
    for name in ("norm.weight", "layers.1.mlp.up_proj.weight"):
        del tensors[name]
    tensors["fc.weight"] = torch.zeros(32, 96)
    out = published(tmp_path / "out", DEEPSPEC, tensors)
    with pytest.raises(CheckpointError) as caught:
        import_draft(out, spec=target.spec)
    assert "missing: layers.1.mlp.up_proj.weight, norm.weight" in str(caught.value)
    assert "unknown: extra.weight, layers.0.self_attn.attention_sink_bias" in str(caught.value)
    assert "fc.weight is [32, 96], wanted [32, 64]" in str(caught.value)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_rows_that_are_not_the_targets_are_refused(name, target, folder, tmp_path):
    rows = target.head.embedding_VD if name.startswith("embed") else target.head.lm_head_VD
    own = rows.bfloat16().clone()
    out = published(tmp_path / "out", DEEPSPEC, dspark_tensors(**{name: own}))
    import_draft(out, spec=target.spec, target_folder=folder)
    with pytest.raises(ConfigError, match=f"brings {name} of its own, which has to be compared"):
        import_draft(out, spec=target.spec)
    own[5, 5] += 1
    published(out, DEEPSPEC, dspark_tensors(**{name: own}))
    with pytest.raises(CheckpointError, match=f"its {name} is not the target's"):
        import_draft(out, spec=target.spec, target_folder=folder)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ({"d2t": 2 * torch.arange(64) + 1}, "t2d names other tokens than d2t|distinct ids"),  # absolute, not offsets
        ({"d2t": torch.arange(64) + 80}, "from 80 to 206"),
        ({"d2t": -torch.arange(64)}, "gives 1 distinct ids of 64"),
        ({"t2d": torch.ones(128, dtype=torch.bool)}, "t2d names other tokens"),
    ],
)
def test_ids_that_cannot_be_are_refused(ids, says, target, tmp_path):
    config = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    out = published(tmp_path / "out", config, eagle3_tensors(**ids))
    with pytest.raises(CheckpointError, match=says):
        import_draft(out, spec=target.spec)


def test_folders_that_cannot_be_read(target, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        import_draft(tmp_path, spec=target.spec)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        import_draft(tmp_path, spec=target.spec)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no settings"):
        import_draft(tmp_path, spec=target.spec)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSPEC))
    (tmp_path / "pytorch_model.bin").write_text("pickle")
    with pytest.raises(CheckpointError, match=r"0 \.safetensors files.*pytorch_model\.bin may run code"):
        import_draft(tmp_path, spec=target.spec)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="its tensors cannot be read"):
        import_draft(tmp_path, spec=target.spec)
    out = published(tmp_path / "other", {"architectures": ["LlamaForCausalLM"]}, {"model.embed.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="are of no draft that is known"):
        import_draft(out, spec=target.spec)
    out = published(tmp_path / "twice", DEEPSPEC, dspark_tensors(**{"model.norm.weight": torch.zeros(32)}))
    with pytest.raises(CheckpointError, match=r"holds 'norm\.weight' twice"):
        import_draft(out, spec=target.spec)
    out = published(tmp_path / "mask", DEEPSPEC, dspark_tensors())
    (out / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a mask embedding of its own"):
        import_draft(out, spec=target.spec)


FC = "fc.weight"
TENSORS = [
    (
        FC,
        lambda x: x.to(torch.int8),
        r"fc.weight is torch.int8 of shape \[32, 96\]; accepted: bfloat16, float16 or float32",
    ),
    (FC, lambda x: x.to(torch.float8_e4m3fn), "fc.weight is torch.float8_e4m3fn"),
    (FC, lambda x: x[0, 0].clone(), r"fc.weight is torch.bfloat16 of shape \[\]"),
    (FC, lambda x: x * torch.nan, "fc.weight holds NaN or infinite weights"),
    ("d2t", lambda x: x[:0].clone(), r"d2t is torch.int64 of shape \[0\]; accepted: whole numbers in one row"),
    ("d2t", lambda x: x[0].clone(), r"d2t is torch.int64 of shape \[\]"),
    ("d2t", lambda x: x.float(), "d2t is torch.float32"),
]


@pytest.mark.parametrize(("name", "change", "says"), TENSORS)
def test_tensors_of_another_kind_are_refused_by_name(name, change, says, target, tmp_path):
    tensors = eagle3_tensors()
    config = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 2]}
    out = published(tmp_path / "out", config, {**tensors, name: change(tensors[name])})
    with pytest.raises(CheckpointError, match=says):
        import_draft(out, spec=target.spec)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layer_ids": 5}, "^given.layer_ids is 5, accepted: a list of whole numbers"),
        ({"block_size": "x"}, "^given.block_size is 'x', accepted: a whole number from 1 on"),
    ],
)
def test_what_is_given_is_of_its_kind(given, says, target, tmp_path):
    out = published(tmp_path / "out", DEEPSPEC, dspark_tensors())
    with pytest.raises(ConfigError, match=says):
        import_draft(out, spec=target.spec, given=given)


def test_a_config_without_layer_types_slides_as_its_switch_says(target, tmp_path):
    keys = {"layer_types": None, "use_sliding_window": True, "sliding_window": 9, "is_causal": False}
    out = published(tmp_path / "out", {**DEEPSPEC, **keys, "max_window_layers": 0}, dspark_tensors())
    assert import_draft(out, spec=target.spec)[0]["window"] == 8
    published(out, {**DEEPSPEC, **keys}, dspark_tensors())
    assert import_draft(out, spec=target.spec)[0]["window"] is None


def test_a_drafter_of_our_own_is_told_apart(target, tmp_path):
    out = published(tmp_path / "out", {"schema": 1, "drafters_version": "0.1.0"}, dspark_tensors())
    with pytest.raises(CheckpointError, match="is a drafter of this package, not a published draft; measure its run"):
        import_draft(out, spec=target.spec)
