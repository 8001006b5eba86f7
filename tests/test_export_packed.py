# `to=packed`: what is refused, what is written, and that unpacking gives every tensor back to the bit.

import json
from dataclasses import replace

import pytest
import torch

from drafters.checkpoint import load_drafter, read_config
from drafters.errors import ConfigError
from drafters.packed.block import Block, save_block
from export import to_packed
from export.pack import check_packing, pack, parts_of, scheme_for, unpack
from export.quantize import Quantized, Scheme, dequantize, quantize, scheme_of
from export.selfcheck import check_tensors, check_values
from tests.contract_cases import shaken
from tests.packed_doubles import source_of, wide_world

BASES = {
    "int8": scheme_of("int8"),
    "int4": scheme_of("int4"),
    "int8 asymmetric": replace(scheme_of("int8"), symmetric=False),
    "int4 asymmetric": replace(scheme_of("int4"), symmetric=False),
    "int4 by 64": replace(scheme_of("int4"), group_size=64),
}


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "layers.0.self_attn.q_proj.weight": (32, 64),
        "layers.0.self_attn.k_proj.weight": (16, 64),
        "layers.0.self_attn.v_proj.weight": (16, 64),
        "layers.0.mlp.gate_proj.weight": (48, 64),
        "layers.0.mlp.up_proj.weight": (48, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "fc.weight": (64, 128),
        "norm.weight": (64,),
        "markov_head.markov_w1.weight": (40, 6),
        "output_rows": (20, 64),
    }
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**found, "vocab.d2t": torch.arange(20)}


@pytest.mark.parametrize("name", BASES)
def test_unpacking_gives_every_tensor_back_to_the_bit(name, tmp_path):
    base, given = BASES[name], tensors()
    save_block(pack(given, base), tmp_path / "block")
    found = unpack(Block.open(tmp_path / "block"))
    assert found.keys() == given.keys()
    for key, tensor in given.items():
        scheme, back = scheme_for(key, base), found[key]
        if scheme is None:
            assert torch.equal(back, tensor), key
            continue
        wanted = quantize(tensor, scheme, name=key)
        assert isinstance(back, Quantized)
        assert torch.equal(back.values, wanted.values), key
        assert torch.equal(back.scale, wanted.scale), key
        assert (back.zero_point is None) == (wanted.zero_point is None)
        assert back.zero_point is None or torch.equal(back.zero_point, wanted.zero_point), key
        assert torch.equal(dequantize(back), dequantize(wanted)), key


def test_what_engines_fuse_is_one_part_and_the_rest_by_itself():
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    parts = parts_of(shapes, BASES["int4"], {"vocab.d2t": torch.int64})
    joined = {part.names: (part.shape, part.form) for part in parts if len(part.names) > 1}
    prefix = "layers.0."
    assert joined == {
        tuple(f"{prefix}self_attn.{kind}_proj.weight" for kind in "qkv"): ((64, 64), "int4"),
        tuple(f"{prefix}mlp.{kind}_proj.weight" for kind in ("gate", "up")): ((96, 64), "int4"),
    }
    single = {part.names[0]: part.form for part in parts if len(part.names) == 1}
    assert (single["norm.weight"], single["vocab.d2t"], single["fc.weight"]) == ("float32", "int64", "int8")
    wide = {part.names[0] for part in parts if part.quantized_inputs}
    assert wide == {"output_rows"}


@pytest.mark.parametrize(
    ("to", "quant", "said"),
    [
        ("hf", "int8", "Engines join q, k, v"),
        ("gguf", "int4", "split tensors"),
        ("packed", "none", "packing alone is meaningless"),
        ("packed", "fp8", "no fast product of 8-bit floats"),
        ("packed", "int3", "unknown"),
    ],
)
def test_packing_that_means_nothing_is_refused(to, quant, said):
    with pytest.raises(ConfigError, match=said):
        check_packing(to, quant)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (Scheme(bits=8, group_size=32), "group_size: got 32 .* accepted: null"),
        (Scheme(bits=4), "group_size: got null .* accepted: 32, 64, 128"),
        (Scheme(bits=4, group_size=32, scale_dtype="f32"), "scale_dtype: got 'f32'"),
        (Scheme(kind="fp8"), "fp8"),
    ],
)
def test_schemes_that_no_kernel_takes_are_refused(base, said):
    with pytest.raises(ConfigError, match=said):
        pack(tensors(), base)


def test_rows_that_the_four_bit_kernel_does_not_take_are_named():
    odd = {"layers.0.mlp.down_proj.weight": torch.randn(40, 64)}
    with pytest.raises(ConfigError, match=r"down_proj.weight of 40 rows is no multiple of 16"):
        pack(odd, BASES["int4"])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    world = wide_world()
    return source_of(shaken(world.drafter("markov")), world.target, tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("output_rows", [True, False])
def test_a_folder_is_whole_and_loads(source, quant, output_rows, tmp_path):
    options = to_packed.Options(output_rows=output_rows)
    to_packed.write(source, quant, tmp_path, options=options)
    wanted = to_packed.manifest(source, quant, options=options)
    assert ("output_rows" in wanted) == output_rows
    check_tensors(wanted, to_packed.stored(tmp_path), where=tmp_path)
    node, back = to_packed.read(tmp_path, spec=source.spec)
    assert node == source.node
    assert back.keys() == source.tensors.keys()
    worst = check_values(source.tensors, back, to_packed.bounds(source, quant, options=options), where=tmp_path)
    assert 0 < worst < 0.2
    assert type(to_packed.load(tmp_path, source=source)) is type(source.drafter)
    config = read_config(tmp_path / "drafter")
    assert (config["weights"]["packed"], config["weights"]["quant"]) == (True, quant)
    assert config["provenance"]["packed_from"] == source.provenance["sha256"]
    assert load_drafter(tmp_path / "drafter").config == source.drafter.config


def test_its_rows_need_the_targets_folder(source, tmp_path):
    lost = replace(source, target_folder=None)
    with pytest.raises(ConfigError, match=r"to.output_rows: got true"):
        to_packed.write(lost, "int8", tmp_path)
    to_packed.write(lost, "int8", tmp_path, options=to_packed.Options(output_rows=False))
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["weights"]["quant"] == "int8"


def test_layers_that_run_the_targets_code_are_refused(source):
    other = replace(source, node={**source.node, "block": "target"})
    with pytest.raises(ConfigError, match=r"drafter.block=target"):
        to_packed.refuse(other, "int8")
