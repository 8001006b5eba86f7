# Weights that lie in a block. To those who ask for a shape, a dtype or a device they are tensors, and so parameters of
# any drafter; what its code does with weights (products, look-ups, joining rows) is done from the block's bytes. All
# else is refused: nothing turns a block into floats unseen.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.layers import join
from drafters.packed.products import Matrix

__all__ = ["PackedWeight", "Rows"]


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a matrix."""

    matrix: Matrix
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class PackedWeight(Tensor):
    """A weight [N, K] of `pieces`, one below the other. Products with it come in its dtype."""

    pieces: tuple[Rows, ...]

    @staticmethod
    def __new__(cls, pieces: Sequence[Rows], dtype: torch.dtype) -> "PackedWeight":
        first = pieces[0].matrix
        shape = (sum(map(len, pieces)), first.shape[1])
        weight: PackedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=first.device)
        return weight

    def __init__(self, pieces: Sequence[Rows], dtype: torch.dtype) -> None:
        self.pieces = tuple(pieces)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a packed weight serves products and look-ups only; unpack it for all else")

    def as_floats(self) -> Tensor:
        """Float32 [N, K], computed."""
        parts = [p.matrix.rows(torch.arange(p.start, p.stop, device=self.device)) for p in self.pieces]
        return torch.cat(parts)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    rows_MK = x.reshape(-1, x.shape[-1])
    parts = [piece.matrix.product(rows_MK, piece.start, piece.stop) for piece in weight.pieces]
    product = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(weight.dtype)
    return (product if bias is None else product + bias).view(*x.shape[:-1], -1)


class _Transposed:
    """W^T, only good for products."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm) or kwargs:
            raise NotImplementedError(f"{func}: a transposed packed weight serves products only")
        return _linear(args[0], args[1].weight)


def _to(weight: PackedWeight, *args: Any, **kwargs: Any) -> PackedWeight:
    device, dtype = weight.device, weight.dtype
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device | str):
            device = torch.device(value)
    if (device, dtype) == (weight.device, weight.dtype):
        return weight
    pieces = weight.pieces
    if device != weight.device:
        pieces = tuple(Rows(piece.matrix.to(device), piece.start, piece.stop) for piece in pieces)
    return PackedWeight(pieces, dtype)


def _cat(weights: Sequence[Any], dim: int = 0) -> PackedWeight:
    """Rows that follow each other in one matrix become one piece: nothing is copied."""
    assert dim == 0
    pieces: list[Rows] = []
    for piece in (piece for weight in weights for piece in weight.pieces):
        last = pieces[-1] if pieces else None
        if last is not None and last.matrix is piece.matrix and last.stop == piece.start:
            pieces[-1] = Rows(last.matrix, last.start, piece.stop)
        else:
            pieces.append(piece)
    return PackedWeight(pieces, weights[0].dtype)


def _join(dtype: torch.dtype, *weights: Any) -> PackedWeight:
    return _to(_cat(weights), dtype)


def _some_rows(weight: PackedWeight, index: Any) -> PackedWeight:
    if not isinstance(index, slice):
        raise NotImplementedError(f"a packed weight gives slices of rows, not [{index!r}]")
    start, stop, _ = index.indices(len(weight))
    pieces, at = [], 0
    for piece in weight.pieces:
        low, high = max(start, at), min(stop, at + len(piece))
        if low < high:
            pieces.append(Rows(piece.matrix, piece.start + low - at, piece.start + high - at))
        at += len(piece)
    return PackedWeight(pieces, weight.dtype)


def _embedding(ids: Tensor, weight: PackedWeight, *_: Any, **__: Any) -> Tensor:
    (piece,) = weight.pieces
    found = piece.matrix.rows(ids.flatten() + piece.start if piece.start else ids.flatten())
    return found.to(weight.dtype).view(*ids.shape, -1)


def _zeros(weight: PackedWeight, *size: int, **kwargs: Any) -> Tensor:
    return torch.zeros(*size, **{"dtype": weight.dtype, "device": weight.device, **kwargs})


def _put(weight: PackedWeight, other: PackedWeight) -> None:
    """`weight.data = other`, as a module does when it is moved."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(weight, other)  # type: ignore[attr-defined]
    weight.pieces = other.pieces


def _num_bytes(weight: PackedWeight) -> int:
    """Of the arrays; those of a matrix that is shared count by rows."""
    return sum(
        sum(array.nbytes for array in piece.matrix.arrays()) * len(piece) // piece.matrix.shape[0]
        for piece in weight.pieces
    )


def _same(weight: PackedWeight, *_: Any) -> PackedWeight:
    return PackedWeight(weight.pieces, weight.dtype)


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.T.__get__: _Transposed,  # type: ignore[attr-defined]
    Tensor.to: _to,
    torch.cat: _cat,
    join: _join,
    Tensor.__getitem__: _some_rows,
    Tensor.new_zeros: _zeros,
    Tensor.detach: _same,
    Tensor.__deepcopy__: _same,
    Tensor.data.__get__: _same,  # type: ignore[attr-defined]
    Tensor.data.__set__: _put,  # type: ignore[attr-defined]
    Tensor.nbytes.__get__: _num_bytes,  # type: ignore[attr-defined]
    Tensor.__repr__: lambda weight, **_: f"PackedWeight({list(weight.shape)}, {weight.dtype})",
}
