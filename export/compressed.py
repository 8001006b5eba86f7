# The compressed-tensors layout, which vLLM and SGLang load and llama.cpp's converter reads: the tensors of a quantized
# matrix, the `quantization_config` beside them, and the way back. Written directly, since every engine pins another
# version of the package of that name; what is written here (4 and 8 bits) is the same in all of them.

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from export.quantize import DTYPES, Quantized, Scheme, dequantize

__all__ = [
    "IGNORE",
    "check_served",
    "manifest_of",
    "pack",
    "quantization_config",
    "read_quantized",
    "tensors_of",
    "unpack",
]

# What an engine must not take for quantized. It matches the names of its own modules (`model.fc`, layers counted on
# from the target's), so every pattern is a regular expression with an open beginning.
IGNORE = (
    "re:.*fc$",
    "re:.*eh_proj$",
    "re:.*input_proj$",
    "re:.*lm_head$",
    "re:.*markov_head.*",
    "re:.*confidence_head.*",
)
# Engines join these into one module with one scheme: an ignore that names a part leaves a module that is half of each.
_PARTS = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj", "gate_up_proj"))

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def check_served(scheme: Scheme) -> None:
    """Raises ConfigError for a scheme that engines have no kernel for, and says what to take instead. int8 with dynamic
    activations is W8A8, int without them weight-only, fp8 W8A8 (W8A16 on GPUs before fp8)."""
    problem = None
    if scheme.kind == "fp8":
        if not scheme.dynamic_activations:
            problem = "quant.dynamic_activations: got false with kind 'fp8'; accepted: true"
    elif scheme.dynamic_activations:
        if (scheme.bits, scheme.symmetric, scheme.group_size) != (8, True, None):
            problem = (
                f"quant: got dynamic_activations true with bits {scheme.bits}, symmetric {scheme.symmetric}, "
                f"group_size {scheme.group_size}, which engines have no kernel for; accepted: bits 8, symmetric true, "
                "group_size null; or dynamic_activations false"
            )
    elif scheme.bits == 8 and scheme.group_size is None:
        problem = (
            "quant.group_size: got null for int8 weights with float activations, which vLLM has no CPU kernel for and "
            "llama.cpp cannot convert; accepted: dynamic_activations true, or group_size 32, 64 or 128"
        )
    if problem is not None:
        raise ConfigError(problem)


def quantization_config(scheme: Scheme, *, ignore: Sequence[str] = IGNORE) -> dict[str, Any]:
    """The `quantization_config` of a config.json: every linear layer but those that `ignore` names is of `scheme`.

    Raises ConfigError as `check_served`, for a literal name in `ignore` (an engine's names are not the file's), and for
    a pattern that takes a part of what engines join.
    """
    check_served(scheme)
    _check_ignore(ignore)
    weights = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    activations = {**weights, "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if scheme.dynamic_activations else None,
        "output_activations": None,
        "format": _format(scheme),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _format(scheme),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def tensors_of(name: str, q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a file holds for the matrix `name` (as the file calls it, without ".weight"), scales in `dtype`.

    Weight-only integers are packed into int32 words: `weight_packed` [out, ceil(in * bits / 32)], `weight_shape`,
    `weight_scale` [out, groups] and, if asymmetric, `weight_zero_point` [ceil(out * bits / 32), groups]. Others are a
    `weight` [out, in] of int8 or float8_e4m3fn and its scale [out, 1]. Raises ConfigError where `dtype` cannot hold the
    scales, and for asymmetric rows that fill no word where engines join matrices by words.
    """
    scale = q.scale.to(dtype)
    if not torch.equal(scale.float(), q.scale.float()):
        raise ConfigError(
            f"{name}: its scales were made for {q.scheme.scale_dtype} and are not exact in {dtype}; quantize with "
            f"scale_dtype={next((key for key, one in DTYPES.items() if one == dtype), 'bf16')}"
        )
    if _format(q.scheme) != "pack-quantized":
        whole = {f"{name}.weight": q.values, f"{name}.weight_scale": scale}
        return whole if q.zero_point is None else {**whole, f"{name}.weight_zero_point": q.zero_point}
    bits = q.scheme.bits
    tensors = {
        f"{name}.weight_packed": pack(q.values, bits),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(q.values.shape, dtype=torch.int64),
    }
    if q.zero_point is not None:
        _check_rows(name, len(q.values), bits)
        tensors[f"{name}.weight_zero_point"] = pack(q.zero_point.T, bits).T.contiguous()
    return tensors


def manifest_of(
    name: str, shape: Sequence[int], scheme: Scheme, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype, as safetensors spells it ("BF16", "I32"), of each tensor that `tensors_of` gives for a matrix of
    `shape`: from these numbers alone."""
    rows, width = shape
    groups = 1 if scheme.group_size is None else width // scheme.group_size
    found: dict[str, tuple[tuple[int, ...], str]] = {f"{name}.weight_scale": ((rows, groups), _NAMES[dtype])}
    if _format(scheme) == "pack-quantized":
        found[f"{name}.weight_packed"] = (rows, _words(width, scheme.bits)), "I32"
        found[f"{name}.weight_shape"] = (2,), "I64"
        zero_point = (_words(rows, scheme.bits), groups), "I32"
    else:
        found[f"{name}.weight"] = (rows, width), "F8_E4M3" if scheme.kind == "fp8" else "I8"
        zero_point = (rows, groups), "I8"
    return found if scheme.symmetric else {**found, f"{name}.weight_zero_point": zero_point}


def read_quantized(tensors: Mapping[str, Tensor], name: str, config: Mapping[str, Any]) -> Tensor:
    """The float32 matrix `name` (without ".weight") of a file with this `quantization_config`; one that is stored as
    floats too. Raises CheckpointError for what is missing or does not fit the config, ConfigError for a config that
    says what is not read here (several groups, other bits, blocks, reordered columns)."""
    scheme, strategy = _scheme_of(config)
    packed = f"{name}.weight_packed" in tensors
    main = f"{name}.weight_packed" if packed else f"{name}.weight"
    if main not in tensors:
        raise CheckpointError(f"{name}: neither weight nor weight_packed is in the file; export it again")
    if not packed and f"{name}.weight_scale" not in tensors:
        if tensors[main].dtype in (torch.int8, torch.float8_e4m3fn):
            raise CheckpointError(f"{name}.weight_scale: missing beside {main}, which is quantized; export it again")
        return tensors[main].float()
    if f"{name}.weight_g_idx" in tensors:
        raise ConfigError(f"{name}.weight_g_idx: columns in another order (actorder) are not read; accepted: none")
    values = _values(tensors, name, scheme) if packed else tensors[main]
    expected = torch.float8_e4m3fn if scheme.kind == "fp8" else torch.int8
    if values.dtype != expected:
        raise CheckpointError(f"{main}: got {values.dtype}, expected {expected} by its quantization_config")
    if values.dim() != 2:
        raise CheckpointError(f"{main}: got shape {list(values.shape)}, expected [out, in]; the file is damaged")
    rows, width = values.shape
    groups = 1 if scheme.group_size is None else width // scheme.group_size
    if scheme.group_size is not None and width % scheme.group_size:
        raise ConfigError(
            f"{name}: {width} columns in groups of {scheme.group_size}; accepted: groups that divide them"
        )
    scale = _part(tensors, f"{name}.weight_scale").float()
    if strategy == "tensor" and scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(rows, 1)
    zero_point = None if scheme.symmetric else _part(tensors, f"{name}.weight_zero_point")
    if zero_point is not None and packed:
        zero_point = unpack(zero_point.T, scheme.bits, rows).T
    for kind, part in (("weight_scale", scale), ("weight_zero_point", zero_point)):
        if part is not None and part.shape != (rows, groups):
            raise CheckpointError(
                f"{name}.{kind}: shape {list(part.shape)} (unpacked), expected {[rows, groups]} by its "
                f"quantization_config and a matrix of {[rows, width]}"
            )
    return dequantize(Quantized(values, scale, zero_point, scheme))


def pack(values: Tensor, bits: int) -> Tensor:
    """Signed `values` [rows, n] of 4 or 8 bits as int32 words [rows, ceil(n * bits / 32)]: value + 2^(bits - 1), the
    first in the lowest bits, zeros after the last."""
    per_word = 32 // bits
    fields = values.to(torch.int64) + 2 ** (bits - 1)
    fields = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    words = (fields << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor, bits: int, num_values: int) -> Tensor:
    """int8 values [rows, num_values] of words that `pack` made."""
    fields = (words.to(torch.int64)[..., None] >> (bits * torch.arange(32 // bits))) & (2**bits - 1)
    return (fields.flatten(-2)[..., :num_values] - 2 ** (bits - 1)).to(torch.int8)


def _format(scheme: Scheme) -> str:
    if scheme.kind == "fp8":
        return "float-quantized"
    return "int-quantized" if scheme.dynamic_activations else "pack-quantized"


def _words(num_values: int, bits: int) -> int:
    return -(-num_values * bits // 32)


def _check_rows(name: str, rows: int, bits: int) -> None:
    part = name.rpartition(".")[2]
    if rows % (32 // bits) and any(part in parts for parts in _PARTS):
        raise ConfigError(
            f"{name}: {rows} rows; engines join it with its neighbours by words of {32 // bits} zero points; accepted: "
            f"rows that {32 // bits} divides, or quant.symmetric true"
        )


def _check_ignore(ignore: Sequence[str]) -> None:
    for pattern in ignore:
        if not pattern.startswith("re:"):
            raise ConfigError(
                f"quant.ignore: got '{pattern}', a name of the file; engines match names of their own; accepted: "
                f"a regular expression, 're:.*{pattern.rpartition('.')[2]}$'"
            )
        # One layer stands for all: its number is the engine's own.
        for parts, module in ((_PARTS[0], "self_attn"), (_PARTS[1], "mlp")):
            hit = {part for part in parts if re.match(pattern[3:], f"model.layers.7.{module}.{part}")}
            if hit and hit != set(parts):
                raise ConfigError(
                    f"quant.ignore: '{pattern}' matches {', '.join(sorted(hit))} but not all of {', '.join(parts)}, "
                    "which engines join; accepted: a pattern for all or for none of them"
                )


def _scheme_of(config: Mapping[str, Any]) -> tuple[Scheme, str]:
    """What a quantization_config says of weights, and its strategy. "tensor" reads as one scale a row."""
    groups = list(config.get("config_groups", {}).values())
    if config.get("quant_method") != "compressed-tensors" or len(groups) != 1 or not groups[0].get("weights"):
        raise ConfigError(
            f"quantization_config: got method {config.get('quant_method')!r} with {len(groups)} config_groups; "
            "accepted: compressed-tensors with one that has weights"
        )
    weights = groups[0]["weights"]
    kind = "fp8" if weights.get("type", "int") == "float" else "int"
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    if strategy not in ("tensor", "channel", "group"):
        raise ConfigError(f"quantization_config.strategy: got '{strategy}'; accepted: tensor, channel, group")
    try:
        scheme = Scheme(
            bits=bits,
            kind=kind,
            symmetric=weights.get("symmetric", True),
            group_size=size if strategy == "group" else None,
            dynamic_activations=groups[0].get("input_activations") is not None,
        )
    except ValueError as error:
        raise ConfigError(f"quantization_config.config_groups: {error}") from error
    return scheme, strategy


def _values(tensors: Mapping[str, Tensor], name: str, scheme: Scheme) -> Tensor:
    """int8 [out, in] of packed words."""
    words, shape = tensors[f"{name}.weight_packed"], _part(tensors, f"{name}.weight_shape").flatten().tolist()
    if scheme.kind == "fp8" or words.dtype != torch.int32 or len(shape) != 2:
        raise CheckpointError(
            f"{name}.weight_packed: {words.dtype} words of a matrix {shape} do not fit kind '{scheme.kind}'; expected "
            "int32 words of [out, in] integers"
        )
    expected = [shape[0], _words(shape[1], scheme.bits)]
    if list(words.shape) != expected:
        raise CheckpointError(
            f"{name}.weight_packed: {list(words.shape)} words, expected {expected} for a matrix of {shape} in "
            f"{scheme.bits} bits"
        )
    return unpack(words, scheme.bits, shape[1])


def _part(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"{name}: missing in the file; export it again")
    return tensors[name]
