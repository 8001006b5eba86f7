# What an export starts from: the `drafter/` folder of a run, loaded and checked once. Formats read numbers and tensors
# from here and write files; none of them reads the folder itself.

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.checkpoint import is_packed, load_drafter, read_config
from drafters.errors import CheckpointError
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec
from drafters.weights import fingerprint

__all__ = ["Source", "open_source"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained drafter to export. `node` is its settings with `_target_`; `target_folder` the target's own folder
    (config.json, tokenizer, weights), None where it is not at hand: formats that need it say so."""

    folder: Path
    drafter: Drafter
    spec: TargetSpec
    node: Mapping[str, Any]
    provenance: Mapping[str, Any]
    target_folder: Path | None = None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The state dict by our own names, float32 (ids int64)."""
        return dict(self.drafter.state_dict())


def open_source(folder: Path, *, target_folder: Path | None = None, other_target: bool = False) -> Source:
    """Load a `drafter/` folder. Raises CheckpointError when it is missing, damaged, packed or of another version, or
    when other weights lie in `target_folder` than those it was trained for, unless `other_target`."""
    stored = read_config(folder)
    if is_packed(stored):
        raise CheckpointError(
            f"run: {folder} is packed, its weights are rounded already; export the run that it was made of"
        )
    spec = TargetSpec.from_dict(stored["target"])
    if target_folder is not None and not other_target and (found := fingerprint(target_folder)) != spec.weights_hash:
        raise CheckpointError(
            f"{folder}: trained for target '{spec.name}', weights {spec.weights_hash[:12]}, but in {target_folder} lie "
            f"weights {found[:12]}; put the target it was trained for there, or name another as target="
        )
    return Source(
        folder=folder,
        drafter=load_drafter(folder),
        spec=spec,
        node=stored["drafter"],
        provenance={**stored["provenance"], "sha256": stored["weights"]["sha256"]},
        target_folder=target_folder,
    )
