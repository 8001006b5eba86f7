# What we write, read and written again by the published package `compressed-tensors`, which engines read with. It is no
# dependency: engines pin different versions. Install one into an environment with pytest and run this file there.

import pytest
import torch
from torch import nn

from export.compressed import quantization_config, tensors_of
from export.quantize import Scheme, dequantize, quantize
from tests.test_export_compressed import FLOAT, JOINED, SERVED, SPLIT, random_weight

package = pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")

# The layout of weight-only int8 with one scale a row exists, though engines without a kernel for it make us refuse it.
LAYOUTS = {**SERVED, "int8 a row": Scheme(bits=8), "int8 asymmetric a row": Scheme(bits=8, symmetric=False)}


def read_config(scheme):
    """Our config through the package's own, which rejects what it does not know."""
    from compressed_tensors.quantization import QuantizationConfig

    if scheme in SERVED.values():
        return QuantizationConfig.model_validate(quantization_config(scheme))
    config = quantization_config(Scheme(bits=8, group_size=32))
    changes = {"strategy": "channel", "group_size": None, "symmetric": scheme.symmetric}
    config["config_groups"]["group_0"]["weights"].update(changes)
    return QuantizationConfig.model_validate(config)


def compressor_of(config):
    from compressed_tensors.compressors import BaseCompressor

    group = config.config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(group.format), group


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(16, 128), (24, 384)])
def test_it_reads_our_weights(name, shape):
    q = quantize(random_weight(*shape), LAYOUTS[name], name="x")
    tensors = {one.removeprefix("x."): t for one, t in tensors_of("x", q, torch.bfloat16).items()}
    tensors["weight_scale"] = tensors["weight_scale"].float()  # it computes in the dtype of the scale
    compressor, group = compressor_of(read_config(q.scheme))
    assert set(tensors) == set(compressor.compression_param_names(group))
    assert torch.equal(compressor.decompress(tensors, group)["weight"], dequantize(q))


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_writes_the_same_from_our_scales(name):
    q = quantize(random_weight(24, 384), LAYOUTS[name], name="x")
    ours = {one.removeprefix("x."): t for one, t in tensors_of("x", q, torch.bfloat16).items()}
    compressor, group = compressor_of(read_config(q.scheme))
    given = {"weight": dequantize(q), "weight_scale": q.scale}
    if q.zero_point is not None:
        given["weight_zero_point"] = q.zero_point
    theirs = compressor.compress(given, group)
    assert set(theirs) == set(ours)
    for one, tensor in ours.items():
        if one != "weight_scale":
            assert theirs[one].dtype == tensor.dtype
            assert torch.equal(theirs[one].double(), tensor.double())


@pytest.mark.parametrize("name", SERVED)
def test_it_reads_our_config_as_we_mean_it(name):
    from compressed_tensors.compressors.format import infer_module_format

    scheme = SERVED[name]
    config = read_config(scheme)
    group = config.config_groups["group_0"]
    assert group.weights.num_bits == scheme.bits
    assert group.weights.symmetric == scheme.symmetric
    assert group.weights.group_size == scheme.group_size
    assert group.weights.strategy == ("channel" if scheme.group_size is None else "group")
    assert (group.input_activations is not None) == scheme.dynamic_activations
    if scheme.dynamic_activations:
        assert group.input_activations.dynamic is True
        assert group.input_activations.strategy == "token"
    assert infer_module_format(nn.Linear, group).value == group.format == config.format


def test_it_ignores_what_we_mean_it_to():
    from compressed_tensors.utils.match import is_match

    config = read_config(SERVED["int4"])
    linear = nn.Linear(1, 1)

    def ignored(name):
        return any(is_match(name, linear, pattern) for pattern in config.ignore)

    assert not [name for name in JOINED + SPLIT if ignored(name)]
    assert not [name for name in FLOAT if not ignored(name)]
