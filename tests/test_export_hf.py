# The flat folder: names, numbers and tensors by each reader's way of counting; a reader that knows the format alone
# drafts what our own session drafts; what no engine would serve is refused with what to do.

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.errors import CheckpointError, ConfigError
from export import to_hf
from export.quantize import scheme_of
from export.selfcheck import check_tensors, check_values
from export.to_hf import Options
from tests.contract_cases import Reading
from tests.published_doubles import BlockEngine, Eagle3Engine, drafter_of_family, saved_target, source_of, stored

F32 = Options(dtype="f32")
FAMILIES = ["parallel", "markov", "gated", "rnn", "eagle3", "medusa"]
SERVED = [(f, r) for f in FAMILIES for r in (False, True) if not (r and f in ("gated", "rnn", "medusa"))]
PROMPT = torch.tensor([9, 40, 77, 5, 100, 61, 20])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    return saved_target(folder)


def made(family, target, folder, *, reduced=False, **settings):
    return source_of(drafter_of_family(family, target, reduced=reduced, **settings), target_folder=folder)


def written(source, out, *, quant="none", options=F32):
    out.mkdir()
    to_hf.write(source, quant, out, options=options)
    return out


def in_file(folder):
    """Shape and dtype of every tensor, as the file's own header says."""
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (no dictionary)
        return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}


def proposed(source, target, length, prompt=PROMPT):
    """What our session drafts after the prompt: tokens, anchor, the proposal."""
    reading = Reading(source.drafter, target, [prompt])
    return int(reading.session.anchor_B[0]), reading.propose(length)


@pytest.mark.parametrize("options", [F32, Options(), Options(dtype="f16")], ids=lambda o: o.dtype)
@pytest.mark.parametrize(("family", "reduced"), SERVED)
def test_the_file_holds_what_the_manifest_says(family, reduced, options, target, folder, tmp_path):
    source = made(family, target, folder, reduced=reduced)
    out = written(source, tmp_path / "out", options=options)
    assert in_file(out) == to_hf.manifest(source, "none", options=options)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_names_and_shapes_of_a_published_dspark(target, folder, tmp_path):
    names = in_file(written(made("markov", target, folder, reduced=True), tmp_path / "out", options=Options()))
    assert not [name for name in names if name.startswith("model.")]
    expected = {
        "fc.weight": (32, 64),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "layers.1.self_attn.q_proj.weight": (32, 32),
        "layers.1.self_attn.k_proj.weight": (16, 32),
        "layers.1.self_attn.k_norm.weight": (8,),
        "layers.1.mlp.down_proj.weight": (32, 64),
        "markov_head.markov_w1.weight": (128, 6),
        "markov_head.markov_w2.weight": (64, 6),
        "confidence_head.proj.weight": (1, 38),
        "confidence_head.proj.bias": (1,),
        "lm_head.weight": (64, 32),
        "d2t": (64,),
        "t2d": (128,),
    }
    assert {name: names[name][0] for name in expected} == expected
    assert {name for name, (_, dtype) in names.items() if dtype != "BF16"} == {"d2t", "t2d"}
    assert len(names) == 2 * 11 + 10


def test_a_full_vocabulary_brings_no_rows_and_no_ids(target, folder, tmp_path):
    names = in_file(written(made("markov", target, folder), tmp_path / "out"))
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & names.keys()


def test_layers_are_counted_as_each_reader_does(target, folder, tmp_path):
    config, _ = stored(written(made("markov", target, folder), tmp_path / "block"))
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert "eagle_aux_hidden_state_layer_ids" not in config
    config, _ = stored(written(made("eagle3", target, folder), tmp_path / "eagle3"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["num_aux_hidden_states"] == 3


def test_what_a_config_says_of_blocks(target, folder, tmp_path):
    config, _ = stored(written(made("markov", target, folder), tmp_path / "markov", options=Options()))
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["block_size"], config["sample_from_anchor"]) == (4, True)  # four slots draft four
    assert "sample_from_anchor" not in config["dflash_config"]
    assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
    assert config["enable_confidence_head"] is config["confidence_head_with_markov"] is True
    assert config["mask_token_id"] == config["dflash_config"]["mask_token_id"] == 3
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == config["vocab_size"] == 128
    config, _ = stored(written(made("parallel", target, folder, reduced=True), tmp_path / "parallel"))
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["block_size"], config["sample_from_anchor"]) == (5, False)  # and the anchor's slot before four
    assert config["dflash_config"]["sample_from_anchor"] is False
    assert config["draft_vocab_size"] == 64
    assert not [key for key in config if "markov" in key or "confidence" in key]


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
@pytest.mark.parametrize("keys", ["both", "old", "new"])
def test_readers_get_the_targets_rotary_frequencies_from_either_spelling(scaling, keys, tmp_path):
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": 5000.0}
    target = saved_target(tmp_path / "target", rope_parameters=rope)
    config, _ = stored(written(made("eagle3", target, None), tmp_path / "out"))
    for key in {"both": (), "old": ("rope_parameters",), "new": ("rope_theta", "rope_scaling")}[keys]:
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(found, torch.tensor(target.spec.rope_inv_freq))
    if scaling:
        assert not torch.allclose(found, 5000.0 ** (-torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("window", [None, 6])
def test_transformers_keeps_what_a_config_says(window, target, folder, tmp_path):
    out = written(made("markov", target, folder, window=window), tmp_path / "out")
    config, said = AutoConfig.from_pretrained(out), stored(out)[0]
    for key in ("head_dim", "num_key_value_heads", "layer_types", "block_size", "dflash_config", "sample_from_anchor"):
        assert getattr(config, key) == said[key], key
    # Seven: the position that looks counts, and the six before it.
    assert (config.sliding_window, config.use_sliding_window) == ((None, False) if window is None else (7, True))
    if window is not None:
        assert config.layer_types == ["sliding_attention"] * 2
        assert config.is_causal is config.dflash_config["causal"] is False
        assert config.dflash_config["swa_window_size"] == 7


@pytest.mark.parametrize(("family", "reduced"), [pair for pair in SERVED if pair[0] not in ("eagle3", "medusa")])
def test_a_reader_of_the_format_drafts_what_our_session_drafts(family, reduced, target, folder, tmp_path):
    source = made(family, target, folder, reduced=reduced)
    engine = BlockEngine(written(source, tmp_path / "out"), target)
    anchor, proposal = proposed(source, target, 4)
    ids, _, confidences = engine.draft(PROMPT, anchor)
    assert ids == proposal.tokens_BS[0].tolist()
    assert len(set(ids)) > 1 or family == "parallel"
    if confidences is not None:
        torch.testing.assert_close(confidences, proposal.confidence_BS[0], rtol=1e-4, atol=1e-5)
    reading = Reading(source.drafter, target, [PROMPT])
    states = engine.slots(PROMPT, anchor)[-4:]
    torch.testing.assert_close(states, reading.session.hidden()[0], rtol=1e-4, atol=1e-5)


def test_a_window_is_that_of_training_at_the_anchor_and_one_less_a_slot_in_engines(target, folder, tmp_path):
    source = made("markov", target, folder, window=4, num_layers=1)
    engine = BlockEngine(written(source, tmp_path / "out"), target)
    anchor, _ = proposed(source, target, 4)
    ours = Reading(source.drafter, target, [PROMPT]).session.hidden()[0]
    states = engine.slots(PROMPT, anchor)
    torch.testing.assert_close(states[0], ours[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(states[1], ours[1], rtol=1e-2)
    # Counted from the anchor, and without the position that looks, it would be ours.
    engine.layers["sliding_window"] -= 1
    torch.testing.assert_close(engine.slots(PROMPT, anchor, seen="trainer"), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_reader_of_eagle3_drafts_what_our_session_drafts(reduced, before, target, folder, tmp_path):
    source = made("eagle3", target, folder, reduced=reduced, norm_before_residual=before)
    engine = Eagle3Engine(written(source, tmp_path / "out"), target, layer="midlayer")
    anchor, proposal = proposed(source, target, 4)
    ids, logits = engine.draft(PROMPT, anchor, 4)
    assert ids == proposal.tokens_BS[0].tolist()
    assert len(set(ids)) > 1
    session = Reading(source.drafter, target, [PROMPT]).session
    with torch.inference_mode():
        state = session._unroll().step(session.head.embed(session.anchor_B[:, None]), session.state_BD[:, None])
        torch.testing.assert_close(logits[0], session.logits(state[0, 0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_a_reader_of_medusa_drafts_what_our_session_drafts(own, target, folder, tmp_path):
    source = made("medusa", target, folder, own_projection=own)
    out = written(source, tmp_path / "out")
    assert in_file(out) == to_hf.manifest(source, "none", options=F32)
    config, tensors = stored(out)
    _, proposal = proposed(source, target, 3)
    last = target.model(PROMPT[None], output_hidden_states=True).hidden_states[-1][0, -1]
    ids = []
    for head in range(config["medusa_num_heads"]):
        x = last
        for layer in range(config["medusa_num_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            x = x + torch.nn.functional.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        row = tensors[f"lm_heads.{0 if config['original_lm_head'] else head}.weight"] @ x
        ids.append(int(row.argmax()))
    assert ids == proposal.tokens_BS[0].tolist()
    assert config["medusa_fc_bias"] is True
    assert config["original_lm_head"] is not own
    assert to_hf.read(out, spec=target.spec)[0]["own_projection"] is own


def test_ids_go_out_as_offsets_and_rows_are_the_targets(target, folder, tmp_path):
    source = made("markov", target, folder, reduced=True)
    _, tensors = stored(written(source, tmp_path / "out"))
    ids = tensors["d2t"] + torch.arange(64)
    assert torch.equal(ids, source.drafter.vocab.ids_V)
    assert tensors["d2t"][:4].tolist() == [0, 1, 2, 3]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert torch.equal(tensors["lm_head.weight"], target.head.lm_head_VD[ids])


def test_rows_of_a_tied_head_are_those_of_the_embedding(tmp_path):
    target = saved_target(tmp_path / "target", tie_word_embeddings=True)
    source = made("markov", target, tmp_path / "target", reduced=True)
    _, tensors = stored(written(source, tmp_path / "out"))
    assert torch.equal(tensors["lm_head.weight"], target.head.embedding_VD[source.drafter.vocab.ids_V])


def test_scales_of_the_target_go_into_the_rows_that_go_along(target, folder, tmp_path):
    source = made("markov", target, folder, reduced=True)
    source = replace(source, spec=replace(source.spec, embed_scale=4.0, logit_scale=0.25))
    config, tensors = stored(written(source, tmp_path / "out"))
    assert torch.equal(tensors["embed_tokens.weight"], target.head.embedding_VD * 4)
    assert torch.equal(tensors["lm_head.weight"], target.head.lm_head_VD[source.drafter.vocab.ids_V] / 4)
    assert "logit_scale" not in config
    assert config["dflash_config"]["input_embedding_scale"] == 1.0
    assert in_file(tmp_path / "out") == to_hf.manifest(source, "none", options=F32)


def test_scales_of_a_full_vocabulary_are_named(target, folder, tmp_path):
    source = made("parallel", target, folder)
    source = replace(source, spec=replace(source.spec, logit_scale=0.25, logit_softcap=30.0))
    config, _ = stored(written(source, tmp_path / "out"))
    assert config["logit_scale"] == config["dflash_config"]["output_multiplier"] == 0.25
    assert config["dflash_config"]["final_logit_softcapping"] == 30.0


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["markov", "eagle3"])
def test_projections_are_quantized_and_the_rest_is_not(family, quant, target, folder, tmp_path):
    source = made(family, target, folder, reduced=True)
    out = written(source, tmp_path / "out", quant=quant, options=Options())
    config, _ = stored(out)
    names = in_file(out)
    assert names == to_hf.manifest(source, quant)
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    layer = "midlayer" if family == "eagle3" else "layers.0"
    assert f"{layer}.self_attn.q_proj.weight_scale" in names
    for name in ("fc.weight", "lm_head.weight", "norm.weight"):
        assert names[name][1] == "BF16"
    _, tensors = to_hf.read(out, spec=target.spec)
    for name, tensor in source.tensors.items():
        assert tensors[name].shape == tensor.shape, name
        assert (tensors[name] - tensor).float().norm() <= 0.12 * tensor.float().norm(), name


@pytest.mark.parametrize("options", [F32, Options()], ids=lambda o: o.dtype)
@pytest.mark.parametrize(("family", "reduced"), SERVED)
def test_reading_gives_the_settings_and_the_tensors_back(family, reduced, options, target, folder, tmp_path):
    settings = {"window": 9} if family in ("parallel", "markov") else {}
    source = made(family, target, folder, reduced=reduced, **settings)
    node, tensors = to_hf.read(written(source, tmp_path / "out", options=options), spec=target.spec)
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in source.node.items()}
    assert {key: value for key, value in node.items() if key != "name"} == {k: said[k] for k in node if k != "name"}
    assert tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        expected = tensor if options is F32 or not tensor.is_floating_point() else tensor.bfloat16().float()
        assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("options", [F32, Options(), Options(dtype="f16")], ids=lambda o: o.dtype)
def test_what_comes_back_is_within_the_bounds_and_drafts(quant, options, target, folder, tmp_path):
    source = made("markov", target, folder, reduced=True)
    out = written(source, tmp_path / "out", quant=quant, options=options)
    check_tensors(to_hf.manifest(source, quant, options=options), to_hf.stored(out), where=out)
    drafter = to_hf.load(out, source=source)
    bounds = to_hf.bounds(source, quant, options=options)
    worst = check_values(source.tensors, dict(drafter.state_dict()), bounds, where=out)
    assert (worst == 0) == (options is F32 and quant == "none")
    assert len(Reading(drafter, target, [PROMPT]).propose(4).tokens_BS[0]) == 4


def test_a_confidence_head_without_a_sequential_head_is_left_out_with_a_warning(target, folder, tmp_path):
    source = made("parallel", target, folder, confidence=True)
    with pytest.warns(UserWarning, match=r"confidence_head\.proj\.weight, .*DFlash has no confidence head"):
        out = written(source, tmp_path / "out")
    assert in_file(out) == to_hf.manifest(source, "none", options=F32)
    assert to_hf.read(out, spec=target.spec)[0]["confidence"] is False


REFUSED = [
    ("gated", {"reduced": True}, r"SGLang: its Markov head .*to=packed .*draft_vocab_size=null"),
    ("rnn", {"reduced": True}, r"vLLM, llama.cpp: it knows the plain Markov head only"),
    ("parallel", {"sample_from_anchor": True}, r"sample_from_anchor=true without a sequential head.*to=packed"),
    ("markov", {"sample_from_anchor": False}, r"block size .*to=speculators \(vLLM, llama.cpp\), to=gguf"),
    ("markov", {"window": 2}, r"drafter.window=2 for a block of 4 slots.*accepted: 3 or more"),
    ("medusa", {"reduced": True}, r"map of draft ids for a missing weight.*drafter.draft_vocab_size=null"),
]


@pytest.mark.parametrize(("family", "settings", "says"), REFUSED)
def test_what_no_engine_serves_is_refused_with_what_to_do(family, settings, says, target, folder):
    with pytest.raises(ConfigError, match=says):
        to_hf.refuse(made(family, target, folder, **settings), "none")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("drafters.heads.mtp.MtpDrafter", "to=mtp"),
        ("drafters.heads.exit.ExitDrafter", "first layers.*to=packed"),
        ("drafters.heads.draft_model.DraftModel", "a model already: give its own folder"),
        ("drafters.heads.ngram.NgramDrafter", "prompt look-up of their own"),
        ("mine.heads.Mine", "no class of your own.*to=packed"),
    ],
)
def test_other_families_are_refused_with_where_to_go(path, says, target, folder):
    source = replace(made("markov", target, folder), node={"_target_": path, "draft_vocab_size": None})
    with pytest.raises(ConfigError, match=says):
        to_hf.refuse(source, "none")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logit_softcap": 30.0}, "caps its logits at 30 before"),
        ({"logit_scale": 0.5}, "scales its logits by 0.5"),
        ({"rope_inv_freq": (1.0, 0.5, 0.2, 0.1)}, "frequencies are not those of theta 10000 and scaling None"),
    ],
)
def test_a_target_whose_numbers_engines_do_not_take_is_refused(change, says, target, folder):
    source = made("markov", target, folder)
    with pytest.raises(ConfigError, match=says):
        to_hf.refuse(replace(source, spec=replace(source.spec, **change)), "none")


def test_refusals_of_quantization_dtype_and_a_missing_target(target, folder, tmp_path):
    with pytest.raises(ConfigError, match="quant: got 'int3'; accepted: none, int8"):
        to_hf.refuse(made("markov", target, folder), "int3")
    with pytest.raises(ConfigError, match="medusa, whose layers engines hold as floats"):
        to_hf.refuse(made("medusa", target, folder), "int8")
    with pytest.raises(ConfigError, match=r"target: its folder is needed.*lm_head\.weight"):
        to_hf.refuse(made("markov", target, None, reduced=True), "none")
    with pytest.raises(ValueError, match="dtype: got 'fp4'; accepted: bf16, f16, f32"):
        Options(dtype="fp4")
    source = made("markov", target, folder)
    with torch.no_grad():
        source.drafter.fc.weight[0, 0] = 1e6
    with pytest.raises(ConfigError, match=r"dtype: got f16, but fc\.weight has weights as large as 1e\+06"):
        written(source, tmp_path / "large", options=Options(dtype="f16"))
    with torch.no_grad():
        source.drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.weight: holds NaN"):
        written(source, tmp_path / "nan")


def test_the_folder_of_another_target_is_refused(target, folder, tmp_path):
    saved_target(tmp_path / "other", hidden_size=16)
    source = made("markov", target, tmp_path / "other", reduced=True)
    with pytest.raises(CheckpointError, match=re.escape("0 tensors '*lm_head.weight' of shape [128, 32]")):
        written(source, tmp_path / "out")


def test_scales_of_int4_do_not_have_to_fit(target, folder, tmp_path):
    source = made("markov", saved_target(tmp_path / "odd", intermediate_size=48), tmp_path / "odd")
    with pytest.raises(ConfigError, match=r"group_size: got 32, which does not divide 48"):
        written(source, tmp_path / "out", quant="int4")
    assert scheme_of("int4").group_size == 32
