# `to=mtp`: a trained module for multi-token prediction stitched into a copy of its target, the only place where engines
# look for one, under the names that the target's family publishes such modules with (vLLM 0.33, SGLang 0.5.23,
# llama.cpp b11434, transformers 5.24). `notes` says where engines differ from each other.

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.heads.base import Drafter
from drafters.plain_json import parse
from drafters.spec import TargetSpec
from export import mtp_serving, table
from export.compressed import manifest_of, read_quantized
from export.families import family_of, vocabulary_of
from export.importing import drafter_of
from export.mtp_names import Spelling, from_file, model_type_of, module_prefix, spelling_of, text_section
from export.mtp_plan import Options, Plan, check
from export.mtp_quant import KEY, group_of, method_of
from export.quantize import DTYPES, error_bound, quantize
from export.selfcheck import ROUNDING
from export.selfcheck import stored_in_safetensors as stored
from export.source import Source
from export.stitch import (
    CONFIG,
    DTYPE_NAMES,
    Stitch,
    Stored,
    load_stored,
    read_json,
    stitch,
    stored_metadata,
    stored_tensors,
)

__all__ = ["Options", "bounds", "commands", "load", "manifest", "notes", "read", "refuse", "stored", "write"]

METADATA = "drafter"
DEFAULT = Options()
SCALES = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")


def refuse(source: Source, quant: str, *, options: Options = DEFAULT) -> None:
    """Raises ConfigError for what no engine would run as it was trained, with what to train or choose instead;
    CheckpointError for a target's folder that is missing or damaged."""
    table.check("mtp", family_of(source.node), vocabulary_of(source.node))
    if quant != "none":
        raise ConfigError(
            f"quant: got '{quant}' with to=mtp; accepted: none. A module is as its target is: stitch it into a "
            "quantized one with mtp_quant=quantized"
        )
    if source.target_folder is None:
        raise ConfigError(
            "to=mtp: copies the target, whose folder is not at hand; accepted: a target that can be found"
        )
    check(Plan(source, options))


def manifest(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype (as safetensors spells it) of every tensor of the stitched folder: the target's as they lie in
    its own files, the module's by the settings and the target's config."""
    plan = Plan(source, options)
    facts = {name: (one.shape, one.dtype) for name, one in plan.stored.items() if name not in plan.drop}
    if options.mtp_quant == "absent":
        return facts
    for name, tensor in plan.renamed(plan.blank).items():
        scheme = plan.scheme(name)
        if scheme is None:
            facts[name] = tuple(tensor.shape), DTYPE_NAMES[plan.dtype_of(name)]
        else:
            facts |= manifest_of(name.removesuffix(".weight"), tensor.shape, scheme, DTYPES[scheme.scale_dtype])
    return facts


def write(source: Source, quant: str, out: Path, *, options: Options = DEFAULT) -> None:
    """Fills the empty folder `out` with the target's files and the module. Raises ConfigError as `refuse`,
    CheckpointError for a disk that is too small and for weights that `dtype` cannot hold."""
    refuse(source, quant, options=options)
    plan = Plan(source, options)
    tensors: dict[str, Tensor | Stored] = {}
    if options.mtp_quant != "absent":
        for name, tensor in plan.renamed(plan.first(source.tensors)).items():
            tensors.update(plan.stored_form(name, tensor))
    config, files = plan.new_config()
    settings = {key: value for key, value in plan.node.items() if key != "target_config"}
    what = Stitch(
        config=config,
        files=files,
        tensors=tensors,
        drop=plan.drop,
        metadata={METADATA: json.dumps(settings)} if tensors else {},
    )
    stitch(plan.target, out, what, link=options.link)


def read(folder: Path, *, spec: TargetSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and float32 tensors by our names, of a folder that `write` made or a model that was published with
    modules. Raises CheckpointError when there is none or it is of another size, ConfigError for a model type or a
    quantization that is not read here."""
    config = read_json(folder / CONFIG)
    section, spelling = text_section(config), spelling_of(model_type_of(config))
    num_layers, count = section["num_hidden_layers"], section.get(spelling.count_key, 1)
    prefixes = tuple(module_prefix(spelling, i, num_layers=num_layers) for i in range(count))
    found = {name: one for name, one in stored_tensors(folder).items() if name.startswith(prefixes)} if count else {}
    if not found:
        raise CheckpointError(f"{folder}: holds no module for multi-token prediction; give a folder that does")
    if spelling.num_modules is not None and count > spelling.num_modules:
        raise ConfigError(f"{folder}: {count} modules share a projection; accepted: {spelling.num_modules}")
    tensors = from_file(_as_floats(load_stored(found), config), spelling, num_layers=num_layers, count=count)
    expected = (spec.hidden_size, 2 * spec.hidden_size)
    projection = tensors.get("depths.0.input_proj.weight")
    if projection is None or tuple(projection.shape) != expected:
        size = "none" if projection is None else list(projection.shape)
        raise CheckpointError(f"{folder}: its module's projection is {size}, expected {list(expected)}")
    metadata = stored_metadata(next(iter(found.values())).file)
    settings = parse(metadata[METADATA]) if METADATA in metadata else _published(spelling, count)
    return {**settings, "target_config": _target_config(section)}, tensors


def bounds(source: Source, quant: str, *, options: Options = DEFAULT) -> dict[str, Tensor]:
    """By our names, how far each weight that is exported may be off when it comes back."""
    plan = Plan(source, options)
    if options.mtp_quant == "absent":
        return {}
    off: dict[str, Tensor] = {}
    for name, tensor in plan.renamed(plan.first(source.tensors)).items():
        scheme, dtype = plan.scheme(name), plan.dtype_of(name)
        if scheme is not None:
            off[name] = error_bound(quantize(tensor, scheme, name=name)) * (1 + 1e-5)
        else:
            relative, absolute = ROUNDING[next(key for key, one in DTYPES.items() if one == dtype)]
            off[name] = tensor.abs() * relative + absolute
            if plan.is_offset(name):
                off[name] += (tensor.abs() + 2) * 2.0**-24  # one is taken off, and added again
    plain = replace(plan.spelling, offset_norms=False)
    return from_file(off, plain, num_layers=plan.num_layers, count=1)


def load(folder: Path, *, source: Source) -> Drafter | None:
    """The drafter that the folder holds, float32; None where its config says that it holds none."""
    config = read_json(folder / CONFIG)
    if text_section(config).get(spelling_of(model_type_of(config)).count_key) == 0:
        return None
    node, tensors = read(folder, spec=source.spec)
    return drafter_of(node, tensors, spec=source.spec)


def commands(source: Source, *, options: Options = DEFAULT, target: str, folder: str) -> dict[str, str]:
    """By engine, how to serve it."""
    return mtp_serving.commands(Plan(source, options), folder=folder)


def notes(source: Source, *, options: Options = DEFAULT) -> list[str]:
    """What to know before it is served."""
    return mtp_serving.notes(Plan(source, options))


def _as_floats(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """float32, quantized matrices included."""
    floats: dict[str, Tensor] = {}
    quantized = {name.rpartition(".")[0] for name in tensors if name.endswith((".weight_packed", ".weight_scale"))}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if module in quantized and name.endswith((".weight", *SCALES)):
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ConfigError(
                f"{name}: {str(tensor.dtype).removeprefix('torch.')} of a target quantized by '{method_of(config)}'; "
                "accepted: floats, or compressed-tensors"
            )
        floats[name] = tensor.float()
    for module in sorted(quantized):
        one = {**config.get(KEY, {}), "config_groups": {"group_0": group_of(config, module)}}
        floats[f"{module}.weight"] = read_quantized(tensors, module, one)
    return floats


def _published(spelling: Spelling, count: int) -> dict[str, Any]:
    """Settings of modules that came with a model."""
    return {
        "_target_": "drafters.heads.mtp.MtpDrafter",
        "name": "mtp",
        "block_size": count,
        "share_depths": False,
        "order": spelling.order,
        "feedback": "after_norm",
        "block": "target",
        "draft_vocab_size": None,
        "init": "random",
    }


def _target_config(section: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the target as `drafters.heads.mtp_block.plain_config` gives it."""
    from transformers import AutoConfig

    own = {key: value for key, value in section.items() if key != KEY}
    # MiMo's layers are Qwen2's, and transformers does not know its name.
    own["model_type"] = "qwen2" if own["model_type"] == "mimo" else own["model_type"]
    plain: dict[str, Any] = json.loads(json.dumps(AutoConfig.for_model(**own).to_dict()))
    return {**plain, "_name_or_path": ""}
