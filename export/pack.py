# Multi-tensor packing: on top of a base quantization, all tensors of a drafter become one block, from which this
# package drafts (drafters/packed). Which tensors of low precision there are is decided for our own kernels here, so it
# is more than `quantize.is_quantized` says for engines: what is read in full at every draft, and the tables.

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from drafters.errors import ConfigError
from drafters.packed.block import PLAIN, Block, Part
from drafters.packed.nibbles import ROWS, tile, untile
from drafters.progress import over
from export.quantize import GROUP_SIZES, Quantized, Scheme, fused_groups, is_quantized, quantize

__all__ = ["Packed", "check_packing", "pack", "parts_of", "scheme_for", "unpack"]

# Arrays by part, in the order in which they lie.
Packed = dict[Part, dict[str, Tensor]]

_WIDE = Scheme(bits=8, dynamic_activations=True)
_NARROW = Scheme(bits=8)
# The first scheme whose pattern is found. Output rows are the largest product of a draft, and eight bits are as fast as
# four there. Tables, and products with few rows of input, take these as floats; `fc` must, since what enters it are the
# target's raw states, a few of which are a thousand times the others.
_OWN = (
    (re.compile(r"\blm_head\.weight$|^output_rows$"), _WIDE),
    (re.compile(r"^fc\.weight$|\b(?:input_proj|eh_proj)\.weight$|^markov_head\.markov_w[12]\.weight$"), _NARROW),
    (re.compile(r"^heads\.\d+\.blocks\.\d+\.linear\.weight$"), _NARROW),
)


def check_packing(to: str, quant: str) -> None:
    """Raises ConfigError where packing is asked of a format of engines, or without a base quantization."""
    if to != "packed":
        raise ConfigError(
            f"to: got '{to}' with packing; accepted with it: to=packed. Engines join q, k, v and gate, up as they "
            "load, by the names of split tensors, and know none that are joined in a file"
        )
    if quant not in ("int8", "int4"):
        said = {
            "none": "packing alone is meaningless: it lays out what a quantization made small, and floats need none",
            "fp8": "CPUs have no fast product of 8-bit floats; fp8 is for engines (to=hf, to=speculators)",
        }
        raise ConfigError(
            f"quant: got '{quant}' with to=packed; accepted: int8, int4. {said.get(quant, 'It is unknown')}"
        )


def scheme_for(name: str, base: Scheme) -> Scheme | None:
    """The scheme of the tensor of this name; None = it stays as it is."""
    if is_quantized(name):
        return base
    return next((scheme for pattern, scheme in _OWN if pattern.search(name)), None)


def parts_of(shapes: Mapping[str, tuple[int, ...]], base: Scheme, dtypes: Mapping[str, torch.dtype]) -> list[Part]:
    """The parts of a block of tensors of these shapes, from numbers alone; `dtypes` where one is not float32. Raises
    ConfigError for a scheme or a shape that our kernels do not take."""
    _check_scheme(base)
    joined = {group[0]: group for group in fused_groups(shapes)}
    inside = {name for group in joined.values() for name in group[1:]}
    parts = []
    for name in shapes:
        if name in inside:
            continue
        names = joined.get(name, (name,))
        scheme = scheme_for(name, base)
        if scheme is None and len(names) > 1:
            parts += [_plain(one, shapes[one], dtypes) for one in names]
        elif scheme is None:
            parts.append(_plain(name, shapes[name], dtypes))
        else:
            parts.append(_quantized(names, [shapes[one] for one in names], scheme))
    return parts


def pack(tensors: Mapping[str, Tensor], base: Scheme) -> Packed:
    """Quantize and lay out; `tensors` by the names of a state dict, and `output_rows`. Raises as `parts_of`, and as
    `quantize` for weights that are not finite."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    parts = parts_of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, base, dtypes)
    packed: Packed = {}
    for part in over(parts, "quantizing", unit="tensors"):
        scheme = scheme_for(part.names[0], base)
        if scheme is None:
            packed[part] = {"values": tensors[part.names[0]]}
        else:
            packed[part] = lay_out(part, [quantize(tensors[name], scheme, name=name) for name in part.names])
    return packed


def lay_out(part: Part, matrices: list[Quantized]) -> dict[str, Tensor]:
    """The arrays of one part from the quantized matrices of its tensors."""
    values, scale = (torch.cat([getattr(q, key) for q in matrices]) for key in ("values", "scale"))
    zeros = [q.zero_point for q in matrices if q.zero_point is not None]
    zero = torch.cat(zeros) if zeros else None
    if part.form == "int8":
        arrays = {"values": values, "scale": scale[:, 0].to(part.arrays()["scale"][0])}
        return arrays if zero is None else {**arrays, "zero": zero[:, 0]}
    offset = torch.zeros_like(scale) if zero is None else -zero.float() * scale
    pairs = torch.stack([scale, offset], dim=-1).transpose(0, 1).bfloat16()
    return {"values": tile(values), "scale_zero": pairs.contiguous()}


def unpack(block: Block) -> dict[str, Tensor | Quantized]:
    """Every tensor of a block by name, to the bit as it went in: plain ones, and quantized matrices."""
    found: dict[str, Tensor | Quantized] = {}
    for part in block.parts:
        arrays = block.arrays(part)
        if part.form in PLAIN:
            found[part.names[0]] = arrays["values"].clone()
            continue
        joined = _as_quantized(part, arrays)
        start = 0
        for name, rows in zip(part.names, part.rows, strict=True):
            at = slice(start, start + rows)
            zero = None if joined.zero_point is None else joined.zero_point[at]
            found[name] = replace(joined, values=joined.values[at], scale=joined.scale[at], zero_point=zero)
            start += rows
    return found


def _as_quantized(part: Part, arrays: Mapping[str, Tensor]) -> Quantized:
    scheme = Scheme(
        bits=8 if part.form == "int8" else 4,
        symmetric=part.symmetric,
        group_size=part.group_size,
        dynamic_activations=part.quantized_inputs,
    )
    if part.form == "int8":
        zero = arrays["zero"].clone()[:, None] if "zero" in arrays else None
        return Quantized(arrays["values"].clone(), arrays["scale"].float().clone()[:, None], zero, scheme)
    scale, offset = arrays["scale_zero"].float().permute(2, 1, 0).contiguous()
    zero = None if part.symmetric else (-offset / scale).round().to(torch.int8)
    return Quantized(untile(arrays["values"]), scale, zero, scheme)


def _check_scheme(base: Scheme) -> None:
    if base.kind != "int":
        check_packing("packed", base.kind)
    fits = base.group_size is None if base.bits == 8 else base.group_size in GROUP_SIZES
    if not fits:
        accepted = "null" if base.bits == 8 else ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(
            f"quant.group_size: got {'null' if base.group_size is None else base.group_size} with to=packed and "
            f"{base.bits} bits; accepted: {accepted}, which our kernels take"
        )
    if base.scale_dtype != "bf16":
        raise ConfigError(f"quant.scale_dtype: got '{base.scale_dtype}' with to=packed; accepted: bf16")


def _plain(name: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype]) -> Part:
    form = str(dtypes.get(name, torch.float32)).removeprefix("torch.")
    if form not in PLAIN:
        raise ConfigError(f"{name}: got {form} with to=packed; accepted: {', '.join(PLAIN)}")
    return Part(names=(name,), rows=shape[:1] or (1,), shape=shape, form=form)


def _quantized(names: tuple[str, ...], shapes: list[tuple[int, ...]], scheme: Scheme) -> Part:
    rows, width = tuple(shape[0] for shape in shapes), shapes[0][1]
    if scheme.bits == 4 and sum(rows) % ROWS:
        raise ConfigError(
            f"quant: got int4 with to=packed, but {', '.join(names)} of {sum(rows)} rows is no multiple of {ROWS}, as "
            "its kernel wants; accepted for it: quant=int8"
        )
    return Part(
        names=names,
        rows=rows,
        shape=(sum(rows), width),
        form=f"int{scheme.bits}",
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        quantized_inputs=scheme.dynamic_activations,
    )
