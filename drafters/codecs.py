# How hidden states are spelled on disk. A codec turns rows [N, D] into named parts whose first dimension is N, so
# that a reader fetches any run of rows by slicing every part; scales of quantized codecs are parts too. A training step
# waits for its batch to be decoded: that goes in blocks that stay in the processor's cache, by the few operations of
# torch that take many numbers at a time.

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.errors import ConfigError

__all__ = ["CODECS", "CastCodec", "Codec", "Float8Codec", "Int4Codec", "Int8Codec", "find_codec"]

# The 16 levels of NF4, quantiles of a normal distribution with 0 and both ends among them (2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FLOAT8 = torch.float8_e4m3fn
LARGEST8 = torch.finfo(FLOAT8).max
# Scales stay above 0, where a row or group is all zeros.
LEAST = 1e-7
BLOCK = 2**18  # numbers that one thread decodes at a time: with all between, about two megabytes
FINE = 511  # int4 is looked up on a grid of this many steps from 0 to the largest of a group


class Codec(Protocol):
    """Rows are coded one by one: `decode(encode(x)[a:b]) == decode(encode(x))[a:b]`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that `encode` returns; a file calls them `<layer>.<part>`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of decoded states: bfloat16 or float32."""

    def row_bytes(self, width: int) -> int:
        """Bytes on disk of one row of `width` numbers."""

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        """Contiguous CPU tensors, N rows each."""

    def decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """States [N, D] of CPU parts: in `out`, of this shape and `dtype` and of any strides, else in a new tensor or a
        view of the parts."""


class CastCodec:
    """States as they are, in one float type."""

    parts = ("data",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def row_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        return {"data": rows_ND.to(device="cpu", dtype=self.dtype).contiguous()}

    def decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        return parts["data"] if out is None else out.copy_(parts["data"])


class Float8Codec:
    """One byte a number, e4m3, and a float32 scale a row: errors are in proportion to each number, so that rows of few
    large ones and many small ones keep both."""

    parts = ("data", "scale")
    dtype = torch.bfloat16

    def row_bytes(self, width: int) -> int:
        return width + torch.float32.itemsize

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        wide_ND = rows_ND.float()
        scale_N1 = (wide_ND.abs().amax(1, keepdim=True) / LARGEST8).clamp_min(LEAST)
        return {"data": (wide_ND / scale_N1).to(FLOAT8).cpu(), "scale": scale_N1.cpu()}

    def decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        return in_blocks(_float8, parts, parts["data"].shape[1], out)


class Int8Codec:
    """One byte a number, and a bfloat16 scale for each 64 neighbours: one scale a row would be set by its few largest
    numbers, and lose the others."""

    parts = ("data", "scale")
    dtype = torch.bfloat16
    group = 64

    def row_bytes(self, width: int) -> int:
        return width + num_groups(width, self.group) * torch.bfloat16.itemsize

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        rows_NGS = grouped(rows_ND.float(), self.group)
        scale_NG = (rows_NGS.abs().amax(2) / 127).clamp_min(LEAST).bfloat16()
        data_NGS = (rows_NGS / scale_NG[..., None].float()).round_().clamp_(-127, 127)
        data_ND = data_NGS.to(torch.int8).flatten(1)[:, : rows_ND.shape[1]]
        return {"data": data_ND.cpu().contiguous(), "scale": scale_NG.cpu()}

    def decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        return in_blocks(_int8, parts, parts["data"].shape[1], out)


class Int4Codec:
    """Half a byte a number, one of the 16 levels of NF4, and a bfloat16 scale for each 16 neighbours. Rows are of even
    width."""

    parts = ("data", "scale")
    dtype = torch.bfloat16
    group = 16

    def row_bytes(self, width: int) -> int:
        return width // 2 + num_groups(width, self.group) * torch.bfloat16.itemsize

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        rows_NGS = grouped(rows_ND.float(), self.group)
        scale_NG = rows_NGS.abs().amax(2).clamp_min(LEAST).bfloat16()
        fine_NGS = (rows_NGS / scale_NG[..., None].float()).mul_(FINE).round_().clamp_(-FINE, FINE).add_(FINE)
        level_ND = _nearest_level().to(rows_ND.device)[fine_NGS.int().flatten(1)[:, : rows_ND.shape[1]]]
        return {"data": (level_ND[:, ::2] | level_ND[:, 1::2] << 4).cpu(), "scale": scale_NG.cpu()}

    def decode(self, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        return in_blocks(_int4, parts, 2 * parts["data"].shape[1], out)


def in_blocks(
    decode: Callable[[Tensor, Tensor, Tensor], None], parts: Mapping[str, Tensor], width: int, out: Tensor | None
) -> Tensor:
    """What `decode(data, scale, out)` writes of each run of rows, bfloat16 [N, width]: in `out`, or a new tensor."""
    data, scale = parts["data"], parts["scale"]
    out_ND = torch.empty(len(data), width, dtype=torch.bfloat16) if out is None else out
    rows = max(1, BLOCK * torch.get_num_threads() // max(1, width))
    for block in zip(data.split(rows), scale.split(rows), out_ND.split(rows), strict=True):
        decode(*block)
    return out_ND


def _float8(data_ND: Tensor, scale_N1: Tensor, out_ND: Tensor) -> None:
    # A cast from this type takes numbers one by one. Its bits in the places of float16's are the number / 2^8, also
    # where float16 is subnormal. Widening repeats the sign: the shift leaves it in its place, and a copy to be cleared.
    bits_ND = data_ND.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~0x4000)
    # No overflow: the largest of finite numbers makes a scale below 2^120.
    out_ND.copy_(bits_ND.view(torch.float16).float().mul_(scale_N1 * 2.0**8))


def _int8(data_ND: Tensor, scale_NG: Tensor, out_ND: Tensor) -> None:
    # Groups of 64 are as long as one vector operation: the product may repeat each scale within itself.
    group, num_whole = Int8Codec.group, out_ND.shape[1] // Int8Codec.group
    out_ND.copy_(data_ND)
    out_ND[:, : num_whole * group].unflatten(1, (num_whole, group)).mul_(scale_NG[:, :num_whole, None])
    if num_whole < scale_NG.shape[1]:
        out_ND[:, num_whole * group :].mul_(scale_NG[:, num_whole:])


def _int4(data_NP: Tensor, scale_NG: Tensor, out_ND: Tensor) -> None:
    # Four numbers a look-up where the rows can be seen as words of two bytes.
    word = torch.uint8 if data_NP.shape[1] % 2 else torch.uint16
    if data_NP.storage_offset() % word.itemsize:
        data_NP = data_NP.clone()
    bits_W = _levels(word).index_select(0, data_NP.view(word).int().flatten())
    values_ND = bits_W.view(torch.bfloat16).view(len(out_ND), out_ND.shape[1])
    # A product that repeats a scale within itself takes each group of 16 alone: slower than a copy and a plain product.
    scale_ND = scale_NG.repeat_interleave(Int4Codec.group, 1)[:, : out_ND.shape[1]]
    torch.mul(values_ND, scale_ND, out=out_ND)


@cache
def _levels(word: torch.dtype) -> Tensor:
    """The levels of each word of one or two bytes, bfloat16 in the bits of one integer: int32 [256], int64 [65536]."""
    words = torch.arange(2 ** (8 * word.itemsize)).to(word)
    bytes_WB = words.view(torch.uint8).view(len(words), word.itemsize)
    codes_WN = torch.stack([bytes_WB & 15, bytes_WB >> 4], dim=2).flatten(1).int()
    bits_WN = torch.tensor(NF4, dtype=torch.bfloat16)[codes_WN]
    return bits_WN.view(torch.int32 if word == torch.uint8 else torch.int64).flatten()


@cache
def _nearest_level() -> Tensor:
    """The NF4 level nearest to (i - FINE) / FINE, uint8 [2 FINE + 1]: a look-up is faster than a search."""
    fine = torch.arange(-FINE, FINE + 1) / FINE
    return (fine[:, None] - torch.tensor(NF4)).abs().argmin(1).to(torch.uint8)


def num_groups(width: int, group: int) -> int:
    """Of `group` neighbours each; the last one may have fewer."""
    return -(-width // group)


def grouped(rows_ND: Tensor, group: int) -> Tensor:
    """[N, groups, group], with zeros where the last group has fewer."""
    missing = -rows_ND.shape[1] % group
    return F.pad(rows_ND, (0, missing)).unflatten(1, (-1, group)) if missing else rows_ND.unflatten(1, (-1, group))


CODECS: dict[str, Codec] = {
    "bf16": CastCodec(torch.bfloat16),
    "fp32": CastCodec(torch.float32),
    "fp8": Float8Codec(),
    "int8": Int8Codec(),
    "int4": Int4Codec(),
}


def find_codec(name: str) -> Codec:
    """The codec of that name. Raises ConfigError with the names there are."""
    if name not in CODECS:
        raise ConfigError(f"cache.codec: got '{name}'; accepted: {', '.join(CODECS)}")
    return CODECS[name]
