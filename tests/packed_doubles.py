# Packed drafters of tiny targets, and matrices that compute what kernels compute, by definition and in float64.

import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers

from drafters.checkpoint import load_drafter, save_drafter
from drafters.packed.products import Matrix, quantize_rows
from drafters.packed.weight import PackedWeight, Rows
from drafters.target import FrozenTarget
from export import to_packed
from export.source import open_source
from tests.contract_cases import World, tiny_world
from tests.test_families import sharpened
from tests.tiny import tiny_llama


@cache
def wide_world() -> World:
    """As the tiny world, in sizes that groups of 32 divide."""
    model = sharpened(tiny_llama(num_hidden_layers=6, intermediate_size=64))
    target = FrozenTarget.from_model(model, mask_token_id=3)
    return World(target, tiny_world().examples, draft_vocab=96)


def folder_of(target, folder: Path) -> Path:
    """The target's weights in a folder, as from the hub."""
    transformers.utils.logging.disable_progress_bar()
    target.model.save_pretrained(folder)
    return folder


def source_of(drafter, target, folder: Path):
    """A drafter opened to be exported, and its target's folder beside."""
    saved = save_drafter(drafter, folder / "drafter", spec=target.spec)
    return open_source(saved, target_folder=folder_of(target, folder / "target"), other_target=True)


def written(drafter, target, folder: Path, *, quant="int8", **options) -> Path:
    """The `drafter` folder of a packed one."""
    out = folder / f"packed-{quant}"
    out.mkdir()
    to_packed.write(source_of(drafter, target, folder), quant, out, options=to_packed.Options(**options))
    return out / "drafter"


def packed(drafter, target, *, quant="int8", **options):
    """The same drafter, on a block."""
    folder = Path(tempfile.mkdtemp())
    return load_drafter(written(drafter, target, folder, quant=quant, **options), spec=target.spec)


def packed_weights(drafter) -> dict[str, PackedWeight]:
    return {name: p for name, p in drafter.named_parameters() if isinstance(p, PackedWeight)}


class NaiveMatrix(Matrix):
    """The product by definition."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.shape, self.device = matrix, matrix.shape, matrix.device
        self.weight_NK = matrix.rows(torch.arange(matrix.shape[0])).double()

    def product(self, x_MK, start, stop):
        x_MK = x_MK.double()
        if getattr(self.matrix, "quantized_inputs", False) and self.shape[1] > 1:
            steps_MK, step_M1 = quantize_rows(x_MK)
            x_MK = steps_MK.double() * step_M1.double()
        return (x_MK @ self.weight_NK[start:stop].T).float()

    def rows(self, ids_X):
        return self.weight_NK[ids_X].float()

    def to(self, device):
        return self

    def arrays(self):
        return (self.weight_NK,)


def naive(drafter):
    """The drafter with every matrix replaced by its naive twin, in place."""
    twins = {}
    for weight in packed_weights(drafter).values():
        (piece,) = weight.pieces
        twin = twins.setdefault(id(piece.matrix), NaiveMatrix(piece.matrix))
        weight.pieces = (Rows(twin, piece.start, piece.stop),)
    return drafter
