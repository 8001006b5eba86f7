# A target of which the embedding, the output rows and the final norm are in memory, and not the layers: what training
# from a finished cache needs. All else is read from the weights' own files, tensor by tensor, when a drafter begins
# from it. What families hide in their code cannot be measured so: it comes from the capture, which did.

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drafters.cache import HiddenCache
from drafters.errors import CheckpointError
from drafters.files import plain_name
from drafters.plain_json import parse
from drafters.spec import TargetSpec
from drafters.states import log_sum_exp, predicts
from drafters.target import FrozenTarget, TargetHead
from drafters.types import Needs

__all__ = ["StoredTensors", "check_head", "read_head"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOLERANCE = 1e-2  # of a log-sum-exp, relative: the same product on another device and in another dtype


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of `model` (an outline) in the safetensors files of `folder`, by their names in its `state_dict` and
    in the dtypes there; each is read from the disk when it is asked for.

    Raises CheckpointError for files that are missing or damaged, and, when it is asked for, for a tensor that they do
    not hold by itself.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.folder = folder
        self._dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self._files = _files(folder)
        self._places = _places(model, list(self._files))

    def __getitem__(self, name: str) -> Tensor:
        dtype = self._dtypes[name]
        if name not in self._places:
            raise CheckpointError(
                f"target.weights: {self.folder} does not hold '{name}' as one tensor, so the target's layers have to "
                "be in memory for this drafter: set callbacks.probe_every_n_steps or report.num_prompts"
            )
        file = self.folder / self._files[self._places[name]]
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(self._places[name])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"target.weights: cannot read '{name}' from {file}: {error}") from error
        return tensor.to(dtype, copy=True)  # not a view of the mapped file

    def __contains__(self, name: object) -> bool:
        return name in self._dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)


def read_head(outline: FrozenTarget, spec: TargetSpec, folder: Path, *, device: torch.device) -> FrozenTarget:
    """The target of `outline`, its head and final norm read from `folder` to `device`, its layers not. `spec` is what a
    capture kept of it. Raises CheckpointError when the files do not hold what it says."""
    model, stored = outline.model, StoredTensors(outline.model, folder)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [embedding] if spec.tied_head else [embedding, head]
    if isinstance(norm := getattr(outline.decoder, "norm", None), nn.Module):
        parts.append(norm)
    for part in parts:
        own = {name: stored[f"{names[part]}.{name}"].to(device) for name in part.state_dict()}
        try:
            part.load_state_dict(own, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"target.weights: {folder} does not fit its config.json: {reason}") from error
    if spec.tied_head:
        head.weight = embedding.weight
    model.requires_grad_(False)
    known = replace(outline.spec, embed_scale=spec.embed_scale, logit_scale=spec.logit_scale, tied_head=spec.tied_head)
    return FrozenTarget(model, tokenizer=outline.tokenizer, spec=known, stored=stored)


@torch.inference_mode()
def check_head(head: TargetHead, cache: HiddenCache) -> None:
    """Prove on a conversation of the cache that the head makes of its states what the captured target made of them.
    Raises CheckpointError."""
    (sample,) = cache.read([0], Needs(last=True))
    read_T = predicts(sample.loss_mask_T)
    found_N = log_sum_exp(head, sample.last_TD[read_T].to(head.lm_head_VD.device)).cpu()
    error = float((found_N - sample.lse_T[read_T]).norm() / sample.lse_T[read_T].norm().clamp_min(1e-6))
    if not error <= TOLERANCE:
        raise CheckpointError(
            f"target: its output rows and the states in {cache.folder} do not fit: their log-sum-exp differ by "
            f"{error:.1e}, relatively (allowed {TOLERANCE:.0e}); remove that folder and capture again"
        )


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the names in the files."""
    try:
        if (folder / INDEX).is_file():
            files = dict(parse((folder / INDEX).read_text())["weight_map"])
            return {str(name): plain_name(file) for name, file in files.items()}
        with safe_open(folder / SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"target.weights: neither {INDEX} nor {SINGLE} can be read in {folder}: {error}; fetch the weights again"
        ) from error


def _places(model: Any, stored: list[str]) -> dict[str, str]:
    """The stored name of each of the model's tensors that transformers takes as it is, under this or another name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    places = {}
    for name in sorted(stored):
        found, converter = rename_source_key(name, renamings, converters, prefix, own)
        if found not in own and name in own:
            found, converter = name, None
        if converter is None and found in own:
            places[found] = name
    return places
