# Rows of a target's embedding and output projection, read from its folder without making a model of it. Drafters hold
# neither, but a draft of a reduced vocabulary has to bring its rows along.

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.spec import TargetSpec

__all__ = ["embedding_rows", "head_rows"]


def head_rows(folder: Path | None, spec: TargetSpec, *, ids_V: Tensor | None = None) -> Tensor:
    """Rows [V', D] of the output projection, of `ids_V` or all, times the target's logit scale, float32: what an
    engine multiplies a draft's state with. Raises ConfigError without a folder, CheckpointError when it lacks them."""
    rows_VD = _read(folder, spec, "embed_tokens.weight" if spec.tied_head else "lm_head.weight")
    rows = (rows_VD if ids_V is None else rows_VD[ids_V]).float()
    return rows if spec.logit_scale == 1.0 else rows * spec.logit_scale


def embedding_rows(folder: Path | None, spec: TargetSpec) -> Tensor:
    """The embedding [V, D] as it enters the target's first layer (its scale applied), in the target's dtype. Raises as
    `head_rows`."""
    rows = _read(folder, spec, "embed_tokens.weight").to(getattr(torch, spec.dtype))
    return rows if spec.embed_scale == 1.0 else rows * spec.embed_scale


def _read(folder: Path | None, spec: TargetSpec, suffix: str) -> Tensor:
    """The one tensor [V, D] of the target whose name ends with `suffix`, as it is stored."""
    if folder is None:
        raise ConfigError(
            "target: its folder is needed, for rows of its embedding or output projection that the draft brings along; "
            "give the one with its config.json and .safetensors files"
        )
    shape, found = [spec.vocab_size, spec.hidden_size], []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.endswith(suffix)]  # noqa: SIM118  (no dictionary)
                found += [opened.get_tensor(name) for name in names if opened.get_slice(name).get_shape() == shape]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}; the target's weights are damaged") from error
    if len(found) != 1:
        raise CheckpointError(
            f"{folder}: holds {len(found)} tensors '*{suffix}' of shape {shape} in its .safetensors files, wanted 1; "
            "give the folder of the target that the drafter was trained for"
        )
    tensor: Tensor = found[0]
    return tensor
