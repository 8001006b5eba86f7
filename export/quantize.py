# Weights to integers or 8-bit floats and back: one scale a row or a group of a row, rounded to nearest, the scale
# searched for the smallest error where the scheme says so. Nothing here knows a file format: `compressed` lays the
# numbers out for engines. Which tensors of a drafter are quantized at all is decided here too (`float_reason`).

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError

__all__ = [
    "DTYPES",
    "GROUP_SIZES",
    "SCHEMES",
    "Quantized",
    "Scheme",
    "dequantize",
    "error_bound",
    "float_reason",
    "fused_groups",
    "is_quantized",
    "quantize",
    "scheme_of",
]

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
GROUP_SIZES = (32, 64, 128)  # what engines have kernels for

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
# Shares of the full range that a search tries. Above 1 the largest weight of a symmetric group keeps its half step;
# 1 itself is tried first, so that a search is never worse than none.
_FACTORS = (1.0, *(1.1 - 0.02 * i for i in range(41) if i != 5))
_CHUNK = 1 << 19  # weights that are searched at a time, for the cache and for memory

_LAYER = r"(?:layers\.\d+|midlayer|depths\.\d+\.block|adapter)"
_PROJECTION = re.compile(rf"{_LAYER}\.(?:\w+\.)*\w+_proj(?:_with_mqa)?\.weight")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
_FLOAT = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"\.bias$", "a bias is added as it is"),
        (r"norm\.\w+$|^gain_D$", "a norm's gain is a few numbers, and each scales a whole channel"),
        (r"^vocab\.", "ids, not weights"),
        (
            r"^fc\.|\b(?:input_proj|eh_proj)\.",
            "engines hold it as a plain float layer; and all that the drafter knows of the target goes through it",
        ),
        (
            r"^markov_head\.",
            "its first factor is an embedding, its second adds straight to the logits: engines read both as floats",
        ),
        (r"^confidence_head\.", "engines hold it in float32, and it is a single row"),
        (r"\blm_head\.", "engines read a drafter's output projection as floats, and its errors are errors of logits"),
        (r"\bembed\w*\.", "a look-up, not a product: engines have no kernel for it"),
        (r"^heads\.", "engines hold the layers of Medusa's heads as plain float layers"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a weight becomes a number of `bits` bits. `kind`: "int" or "fp8" (e4m3). `group_size` None = one scale a row,
    "channel" to engines. `search`: scales that minimise the squared error, else those that reach the largest weight.
    `dynamic_activations`: engines quantize what enters the product too, row by row. `scale_dtype`: "bf16", "f16" or
    "f32"; scales are exact in it, so that a file of this dtype holds them as they are."""

    bits: int = 8
    kind: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    search: bool = True
    dynamic_activations: bool = False
    scale_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name, accepted in (
            ("bits", (4, 8)),
            ("kind", ("int", "fp8")),
            ("group_size", (None, *GROUP_SIZES)),
            ("scale_dtype", tuple(DTYPES)),
        ):
            value = getattr(self, name)
            if value not in accepted:
                choices = ", ".join("null" if one is None else str(one) for one in accepted)
                raise ValueError(f"{name}: got {value!r}; accepted: {choices}")
        if self.kind == "fp8" and (self.bits, self.symmetric, self.group_size) != (8, True, None):
            raise ValueError("kind: got 'fp8'; accepted only with bits 8, symmetric true, group_size null")


SCHEMES = {
    "int8": Scheme(bits=8, dynamic_activations=True),
    "int4": Scheme(bits=4, group_size=32),
    "fp8": Scheme(kind="fp8", dynamic_activations=True),
}


@dataclass(frozen=True, eq=False)
class Quantized:
    """`values` [out, in] int8 or float8_e4m3fn; `scale` float32 [out, groups]; `zero_point` int8 [out, groups], None
    where symmetric; `clipped` float32 [out, groups]: by how much weights lie beyond what the numbers reach, None = not
    at all. A weight is (value - zero point) * scale, of its row and its group of in / groups neighbours."""

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: Scheme
    clipped: Tensor | None = None


def scheme_of(quant: str, *, dtype: str = "bf16") -> Scheme:
    """The scheme that a user calls `quant`, with scales that a file of `dtype` holds. Raises ConfigError."""
    if quant not in SCHEMES:
        raise ConfigError(f"quant: got '{quant}'; accepted: none, {', '.join(SCHEMES)}")
    if dtype not in DTYPES:
        raise ConfigError(f"to.dtype: got '{dtype}'; accepted: {', '.join(DTYPES)}")
    return replace(SCHEMES[quant], scale_dtype=dtype)


def quantize(weight: Tensor, scheme: Scheme, *, name: str, input_moments: Tensor | None = None) -> Quantized:
    """Quantize `weight` [out, in] of any float dtype; `name` is for errors.

    `input_moments` [in], means of x^2 of what the weight is multiplied with, weigh the errors that a search sums.
    Without a search no weight is clipped. Raises ConfigError for what is no matrix and for a group that does not divide
    its width, CheckpointError for weights that are not finite.
    """
    weight = _checked(weight, scheme, name)
    if input_moments is not None:
        _check_moments(input_moments, weight.shape[1], name)
        input_moments = input_moments.to(weight).unflatten(0, (-1, scheme.group_size or weight.shape[1]))
    rows = max(1, _CHUNK // weight.shape[1])
    parts = [_quantize(part, scheme, input_moments) for part in weight.split(rows)]
    values, scale, clipped = (torch.cat(part) for part in list(zip(*parts, strict=True))[:3])
    if not scale.isfinite().all():
        raise ConfigError(
            f"{name}: weights as large as {weight.abs().max():.3g} need a scale that {scheme.scale_dtype} cannot hold; "
            "accepted: dtype bf16 or f32"
        )
    zero_point = None if scheme.symmetric else torch.cat([part[3] for part in parts])
    return Quantized(values, scale, zero_point, scheme, clipped)


def dequantize(q: Quantized) -> Tensor:
    """The weights [out, in] in float32."""
    steps = q.values.float().unflatten(1, (q.scale.shape[1], -1))
    if q.zero_point is not None:
        steps = steps - q.zero_point.float()[..., None]
    return (steps * q.scale.float()[..., None]).flatten(1)


def error_bound(q: Quantized) -> Tensor:
    """The largest |weight - dequantize(q)|, [out, in] float32: half the distance to the next number, and at the two
    ends of the range what was clipped beyond it."""
    values = q.values.float().unflatten(1, (q.scale.shape[1], -1))
    low, high = _range(q.scheme)
    half = _half_step(values, q.scheme) * q.scale.float()[..., None]
    if q.clipped is not None:
        half = half + torch.where((values == low) | (values == high), q.clipped[..., None], 0.0)
    # Two products of float32 numbers round, too.
    return (half + 3 * torch.finfo(torch.float32).eps * dequantize(q).abs().view(half.shape)).flatten(1)


def float_reason(name: str) -> str | None:
    """Why the tensor of this name (ours, as in a state dict) stays float; None for what is quantized: the projections
    of draft layers, nearly all that a drafter reads per pass and all that engines have kernels for."""
    if _PROJECTION.fullmatch(name):
        return None
    return next((reason for pattern, reason in _FLOAT if pattern.search(name)), "it is no projection of a draft layer")


def is_quantized(name: str) -> bool:
    """Whether the tensor of this name (ours, as in a state dict) is quantized; `float_reason` says why not."""
    return float_reason(name) is None


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Those of `names`, with or without ".weight", that engines join into one matrix (q, k, v; gate, up), group by
    group: the members of a group need the same scheme."""
    given = set(names)
    groups = []
    for kinds in _FUSED:
        for name in sorted(given):
            parent, found, rest = name.rpartition(kinds[0])
            members = tuple(f"{parent}{kind}{rest}" for kind in kinds)
            if found and rest in ("", ".weight") and parent.endswith(".") and given.issuperset(members):
                groups.append(members)
    return groups


def _checked(weight: Tensor, scheme: Scheme, name: str) -> Tensor:
    if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise ConfigError(
            f"{name}: got {str(weight.dtype).removeprefix('torch.')} of shape {list(weight.shape)}; only a matrix "
            "[out, in] of floats is quantized; keep it as it is"
        )
    width = weight.shape[1]
    if scheme.group_size is not None and width % scheme.group_size:
        fitting = [str(size) for size in GROUP_SIZES if width % size == 0]
        raise ConfigError(
            f"quant.group_size: got {scheme.group_size}, which does not divide {width}, the width of {name}; accepted "
            f"for it: {', '.join([*fitting, 'null'])}"
        )
    weight = weight.detach().float()
    bad = int((~weight.isfinite()).sum())
    if bad:
        raise CheckpointError(
            f"{name}: {bad} of {weight.numel()} weights are NaN or infinite; a damaged drafter is not exported: train "
            "it again"
        )
    return weight


def _check_moments(moments: Tensor, width: int, name: str) -> None:
    if moments.shape != (width,) or not moments.isfinite().all() or (moments < 0).any():
        raise ConfigError(
            f"{name}: input_moments of shape {list(moments.shape)}; accepted: [{width}], finite and 0 or more"
        )


def _quantize(weight: Tensor, scheme: Scheme, moments: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values [out, in]; scale, clipped and zero point [out, groups] of some rows."""
    groups = weight.unflatten(1, (-1, scheme.group_size or weight.shape[1]))
    largest, smallest = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    scale, zero = _scale(smallest, largest, scheme)
    if scheme.search:
        least = _error(groups, scale, zero, scheme, moments)
        for factor in _FACTORS[1:]:
            other_scale, other_zero = _scale(smallest * factor, largest * factor, scheme)
            error = _error(groups, other_scale, other_zero, scheme, moments)
            better = error < least
            scale, zero = torch.where(better, other_scale, scale), torch.where(better, other_zero, zero)
            least = torch.where(better, error, least)
    values = _round(groups, scale, zero, scheme)
    low, high = ((end - zero) * scale for end in _range(scheme))
    ends = values.new_tensor(_range(scheme)[1])
    beyond = torch.maximum(largest - high, low - smallest) - _half_step(ends, scheme) * scale
    values = values.flatten(1).to(_FP8 if scheme.kind == "fp8" else torch.int8)
    return values, scale.squeeze(-1), beyond.clamp(min=0).squeeze(-1), zero.squeeze(-1).to(torch.int8)


def _range(scheme: Scheme) -> tuple[float, float]:
    if scheme.kind == "fp8":
        return -_FP8_MAX, _FP8_MAX
    return -(2.0 ** (scheme.bits - 1)), 2.0 ** (scheme.bits - 1) - 1


def _scale(smallest: Tensor, largest: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point that just reach from `smallest` to `largest`; 0 is always a number of its own."""
    if scheme.kind == "fp8":
        scale = torch.maximum(largest, -smallest) / _FP8_MAX
    elif scheme.symmetric:
        # Half a step of reach on each side: from -8 to 7.5 steps, not 7, in 4 bits.
        scale = torch.maximum(largest, -smallest) / ((2**scheme.bits - 1) / 2)
    else:
        # Divided first: the difference of two finite weights may not be.
        smallest, largest = smallest.clamp(max=0), largest.clamp(min=0)
        scale = largest / (2**scheme.bits - 1) - smallest / (2**scheme.bits - 1)
    scale = torch.where(scale == 0, 1.0, _round_up(scale, DTYPES[scheme.scale_dtype]))
    if scheme.symmetric:
        return scale, torch.zeros_like(scale)
    low, high = _range(scheme)
    return scale, (low - smallest / scale).round().clamp(low, high)


def _round_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The next number of `dtype` that is no smaller, as float32: rounded down, a scale would clip the largest weight.
    Not below float32's normal numbers, which engines may take for 0."""
    scale = scale.clamp(min=torch.finfo(torch.float32).smallest_normal)
    rounded = scale.to(dtype)
    if dtype == torch.float32:
        return rounded
    following = (rounded.view(torch.int16) + 1).view(dtype)
    return torch.where(rounded.float() < scale, following, rounded).float()


def _round(groups: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """The nearest numbers, as float32."""
    low, high = _range(scheme)
    if scheme.kind == "fp8":
        return (groups / scale).clamp_(low, high).to(_FP8).float()
    return (groups / scale).round_().add_(zero).clamp_(low, high)


def _error(groups: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme, moments: Tensor | None) -> Tensor:
    """Squared error of every group [out, groups, 1]."""
    error = _round(groups, scale, zero, scheme).sub_(zero).mul_(scale).sub_(groups).square_()
    return (error if moments is None else error.mul_(moments)).sum(-1, keepdim=True)


def _half_step(values: Tensor, scheme: Scheme) -> Tensor:
    """Half the distance from quantized `values` to the next larger one, in units of the scale."""
    if scheme.kind == "int":
        return torch.full_like(values, 0.5)
    # e4m3: 8 steps between two powers of 2, and 2^-9 apart below 2^-6.
    exponent = values.abs().clamp(min=2.0**-6).frexp().exponent - 1
    return torch.ldexp(torch.ones_like(values), exponent - 4)
