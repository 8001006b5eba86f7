# Weights to integers or 8-bit floats and back: one scale a row or a group of a row, rounded to nearest, the scale
# searched for the smallest error where the scheme says so. Nothing here knows a file format: `compressed` lays the
# numbers out for engines. Which tensors of a drafter are quantized at all is decided here too (`is_quantized`).

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "GROUP_SIZES",
    "SCHEMES",
    "Quantized",
    "Scheme",
    "dequantize",
    "error_bound",
    "fused_groups",
    "is_quantized",
    "quantize",
    "scheme_of",
]

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How weights become numbers of `bits` bits. `group_size` None = one scale a row ("channel"). `search`: scales that
    minimise the squared error. `scale_dtype`: scales are exact in it, so that a file can hold them as they are."""

    bits: int = 8
    kind: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    search: bool = True
    dynamic_activations: bool = False
    scale_dtype: torch.dtype = torch.bfloat16


SCHEMES = {
    "int8": Scheme(bits=8, dynamic_activations=True),
    "int4": Scheme(bits=4, group_size=32),
    "fp8": Scheme(kind="fp8", dynamic_activations=True),
}


@dataclass(frozen=True, eq=False)
class Quantized:
    """`values` [out, in] int8 or float8_e4m3fn; `scale` float32 [out, groups]; `zero_point` int8 [out, groups], None
    where symmetric; `clipped` float32 [out, groups]: by how much weights lie beyond the range of the numbers, None = by
    nothing. A weight is (value - zero point) * scale."""

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: Scheme
    clipped: Tensor | None = None


def scheme_of(quant: str, *, dtype: torch.dtype = torch.bfloat16) -> Scheme:
    """The scheme that a user calls `quant`, for a file whose float tensors are of `dtype`."""
    raise NotImplementedError


def quantize(weight: Tensor, scheme: Scheme, *, name: str, input_moments: Tensor | None = None) -> Quantized:
    """`weight` [out, in] by `scheme`; `name` is for errors, `input_moments` [in] weigh a search."""
    raise NotImplementedError


def dequantize(q: Quantized) -> Tensor:
    """The weights [out, in] in float32."""
    raise NotImplementedError


def error_bound(q: Quantized) -> Tensor:
    """The largest |weight - dequantize(q)| that rounding to nearest allows, [out, in] float32."""
    raise NotImplementedError


def is_quantized(name: str) -> bool:
    """Whether the tensor of this name (ours, with `.weight`) is quantized."""
    raise NotImplementedError


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that engines join into one matrix (q, k, v; gate, up), which therefore share a scheme."""
    raise NotImplementedError
