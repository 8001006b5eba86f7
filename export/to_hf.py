# `to=hf`: one flat folder that vLLM, SGLang and llama.cpp's converter load (names of DeepSpec, z-lab and SpecForge).
# The config says each number under every key that one of them reads, by that reader's way of counting.

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.errors import ConfigError
from drafters.files import save_tensors
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec
from export import serving, table
from export.compressed import quantization_config
from export.families import family_of, vocabulary_of
from export.importing import drafter_of, read_flat
from export.published import backbone, dspark_keys, dtype_keys, eagle3_keys, num_slots, window_keys
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """`dtype` of what is not quantized: "bf16", "f16" or "f32"."""

    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got '{self.dtype}'; accepted: {', '.join(DTYPES)}")


DEFAULT = Options()


def refuse(source: Source, quant: str, *, options: Options = DEFAULT) -> None:
    """Raises ConfigError where no engine would serve this drafter from such a folder, with what to do instead."""
    node, family = source.node, family_of(source.node)
    table.check("hf", family, vocabulary_of(node))
    check_quant(quant, family)
    check_anchor(node, "hf")
    if family in ("markov", "gated", "rnn") and not node["sample_from_anchor"]:
        others = table.alternatives(family, vocabulary_of(node), to="hf")
        raise ConfigError(
            "to=hf: got drafter.sample_from_anchor=false with a sequential head, whose block size readers of this "
            f"format count differently by one; accepted for it: {others}; or train it again with "
            "drafter.sample_from_anchor=true"
        )
    check_served(source, "hf", reach=1)


def manifest(source: Source, quant: str, *, options: Options = DEFAULT) -> Manifest:
    """Shape and dtype (as safetensors spells it) of every tensor that must be in the file, from numbers alone."""
    return published_manifest(source.node, source.spec, quant, dtype=options.dtype)


def write(source: Source, quant: str, out: Path, *, options: Options = DEFAULT) -> None:
    """Writes config.json and model.safetensors into the empty folder `out`. Raises ConfigError as `refuse` does, and
    where a group size does not divide a layer; OSError when the disk does not take it."""
    refuse(source, quant, options=options)
    if names := left_out(source.node):
        warnings.warn(f"to=hf: {', '.join(names)} left out, since DFlash has no confidence head", stacklevel=2)
    save_tensors(published_tensors(source, quant, dtype=options.dtype), out / "model.safetensors")
    config = config_of(source.node, source.spec, quant, options=options)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read(folder: Path, *, spec: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and float32 tensors, by our names, of a folder that `write` made. Raises CheckpointError when it is
    damaged or another's (`importing` reads those)."""
    return read_flat(folder, spec=spec)


def bounds(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, Tensor]:
    """By our names, how far each weight may be off when it comes back; it broadcasts."""
    return weight_bounds(source.tensors, quant, dtype=options.dtype)


def load(folder: Path, *, source: Source) -> Drafter:
    """The drafter that the folder describes, float32."""
    node, tensors = read(folder, spec=source.spec)
    return drafter_of(node, tensors, spec=source.spec)


def commands(source: Source, *, options: Options = DEFAULT, target: str, folder: str) -> dict[str, str]:
    """By engine, how to serve it; `target` and `folder` are where the two lie."""
    return serving.commands(source.node, "hf", target=target, folder=folder)


def notes(source: Source, *, options: Options = DEFAULT) -> list[str]:
    """What to know before it is served."""
    return serving.notes(source.node, source.spec, "hf")


def config_of(node: Mapping[str, Any], spec: TargetSpec, quant: str, *, options: Options = DEFAULT) -> dict[str, Any]:
    """The config.json of a drafter of these settings."""
    family = family_of(node)
    make = {"medusa": _medusa, "eagle3": _eagle3}.get(family, _block)
    config = {**make(node, spec), **dtype_keys(options.dtype)}
    if quant != "none":
        config["quantization_config"] = quantization_config(scheme_of(quant, dtype=options.dtype))
    return config


def _block(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    family, layer_ids = family_of(node), list(node["layer_ids"])
    nested: dict[str, Any] = {
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": layer_ids,
        "block_size": num_slots(node),
        "causal": False,
    }
    config = {
        "architectures": ["DFlashDraftModel" if family == "parallel" else "Qwen3DSparkModel"],
        **backbone(spec, model_type="qwen3", num_layers=node["num_layers"]),
        **window_keys(node["window"], node["num_layers"], counts_itself=True),
        "draft_vocab_size": node["draft_vocab_size"] or spec.vocab_size,
        "block_size": num_slots(node),
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": layer_ids,
        "sample_from_anchor": node["sample_from_anchor"],
        "dflash_config": nested,
    }
    if node["window"] is not None:
        nested |= {"use_swa": True, "swa_window_size": config["sliding_window"]}
    if spec.embed_scale != 1.0:
        nested["input_embedding_scale"] = 1.0  # the rows that go along are scaled
    if spec.logit_scale != 1.0 and node["draft_vocab_size"] is None:
        config["logit_scale"] = nested["output_multiplier"] = spec.logit_scale
    if spec.logit_softcap is not None:
        nested["final_logit_softcapping"] = spec.logit_softcap
    if family == "parallel":
        nested["sample_from_anchor"] = False
        return config
    # Not in `dflash_config`: vLLM takes sample_from_anchor there for a DFlash that it cannot serve.
    return config | dspark_keys(node)


def _eagle3(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **backbone(spec, model_type="llama", num_layers=1),
        **eagle3_keys(node, spec),
        "block_size": node["block_size"],
        # The same key, counted otherwise: SGLang reads it here, as the number of the layer whose output it takes.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(node["layer_ids"]),
            "use_aux_hidden_state": True,
        },
    }


def _medusa(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "medusa_num_heads": node["block_size"],
        "medusa_num_layers": node["num_layers"],
        "medusa_fc_bias": True,  # without it vLLM leaves the biases out, and does not say so
        "original_lm_head": not node["own_projection"],
        "version": "2",
    }
