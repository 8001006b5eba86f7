# An export that lacks a tensor, has one too many, one of another shape or type, or values farther off than its format
# makes them, is found out and named.

import pytest
import torch
from safetensors.torch import save_file

from drafters.errors import CheckpointError
from export.quantize import SCHEMES, dequantize, quantize, scheme_of
from export.selfcheck import check_tensors, check_values, stored_in_safetensors, weight_bounds

WANTED = {"fc.weight": ((4, 8), "BF16"), "norm.weight": ((4,), "BF16"), "d2t": ((3,), "I64")}


def made(**changes):
    return {**WANTED, **changes}


def without(name):
    return {key: value for key, value in WANTED.items() if key != name}


def test_the_headers_say_what_is_stored(tmp_path):
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.arange(4)}
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(1, dtype=torch.int8)}, tmp_path / "model-2.safetensors")
    assert stored_in_safetensors(tmp_path) == {"a": ((2, 3), "BF16"), "b": ((4,), "I64"), "c": ((1,), "I8")}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (without("norm.weight"), r"out: the export is not whole: norm\.weight is missing; nothing was kept"),
        (made(extra=((1,), "F32")), "extra is none of its tensors"),
        (made(**{"fc.weight": ((8, 4), "BF16")}), r"fc\.weight is \(\(8, 4\), 'BF16'\), wanted \(\(4, 8\), 'BF16'\)"),
        (made(d2t=((3,), "I32")), r"d2t is \(\(3,\), 'I32'\)"),
        ({}, "d2t is missing; fc.weight is missing; norm.weight is missing"),
    ],
)
def test_what_is_not_whole_is_refused_by_name(tmp_path, found, said):
    check_tensors(WANTED, dict(WANTED), where=tmp_path)
    with pytest.raises(CheckpointError, match=said):
        check_tensors(WANTED, found, where=tmp_path / "out")


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.self_attn.q_proj.weight": torch.randn(8, 64, generator=generator),
        "fc.weight": torch.randn(8, 64, generator=generator),
        "norm.weight": torch.randn(8, generator=generator) * 1e-3,
        "vocab.d2t": torch.arange(5),
    }


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("quant", ["none", *SCHEMES])
def test_bounds_hold_for_what_a_format_makes_of_weights_and_for_no_more(tmp_path, dtype, quant):
    tensors = weights()
    bounds = weight_bounds(tensors, quant, dtype=dtype)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    back = {name: t.to(kind).float() if t.is_floating_point() else t for name, t in tensors.items()}
    if quant != "none":
        name = "layers.0.self_attn.q_proj.weight"
        back[name] = dequantize(quantize(tensors[name], scheme_of(quant, dtype=dtype), name=name))
    worst = check_values(tensors, back, bounds, where=tmp_path)
    assert worst <= {"none": 0.01, "int8": 0.01, "fp8": 0.07, "int4": 0.2}[quant]
    assert (worst == 0) == (quant == "none" and dtype == "f32")
    for name in tensors:
        off = {**back, name: back[name] + (1 if name == "vocab.d2t" else 0.5)}
        with pytest.raises(CheckpointError, match=f"out: {name} came back .* off, where the format allows"):
            check_values(tensors, off, bounds, where=tmp_path / "out")
