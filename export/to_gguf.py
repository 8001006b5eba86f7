# `to=gguf`: one file that llama.cpp serves beside a target's own GGUF:
#
#     llama-server -m TARGET.gguf -md dspark-markov.gguf --spec-type draft-dspark --spec-draft-n-max BLOCK_SIZE
#
# The numbers are written here; `gguf_layout` has the tensors, `gguf_types` their types, `gguf_tokenizer` the tokenizer.

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec
from export import table
from export.families import BLOCK, EAGLE3, SEQUENTIAL, family_of, vocabulary_of
from export.formats import Manifest
from export.gguf_file import open_gguf, read_tensors, stored_tensors, write_gguf
from export.gguf_layout import kind_of, layout, our_tensors, tensors_of
from export.gguf_notes import gguf_notes
from export.gguf_tokenizer import Field, tokenizer_fields
from export.gguf_types import TYPES, base_type, bound_of, type_of
from export.importing import drafter_of
from export.published import hidden_state_ids, layer_outputs, num_slots
from export.source import Source

__all__ = [
    "Options",
    "bounds",
    "commands",
    "load",
    "manifest",
    "notes",
    "numbers",
    "read",
    "refuse",
    "stored",
    "write",
]

_NUM_FUSED = 3  # states that llama.cpp's eagle3 reads


@dataclass(frozen=True, kw_only=True)
class Options:
    """`type` of the large matrices, one of F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0, Q4_1; None = by `quant`: F16 for
    none, Q8_0 for int8, Q4_0 for int4. `target_gguf`: the target's own GGUF file, whose tokenizer is copied; None =
    made from tokenizer.json in the target's folder."""

    type: str | None = None
    target_gguf: Path | None = None

    def __post_init__(self) -> None:
        if self.type is not None and self.type not in TYPES:
            raise ValueError(f"type: got '{self.type}'; accepted: {', '.join(TYPES)}, or null (by quant)")


DEFAULT = Options()


def refuse(source: Source, quant: str, *, options: Options = DEFAULT) -> None:
    """Raises ConfigError where llama.cpp could not draft with this file as training did, with what to do instead."""
    node, spec = source.node, source.spec
    family, vocabulary = family_of(node), vocabulary_of(node)
    table.check("gguf", family, vocabulary)
    base_type(quant, options.type)
    elsewhere = table.alternatives(family, vocabulary, to="gguf")
    if family == "eagle3" and len(node["layer_ids"]) != _NUM_FUSED:
        raise ConfigError(
            f"to=gguf: got drafter.layer_ids={list(node['layer_ids'])}, but llama.cpp fuses the states of exactly "
            f"{_NUM_FUSED} layers; accepted for it: {elsewhere}; or train it again with {_NUM_FUSED} layers"
        )
    if spec.num_layers - 1 in node["layer_ids"]:
        raise ConfigError(
            f"to=gguf: got drafter.layer_ids={list(node['layer_ids'])}, but llama.cpp takes states where a layer "
            f"begins, so it has none of the last layer, {spec.num_layers - 1}; accepted for it: {elsewhere}; or train "
            "it again with earlier layers"
        )
    if family in SEQUENTIAL and spec.logit_softcap is not None:
        raise ConfigError(
            f"to=gguf: the target caps its logits at {spec.logit_softcap:g} before the Markov head's bias is added; "
            "llama.cpp caps no draft's logits; accepted for it: to=packed, or a parallel or eagle3 drafter"
        )
    window = node.get("window")
    if window is not None and window + 1 < num_slots(node):
        raise ConfigError(
            f"to=gguf: got drafter.window={window} for a block of {num_slots(node)} slots; llama.cpp would hide parts "
            f"of the block from each other; accepted: {num_slots(node) - 1} or more, or null; or to=packed"
        )


def manifest(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor that must be in the file, from numbers alone. Shapes are ours: GGUF lists the
    same dimensions the other way round."""
    base = base_type(quant, options.type)
    entries = layout(source.node, source.spec)
    return {name: (entry.shape, type_of(entry, base)) for name, entry in entries.items()}


def write(source: Source, quant: str, out: Path, *, options: Options = DEFAULT) -> None:
    """Writes `<kind>-<name>.gguf` into the empty folder `out`; <kind> (dspark, dflash, eagle3) is what llama.cpp's
    `--spec-type draft-<kind>` says, and how it finds a draft beside a target. Raises ConfigError as `refuse` does, and
    for weights that a type cannot hold; OSError when the disk does not take it."""
    refuse(source, quant, options=options)
    node, spec = source.node, source.spec
    base, kind = base_type(quant, options.type), kind_of(node)
    entries, tensors = layout(node, spec), tensors_of(source)
    write_gguf(
        out / _file_name(node),
        arch=_arch(kind),
        fields=[
            Field("general.name", str(node["name"])),
            *(Field(f"{_arch(kind)}.{key}", value) for key, value in numbers(node, spec).items()),
            *tokenizer_fields(source.target_folder, spec, target_gguf=options.target_gguf),
        ],
        tensors={name: (tensors[name], type_of(entry, base)) for name, entry in entries.items()},
        file_type=TYPES[base].file_type,
    )


def stored(folder: Path) -> Manifest:
    """Shape and type of every tensor in the one .gguf file of a folder. Raises CheckpointError as `read`."""
    return stored_tensors(open_gguf(_file_in(folder), key="gguf"))


def read(folder: Path, *, spec: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and float32 tensors, by our names, of the one .gguf file in a folder. Settings are read from the file's
    numbers alone. Raises CheckpointError when it is missing, damaged, or of a draft that is none of ours."""
    path = _file_in(folder)
    reader = open_gguf(path, key="gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = read_tensors(reader)
    try:
        node = _settings(fields, tensors)
    except KeyError as error:
        raise CheckpointError(f"{path}: says no {error}, so it is no draft for llama.cpp; export it again") from error
    _check_whole(path, node, spec, tensors)
    return node, our_tensors(tensors, node, spec)


def load(folder: Path, *, source: Source) -> Drafter:
    """The drafter that the file describes, float32. Raises CheckpointError as `read`."""
    node, tensors = read(folder, spec=source.spec)
    return drafter_of(node, tensors, spec=source.spec)


def bounds(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, Tensor]:
    """By how much each weight, by our names, may differ after `write` and `read`: what rounding to its type allows."""
    base = base_type(quant, options.type)
    entries = layout(source.node, source.spec)
    found = {name: bound_of(tensor, type_of(entries[name], base)) for name, tensor in tensors_of(source).items()}
    return our_tensors(found, source.node, source.spec)


def commands(source: Source, *, options: Options = DEFAULT, target: str, folder: str) -> dict[str, str]:
    """How llama.cpp serves it. Without a draft length it drafts three tokens, whatever the file says."""
    kind, drafts = kind_of(source.node), source.node["block_size"]
    served = target if target.endswith(".gguf") and ":" not in target else "TARGET.gguf"
    file = f"{folder}/{_file_name(source.node)}"
    return {"llama.cpp": f"llama-server -m {served} -md {file} --spec-type draft-{kind} --spec-draft-n-max {drafts}"}


def notes(source: Source, *, options: Options = DEFAULT) -> list[str]:
    """What to know before it is served."""
    return gguf_notes(source.node, source.spec)


def numbers(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    """What the file says of the draft under `<arch>.`: sizes, layers, blocks. Nothing is left to a reader's default.

    `target_layers` are layers whose input is read: ours, whose output is read, plus one. `block_size` counts slots: the
    anchor's too where it drafts nothing. The window counts the position that looks, and moves with it: the anchor sees
    `window` positions as in training, the j-th slot after it j fewer.
    """
    kind = kind_of(node)
    found = {
        "block_count": 1 if kind == "eagle3" else node["num_layers"],
        "context_length": spec.max_position,
        "vocab_size": spec.vocab_size,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "rope.freq_base": float(spec.rope_theta),
        "rope.dimension_count": spec.head_dim,
        "target_layers": hidden_state_ids(node["layer_ids"]),
    }
    if kind == "eagle3":
        # llama.cpp reads no block size here: how many steps are drafted is the server's to say.
        return found | {
            "block_size": node["block_size"],
            "target_hidden_size": spec.hidden_size,
            "norm_before_residual": node["norm_before_residual"],
            "norm_before_fc": False,
        }
    found |= {
        "block_size": num_slots(node),
        "sample_from_anchor": node["sample_from_anchor"],
        "has_confidence_head": node["confidence"],
        "attention.causal": False,
        "embedding_scale": float(spec.embed_scale),
    }
    if node["window"] is not None:
        found["attention.sliding_window"] = node["window"] + 1
        found["attention.sliding_window_pattern"] = [True] * node["num_layers"]
    return found


def _file_name(node: Mapping[str, Any]) -> str:
    return f"{kind_of(node)}-{node['name']}.gguf"


def _file_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{folder}: holds {len(files)} .gguf files, wanted 1; give the folder of one export")
    return files[0]


def _arch(kind: str) -> str:
    return "eagle3" if kind == "eagle3" else "dflash"


def _settings(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Inverse of `numbers`. Raises KeyError for a key that is missing."""
    arch = fields["general.architecture"]
    said = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    node: dict[str, Any] = {
        "_target_": EAGLE3 if arch == "eagle3" else BLOCK,
        "layer_ids": layer_outputs(said["target_layers"]),
        "block_size": said["block_size"],
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else None,
    }
    if arch == "eagle3":
        return {"name": "eagle3", **node, "norm_before_residual": said["norm_before_residual"]}
    w1, w2 = tensors.get("markov_w1.weight"), tensors.get("markov_w2.weight")
    is_markov = w1 is not None and w2 is not None and (w1.shape[1] > 1 or bool(w2.any()))
    window = said.get("attention.sliding_window")
    return {
        "name": "markov" if is_markov else "parallel",
        **node,
        "num_layers": said["block_count"],
        "block_size": said["block_size"] - (not said["sample_from_anchor"]),
        "sample_from_anchor": said["sample_from_anchor"],
        "window": None if window is None else window - 1,
        "sequential": {"_target_": SEQUENTIAL["markov"], "rank": w1.shape[1]} if is_markov and w1 is not None else None,
        "confidence": said["has_confidence_head"],
    }


def _check_whole(path: Path, node: Mapping[str, Any], spec: TargetSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the tensors are those of these settings."""
    wanted = {name: entry.shape for name, entry in layout(node, spec).items()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name)):
        first = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} tensors are not those of its settings; the first, {first}, is "
            f"{got.get(first, 'missing')}, wanted {wanted.get(first, 'none')}; export it again"
        )
