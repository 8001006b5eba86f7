# `to=packed`: a run of this package's own, whose drafter's weights are one block that is mapped, not read, and that
# drafts are computed from. `evaluate.py` and `load_drafter` take it where they take a trained one.

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import drafters
from drafters.checkpoint import SCHEMA, load_drafter, read_config
from drafters.errors import ConfigError
from drafters.files import file_sha256
from drafters.heads.base import Drafter
from drafters.packed.block import Block, Part, block_size, save_block
from drafters.packed.load import OUTPUT_ROWS
from drafters.plain_json import sealed
from drafters.runs import SETTINGS, Run
from drafters.spec import TargetSpec
from export import table
from export.families import family_of, vocabulary_of
from export.formats import Manifest
from export.pack import check_packing, pack, parts_of, scheme_for, unpack
from export.quantize import Quantized, dequantize, error_bound, quantize, scheme_of
from export.source import Source
from export.target_rows import head_rows

__all__ = ["Options", "bounds", "commands", "load", "manifest", "notes", "read", "refuse", "stored", "write"]

WEIGHTS = "model.safetensors"
# Drafters whose drafts end in the target's output projection; the others bring their own.
_BORROW = ("parallel", "markov", "gated", "rnn", "mtp", "exit", "own")


@dataclass(frozen=True, kw_only=True)
class Options:
    """`output_rows`: the block holds a copy, of eight bits, of the target's output rows that drafts go through: the
    largest product of a draft. Without them it is computed with the target's own, in its dtype."""

    output_rows: bool = True


DEFAULT = Options()


def refuse(source: Source, quant: str, *, options: Options = DEFAULT) -> None:
    """Raises ConfigError without a base quantization, for a drafter without weights or one whose layers our kernels do
    not take, and where the target's rows are asked for but its folder is not at hand."""
    check_packing("packed", quant)
    family = family_of(source.node)
    table.check("packed", family, vocabulary_of(source.node))
    if source.node.get("block") == "target":
        raise ConfigError(
            "to=packed: got drafter.block=target, whose layers run the target's own code, and that casts and moves "
            "weights by itself; accepted for it: to=mtp; or train it again with drafter.block=qwen3"
        )
    if family == "exit" and source.node["adapter"] is None:
        raise ConfigError("to=packed: got an exit drafter without an adapter, which has no weights; use it as it is")
    if _borrows(source, options) and source.target_folder is None:
        raise ConfigError(
            "to.output_rows: got true, but the target's folder is not at hand; accepted: false, or a target that can "
            "be found"
        )
    _parts(source, quant, options)


def manifest(source: Source, quant: str, *, options: Options = DEFAULT) -> Manifest:
    """Shape and form of every tensor in the block, from numbers alone; and the block itself."""
    parts = _parts(source, quant, options)
    return {"block": ((block_size(parts)[0],), "U8"), **_named(parts)}


def write(source: Source, quant: str, out: Path, *, options: Options = DEFAULT) -> None:
    """Writes a run into the empty folder `out`: a `drafter` folder, and the settings of the run that it is of, where it
    has some. Raises ConfigError as `refuse` does, CheckpointError for weights that are not finite, OSError when the
    disk does not take it."""
    refuse(source, quant, options=options)
    settings, place = source.folder.parent / SETTINGS, Run(out).drafter
    place.mkdir()
    if settings.is_file():
        (out / SETTINGS).parent.mkdir()
        shutil.copyfile(settings, out / SETTINGS)
    tensors = dict(source.tensors)
    if _borrows(source, options):
        tensors[OUTPUT_ROWS] = head_rows(source.target_folder, source.spec, ids_V=tensors.get("vocab.d2t"))
    save_block(pack(tensors, scheme_of(quant)), place / WEIGHTS)
    config = {
        "schema": SCHEMA,
        "drafters_version": drafters.__version__,
        "drafter": dict(source.node),
        "target": source.spec.to_dict(),
        "draft_vocab_size": source.node.get("draft_vocab_size"),
        "weights": {"file": WEIGHTS, "sha256": file_sha256(place / WEIGHTS), "packed": True, "quant": quant},
        "provenance": {**source.provenance, "packed_from": source.provenance.get("sha256")},
    }
    (place / "config.json").write_text(json.dumps(sealed(config), indent=2) + "\n")


def stored(folder: Path) -> Manifest:
    """What the block of a run holds, by its index. Raises CheckpointError when it is damaged."""
    block = Block.open(Run(folder).drafter / WEIGHTS)
    block.check()
    return {"block": ((len(block.data),), "U8"), **_named(block.parts)}


def read(folder: Path, *, spec: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and float32 tensors by our own names, without the target's output rows. Raises CheckpointError when the
    folder is damaged."""
    place = Run(folder).drafter
    block = Block.open(place / WEIGHTS)
    block.check()
    tensors = {name: _floats(found) for name, found in unpack(block).items() if name != OUTPUT_ROWS}
    return read_config(place)["drafter"], tensors


def bounds(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, Tensor]:
    """By our names, how far each weight may be off when it comes back; it broadcasts."""
    base, found = scheme_of(quant), {}
    for name, tensor in source.tensors.items():
        scheme = scheme_for(name, base)
        found[name] = (
            torch.zeros(()) if scheme is None else error_bound(quantize(tensor, scheme, name=name)) * (1 + 1e-5)
        )
    return found


def load(folder: Path, *, source: Source) -> Drafter:
    """The drafter, on the block."""
    return load_drafter(Run(folder).drafter, spec=source.spec)


def commands(source: Source, *, options: Options = DEFAULT, target: str, folder: str) -> dict[str, str]:
    """How this package drafts with it."""
    return {"drafters": f"python evaluate.py run={folder}"}


def notes(source: Source, *, options: Options = DEFAULT) -> list[str]:
    """What to know before it is used."""
    said = [
        "For this package's own loop; engines load to=hf, to=speculators or to=gguf.",
        "Four bits lie as CPUs with AVX-512 read them; other machines copy them into another layout as they load.",
    ]
    if _borrows(source, options):
        said.append(
            "Its copy of output rows belongs to the target that it was trained for; with a fine-tune of it "
            "(allow_other_target) drafts go through that one's own rows."
        )
    return said


def _borrows(source: Source, options: Options) -> bool:
    """Whether the target's output rows go into the block."""
    family = family_of(source.node)
    shared = family == "medusa" and not source.node["own_projection"]
    return options.output_rows and (family in _BORROW or shared)


def _parts(source: Source, quant: str, options: Options) -> list[Part]:
    tensors = source.drafter.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if _borrows(source, options):
        num_draft = source.node.get("draft_vocab_size") or source.spec.vocab_size
        shapes[OUTPUT_ROWS] = (num_draft, source.spec.hidden_size)
    return parts_of(shapes, scheme_of(quant), {name: tensor.dtype for name, tensor in tensors.items()})


def _named(parts: "list[Part] | tuple[Part, ...]") -> Manifest:
    return {
        name: ((rows, *part.shape[1:]) if part.shape else (), part.form)
        for part in parts
        for name, rows in zip(part.names, part.rows, strict=True)
    }


def _floats(found: Tensor | Quantized) -> Tensor:
    if isinstance(found, Quantized):
        return dequantize(found)
    return found.float() if found.is_floating_point() else found
