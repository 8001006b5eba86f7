# `to=speculators`: the tensors of `to=hf` under an envelope that names the algorithm, the target and how many tokens to
# draft, so that `vllm serve` needs no more than this folder. Layers are counted as indices into hidden_states here.

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.files import save_tensors
from drafters.heads.base import Drafter
from drafters.plain_json import parse
from drafters.spec import TargetSpec
from export import serving, table
from export.compressed import quantization_config
from export.families import family_of, vocabulary_of
from export.importing import drafter_of, read_envelope
from export.published import (
    backbone,
    dspark_keys,
    dtype_keys,
    eagle3_keys,
    hidden_state_ids,
    num_slots,
    window_keys,
)
from export.published_checks import check_anchor, check_quant, check_served
from export.published_tensors import Manifest, left_out, published_manifest, published_tensors
from export.quantize import DTYPES, scheme_of
from export.selfcheck import stored_in_safetensors as stored
from export.selfcheck import weight_bounds
from export.source import Source

__all__ = [
    "Options",
    "bounds",
    "commands",
    "config_of",
    "load",
    "manifest",
    "notes",
    "read",
    "refuse",
    "stored",
    "write",
]

EAGLE3_LAYER = "layers.0"
TYPES = {"parallel": "dflash", "markov": "dspark", "eagle3": "eagle3"}
ARCHITECTURES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "eagle3": "Eagle3Speculator"}
VERSION = "0.9.0"  # of the library whose layout this is


@dataclass(frozen=True, kw_only=True)
class Options:
    """`dtype` of what is not quantized: "bf16", "f16" or "f32". `verifier`: where an engine finds the target, a hub id
    or a folder; None = the target's own name (the door gives its hub id, where it has one)."""

    dtype: str = "bf16"
    verifier: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got '{self.dtype}'; accepted: {', '.join(DTYPES)}")


DEFAULT = Options()


def refuse(source: Source, quant: str, *, options: Options = DEFAULT) -> None:
    """Raises ConfigError where no engine would serve this drafter from such a folder, with what to do instead."""
    family = family_of(source.node)
    table.check("speculators", family, vocabulary_of(source.node))
    check_quant(quant, family)
    check_anchor(source.node, "speculators")
    check_served(source, "speculators", reach=0)


def manifest(source: Source, quant: str, *, options: Options = DEFAULT) -> Manifest:
    """Shape and dtype (as safetensors spells it) of every tensor that must be in the file, from numbers alone."""
    return published_manifest(source.node, source.spec, quant, dtype=options.dtype, eagle3_layer=EAGLE3_LAYER)


def write(source: Source, quant: str, out: Path, *, options: Options = DEFAULT) -> None:
    """Writes config.json and model.safetensors into the empty folder `out`. Raises ConfigError as `refuse` does, and
    where a group size does not divide a layer; OSError when the disk does not take it."""
    refuse(source, quant, options=options)
    if names := left_out(source.node):
        warnings.warn(f"to=speculators: {', '.join(names)} left out: DFlash has no confidence head", stacklevel=2)
    tensors = published_tensors(source, quant, dtype=options.dtype, eagle3_layer=EAGLE3_LAYER)
    save_tensors(tensors, out / "model.safetensors")
    config = config_of(source, quant, options=options)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read(folder: Path, *, spec: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and float32 tensors, by our names, of a folder that `write` made. Raises CheckpointError when it is
    damaged or another's (`importing` reads those)."""
    return read_envelope(folder, spec=spec)


def bounds(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, Tensor]:
    """By our names, how far each weight may be off when it comes back; it broadcasts."""
    return weight_bounds(source.tensors, quant, dtype=options.dtype)


def load(folder: Path, *, source: Source) -> Drafter:
    """The drafter that the folder describes, float32."""
    node, tensors = read(folder, spec=source.spec)
    return drafter_of(node, tensors, spec=source.spec)


def commands(source: Source, *, options: Options = DEFAULT, target: str, folder: str) -> dict[str, str]:
    """By engine, how to serve it; `target` and `folder` are where the two lie."""
    return serving.commands(source.node, "speculators", target=target, folder=folder)


def notes(source: Source, *, options: Options = DEFAULT) -> list[str]:
    """What to know before it is served."""
    said, named = serving.notes(source.node, source.spec, "speculators"), options.verifier or source.spec.name
    if "/" not in named:
        said.append(
            f"Its config names the target '{named}', which an engine that starts from this folder alone cannot find: "
            "export it with to.verifier=, the target's hub id or folder, or start the target as above."
        )
    return said


def config_of(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, Any]:
    """The config.json of such a folder."""
    node, spec = source.node, source.spec
    kind = TYPES[family_of(node)]
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        **dtype_keys(options.dtype),
        "tie_word_embeddings": False,
        "target_hidden_size": spec.hidden_size,
        **(eagle3_keys(node, spec) if kind == "eagle3" else _block(node, spec)),
        "transformer_layer_config": {**_layers(node, spec), **dtype_keys(options.dtype)},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": node["block_size"],
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": options.verifier or spec.name,
                "architectures": _architectures(source.target_folder),
            },
        },
    }
    if quant != "none":
        config["quantization_config"] = quantization_config(scheme_of(quant, dtype=options.dtype))
    return config


def _block(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    return {
        "draft_vocab_size": node["draft_vocab_size"] or spec.vocab_size,
        "block_size": num_slots(node),
        "mask_token_id": spec.mask_token_id,
        "aux_hidden_state_layer_ids": hidden_state_ids(node["layer_ids"]),
        "sample_from_anchor": node["sample_from_anchor"],
        # vLLM takes false for causal attention, on layers without a window too.
        "sliding_window_non_causal": True,
        **({} if family_of(node) == "parallel" else dspark_keys(node)),
    }


def _layers(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    """The transformer's own config."""
    if family_of(node) == "eagle3":
        return backbone(spec, model_type="llama", num_layers=1)
    layers = backbone(spec, model_type="qwen3", num_layers=node["num_layers"])
    layers |= window_keys(node["window"], node["num_layers"], counts_itself=False)
    if spec.logit_scale != 1.0 and node["draft_vocab_size"] is None:
        layers["logit_scale"] = spec.logit_scale
    return layers


def _architectures(target_folder: Path | None) -> list[str]:
    if target_folder is None:
        return []
    config = parse((target_folder / "config.json").read_text())
    return list(config.get("architectures") or [])
