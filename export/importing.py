# Published drafts become ours: settings and tensors for `save_drafter`, to be evaluated or trained further. What a
# folder is shows in its tensors' names; what our classes cannot be is refused with all reasons at once.

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.config import build_config
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec
from export.families import family_of
from export.published import our_name
from export.published_files import Published, open_published
from export.published_kinds import wrong_values
from export.published_settings import GIVEN, Facts, block_node, eagle3_node, medusa_node
from export.shapes import shapes_of
from export.target_rows import embedding_rows, head_rows

__all__ = ["drafter_of", "import_draft", "read_envelope", "read_flat"]

Draft = tuple[dict[str, Any], dict[str, Tensor]]
# Drafts of other kinds, which their tensors' names alone would take for one of ours.
OTHERS = {
    "DFlash2DraftModel": "DFlash2's convolutions and candidate selector",
    "DFlash2Speculator": "DFlash2's convolutions and candidate selector",
    "LiLiCorrDraftModel": "LiLiCorr's correction",
    "Gemma4DSparkModel": "layers of Gemma's shape",
    "K3DSparkModel": "latent attention",
    "DeepseekV4DSparkModel": "layers of DeepSeek's shape",
    "Lfm2DSparkDraftModel": "convolutions",
    "Eagle3DeepseekV2ForCausalLM": "latent attention",
    "Eagle3DeepseekV3ForCausalLM": "latent attention",
    "PEagleDraftModel": "drafts made in parallel",
    "PeagleLlamaForCausalLM": "drafts made in parallel",
    "PeagleQwen3ForCausalLM": "drafts made in parallel",
}
KINDS = {"dflash": "block", "dspark": "block", "eagle3": "eagle3"}  # by speculators_model_type


def import_draft(
    folder: Path, *, spec: TargetSpec, target_folder: Path | None = None, given: Mapping[str, Any] | None = None
) -> Draft:
    """Settings (with `_target_`) and float32 tensors, by our names, of a published draft for the target of `spec`.

    Reads flat folders (DeepSpec, z-lab, SpecForge, vLLM's own, and what `to_hf` writes) and speculators' envelopes, of
    DFlash, DSpark, EAGLE-3 and Medusa, also quantized ones. `target_folder` is needed where the draft brings copies of
    the target's embedding or output projection, which must be equal, or an EAGLE-3 draft shares the latter. `given`
    holds settings that the files do not say: layer_ids, block_size, sample_from_anchor, norm_before_residual. Raises
    CheckpointError that names everything which is missing, unknown or beyond our classes.
    """
    given = dict(given or {})
    if unknown := sorted(given.keys() - set(GIVEN)):
        raise ConfigError(f"given.{unknown[0]}: unknown setting; accepted: {', '.join(GIVEN)}")
    if wrong := list(wrong_values(given, "given.")):
        raise ConfigError("; ".join(wrong))
    published = open_published(folder)
    node, tensors, copies = _read(published, spec, given)
    if family_of(node) == "eagle3" and "lm_head.weight" not in tensors:
        if node["draft_vocab_size"] is not None:
            raise CheckpointError(f"{folder}: no lm_head.weight, though its vocabulary is reduced; it is damaged")
        tensors["lm_head.weight"] = head_rows(target_folder, spec)
    _check_shapes(folder, node, spec, tensors)
    _check_copies(folder, copies, spec, target_folder, tensors.get("vocab.d2t"))
    return node, tensors


def read_flat(folder: Path, *, spec: TargetSpec) -> Draft:
    """Settings and tensors of a flat folder; rows of the target in it are left alone."""
    return _read_own(folder, spec, is_envelope=False)


def read_envelope(folder: Path, *, spec: TargetSpec) -> Draft:
    """Settings and tensors of a folder with speculators' envelope; rows of the target in it are left alone."""
    return _read_own(folder, spec, is_envelope=True)


def drafter_of(node: Mapping[str, Any], tensors: Mapping[str, Tensor], *, spec: TargetSpec) -> Drafter:
    """The drafter of what was imported, for `save_drafter`. Raises ConfigError for settings that do not fit."""
    cls: Any
    cls, config = build_config(dict(node), key="drafter")
    drafter: Drafter = cls.from_tensors(config, spec, tensors)
    drafter.load_state_dict(dict(tensors), strict=True)
    return drafter.eval()


def _read_own(folder: Path, spec: TargetSpec, *, is_envelope: bool) -> Draft:
    published = open_published(folder)
    if published.is_envelope != is_envelope:
        raise CheckpointError(
            f"{folder / 'config.json'}: has {'an' if published.is_envelope else 'no'} envelope "
            f"(speculators_model_type); accepted here: the other kind"
        )
    node, tensors, _ = _read(published, spec, {})
    _check_shapes(folder, node, spec, tensors)
    return node, tensors


def _read(
    published: Published, spec: TargetSpec, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Settings, tensors by our names, and copies of the target's rows."""
    kind = _kind(published)
    tensors = dict(published.tensors)
    facts = Facts(published.config, tensors, spec, published.is_envelope, given)
    node = {"block": block_node, "eagle3": eagle3_node, "medusa": medusa_node}[kind](facts)
    if (published.folder / "mask_embedding.pt").is_file():
        facts.problems.append("it brings a mask embedding of its own (mask_embedding.pt); ours is the target's row")
    ids_V = _ids(facts, node["draft_vocab_size"])
    if facts.problems:
        raise CheckpointError(
            f"{published.folder}: cannot be a drafter of ours for target '{spec.name}': {'; '.join(facts.problems)}"
        )
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    copied = ["embed_tokens.weight", *(["lm_head.weight"] if kind == "block" else [])]
    if kind == "medusa" and not node["own_projection"]:
        copied.append("lm_heads.0.weight")
    copies = {name: tensors.pop(name) for name in copied if name in tensors}
    if kind == "block":
        _widen_confidence(tensors)
    ours = {our_name(name, family_of(node)): tensor for name, tensor in tensors.items()}
    if ids_V is not None:
        ours, copies, ours["vocab.d2t"] = *_ascending(ours, copies, ids_V), ids_V.sort().values
    return node, ours, copies


def _kind(published: Published) -> str:
    for name in published.config.get("architectures") or []:
        if name in OTHERS:
            raise CheckpointError(f"{published.folder}: is a {name}; our drafters do not have {OTHERS[name]}")
    names = published.tensors.keys()
    if any(name.startswith("blocks.") for name in names):
        kind = "medusa"
    elif "midlayer.hidden_norm.weight" in names or "layers.0.hidden_norm.weight" in names:
        kind = "eagle3"
    elif "fc.weight" in names and "hidden_norm.weight" in names:
        kind = "block"
    else:
        raise CheckpointError(
            f"{published.folder}: its tensors ({', '.join(sorted(names)[:5])}, ...) are of no draft that is known; "
            "accepted: DFlash, DSpark, EAGLE-3, Medusa"
        )
    said = published.config.get("speculators_model_type")
    if said is not None and KINDS.get(said) != kind:
        raise CheckpointError(
            f"{published.folder}: speculators_model_type is '{said}', but its tensors are of the kind {kind}; "
            f"accepted: {', '.join(KINDS)}, with their own tensors"
        )
    return kind


def _ids(facts: Facts, size: int | None) -> Tensor | None:
    """The target's id of each draft id; files hold how far it lies above that."""
    if size is None:
        return None
    ids_V = facts.tensors["d2t"].long() + torch.arange(size)
    span, num_full = (int(ids_V.min()), int(ids_V.max())), facts.spec.vocab_size
    if span[0] < 0 or span[1] >= num_full or len(ids_V.unique()) != size:
        facts.problems.append(f"d2t gives {len(ids_V.unique())} distinct ids of {size}, from {span[0]} to {span[1]}")
        return ids_V
    inside = facts.tensors.get("t2d")
    if inside is not None and not torch.equal(inside.bool().nonzero().flatten(), ids_V.sort().values):
        facts.problems.append("t2d names other tokens than d2t, whose numbers count from the draft id")
    return ids_V


def _ascending(
    ours: dict[str, Tensor], copies: dict[str, Tensor], ids_V: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows over the draft vocabulary in the order of the target's ids, which ours have."""
    order_V = ids_V.argsort()
    by_row = ("lm_head.weight", "markov_w2.weight")

    def sort(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        fits = {name for name, t in tensors.items() if name.endswith(by_row) and len(t) == len(order_V)}
        return {name: tensor[order_V] if name in fits else tensor for name, tensor in tensors.items()}

    return sort(ours), sort(copies)


def _widen_confidence(tensors: dict[str, Tensor]) -> None:
    """A confidence head that does not read the Markov embedding is one that weighs it with zeros."""
    weight, first = tensors.get("confidence_head.proj.weight"), tensors.get("markov_head.markov_w1.weight")
    norm = tensors.get("norm.weight")
    if weight is not None and first is not None and norm is not None and weight.shape[-1] == len(norm):
        tensors["confidence_head.proj.weight"] = torch.cat([weight, weight.new_zeros(1, first.shape[-1])], dim=1)


def _check_shapes(folder: Path, node: Mapping[str, Any], spec: TargetSpec, tensors: Mapping[str, Tensor]) -> None:
    wanted = shapes_of(node, spec)
    problems = []
    for what, names in (("missing", wanted.keys() - tensors.keys()), ("unknown", tensors.keys() - wanted.keys())):
        if names:
            problems.append(f"{what}: {', '.join(sorted(names))}")
    for name in sorted(wanted.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != wanted[name]:
            problems.append(f"{name} is {list(tensors[name].shape)}, wanted {list(wanted[name])}")
    if problems:
        raise CheckpointError(f"{folder}: tensors do not make a drafter of ours: {'; '.join(problems)}")


def _check_copies(
    folder: Path, copies: Mapping[str, Tensor], spec: TargetSpec, target_folder: Path | None, ids_V: Tensor | None
) -> None:
    """Drafts ship frozen copies of the target's rows; ours read the target's own, so the copies must be equal."""
    for name, copy in copies.items():
        if target_folder is None:
            raise ConfigError(
                f"target: its folder is needed, since {folder} brings {name} of its own, which has to be compared with "
                "the target's; give the folder with its config.json and .safetensors files"
            )
        is_input = name == "embed_tokens.weight"
        rows = embedding_rows(target_folder, spec) if is_input else head_rows(target_folder, spec, ids_V=ids_V)
        if not _equal(copy, rows.float()):
            raise CheckpointError(
                f"{folder}: its {name} is not the target's (with the target's scale, if it has one); our drafters read "
                "the target's own, so this draft cannot be one of them"
            )


def _equal(copy: Tensor, rows: Tensor) -> bool:
    """Whether the copy is `rows`, rounded to the 16 bits that drafts are stored in."""
    if copy.shape != rows.shape:
        return False
    return any(torch.equal(copy, rows.to(dtype).float()) for dtype in (torch.float32, torch.bfloat16, torch.float16))
