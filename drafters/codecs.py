# How hidden states are spelled on disk. A codec turns rows [N, D] into named parts whose first dimension is N, so
# that a reader fetches any run of rows by slicing every part; scales of quantized codecs are parts too, one row each.

from typing import Protocol

import torch
from torch import Tensor

from drafters.errors import ConfigError

__all__ = ["CODECS", "CastCodec", "Codec", "find_codec"]


class Codec(Protocol):
    """Rows are coded one by one: `decode(encode(x)[a:b]) == decode(encode(x))[a:b]`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that `encode` returns; a file calls them `<layer>.<part>`."""

    def row_bytes(self, width: int) -> int:
        """Bytes on disk of one row of `width` numbers."""

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        """Contiguous CPU tensors, N rows each."""

    def decode(self, parts: dict[str, Tensor]) -> Tensor:
        """States [N, D], in bfloat16 or float32."""


class CastCodec:
    """States as they are, in one float type."""

    parts = ("data",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def row_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode(self, rows_ND: Tensor) -> dict[str, Tensor]:
        return {"data": rows_ND.to(device="cpu", dtype=self.dtype).contiguous()}

    def decode(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["data"]


CODECS: dict[str, Codec] = {"bf16": CastCodec(torch.bfloat16), "fp32": CastCodec(torch.float32)}


def find_codec(name: str) -> Codec:
    """The codec of that name. Raises ConfigError with the names there are."""
    if name not in CODECS:
        raise ConfigError(f"cache.codec: got '{name}'; accepted: {', '.join(CODECS)}")
    return CODECS[name]
