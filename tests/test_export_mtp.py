# Modules for multi-token prediction in a copy of their target: what is read back is what was trained, what the family's
# published computation makes of the folder is what our session makes of the drafter, and what engines would run in
# another way is refused.

import json
import shlex
from dataclasses import replace

import pytest
import torch
import transformers

from drafters.errors import CheckpointError, ConfigError
from drafters.target import FrozenTarget
from export import to_mtp
from export.importing import drafter_of
from export.mtp_names import spelling_of
from export.selfcheck import check_tensors, check_values
from export.stitch import stored_tensors
from tests.mtp_export_doubles import SPELLED, Published, save_target, session_draft, source_of, world_of
from tests.test_families import sharpened
from tests.test_lossless import generate
from tests.test_mtp_target_block import LATENT, MOE, target_of
from tests.tiny import SIZES, tiny_target

AS_TRAINED = to_mtp.Options(dtype="f32")


def exported(source, tmp_path, options=AS_TRAINED):
    out = tmp_path / "out"
    out.mkdir()
    to_mtp.write(source, "none", out, options=options)
    return out


def text_of(target, length=17):
    return torch.tensor(generate(target, torch.tensor([5, 9, 2, 7]), length))


@pytest.fixture(params=SPELLED)
def name(request):
    """A family that ships such modules."""
    return request.param


def test_what_is_read_back_is_what_was_trained(name, tmp_path):
    target, source = world_of(name, tmp_path)
    out = exported(source, tmp_path)
    node, tensors = to_mtp.read(out, spec=target.spec)
    assert tensors.keys() == source.tensors.keys()
    assert all(torch.equal(tensor, source.tensors[key]) for key, tensor in tensors.items())
    assert {**node, "target_config": None} == {**source.node, "target_config": None}
    loaded = drafter_of(node, tensors, spec=target.spec)
    text = text_of(target)
    mine, theirs = (session_draft(one, target, text, 12) for one in (source.drafter, loaded))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_target_is_still_the_target(name, tmp_path):
    target, source = world_of(name, tmp_path)
    out = exported(source, tmp_path)
    before, after = stored_tensors(tmp_path / "target"), stored_tensors(out)
    for key, one in before.items():
        other = after[key]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.file.read_bytes()[one.start : one.stop] == other.file.read_bytes()[other.start : other.stop]
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    text_BT = text_of(target)[None]
    with torch.inference_mode():
        assert torch.equal(model(text_BT).logits, target.model(text_BT).logits)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "README.md").exists()


def test_the_published_computation_gives_our_drafts(name, tmp_path):
    target, source = world_of(name, tmp_path)
    published = Published(exported(source, tmp_path), tmp_path / "longer")
    text = text_of(target)
    for at in (1, 2, 13):
        drafts_K, probs_KV = session_draft(source.drafter, target, text, at)
        states_TD = target.states(text[None, :at], needs=source.drafter.needs).last_BTD[0]
        logits_KV = published.logits(text[: at + 1], drafts_K, states_TD)
        torch.testing.assert_close(logits_KV.softmax(-1), probs_KV, rtol=1e-3, atol=1e-5)


def test_one_module_for_all_depths(name, tmp_path):
    """Each depth on a sequence of its own, as it was trained."""
    target, source = world_of(name, tmp_path, block_size=3, share_depths=True)
    published = Published(exported(source, tmp_path), tmp_path / "longer")
    text = text_of(target)
    drafts_K, probs_KV = session_draft(source.drafter, target, text, 13)
    states_TD = target.states(text[None, :13], needs=source.drafter.needs).last_BTD[0]
    logits_KV = published.logits(text[:14], drafts_K, states_TD)
    torch.testing.assert_close(logits_KV.softmax(-1), probs_KV, rtol=1e-3, atol=1e-5)
    node, _ = to_mtp.read(tmp_path / "out", spec=target.spec)
    assert (node["block_size"], node["share_depths"]) == (3, True)
    told = " ".join(to_mtp.notes(source))
    assert "keys and values of its first depth" in told


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_drafts_the_same(name, tmp_path):
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers runs no MTP modules")
    from transformers.cache_utils import MtpCache

    target, source = world_of(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported(source, tmp_path), dtype=torch.float32).eval()
    # It knows the numbers of the published models' layers only.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{SIZES['num_hidden_layers']}\..*"]
    module = layers.MtpModel.from_pretrained(model).eval()
    text = text_of(target)
    _, probs_KV = session_draft(source.drafter, target, text, 13)
    with torch.inference_mode():
        states = model(text[None, :13], output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        cache.activate_past_recording()
        positions = torch.arange(1, 14)[None]
        _, logits, _ = module(text[None, 1:14], states, None, positions, cache)
    torch.testing.assert_close(logits[0].softmax(-1), probs_KV, rtol=1e-3, atol=1e-5)


def test_names_are_those_of_the_target_s_own_layer(name, tmp_path):
    """Experts one by one, whatever transformers makes of them in memory."""
    target, source = world_of(name, tmp_path)
    last = f"model.layers.{target.spec.num_layers - 1}."
    own = {key.removeprefix(last) for key in stored_tensors(tmp_path / "target") if key.startswith(last)}
    spelling, names = (
        spelling_of(source.node["target_config"]["model_type"]),
        stored_tensors(exported(source, tmp_path)),
    )
    prefix = spelling.module.format(layer=target.spec.num_layers, i=0)
    parts = {f"{prefix}{part}.weight" for part in spelling.parts.values()}
    new = names.keys() - stored_tensors(tmp_path / "target").keys()
    assert {key.removeprefix(prefix + spelling.block) for key in new - parts} == own
    assert parts <= new


@pytest.mark.parametrize("options", [AS_TRAINED, to_mtp.Options(dtype="bf16"), to_mtp.Options(dtype="f16")])
def test_the_manifest_is_what_is_written(name, options, tmp_path):
    _, source = world_of(name, tmp_path)
    written = {key: (one.shape, one.dtype) for key, one in stored_tensors(exported(source, tmp_path, options)).items()}
    assert to_mtp.manifest(source, "none", options=options) == written


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_bounds_hold_and_are_tight(name, dtype, tmp_path):
    options = to_mtp.Options(dtype=dtype)
    _, source = world_of(name, tmp_path)
    out = exported(source, tmp_path, options)
    check_tensors(to_mtp.manifest(source, "none", options=options), to_mtp.stored(out), where=out)
    back, bounds = to_mtp.load(out, source=source).state_dict(), to_mtp.bounds(source, "none", options=options)
    assert bounds.keys() == back.keys()
    worst = check_values(source.tensors, back, bounds, where=out)
    assert (worst == 0) == (dtype == "f32")
    for key, bound in bounds.items():
        off = (back[key] - source.tensors[key]).abs()
        assert off.max() >= 0.1 * bound.max() or (dtype == "f32" and bound.max() < 1e-6) or "bias" in key, key


def test_commands_ask_for_as_many_drafts_as_were_trained(name, tmp_path):
    _, source = world_of(name, tmp_path, block_size=2, share_depths=True)
    made = to_mtp.commands(source, target="theirs", folder="out")
    words = shlex.split(made["vLLM"])
    assert words[:3] == ["vllm", "serve", "out"]
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": 2}
    words = shlex.split(made["SGLang"])
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "3"
    assert ("llama.cpp" in made) == (name in ("glm4_moe", "qwen3_next"))
    absent = to_mtp.commands(source, options=to_mtp.Options(mtp_quant="absent"), target="theirs", folder="out")
    assert not any("spec" in command for command in absent.values())


def test_routers_keep_their_biases(tmp_path):
    target, source = world_of("deepseek_v3", tmp_path)
    bias = source.drafter.state_dict()["depths.0.block.mlp.gate.e_score_correction_bias"]
    bias.uniform_()
    _, tensors = to_mtp.read(exported(source, tmp_path, to_mtp.Options(dtype="bf16")), spec=target.spec)
    assert torch.equal(tensors["depths.0.block.mlp.gate.e_score_correction_bias"], bias)


def test_gains_far_from_one_lose_what_the_format_cannot_hold(tmp_path):
    """Qwen3-Next stores gain - 1: exact from 1/2 to 2, to half a step of 1 beyond."""
    target, source = world_of("qwen3_next", tmp_path)
    gain = torch.linspace(0.01, 9.0, 32)
    with torch.no_grad():
        source.drafter.depth(0).final_layernorm.weight.copy_(gain)
    _, tensors = to_mtp.read(exported(source, tmp_path), spec=target.spec)
    got = tensors["depths.0.final_layernorm.weight"]
    assert (got - gain).abs().max() <= 2**-23
    inside = (gain >= 0.5) & (gain <= 2)
    assert torch.equal(got[inside], gain[inside])


def test_the_first_of_several_depths(name, tmp_path):
    target, source = world_of(name, tmp_path, block_size=3, depth_weights=(1.0, 0.5, 0.25))
    with pytest.raises(ConfigError, match=r"drafter\.block_size: got 3 modules; engines run the first one"):
        to_mtp.refuse(source, "none")
    out = exported(source, tmp_path, replace(AS_TRAINED, first_depth=True))
    node, tensors = to_mtp.read(out, spec=target.spec)
    loaded = drafter_of(node, tensors, spec=target.spec)
    text = text_of(target)
    _, mine = session_draft(source.drafter, target, text, 12)
    _, theirs = session_draft(loaded, target, text, 12)
    assert torch.equal(mine[:1], theirs)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_modules_of_the_target_give_way(name, tmp_path):
    target, source = world_of(name, tmp_path)
    stitched = exported(source, tmp_path)
    other = source_of(target, tmp_path / "other", target_folder=stitched, name=name, seed=7)
    with pytest.raises(ConfigError, match="replace: got false, and the target has modules of its own"):
        to_mtp.refuse(other, "none")
    out = tmp_path / "replaced"
    out.mkdir()
    to_mtp.write(other, "none", out, options=replace(AS_TRAINED, replace=True))
    _, tensors = to_mtp.read(out, spec=target.spec)
    assert all(torch.equal(tensor, other.tensors[key]) for key, tensor in tensors.items())
    assert stored_tensors(out).keys() == stored_tensors(stitched).keys()


def test_a_target_without_modules_says_so(tmp_path):
    target, source = world_of("deepseek_v3", tmp_path)
    out = exported(source, tmp_path, to_mtp.Options(mtp_quant="absent"))
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert stored_tensors(out).keys() == stored_tensors(tmp_path / "target").keys()
    with pytest.raises(CheckpointError, match="holds no module"):
        to_mtp.read(out, spec=target.spec)
    assert to_mtp.load(out, source=source) is None
    assert (
        to_mtp.manifest(source, "none", options=to_mtp.Options(mtp_quant="absent")).keys() == stored_tensors(out).keys()
    )


REFUSED = [
    ({"block": "qwen3"}, r"drafter\.block: got 'qwen3', .* accepted for a target of model type 'deepseek_v3': target"),
    ({"order": "hidden_first"}, r"drafter\.order: got 'hidden_first'; .* embedding_first; train it again"),
    ({"reduced": True}, r"mtp with a reduced vocabulary, .* train it again with drafter\.draft_vocab_size=null"),
    ({"block_size": 2}, r"drafter\.block_size: got 2 modules; .* block_size=1, or share_depths=true"),
    (
        {"block_size": 2, "share_depths": True, "feedback": "before_norm"},
        r"drafter\.feedback: got 'before_norm'; .*: after_norm; train it again, or export with first_depth=true",
    ),
]


@pytest.mark.parametrize(
    ("settings", "match"), REFUSED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_what_engines_run_in_another_way_is_refused(settings, match, tmp_path):
    _, source = world_of("deepseek_v3", tmp_path, **settings)
    with pytest.raises(ConfigError, match=match):
        to_mtp.refuse(source, "none")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=match):
        to_mtp.write(source, "none", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_feedback_of_a_single_depth_does_not_matter(tmp_path):
    _, source = world_of("deepseek_v3", tmp_path, feedback="before_norm")
    to_mtp.refuse(source, "none")


def test_other_targets_are_refused(tmp_path):
    target = tiny_target()
    source = source_of(target, tmp_path, target_folder=save_target(target, tmp_path / "llama"))
    with pytest.raises(
        ConfigError, match=r"to=mtp: got a target of model type 'llama'.*accepted: deepseek_v3, glm4_moe"
    ):
        to_mtp.refuse(source, "none")
    _, source = world_of("deepseek_v3", tmp_path / "a")
    with pytest.raises(ConfigError, match="quant: got 'int8' with to=mtp; accepted: none"):
        to_mtp.refuse(source, "int8")
    with pytest.raises(ConfigError, match="folder is not at hand"):
        to_mtp.refuse(replace(source, target_folder=None), "none")
    with pytest.raises(ConfigError, match="mtp_quant: got 'quantized', but the target is not"):
        to_mtp.refuse(source, "none", options=to_mtp.Options(mtp_quant="quantized"))
    glm = save_target(target_of("glm4_moe"), tmp_path / "glm")
    with pytest.raises(ConfigError, match=r"trained for a target of model type 'deepseek_v3', .* is 'glm4_moe'"):
        to_mtp.refuse(replace(source, target_folder=glm), "none")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"use_qk_norm": False}, r"has other parts than the drafter's block \(self_attn\.k_norm, self_attn\.q_norm\)"),
        ({"use_qk_norm": True, "hidden_size": 64}, r"hidden_size is 32 in the drafter's target, 64 in"),
    ],
)
def test_another_target_of_the_family_is_refused(settings, match, tmp_path):
    _, source = world_of("glm4_moe", tmp_path)
    other = model_target(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        **{**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8, **settings},
    )
    folder = save_target(other, tmp_path / "other")
    with pytest.raises(ConfigError, match=match):
        to_mtp.refuse(replace(source, target_folder=folder), "none")


def model_target(config_name, model_name, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **settings})
    return FrozenTarget.from_model(sharpened(getattr(transformers, model_name)(config).eval().float()), mask_token_id=3)


def test_a_block_that_engines_would_build_with_experts_is_refused(tmp_path):
    settings = {**MOE, **LATENT, "n_routed_experts": 4, "first_k_dense_replace": 4, "num_key_value_heads": 4}
    target = model_target("DeepseekV3Config", "DeepseekV3ForCausalLM", **settings)
    source = source_of(target, tmp_path, target_folder=save_target(target, tmp_path / "dense"))
    with pytest.raises(ConfigError, match="one has experts, the other has not"):
        to_mtp.refuse(source, "none")


def test_a_window_is_refused(tmp_path):
    target = model_target(
        "Qwen2Config", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    assert "sliding_attention" in target.model.config.layer_types
    folder = save_target(target, tmp_path / "windowed")
    source = source_of(target, tmp_path, target_folder=folder, order="hidden_first")
    with pytest.raises(ConfigError, match="layers with a sliding window"):
        to_mtp.refuse(source, "none")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    _, source = world_of("mimo", tmp_path)
    with torch.no_grad():
        source.drafter.depth(0).input_proj.weight[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"input_proj\.weight: not finite in torch\.float16; accepted: dtype=f32"):
        exported(source, tmp_path, to_mtp.Options(dtype="f16"))


def test_options_are_checked():
    with pytest.raises(ValueError, match="dtype: got 'int8'; accepted: null, bf16, f16, f32"):
        to_mtp.Options(dtype="int8")
    with pytest.raises(ValueError, match="mtp_quant: got 'int8'; accepted: float, quantized, absent"):
        to_mtp.Options(mtp_quant="int8")


def test_another_size_is_not_read(tmp_path):
    target, source = world_of("mimo", tmp_path)
    out = exported(source, tmp_path)
    with pytest.raises(CheckpointError, match=r"its module's projection is \[32, 64\], expected \[48, 96\]"):
        to_mtp.read(out, spec=replace(target.spec, hidden_size=48))
