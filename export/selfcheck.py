# Engines do not notice what is missing: vLLM loads a DSpark draft without a query projection. So every export is read
# back before it gets its name: each tensor that must be there, its shape and type, and its values within what the
# format can hold.

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drafters.errors import CheckpointError
from drafters.progress import over
from export.formats import Manifest
from export.quantize import error_bound, is_quantized, quantize, scheme_of

__all__ = ["check_tensors", "check_values", "stored_in_safetensors", "weight_bounds"]

# Largest relative error of rounding to nearest, and largest absolute one near zero.
ROUNDING = {"bf16": (2.0**-8, 0.0), "f16": (2.0**-11, 2.0**-25), "f32": (0.0, 0.0)}


def stored_in_safetensors(folder: Path) -> Manifest:
    """Shape and dtype of every tensor in the safetensors files of a folder, from their headers."""
    from safetensors import safe_open

    found: Manifest = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape()), part.get_dtype()
    return found


def weight_bounds(tensors: Mapping[str, Tensor], quant: str, *, dtype: str) -> dict[str, Tensor]:
    """How far weights may be off in a file of `dtype` ("bf16", "f16", "f32") whose projections are quantized."""
    relative, absolute = ROUNDING[dtype]
    bounds = {}
    for name, weight in tensors.items():
        if not weight.is_floating_point():
            bounds[name] = torch.zeros(())
        elif quant != "none" and is_quantized(name):
            bounds[name] = error_bound(quantize(weight, scheme_of(quant, dtype=dtype), name=name)) * (1 + 1e-5)
        else:
            bounds[name] = weight.abs() * relative + absolute
    return bounds


def check_tensors(wanted: Manifest, found: Manifest, *, where: Path) -> None:
    """Raises CheckpointError that names every tensor which is missing, of another shape or type, or not asked for."""
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    wrong += [f"{name} is none of its tensors" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if (tuple(wanted[name][0]), wanted[name][1]) != (tuple(found[name][0]), found[name][1]):
            wrong.append(f"{name} is {found[name]}, wanted {wanted[name]}")
    if wrong:
        raise CheckpointError(f"{where}: the export is not whole: {'; '.join(wrong)}; nothing was kept of it")


def check_values(
    tensors: Mapping[str, Tensor], back: Mapping[str, Tensor], bounds: Mapping[str, Tensor], *, where: Path
) -> float:
    """The largest error of a weight, relative to the largest weight of its tensor, of all that came back. Raises
    CheckpointError for a tensor that is farther off than `bounds` allow; `check_tensors` tells what is missing."""
    worst = 0.0
    for name in over(sorted(tensors.keys() & back.keys()), "checking the export", unit="tensors"):
        weight = tensors[name].double()
        error = (back[name].double() - weight).abs()
        if not bool((error <= bounds[name].double()).all()):
            raise CheckpointError(
                f"{where}: {name} came back {float(error.max()):.3g} off, where the format allows "
                f"{float(bounds[name].max()):.3g}; nothing was kept of the export"
            )
        worst = max(worst, float(error.max() / weight.abs().max().clamp(min=1e-30)))
    return worst
