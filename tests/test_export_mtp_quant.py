# Modules beside a quantized target: float and said to be, in the words of its quantizer, or quantized as the target's
# own layer is. Whatever the config says of a module by any name that an engine has for it is what the file holds.

import json
import re
from dataclasses import replace

import pytest
import torch

from drafters.errors import ConfigError
from export import to_mtp
from export.quantize import SCHEMES, Scheme, dequantize, quantize
from export.selfcheck import check_values
from export.stitch import stored_tensors
from tests.mtp_export_doubles import is_ignored, quantized_folder, save_target, source_of, world_of
from tests.test_export_mtp import exported, model_target
from tests.tiny import SIZES

LAYER = SIZES["num_hidden_layers"]
FLOAT, QUANTIZED = (to_mtp.Options(mtp_quant=one) for one in ("float", "quantized"))
# Modules of a block as vLLM builds them, and the projection before it.
ATTENTION = {
    "deepseek_v3": ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"),
    "glm4_moe": ("qkv_proj", "o_proj"),
    "qwen3_next": ("qkv_proj", "o_proj"),
}
EXPERTS = ("experts", "experts.0.gate_proj", "experts.3.down_proj")
SHARED = {"deepseek_v3": "shared_experts", "glm4_moe": "shared_experts", "qwen3_next": "shared_expert"}
ROOTS = {
    "deepseek_v3": (f"model.layers.{LAYER}.", "model.decoder."),
    "glm4_moe": (f"model.layers.{LAYER}.", "model.decoder."),
    "qwen3_next": ("mtp.layers.0.",),
}


def runtime(name):
    """What engines call the modules that could be quantized."""
    mlp = [f"mlp.{each}" for each in (*EXPERTS, f"{SHARED[name]}.gate_up_proj", f"{SHARED[name]}.down_proj")]
    inner = [*(f"self_attn.{each}" for each in ATTENTION[name]), *mlp]
    return [f"{root}{each}" for root in ROOTS[name] for each in inner]


def stitched(name, tmp_path, options, *, scheme=SCHEMES["int8"], **quantizing):
    """A target, a source on a quantized copy of it, and the stitched folder with its config."""
    target, source = world_of(name, tmp_path)
    folder = quantized_folder(tmp_path / "target", tmp_path / "quantized", scheme, **quantizing)
    source = replace(source, target_folder=folder)
    out = exported(source, tmp_path, options)
    return target, source, out, json.loads((out / "config.json").read_text())


def facts(out):
    """Shape and dtype of every tensor."""
    return {key: (one.shape, one.dtype) for key, one in stored_tensors(out).items()}


@pytest.fixture(params=ROOTS)
def name(request):
    """A family with experts."""
    return request.param


def test_a_float_module_is_said_to_be_float(name, tmp_path):
    target, source, out, config = stitched(name, tmp_path, FLOAT)
    assert all(is_ignored(config, module) for module in runtime(name))
    kept = [key.rpartition(".")[0] for key in stored_tensors(tmp_path / "quantized") if key.endswith("weight_scale")]
    assert kept
    assert not any(is_ignored(config, module) for module in kept)
    assert not is_ignored(config, f"model.layers.{LAYER - 1}.self_attn.o_proj")
    _, tensors = to_mtp.read(out, spec=target.spec)
    for key, tensor in tensors.items():
        wanted = source.tensors[key]
        if name == "qwen3_next" and "block" not in key and wanted.dim() == 1:
            wanted = (wanted - 1).bfloat16().float() + 1
        elif not key.endswith("e_score_correction_bias"):
            wanted = wanted.bfloat16().float()
        assert torch.equal(tensor, wanted), key
    assert to_mtp.manifest(source, "none", options=FLOAT) == facts(out)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_a_module_is_quantized_as_the_target_s_own_layer(name, scheme, tmp_path):
    target, source, out, config = stitched(name, tmp_path, QUANTIZED, scheme=SCHEMES[scheme])
    assert not any(is_ignored(config, module) for module in runtime(name))
    prefix = ROOTS[name][0]
    assert is_ignored(config, f"{prefix}mlp.gate")
    assert is_ignored(config, "mtp.fc" if name == "qwen3_next" else f"{prefix}eh_proj")
    mine, last = stored_tensors(out), f"model.layers.{LAYER - 1}."
    own = {key.removeprefix(last): (one.shape, one.dtype) for key, one in mine.items() if key.startswith(last)}
    new = {key.removeprefix(prefix): (one.shape, one.dtype) for key, one in mine.items() if key.startswith(prefix)}
    assert {key: new[key] for key in own} == own
    _, tensors = to_mtp.read(out, spec=target.spec)
    q = quantize(source.tensors["depths.0.block.self_attn.o_proj.weight"], SCHEMES[scheme], name="")
    assert torch.equal(tensors["depths.0.block.self_attn.o_proj.weight"], dequantize(q))
    q = quantize(source.tensors["depths.0.block.mlp.experts.gate_up_proj"][2, 16:], SCHEMES[scheme], name="")
    assert torch.equal(tensors["depths.0.block.mlp.experts.gate_up_proj"][2, 16:], dequantize(q))
    bounds = to_mtp.bounds(source, "none", options=QUANTIZED)
    assert 0 < check_values(source.tensors, tensors, bounds, where=out) < 0.1
    exact = source.tensors["depths.0.input_proj.weight"].bfloat16().float()
    assert torch.equal(tensors["depths.0.input_proj.weight"], exact)
    assert to_mtp.manifest(source, "none", options=QUANTIZED) == facts(out)


def test_what_is_float_in_the_target_s_layer_is_float_in_the_module(name, tmp_path):
    """Attention in floats, experts quantized."""
    _, _, out, config = stitched(name, tmp_path, QUANTIZED, floats=(r"mlp\.gate$", r"self_attn\..*"))
    for module in runtime(name):
        assert is_ignored(config, module) == ("self_attn" in module), module
    prefix = ROOTS[name][0]
    assert f"{prefix}self_attn.o_proj.weight_scale" not in stored_tensors(out)
    assert f"{prefix}mlp.experts.1.up_proj.weight_scale" in stored_tensors(out)


def test_experts_in_floats(tmp_path):
    _, _, out, config = stitched("glm4_moe", tmp_path, QUANTIZED, floats=(r"mlp\.gate$", r"mlp\.experts\..*"))
    for module in runtime("glm4_moe"):
        assert is_ignored(config, module) == ("mlp.experts" in module), module
    assert stored_tensors(out)[f"model.layers.{LAYER}.mlp.experts.1.up_proj.weight"].dtype == "BF16"


def test_an_ignore_of_the_published_card_makes_way(tmp_path):
    """A card "without MTP" ignores what is now quantized."""
    _, source = world_of("qwen3_next", tmp_path)
    folder = quantized_folder(tmp_path / "target", tmp_path / "quantized", SCHEMES["int8"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*mtp.*", "mtp.fc"]
    (folder / "config.json").write_text(json.dumps(config))
    out = exported(replace(source, target_folder=folder), tmp_path, QUANTIZED)
    config = json.loads((out / "config.json").read_text())
    assert not is_ignored(config, "mtp.layers.0.self_attn.qkv_proj")
    assert is_ignored(config, "mtp.fc")


def test_packed_words(tmp_path):
    """4 bits in groups, of a target whose sizes groups divide; its MTP block is dense."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
    target = model_target("Qwen2Config", "Qwen2ForCausalLM", **sizes)
    save_target(target, tmp_path / "target")
    scheme = Scheme(bits=4, group_size=32, symmetric=False)
    folder = quantized_folder(tmp_path / "target", tmp_path / "quantized", scheme, floats=())
    source = source_of(target, tmp_path, target_folder=folder, order="hidden_first")
    out = exported(source, tmp_path, QUANTIZED)
    stored = stored_tensors(out)
    assert stored["model.mtp_layers.0.mlp.down_proj.weight_packed"].shape == (64, 12)
    assert stored["model.mtp_layers.0.mlp.down_proj.weight_zero_point"].shape == (8, 3)
    assert stored["model.mtp_layers.0.self_attn.q_proj.bias"].dtype == "BF16"
    config = json.loads((out / "config.json").read_text())
    assert not is_ignored(config, "model.mtp_layers.0.mlp.down_proj")
    assert is_ignored(config, "model.mtp_layers.0.input_proj")
    _, tensors = to_mtp.read(out, spec=target.spec)
    q = quantize(source.tensors["depths.0.block.mlp.down_proj.weight"], scheme, name="")
    assert torch.equal(tensors["depths.0.block.mlp.down_proj.weight"], dequantize(q))


def test_groups_that_are_named_by_layer_take_the_module_in(tmp_path):
    _, source = world_of("glm4_moe", tmp_path)
    folder = quantized_folder(tmp_path / "target", tmp_path / "quantized", SCHEMES["int8"])
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] = [r"re:model\.layers\.[0-3]\..*"]
    (folder / "config.json").write_text(json.dumps(config))
    out = exported(replace(source, target_folder=folder), tmp_path, QUANTIZED)
    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    for module in runtime("glm4_moe"):
        assert any(re.match(target[3:], module) for target in group["targets"]), module


UNKNOWN = [
    ({"strategy": "tensor"}, "its strategy is 'tensor'"),
    ({"num_bits": 4, "strategy": "group", "group_size": 32}, "would be written"),
]


@pytest.mark.parametrize(("weights", "match"), UNKNOWN, ids=["tensor", "other bits"])
def test_a_scheme_that_is_not_written_here_is_refused(weights, match, tmp_path):
    _, source = world_of("glm4_moe", tmp_path)
    folder = quantized_folder(tmp_path / "target", tmp_path / "quantized", SCHEMES["int8"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(weights)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=rf"mtp_quant: 'quantized' is not possible: .*{match}.*accepted: float, absent"
    ):
        to_mtp.refuse(replace(source, target_folder=folder), "none", options=QUANTIZED)


def with_config(name, tmp_path, quantization, **files):
    """A source whose target's config names another quantizer; its tensors do not matter here."""
    _, source = world_of(name, tmp_path)
    folder = tmp_path / "target"
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return source


def section(out):
    return json.loads((out / "config.json").read_text())["quantization_config"]


def test_gptq_leaves_the_module_out(name, tmp_path):
    other = {"-:.*visual.*": {}}
    source = with_config(name, tmp_path, {"quant_method": "gptq", "bits": 4, "dynamic": other})
    dynamic = section(exported(source, tmp_path, FLOAT))["dynamic"]
    for module in runtime(name):
        assert any(re.match(pattern.removeprefix("-:"), module) for pattern in dynamic), module
    assert not any(re.match(pattern.removeprefix("-:"), "model.layers.3.mlp.down_proj") for pattern in dynamic)
    assert other.items() <= dynamic.items()


def test_awq_leaves_the_module_out(name, tmp_path):
    source = with_config(name, tmp_path, {"quant_method": "awq", "modules_to_not_convert": None})
    parts = section(exported(source, tmp_path, FLOAT))["modules_to_not_convert"]
    assert all(any(part in module for part in parts) for module in runtime(name))
    assert not any(part in f"model.layers.{LAYER - 1}.mlp.down_proj" for part in parts)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_fp8_leaves_the_module_out(name, key, tmp_path):
    """By whole names; of experts one is enough."""
    source = with_config(name, tmp_path, {"quant_method": "fp8", key: ["lm_head"]})
    names = section(exported(source, tmp_path, FLOAT))[key]
    for module in (one for one in runtime(name) if not one.startswith("model.decoder")):
        in_experts = "experts" in module and any(module in one for one in names if "experts" in one)
        assert module in names or in_experts, module
    assert "lm_head" in names
    assert not any(f"model.layers.{LAYER - 1}" in one for one in names)
    assert set(section(tmp_path / "out")) == {"quant_method", key}


def test_modelopt_leaves_the_module_out(name, tmp_path):
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    source = with_config(name, tmp_path, {"quant_method": "modelopt", "ignore": ["lm_head"]}, hf_quant_config=own)
    out = exported(source, tmp_path, FLOAT)
    own = json.loads((out / "hf_quant_config.json").read_text())
    assert own["producer"] == {"name": "modelopt"}
    for names in (section(out)["ignore"], own["quantization"]["exclude_modules"]):
        patterns = [re.escape(one).replace(r"\*", ".*") for one in names]
        for module in runtime(name):
            assert any(re.fullmatch(pattern, module) for pattern in patterns), module
        assert not any(re.fullmatch(pattern, f"model.layers.{LAYER - 1}.mlp.down_proj") for pattern in patterns)


def test_a_file_of_its_own_is_enough(tmp_path):
    own = {"quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    source = with_config("glm4_moe", tmp_path, None, hf_quant_config=own)
    out = exported(source, tmp_path, FLOAT)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    own = json.loads((out / "hf_quant_config.json").read_text())
    assert f"model.layers.{LAYER}.*" in own["quantization"]["exclude_modules"]


def test_quantizers_that_cannot_say_it_are_refused(tmp_path):
    source = with_config("glm4_moe", tmp_path, {"quant_method": "theirs"})
    with pytest.raises(ConfigError, match=r"'float' is not possible .* quantized by 'theirs'.*accepted: absent"):
        to_mtp.refuse(source, "none")
    with pytest.raises(ConfigError, match="'quantized' is not possible with a target quantized by 'theirs'"):
        to_mtp.refuse(source, "none", options=QUANTIZED)
    to_mtp.refuse(source, "none", options=to_mtp.Options(mtp_quant="absent"))
    source = with_config("mimo", tmp_path / "mimo", {"quant_method": "awq"})
    with pytest.raises(ConfigError, match="'float' is not possible with a MiMo target quantized by awq"):
        to_mtp.refuse(source, "none")


def test_mimo_in_a_quantized_target_is_told(tmp_path):
    _, source, _, config = stitched("mimo", tmp_path, FLOAT, floats=())
    assert is_ignored(config, "self_attn.qkv_proj")
    assert not is_ignored(config, "model.layers.0.self_attn.qkv_proj")
    assert any("needs mtp_quant=quantized" in note for note in to_mtp.notes(source, options=FLOAT))
    assert not any("needs mtp_quant" in note for note in to_mtp.notes(source, options=QUANTIZED))


def test_absent_from_a_quantized_target(tmp_path):
    _, _, out, config = stitched("deepseek_v3", tmp_path, to_mtp.Options(mtp_quant="absent"))
    assert config["num_nextn_predict_layers"] == 0
    assert stored_tensors(out).keys() == stored_tensors(tmp_path / "quantized").keys()
    before = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert config["quantization_config"] == before["quantization_config"]
