# The compressed-tensors layout, which vLLM and SGLang load and llama.cpp's converter reads: tensors of one quantized
# matrix, the `quantization_config` beside them, and the way back. Written directly: engines pin different versions of
# the package of that name.

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from export.quantize import Quantized, Scheme

__all__ = ["IGNORE", "check_served", "manifest_of", "quantization_config", "read_quantized", "tensors_of"]

# What is never quantized. Engines match their own names (`model.fc`), so no pattern is a literal name.
IGNORE = ("re:.*fc$", "re:.*lm_head$", "re:.*markov_head.*", "re:.*confidence_head.*", "re:.*eh_proj$")


def check_served(scheme: Scheme) -> None:
    """Raises ConfigError for a scheme that no engine has a kernel for, and says what to take instead."""
    raise NotImplementedError


def tensors_of(name: str, q: Quantized, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a file holds for the matrix `name` (without ".weight"), scales in `dtype`."""
    raise NotImplementedError


def manifest_of(
    name: str, shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype (as safetensors spells it: "BF16", "I32") of what `tensors_of` gives, from numbers alone."""
    raise NotImplementedError


def read_quantized(tensors: Mapping[str, Tensor], name: str, config: Mapping[str, Any]) -> Tensor:
    """The float32 matrix `name` (without ".weight") of a file with this `quantization_config`; a float one too."""
    raise NotImplementedError


def quantization_config(scheme: Scheme, *, ignore: Sequence[str] = IGNORE) -> dict[str, Any]:
    """The `quantization_config` of a config.json."""
    raise NotImplementedError
