# A published draft as it lies on the disk: its config, flat or in an envelope, and its tensors as float32 under one
# spelling of their names. Nothing is judged here but whether it can be read.

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.files import plain_name
from drafters.plain_json import parse
from export.compressed import read_quantized
from export.published_kinds import wrong_values

__all__ = ["Published", "open_published"]

QUANTIZED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight")
IDS = ("d2t", "t2d", "token_map")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Other spellings of the same tensors (DeepSpec's exporters, TorchSpec, Model-Optimizer), by how a name begins.
ALIASES = {
    "model.": "",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
    "medusa_heads.": "",
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """`config`: of an envelope the transformer's own keys and the algorithm's, side by side. `tensors`: floats as
    float32, ids as they are."""

    folder: Path
    config: Mapping[str, Any]
    is_envelope: bool
    tensors: dict[str, Tensor]


def open_published(folder: Path) -> Published:
    """Reads a folder with config.json and safetensors. Raises CheckpointError when something is missing, damaged, or
    not safetensors."""
    config = _config(folder)
    is_envelope = "speculators_model_type" in config
    raw = _tensors(folder)
    quantization = config.get("quantization_config")
    floats = raw if quantization is None else _dequantized(raw, quantization, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in floats.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        plain = _plain_name(name)
        if plain in tensors:
            raise CheckpointError(f"{folder}: holds '{plain}' twice, once as '{name}'; the folder is damaged")
        tensors[plain] = _checked(plain, tensor, folder)
    if is_envelope:
        config = {**(config.get("transformer_layer_config") or {}), **config}
    return Published(folder=folder, config=config, is_envelope=is_envelope, tensors=tensors)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = parse(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; give the folder of a published draft") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); the file is damaged") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no settings; the file is damaged")
    if "drafters_version" in config:
        raise CheckpointError(
            f"{folder}: is a drafter of this package, not a published draft; measure its run with evaluate.py run="
        )
    if wrong := list(wrong_values(config)):
        raise CheckpointError(f"{path}: {'; '.join(wrong)}; correct the file, or download it again")
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Of model.safetensors, of the shards that an index names, or of the only other safetensors file there is."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    try:
        if not files[0].is_file() and index.is_file():
            names = parse(index.read_text())["weight_map"].values()
            files = [folder / name for name in sorted({plain_name(name) for name in names})]
        elif not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1 and not index.is_file():
            pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt")))
            other = f" ({', '.join(pickles)} may run code when they are read: convert them first)" if pickles else ""
            raise CheckpointError(
                f"{folder}: {len(files)} .safetensors files, wanted model.safetensors, or shards with an index{other}"
            )
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its tensors cannot be read: {error}; download the folder again") from error


def _dequantized(raw: Mapping[str, Tensor], quantization: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization_config.quant_method is {method!r}; accepted: compressed-tensors, "
            "or a draft that is not quantized"
        )
    matrices = {name.removesuffix(".weight_scale") for name in raw if name.endswith(".weight_scale")}
    parts = {f"{name}{suffix}" for name in matrices for suffix in QUANTIZED}
    floats = {name: tensor for name, tensor in raw.items() if name not in parts}
    for name in sorted(matrices):
        try:
            floats[f"{name}.weight"] = read_quantized(raw, name, quantization)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: {error}") from error
    return floats


def _checked(name: str, tensor: Tensor, folder: Path) -> Tensor:
    """Floats as finite float32, ids as they are. Raises CheckpointError for what is neither."""
    if name in IDS:
        if tensor.dim() != 1 or tensor.numel() == 0 or tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; accepted: whole numbers in one row"
            )
        return tensor
    if tensor.dtype not in FLOATS or tensor.dim() == 0:
        raise CheckpointError(
            f"{folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; accepted: bfloat16, float16 or float32 "
            "of one axis or more, or quantized with a weight_scale beside it and a quantization_config"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"{folder}: {name} holds NaN or infinite weights; download the folder again")
    return tensor.float()


def _plain_name(name: str) -> str:
    for alias, ours in ALIASES.items():
        if name.startswith(alias):
            name = ours + name.removeprefix(alias)
    parts = name.split(".")
    if len(parts) > 2 and parts[0].isdigit() and parts[1].isdigit():
        head, layer, rest = parts[0], parts[1], parts[2:]
        if rest[0] == "linear":
            return f"blocks.{head}.layers.{layer}.{rest[-1]}"
        return f"lm_heads.{head}.{rest[-1]}"
    return name
