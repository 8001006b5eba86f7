# The number formats of GGUF that this project writes, which tensor of a draft gets which, and by how much rounding may
# move a weight. The rounding itself is that of the `gguf` package.

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.errors import ConfigError
from export.gguf_layout import Entry

__all__ = ["QUANTS", "TYPES", "base_type", "bound_of", "float_reason", "type_of"]

BLOCK = 32  # neighbours in a row that share a scale
# Type of the large matrices by `quant`.
QUANTS = {"none": "F16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True)
class Number:
    """A type of GGUF. `file_type` is its number in `general.file_type`; `levels` how many steps a block's range has
    (None: a float)."""

    file_type: int
    levels: int | None = None
    signed: bool = True


TYPES = {
    "F32": Number(0),
    "F16": Number(1),
    "BF16": Number(32),
    "Q8_0": Number(7, 254),
    "Q5_0": Number(8, 32),
    "Q5_1": Number(9, 31, signed=False),
    "Q4_0": Number(2, 16),
    "Q4_1": Number(3, 15, signed=False),
}
_FLOAT = {
    "norm": "llama.cpp multiplies with norms in float32, and they are a few numbers each",
    "confidence": "one row: nothing is saved, and the confidence is what a schedule cuts drafts by",
    "ids": "ids, not weights",
}


def base_type(quant: str, explicit: str | None) -> str:
    """The type of the large matrices. `explicit` wins. Raises ConfigError for what is none."""
    if explicit is not None:
        if explicit not in TYPES:
            raise ConfigError(f"to.type: got '{explicit}'; accepted: {', '.join(TYPES)}, or null (by quant)")
        return explicit
    if quant == "fp8":
        raise ConfigError(
            "quant: got 'fp8', which is no type of GGUF; accepted for to=gguf: none, int8, int4; fp8 is there with "
            "to=hf and to=speculators (vLLM)"
        )
    if quant not in QUANTS:
        raise ConfigError(f"quant: got '{quant}'; accepted for to=gguf: {', '.join(QUANTS)}")
    return QUANTS[quant]


def float_reason(entry: Entry, base: str) -> str | None:
    """Why a tensor is not of type `base`, None where it is."""
    if entry.role in _FLOAT:
        return _FLOAT[entry.role]
    if TYPES[base].levels is not None and entry.shape[-1] % BLOCK:
        return f"its rows of {entry.shape[-1]} are no whole blocks of {BLOCK}"
    return None


def type_of(entry: Entry, base: str) -> str:
    """The type of a tensor in a file whose large matrices are `base`."""
    if entry.role == "ids":
        return "I64"
    if entry.role in _FLOAT:
        return "F32"
    return base if float_reason(entry, base) is None else "F16"


def bound_of(weight: Tensor, type_name: str) -> Tensor:
    """The most by which `type_name` may move each weight of a float32 tensor, of its shape.

    Floats: half a unit in the last place. Blocks: half a step of the block's scale, and what the scale's own rounding
    to float16 moves. Q4_0 and Q5_0 end one step early on one side: their largest weights may move by up to a whole one.
    """
    weight = weight.detach().double().abs()
    if type_name in ("F32", "I64"):
        return torch.zeros_like(weight)
    if type_name == "BF16":
        return weight * 2.0**-8
    if type_name == "F16":
        return weight * 2.0**-11 + 2.0**-25
    number = TYPES[type_name]
    assert number.levels is not None
    blocks = weight.unflatten(-1, (-1, BLOCK))
    largest = blocks.amax(-1, keepdim=True)
    # A block of an unsigned type reaches from its least to its largest weight: twice the largest magnitude at most.
    step = 2 * largest / number.levels
    allowed = (step / 2).expand_as(blocks)
    if number.signed and number.levels % 4 == 0:
        allowed = allowed.maximum(blocks - (number.levels / 2 - 1) * step)
    return (allowed + largest * 2.0**-9 + 2.0**-17).flatten(-2)
