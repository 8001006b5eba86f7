# A drafter on a block: the class is made without a number being written, then every parameter is put on its bytes. The
# class itself does not know; its sessions find weights that multiply from the block.

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drafters.errors import CheckpointError
from drafters.heads.base import Drafter
from drafters.packed.block import PLAIN, Block
from drafters.packed.products import matrix_of
from drafters.packed.weight import PackedWeight, Rows

__all__ = ["OUTPUT_ROWS", "load_packed"]

OUTPUT_ROWS = "output_rows"


def load_packed(path: Path, build: Callable[[Mapping[str, Tensor]], Drafter], *, own_rows: bool = True) -> Drafter:
    """The drafter of a block, on the CPU; nothing of the block is copied. `build` makes one, whatever its weights, of
    the tensors that are not quantized. Without `own_rows` it drafts through the output rows of its target, not through
    its own copy of them. Raises CheckpointError for a block that is damaged or does not fit the class."""
    block = Block.open(path)
    plain = {part.names[0]: block.arrays(part)["values"] for part in block.parts if part.form in PLAIN}
    with _Unwritten():
        drafter = build(plain)
    _check_names(path, block, drafter)
    drafter.load_state_dict(plain, strict=False, assign=True)
    for part in block.parts:
        if part.form in PLAIN:
            continue
        matrix, start = matrix_of(block, part), 0
        for name, rows in zip(part.names, part.rows, strict=True):
            weight = PackedWeight([Rows(matrix, start, start + rows)], torch.float32)
            if name != OUTPUT_ROWS or own_rows:
                module, _, leaf = name.rpartition(".")
                setattr(drafter.get_submodule(module), leaf, nn.Parameter(weight, requires_grad=False))
            start += rows
    return drafter.requires_grad_(False).eval()


def _check_names(path: Path, block: Block, drafter: Drafter) -> None:
    """Every tensor of the class is there once, and in its shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found: dict[str, tuple[int, ...]] = {}
    for part in block.parts:
        if (part.form not in PLAIN and len(part.shape) != 2) or (part.form in PLAIN and len(part.names) != 1):
            raise CheckpointError(f"{path}: {part.label}: no part of shape {list(part.shape)} is read here")
        found |= {name: (rows, *part.shape[1:]) for name, rows in zip(part.names, part.rows, strict=True) if part.shape}
    found.pop(OUTPUT_ROWS, None)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{path}: {name} is {_said(found.get(name))} there, {type(drafter).__name__} has "
                f"{_said(wanted.get(name))}; the file is damaged, or its config was edited"
            )


def _said(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"{list(shape)}"


class _Unwritten(TorchFunctionMode):
    """Within it, random starts and constants are not written: what is made holds whatever was in memory."""

    _SKIPPED = (Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._SKIPPED:
            return args[0]
        return func(*args, **(kwargs or {}))
