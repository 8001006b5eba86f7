# Published drafts become ours: folders built here by the names and the configs of those who publish, read into settings
# and tensors; round trips to the bit; everything that our classes cannot be is named.

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.block import BlockDrafter
from export import to_hf, to_speculators
from export.importing import drafter_of, import_draft
from export.source import open_source
from tests.contract_cases import Reading
from tests.published_doubles import BlockEngine, Eagle3Engine, drafter_of_family, saved_target, source_of, stored

PROMPT = torch.tensor([9, 40, 77, 5, 100, 61, 20])
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEEPSPEC = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["full_attention"] * 2,
    "block_size": 4,
    "mask_token_id": 3,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 512,
    "torch_dtype": "bfloat16",
}
Z_LAB = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["full_attention"] * 2,
    "block_size": 5,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}
SPECFORGE = {
    **QWEN3,
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "dflash_config": {
        "projector_type": "dspark",
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    },
}
LLAMA = {**QWEN3, "model_type": "llama", "num_hidden_layers": 1}
EAGLE3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
BACKBONE = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
MARKOV = {"markov_head.markov_w1.weight": (128, 6), "markov_head.markov_w2.weight": (128, 6)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 38), "confidence_head.proj.bias": (1,)}


def layer(prefix, width=32, **more):
    projections = {"q": (32, width), "k": (16, width), "v": (16, width), "o": (32, 32)}
    shapes = {f"{prefix}.self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    shapes |= {f"{prefix}.mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
    shapes |= {f"{prefix}.mlp.down_proj.weight": (32, 64)}
    shapes |= {f"{prefix}.{name}.weight": (32,) for name in ("input_layernorm", "post_attention_layernorm", *more)}
    return shapes


def qwen3_layers():
    shapes = {}
    for index in range(2):
        shapes |= layer(f"layers.{index}")
        shapes |= {f"layers.{index}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
    return shapes


def eagle3_shapes(prefix="midlayer"):
    heads = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (64, 32)}
    return {**heads, **layer(prefix, 64, hidden_norm=True)}


def random_tensors(shapes, *, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(4)
    return {name: (0.3 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def odd_ids():
    """Draft id d is the target's 2 d + 1."""
    tensors = {"d2t": torch.arange(64) + 1, "t2d": torch.zeros(128, dtype=torch.bool)}
    tensors["t2d"][1::2] = True
    return tensors


def published(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def dspark_tensors(**more):
    return {**random_tensors({**BACKBONE, **qwen3_layers(), **MARKOV, **CONFIDENCE}), **more}


def eagle3_tensors(prefix="midlayer", **more):
    return {**random_tensors(eagle3_shapes(prefix)), **odd_ids(), **more}


def envelope(kind, layers, **keys):
    """As speculators' trainer writes it."""
    return {
        "architectures": ["Any"],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "org/target"},
        },
        **keys,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    return saved_target(folder)


def taken(folder, target, **options):
    node, tensors = import_draft(folder, spec=target.spec, **options)
    return node, tensors, drafter_of(node, tensors, spec=target.spec)


def anchor_and_drafts(drafter, target, length):
    reading = Reading(drafter, target, [PROMPT])
    return int(reading.session.anchor_B[0]), reading.propose(length).tokens_BS[0].tolist()


def test_a_dspark_of_deepspec_with_its_frozen_copies(target, folder, tmp_path):
    copies = {"embed_tokens.weight": target.head.embedding_VD, "lm_head.weight": target.head.lm_head_VD}
    copies = {name: tensor.bfloat16() for name, tensor in copies.items()}
    out = published(tmp_path / "out", DEEPSPEC, dspark_tensors(**copies))
    node, _, drafter = taken(out, target, target_folder=folder)
    expected = {"name": "markov", "layer_ids": [0, 2], "num_layers": 2, "block_size": 4, "sample_from_anchor": True}
    assert {key: node[key] for key in expected} == expected
    assert (node["window"], node["draft_vocab_size"], node["confidence"]) == (None, None, True)
    assert isinstance(drafter, BlockDrafter)
    (out / "model.safetensors").unlink()
    published(out, {**DEEPSPEC, "sample_from_anchor": True, "rope_parameters": {"rope_theta": 1e4}}, dspark_tensors())
    anchor, drafts = anchor_and_drafts(drafter, target, 4)
    engine = BlockEngine(out, target)
    engine.tensors = {name: tensor.float() for name, tensor in engine.tensors.items()}
    assert engine.draft(PROMPT, anchor)[0] == drafts


def test_a_dflash_of_z_lab(target, tmp_path):
    out = published(tmp_path / "out", Z_LAB, random_tensors({**BACKBONE, **qwen3_layers()}))
    node, _, drafter = taken(out, target)
    assert (node["name"], node["sequential"], node["confidence"]) == ("parallel", None, False)
    assert (node["block_size"], node["sample_from_anchor"]) == (
        4,
        False,
    )  # five slots, of which the anchor's drafts none
    assert drafter.num_slots == 5


def test_a_dspark_of_specforge_with_everything_nested(target, tmp_path):
    out = published(tmp_path / "out", SPECFORGE, random_tensors({**BACKBONE, **qwen3_layers(), **MARKOV}))
    node, _, _ = taken(out, target)
    assert (node["name"], node["block_size"], node["sample_from_anchor"]) == ("markov", 4, True)
    assert node["sequential"]["rank"] == 6


@pytest.mark.parametrize(
    ("config", "given", "layer_ids"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, [0, 1, 2]),  # vLLM: indices into the hidden states
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, {}, [0, 1, 3]),  # SGLang: outputs
        ({}, {"layer_ids": [0, 2, 3]}, [0, 2, 3]),
    ],
)
def test_an_eagle3_of_specforge(config, given, layer_ids, target, tmp_path):
    out = published(tmp_path / "out", {**EAGLE3, **config}, eagle3_tensors())
    node, tensors, drafter = taken(out, target, given=given)
    assert node["layer_ids"] == layer_ids
    assert (node["norm_before_residual"], node["draft_vocab_size"]) == (False, 64)
    assert drafter.vocab.ids_V.tolist() == list(range(1, 128, 2))
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)


@pytest.mark.parametrize("before", [False, True])
def test_an_eagle3_of_speculators_drafts_alike(before, target, tmp_path):
    keys = dict(draft_vocab_size=64, norm_before_residual=before, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    layers = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in eagle3_tensors("layers.0").items()}
    out = published(tmp_path / "out", envelope("eagle3", layers, **keys), tensors)
    node, _, drafter = taken(out, target)
    assert (node["layer_ids"], node["block_size"], node["norm_before_residual"]) == ([0, 1, 3], 5, before)
    # hidden_states[4] of four layers is after the final norm; ours takes the layer's own output.
    node["layer_ids"] = [0, 1, 2]
    drafter = drafter_of(node, import_draft(out, spec=target.spec)[1], spec=target.spec)
    engine = Eagle3Engine(out, target, layer="layers.0")
    engine.config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    anchor, drafts = anchor_and_drafts(drafter, target, 4)
    assert engine.draft(PROMPT, anchor, 4)[0] == drafts


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_drafts_of_speculators(kind, target, tmp_path):
    layers = {**QWEN3, "layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "use_sliding_window": True}
    keys = dict(block_size=5, mask_token_id=3, aux_hidden_state_layer_ids=[1, 3], sample_from_anchor=False)
    keys |= dict(sliding_window_non_causal=True, draft_vocab_size=128)
    shapes = {**BACKBONE, **qwen3_layers()}
    if kind == "dspark":
        keys |= dict(markov_rank=6, markov_head_type="vanilla")
        shapes |= MARKOV
    node, _, _ = taken(published(tmp_path / "out", envelope(kind, layers, **keys), random_tensors(shapes)), target)
    assert (node["layer_ids"], node["block_size"], node["window"]) == ([0, 2], 4, 7)
    assert node["name"] == ("markov" if kind == "dspark" else "parallel")


def test_a_window_of_a_flat_config_counts_the_position_that_looks(target, tmp_path):
    config = {**Z_LAB, "layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "is_causal": False}
    out = published(tmp_path / "out", config, random_tensors({**BACKBONE, **qwen3_layers()}))
    assert taken(out, target)[0]["window"] == 6
    config = {**Z_LAB, "layer_types": None}
    config["dflash_config"] = {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 9}
    assert taken(published(out, config, random_tensors({**BACKBONE, **qwen3_layers()})), target)[0]["window"] == 8


def test_other_spellings_of_names_and_shards(target, tmp_path):
    spelt = {}
    for name, tensor in dspark_tensors().items():
        for ours, theirs in {
            "markov_head.": "",
            "confidence_head.proj": "confidence_proj",
            "hidden_norm": "context_norm",
        }.items():
            name = name.replace(ours, theirs)
        spelt[f"model.{name}"] = tensor
    out = tmp_path / "out"
    published(out, DEEPSPEC, {})
    (out / "model.safetensors").unlink()
    halves = [dict(list(spelt.items())[::2]), dict(list(spelt.items())[1::2])]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, tensors in zip(files, halves, strict=True):
        save_file(tensors, out / file)
    weights = {name: file for file, tensors in zip(files, halves, strict=True) for name in tensors}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    _, tensors = import_draft(out, spec=target.spec)
    expected = {name: tensor.float() for name, tensor in dspark_tensors().items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_a_confidence_head_that_does_not_read_the_markov_embedding_reads_it_with_zeros(target, tmp_path):
    narrow = dspark_tensors()
    narrow["confidence_head.proj.weight"] = narrow["confidence_head.proj.weight"][:, :32]
    config = {**DEEPSPEC, "confidence_head_with_markov": False}
    _, tensors, _ = taken(published(tmp_path / "out", config, narrow), target)
    weight = tensors["confidence_head.proj.weight"]
    assert torch.equal(weight[:, :32], narrow["confidence_head.proj.weight"].float())
    assert weight.shape == (1, 38)
    assert not weight[:, 32:].any()


def test_ids_in_another_order_are_put_in_the_targets(target, tmp_path):
    tensors = eagle3_tensors()
    turned = torch.arange(127, 0, -2)
    tensors["d2t"] = turned - torch.arange(64)
    config = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    _, ours, drafter = taken(published(tmp_path / "out", config, tensors), target)
    assert torch.equal(ours["lm_head.weight"], tensors["lm_head.weight"].float().flip(0))
    assert torch.equal(drafter.vocab.ids_V, turned.flip(0))


def test_an_eagle3_that_shares_the_targets_head_gets_its_rows(target, folder, tmp_path):
    tensors = random_tensors(eagle3_shapes())
    del tensors["lm_head.weight"]
    config = {**EAGLE3, "draft_vocab_size": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    out = published(tmp_path / "out", config, tensors)
    _, ours, _ = taken(out, target, target_folder=folder)
    assert torch.equal(ours["lm_head.weight"], target.head.lm_head_VD)
    with pytest.raises(ConfigError, match="target: its folder is needed"):
        import_draft(out, spec=target.spec)


def test_ids_of_a_whole_vocabulary_are_none(target, tmp_path):
    tensors = random_tensors({**eagle3_shapes(), "lm_head.weight": (128, 32)})
    tensors |= {"d2t": torch.zeros(128, dtype=torch.int64), "t2d": torch.ones(128, dtype=torch.bool)}
    config = {**EAGLE3, "draft_vocab_size": 128, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    node, ours, _ = taken(published(tmp_path / "out", config, tensors), target)
    assert node["draft_vocab_size"] is None
    assert "vocab.d2t" not in ours


def test_heads_of_the_first_medusa(target, tmp_path):
    shapes = {
        f"{head}.0.linear.{part}": (32, 32) if part == "weight" else (32,)
        for head in range(2)
        for part in ("weight", "bias")
    }
    shapes |= {f"{head}.1.weight": (128, 32) for head in range(2)}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target", "version": "2"}
    node, tensors, drafter = taken(published(tmp_path / "out", config, random_tensors(shapes)), target)
    assert (node["block_size"], node["num_layers"], node["own_projection"]) == (2, 1, True)
    assert torch.equal(tensors["heads.1.lm_head.weight"], random_tensors(shapes)["1.1.weight"].float())
    assert len(anchor_and_drafts(drafter, target, 2)[1]) == 2


CASES = [
    ("parallel", False),
    ("parallel", True),
    ("markov", False),
    ("markov", True),
    ("eagle3", False),
    ("eagle3", True),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("to", [to_hf, to_speculators], ids=["hf", "speculators"])
@pytest.mark.parametrize(("family", "reduced"), CASES)
def test_export_and_import_are_inverse_to_the_bit(family, reduced, to, dtype, target, folder, tmp_path):
    settings = {} if family == "eagle3" else {"window": 9}
    source = source_of(drafter_of_family(family, target, reduced=reduced, **settings), target_folder=folder)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    options = to.Options(dtype=dtype)
    to.write(source, "none", tmp_path / "first", options=options)
    _, tensors, drafter = taken(tmp_path / "first", target, target_folder=folder)
    for name, tensor in source.tensors.items():
        rounded = tensor.bfloat16().float() if dtype == "bf16" and tensor.is_floating_point() else tensor
        assert torch.equal(tensors[name], rounded), name
    save_drafter(drafter, tmp_path / "drafter", spec=target.spec, provenance={"imported": True})
    again = replace(open_source(tmp_path / "drafter"), target_folder=folder)
    to.write(again, "none", tmp_path / "second", options=options)
    first, second = stored(tmp_path / "first"), stored(tmp_path / "second")
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(tensor, second[1][name]) for name, tensor in first[1].items())


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_a_quantized_draft_is_read_as_floats(quant, target, folder, tmp_path):
    source = source_of(drafter_of_family("markov", target, reduced=True), target_folder=folder)
    (tmp_path / "out").mkdir()
    to_hf.write(source, quant, tmp_path / "out")
    _, tensors, drafter = taken(tmp_path / "out", target, target_folder=folder)
    name = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(tensors[name], source.tensors[name])
    assert (tensors[name] - source.tensors[name]).norm() < 0.12 * source.tensors[name].norm()
    assert len(anchor_and_drafts(drafter, target, 4)[1]) == 4


def test_an_imported_drafter_loads_and_drafts_as_before(target, folder, tmp_path):
    source = source_of(drafter_of_family("markov", target, reduced=True, window=8), target_folder=folder)
    (tmp_path / "out").mkdir()
    to_hf.write(source, "none", tmp_path / "out", options=to_hf.Options(dtype="f32"))
    _, _, drafter = taken(tmp_path / "out", target, target_folder=folder)
    save_drafter(drafter, tmp_path / "drafter", spec=target.spec)
    loaded = load_drafter(tmp_path / "drafter", spec=target.spec)
    assert anchor_and_drafts(loaded, target, 4) == anchor_and_drafts(source.drafter, target, 4)


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
    ({"target_layer_ids": None}, "are missing .*give layer_ids="),
    ({"block_size": None}, "block_size is missing; give block_size="),
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


@pytest.mark.parametrize(("change", "says"), REFUSED)
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
        ({"speculators_model_type": "eagle3"}, "norm_before_residual is missing; give norm_before_residual="),
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
    out = published(tmp_path / "mask", DEEPSPEC, dspark_tensors())
    (out / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a mask embedding of its own"):
        import_draft(out, spec=target.spec)


def test_what_is_given_stands_for_what_a_config_says(target, tmp_path):
    out = published(tmp_path / "out", {**DEEPSPEC, "target_layer_ids": None}, dspark_tensors())
    node, _ = import_draft(out, spec=target.spec, given={"layer_ids": [1, 2], "block_size": 3})
    assert (node["layer_ids"], node["block_size"]) == ([1, 2], 3)
    with pytest.raises(ConfigError, match=r"import\.rank: unknown setting; accepted: layer_ids"):
        import_draft(out, spec=target.spec, given={"rank": 3})


def test_each_reader_refuses_the_other_kind_of_folder(target, folder, tmp_path):
    source = source_of(drafter_of_family("markov", target, reduced=False), target_folder=folder)
    for to, other in ((to_hf, to_speculators), (to_speculators, to_hf)):
        out = tmp_path / to.__name__
        out.mkdir()
        to.write(source, "none", out)
        with pytest.raises(CheckpointError, match=r"has (an|no) envelope"):
            other.read(out, spec=target.spec)
