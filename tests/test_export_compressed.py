# The compressed-tensors layout: golden vectors of the published packages, a naive twin that counts bits, the way back,
# the config, and what is refused. `test_export_compressed_package.py` asks the package itself where it is installed.

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.errors import CheckpointError, ConfigError
from export.compressed import (
    IGNORE,
    check_served,
    manifest_of,
    pack,
    quantization_config,
    read_quantized,
    tensors_of,
    unpack,
)
from export.quantize import DTYPES, SCHEMES, Scheme, dequantize, quantize

SERVED = {
    **SCHEMES,
    "int4 in 64": Scheme(bits=4, group_size=64),
    "int4 in 128": Scheme(bits=4, group_size=128),
    "int4 a row": Scheme(bits=4),
    "int4 asymmetric": Scheme(bits=4, group_size=32, symmetric=False),
    "int4 asymmetric a row": Scheme(bits=4, symmetric=False),
    "int8 in 32": Scheme(group_size=32),
    "int8 asymmetric": Scheme(group_size=128, symmetric=False),
    "int4 unsearched": Scheme(bits=4, group_size=32, search=False),
}
NAME = "layers.0.mlp.down_proj"


def words(*rows):
    """int32 words as they are written in hexadecimal."""
    return torch.tensor(rows, dtype=torch.int64).sub(2**32).where(torch.tensor(rows) >= 2**31, torch.tensor(rows)).int()


def random_weight(rows=16, width=128):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) + 0.1


def column(values):
    return torch.tensor(values, dtype=torch.int8)[:, None]


def test_golden_words_of_4_bits():
    everything = torch.arange(-8, 8, dtype=torch.int8)[None]
    assert torch.equal(pack(everything, 4), words([0x76543210, 0xFEDCBA98]))
    ragged = torch.arange(-8, -3, dtype=torch.int8)[None]
    assert torch.equal(pack(ragged, 4), words([0x00043210]))


def test_golden_words_of_8_bits():
    values = torch.tensor([[-128, -1, 0, 127, 5, -5, 1, 2]], dtype=torch.int8)
    assert torch.equal(pack(values, 8), words([0xFF807F00, 0x82817B85]))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([range(-8, 8)], [[0x76543210], [0xFEDCBA98]]),
        ([range(-8, 8), range(7, -9, -1)], [[0x76543210, 0x89ABCDEF], [0xFEDCBA98, 0x01234567]]),
    ],
)
def test_golden_zero_points_are_packed_down_the_rows(columns, expected):
    zero_points = torch.cat([column(list(one)) for one in columns], dim=1)
    q = quantize(random_weight(16, 32 * len(columns)), Scheme(bits=4, group_size=32, symmetric=False), name="w")
    tensors = tensors_of(NAME, replace(q, zero_point=zero_points), torch.bfloat16)
    assert torch.equal(tensors[f"{NAME}.weight_zero_point"], words(*expected))
    assert tensors[f"{NAME}.weight_zero_point"].is_contiguous()


def naive_pack(row, bits):
    """One long number, the first value in its lowest bits, cut into words."""
    stream = sum((value + 2 ** (bits - 1)) << (bits * place) for place, value in enumerate(row))
    count = -(-len(row) * bits // 32)
    return [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(count)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 9, 16, 37])
def test_packing_equals_a_naive_twin_and_comes_back(bits, width):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    values = torch.randint(low, high, (5, width), dtype=torch.int8, generator=torch.Generator().manual_seed(width))
    packed = pack(values, bits)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, words(*(naive_pack(row, bits) for row in values.tolist())))
    assert torch.equal(unpack(packed, bits, width), values)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_back_from_a_file_bit_by_bit(name, dtype, tmp_path):
    q = quantize(random_weight(), replace(SERVED[name], scale_dtype=dtype), name=NAME)
    save_file(tensors_of(NAME, q, DTYPES[dtype]), tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(json.dumps(quantization_config(q.scheme)))
    back = read_quantized(load_file(tmp_path / "model.safetensors"), NAME, config)
    assert back.dtype == torch.float32
    assert torch.equal(back, dequantize(q))
    assert back.unique().numel() > 100


def test_scales_of_bf16_are_exact_in_float32_files_too():
    q = quantize(random_weight(), SCHEMES["int4"], name=NAME)
    tensors = tensors_of(NAME, q, torch.float32)
    assert tensors[f"{NAME}.weight_scale"].dtype == torch.float32
    assert torch.equal(read_quantized(tensors, NAME, quantization_config(q.scheme)), dequantize(q))


def test_scales_that_a_file_cannot_hold_are_refused():
    q = quantize(random_weight(), replace(SCHEMES["int4"], scale_dtype="f32"), name=NAME)
    with pytest.raises(ConfigError, match=rf"{NAME}: its scales were made for f32 .*; quantize with scale_dtype=bf16"):
        tensors_of(NAME, q, torch.bfloat16)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("shape", [(16, 128), (24, 384)])
def test_the_manifest_says_what_is_written(name, shape, tmp_path):
    q = quantize(random_weight(*shape), SERVED[name], name=NAME)
    tensors = tensors_of(NAME, q, torch.bfloat16)
    save_file(tensors, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    written = {one: (tuple(entry["shape"]), entry["dtype"]) for one, entry in header.items()}
    assert manifest_of(NAME, shape, SERVED[name], torch.bfloat16) == written
    assert len(written) == 2 + (name.startswith("int4") or " in " in name or "asym" in name) + ("asym" in name)


def test_shapes_of_the_layouts():
    """As the published package writes them, for 576 inputs and 192 outputs."""
    weight = random_weight(192, 576)

    def shapes(scheme):
        tensors = tensors_of("x", quantize(weight, scheme, name="x"), torch.bfloat16)
        return {one.removeprefix("x."): (str(t.dtype)[6:], list(t.shape)) for one, t in tensors.items()}

    assert shapes(SCHEMES["int4"]) == {
        "weight_packed": ("int32", [192, 72]),
        "weight_scale": ("bfloat16", [192, 18]),
        "weight_shape": ("int64", [2]),
    }
    assert shapes(SERVED["int4 asymmetric"]) == {
        "weight_packed": ("int32", [192, 72]),
        "weight_scale": ("bfloat16", [192, 18]),
        "weight_shape": ("int64", [2]),
        "weight_zero_point": ("int32", [24, 18]),
    }
    assert shapes(SERVED["int4 asymmetric a row"])["weight_zero_point"] == ("int32", [24, 1])
    assert shapes(Scheme(bits=8))["weight_packed"] == ("int32", [192, 144])
    assert shapes(SCHEMES["int8"]) == {"weight": ("int8", [192, 576]), "weight_scale": ("bfloat16", [192, 1])}
    assert shapes(SCHEMES["fp8"]) == {"weight": ("float8_e4m3fn", [192, 576]), "weight_scale": ("bfloat16", [192, 1])}


def test_the_configs_in_full():
    def config(name):
        made = quantization_config(SCHEMES[name])
        return made["format"], made["config_groups"]["group_0"]

    token = {"symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}
    row = {"symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False}
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    rest = {"targets": ["Linear"], "output_activations": None}
    assert config("int4") == (
        "pack-quantized",
        {**rest, "format": "pack-quantized", "weights": int4, "input_activations": None},
    )
    for name, kind, form in (("int8", "int", "int-quantized"), ("fp8", "float", "float-quantized")):
        numbers = {"num_bits": 8, "type": kind}
        expected = {**rest, "format": form, "weights": {**numbers, **row}, "input_activations": {**numbers, **token}}
        assert config(name) == (form, expected)
    whole = quantization_config(SCHEMES["int4"], ignore=["re:.*fc$"])
    del whole["config_groups"], whole["format"]
    assert whole == {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": ["re:.*fc$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


# Names of modules while engines run: layers counted on from the target's, joined.
JOINED = [
    f"model.layers.{n}.{part}"
    for n in (0, 7, 30, 112)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]
SPLIT = [f"layers.0.{part}" for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")]
FLOAT = ["model.fc", "fc", "lm_head", "model.lm_head", "model.markov_head.markov_w2", "markov_head.gate_proj"]
FLOAT += ["confidence_head.proj", "model.layers.30.eh_proj", "mtp.fc", "model.mtp_layers.0.input_proj"]


def test_ignore_takes_what_is_float_by_the_names_that_engines_use():
    def ignored(name):
        return any(re.match(pattern.removeprefix("re:"), name) for pattern in IGNORE)

    assert not [name for name in JOINED + SPLIT if ignored(name)]
    assert not [name for name in FLOAT if not ignored(name)]
    assert quantization_config(SCHEMES["int4"])["ignore"] == list(IGNORE)


@pytest.mark.parametrize("pattern", [r"re:.*self_attn.*", r"re:.*mtp.*", r"re:.*layers\.30\..*", r"re:.*down_proj$"])
def test_other_patterns_that_take_all_of_a_module_or_none(pattern):
    assert quantization_config(SCHEMES["int4"], ignore=[*IGNORE, pattern])["ignore"][-1] == pattern


@pytest.mark.parametrize("pattern", [r"re:.*v_proj", r"re:.*up_proj", r"re:.*\.[qkv]_proj$", r"re:.*gate_up_proj"])
def test_a_pattern_that_takes_a_part_of_what_engines_join_is_refused(pattern):
    with pytest.raises(ConfigError, match=rf"quant\.ignore: '{re.escape(pattern)}' matches .*_proj but not all of"):
        quantization_config(SCHEMES["int4"], ignore=[pattern])


def test_a_literal_name_is_refused():
    with pytest.raises(ConfigError, match=r"quant\.ignore: got 'model\.fc', a name of the file.*'re:\.\*fc\$'"):
        quantization_config(SCHEMES["int4"], ignore=["model.fc"])


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (
            Scheme(bits=8),
            r"group_size: got null for int8 weights .*; accepted: dynamic_activations true, or group_size 32",
        ),
        (Scheme(bits=8, symmetric=False), r"group_size: got null for int8"),
        (Scheme(bits=4, group_size=32, dynamic_activations=True), r"with bits 4, symmetric True, group_size 32"),
        (Scheme(bits=8, group_size=32, dynamic_activations=True), r"with bits 8, symmetric True, group_size 32"),
        (
            Scheme(bits=8, symmetric=False, dynamic_activations=True),
            r"symmetric False.*accepted: bits 8, symmetric true",
        ),
        (Scheme(kind="fp8"), r"dynamic_activations: got false with kind 'fp8'; accepted: true"),
    ],
)
def test_what_no_engine_has_a_kernel_for_is_refused(scheme, said):
    for function in (check_served, quantization_config):
        with pytest.raises(ConfigError, match=said):
            function(scheme)


def test_served_schemes_are_not_refused():
    for scheme in SERVED.values():
        check_served(scheme)


def test_zero_points_that_fill_no_word_are_refused_where_rows_are_joined():
    q = quantize(random_weight(12, 64), SERVED["int4 asymmetric"], name="w")
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_proj: 12 rows; .* words of 8 zero points"):
        tensors_of("layers.0.self_attn.k_proj", q, torch.bfloat16)
    tensors = tensors_of("layers.0.self_attn.o_proj", q, torch.bfloat16)
    assert tensors["layers.0.self_attn.o_proj.weight_zero_point"].shape == (2, 2)
    back = read_quantized(tensors, "layers.0.self_attn.o_proj", quantization_config(q.scheme))
    assert torch.equal(back, dequantize(q))


def test_float_matrices_are_read_as_they_are():
    weight = random_weight().bfloat16()
    back = read_quantized({"fc.weight": weight}, "fc", quantization_config(SCHEMES["int4"]))
    assert torch.equal(back, weight.float())


def test_one_scale_for_a_whole_matrix_is_read():
    values = torch.randint(-128, 128, (4, 6), dtype=torch.int8)
    config = quantization_config(SCHEMES["int8"])
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    for scale in (torch.tensor([0.5]), torch.tensor(0.5)):
        back = read_quantized({"x.weight": values, "x.weight_scale": scale}, "x", config)
        assert torch.equal(back, values.float() * 0.5)


@pytest.mark.parametrize("name", ["int4 asymmetric", "int8", "fp8"])
def test_every_tensor_is_missed(name):
    q = quantize(random_weight(), SERVED[name], name=NAME)
    tensors = tensors_of(NAME, q, torch.bfloat16)
    for gone in tensors:
        with pytest.raises(CheckpointError, match=NAME):
            read_quantized({one: t for one, t in tensors.items() if one != gone}, NAME, quantization_config(q.scheme))


def changed(tensors, part, change):
    return {**tensors, f"{NAME}.{part}": change(tensors[f"{NAME}.{part}"])}


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("weight_packed", lambda t: t[:, :-1], r"\[16, 15\] words, expected \[16, 16\]"),
        ("weight_packed", lambda t: t.long(), r"int64 words"),
        ("weight_shape", lambda t: t * 2, r"\[16, 16\] words, expected \[32, 32\]"),
        ("weight_scale", lambda t: t[:, :2], r"weight_scale: shape \[16, 2\] .*expected \[16, 4\]"),
        ("weight_zero_point", lambda t: t[:, :2], r"weight_zero_point: shape \[16, 2\] .*expected \[16, 4\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(part, change, said):
    q = quantize(random_weight(), SERVED["int4 asymmetric"], name=NAME)
    tensors = changed(tensors_of(NAME, q, torch.bfloat16), part, change)
    with pytest.raises(CheckpointError, match=said):
        read_quantized(tensors, NAME, quantization_config(q.scheme))


def test_values_of_another_kind_are_refused():
    q = quantize(random_weight(), SCHEMES["int8"], name=NAME)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: got torch\.int8, expected torch\.float8_e4m3fn"):
        read_quantized(tensors_of(NAME, q, torch.bfloat16), NAME, quantization_config(SCHEMES["fp8"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_method": "gptq"}, "got method 'gptq'"),
        ({"config_groups": {}}, "with 0 config_groups"),
        ({"num_bits": 3}, "bits: got 3; accepted: 4, 8"),
        ({"group_size": 16}, "group_size: got 16"),
        ({"strategy": "block"}, "strategy: got 'block'; accepted: tensor, channel, group"),
    ],
)
def test_configs_that_are_not_read_are_refused(change, said):
    config = quantization_config(SCHEMES["int4"])
    config.update({key: value for key, value in change.items() if key in config})
    for group in config["config_groups"].values():
        group["weights"].update({key: value for key, value in change.items() if key not in config})
    q = quantize(random_weight(), SCHEMES["int4"], name=NAME)
    with pytest.raises(ConfigError, match=said):
        read_quantized(tensors_of(NAME, q, torch.bfloat16), NAME, config)


def test_reordered_columns_and_groups_that_do_not_divide_are_refused():
    q = quantize(random_weight(), SCHEMES["int4"], name=NAME)
    tensors = tensors_of(NAME, q, torch.bfloat16)
    with pytest.raises(ConfigError, match="weight_g_idx: columns in another order"):
        read_quantized({**tensors, f"{NAME}.weight_g_idx": torch.arange(128)}, NAME, quantization_config(q.scheme))
    odd = quantize(random_weight(8, 48), Scheme(bits=4), name=NAME)
    with pytest.raises(ConfigError, match="48 columns in groups of 32"):
        read_quantized(tensors_of(NAME, odd, torch.bfloat16), NAME, quantization_config(SCHEMES["int4"]))
