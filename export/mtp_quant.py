# MTP modules beside a quantized target. Its quantization_config would be taken for the modules too, so it has to say
# that they are float, each quantizer in its own words; or they are quantized like the target's own layer of that
# class, matrix by matrix. The projection before the block is float in every engine.

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drafters.errors import ConfigError
from export.compressed import manifest_of
from export.mtp_names import Spelling, module_prefix
from export.quantize import DTYPES, Scheme
from export.stitch import FLOATS, Stored, read_json

__all__ = ["KEY", "as_float", "group_of", "is_quantized", "method_of", "quantized_config", "schemes_of"]

KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
METHODS = "compressed-tensors, gptq, awq, fp8, modelopt"
# Engines join these into one module, whose name they then look for.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def method_of(config: Mapping[str, Any]) -> str | None:
    """What quantized a target, None where nothing did."""
    quantization = config.get(KEY)
    return None if quantization is None else str(quantization.get("quant_method"))


def is_quantized(target: Path, config: Mapping[str, Any]) -> bool:
    """Whether the folder `target` with this config.json is of a quantized model."""
    return KEY in config or (target / MODELOPT_FILE).is_file()


def as_float(
    target: Path, config: Mapping[str, Any], spelling: Spelling, modules: Iterable[str], *, num_layers: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The config.json `config` of the folder `target`, and further JSON files by name, so changed that they say that
    MTP modules are float. `modules` are the names of their linear layers in the file. Raises ConfigError for a
    quantizer that cannot say it, or that is not known.

    Engines match by: compressed-tensors, `ignore`: regular expressions; gptq, `dynamic`: the same after "-:"; awq:
    parts of names; fp8: whole names; modelopt: names with `*`, which it may keep in a file of its own.
    """
    changed = dict(config)
    if KEY in config:
        changed[KEY] = _float_section(config, spelling, modules, num_layers=num_layers)
    return changed, _float_files(target, spelling, num_layers=num_layers)


def _float_section(
    config: Mapping[str, Any], spelling: Spelling, modules: Iterable[str], *, num_layers: int
) -> dict[str, Any]:
    quantization, method = dict(config[KEY]), method_of(config)
    patterns = [each.format(layer=num_layers) for each in spelling.everything]
    prefix = module_prefix(spelling, 0, num_layers=num_layers)
    if method == "compressed-tensors":
        quantization["ignore"] = _with(quantization.get("ignore"), [f"re:{each}" for each in patterns])
    elif method == "gptq":
        quantization["dynamic"] = {**{f"-:{each}": {} for each in patterns}, **(quantization.get("dynamic") or {})}
    elif method in ("awq", "fp8", "modelopt"):
        if spelling.name == "mimo":
            raise ConfigError(
                f"mtp_quant: 'float' is not possible with a MiMo target quantized by {method}: engines call the MTP "
                "block there like the target's own layers, and this method knows names only; accepted: absent, or a "
                "target that is not quantized"
            )
        if method == "awq":
            key, names = "modules_to_not_convert", [prefix, *_others(spelling)]
        elif method == "fp8":
            key = "ignored_layers" if "ignored_layers" in quantization else "modules_to_not_convert"
            names = [prefix.rstrip("."), *(each.rstrip(".") for each in _others(spelling)), *_with_joined(modules)]
        else:
            key = "ignore" if "exclude_modules" not in quantization else "exclude_modules"
            names = [f"{each}*" for each in (prefix, *_others(spelling))]
        quantization[key] = _with(quantization.get(key), names)
    else:
        raise ConfigError(
            f"mtp_quant: 'float' is not possible with a target quantized by '{method}', whose config is not known; "
            f"accepted: absent, a target quantized by {METHODS}, or one that is not quantized"
        )
    return quantization


def _float_files(target: Path, spelling: Spelling, *, num_layers: int) -> dict[str, dict[str, Any]]:
    if not (target / MODELOPT_FILE).is_file():
        return {}
    content = read_json(target / MODELOPT_FILE)
    section = dict(content.get("quantization") or {})
    names = [f"{each}*" for each in (module_prefix(spelling, 0, num_layers=num_layers), *_others(spelling))]
    section["exclude_modules"] = _with(section.get("exclude_modules"), names)
    return {MODELOPT_FILE: {**content, "quantization": section}}


def schemes_of(
    config: Mapping[str, Any], stored: Mapping[str, Stored], layer: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Scheme]:
    """How each matrix of a block is quantized that is quantized in the target's own layer with the prefix `layer`, by
    its name there (without ".weight"); others are float. `shapes` are the matrices of the block.

    Raises ConfigError where the target's quantizer or scheme is not one that can be written here.
    """
    if method_of(config) != "compressed-tensors":
        raise ConfigError(
            f"mtp_quant: 'quantized' is not possible with a target quantized by '{method_of(config)}'; accepted: "
            "float, absent, or a target quantized by compressed-tensors"
        )
    schemes: dict[str, Scheme] = {}
    for name, shape in shapes.items():
        mine = f"{layer}{name}"
        found = {
            key.removeprefix(f"{mine}."): (one.shape, one.dtype)
            for key, one in stored.items()
            if key.startswith(f"{mine}.") and not key.endswith("bias")
        }
        if found.keys() == {"weight"} and found["weight"][1] in FLOATS:
            continue
        scheme = _scheme(group_of(config, mine), mine, found)
        wanted = {
            key.removeprefix(f"{mine}."): fact
            for key, fact in manifest_of(mine, shape, scheme, DTYPES[scheme.scale_dtype]).items()
        }
        if found != wanted:
            raise _unknown(mine, f"it holds {_told(found)}, where {_told(wanted)} would be written")
        schemes[name] = scheme
    return schemes


def quantized_config(
    config: Mapping[str, Any],
    spelling: Spelling,
    *,
    num_layers: int,
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """`config` whose compressed-tensors section quantizes the matrices in `schemes`, and neither the others in `shapes`
    nor the projection before the block."""
    quantization = dict(config[KEY])
    prefix = f"{module_prefix(spelling, 0, num_layers=num_layers)}{spelling.block}"
    ignore = [
        entry
        for entry in quantization.get("ignore") or []
        if not any(_matches(entry, f"{prefix}{name}") for name in schemes)
    ]
    roots = [root.format(layer=num_layers) for root in spelling.roots]
    rest = [name for name in shapes if name not in schemes]
    patterns = [f"re:{root}{each}" for root in roots for each in _float_patterns(rest, schemes)]
    quantization["ignore"] = _with(ignore, [*patterns, f"re:.*{re.escape(spelling.parts['input_proj'])}$"])
    groups = {key: dict(group) for key, group in quantization["config_groups"].items()}
    for name in schemes:
        if not any(_takes(group, f"{prefix}{name}") for group in groups.values()):
            # Targets that are named one by one, or by the numbers of layers.
            layer_group = next(iter(groups.values()))
            layer_group["targets"] = _with(layer_group.get("targets"), [f"re:{root}.*" for root in roots])
    return {**config, KEY: {**quantization, "config_groups": groups}}


def group_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The group of a compressed-tensors config that the module `name` belongs to. Raises ConfigError for none."""
    groups = list((config[KEY].get("config_groups") or {}).values())
    named = [group for group in groups if _takes(group, name, by_class=False)]
    by_class = [group for group in groups if "Linear" in (group.get("targets") or [])]
    for group in (*named, *by_class):
        return dict(group)
    raise ConfigError(f"{KEY}: no config_group takes {name}, though it is quantized; accepted: mtp_quant float, absent")


def _scheme(group: Mapping[str, Any], name: str, found: Mapping[str, tuple[tuple[int, ...], str]]) -> Scheme:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    strategy = weights.get("strategy") or ("channel" if weights.get("group_size") is None else "group")
    if strategy not in ("channel", "group"):
        raise _unknown(name, f"its strategy is '{strategy}'; accepted: channel, group")
    if activations is not None and not activations.get("dynamic"):
        raise _unknown(name, "its activations are quantized by scales that were measured on a calibration set")
    dtypes = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
    try:
        return Scheme(
            bits=weights.get("num_bits", 8),
            kind="fp8" if weights.get("type") == "float" else "int",
            symmetric=weights.get("symmetric", True),
            group_size=weights.get("group_size") if strategy == "group" else None,
            dynamic_activations=activations is not None,
            scale_dtype=dtypes.get(found.get("weight_scale", ((), ""))[1], "bf16"),
        )
    except ValueError as error:
        raise _unknown(name, str(error)) from error


def _unknown(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"mtp_quant: 'quantized' is not possible: {name} of the target is quantized in a way that is not written here: "
        f"{reason}; accepted: float, absent"
    )


def _told(facts: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (shape, dtype) in sorted(facts.items())) or "nothing"


def _float_patterns(rest: Iterable[str], schemes: Iterable[str]) -> list[str]:
    """Endings for names of float matrices. Where all matrices beside each other are float one ending takes them all,
    joined or not; else each has its own, and engines join none of them: q, k and v are of one kind."""
    quantized = {name.partition(".experts.")[0] if ".experts." in name else name.rpartition(".")[0] for name in schemes}
    patterns: list[str] = []
    for name in rest:
        experts, is_expert, _ = name.partition(".experts.")
        parent, _, last = name.rpartition(".")
        if is_expert:
            each = re.escape(f"{experts}.experts") + ".*"
        else:
            each = re.escape(f"{parent}.") + (f"{re.escape(last)}$" if parent in quantized else "[^.]*$")
        patterns = _with(patterns, [each])
    return patterns


def _takes(group: Mapping[str, Any], name: str, *, by_class: bool = True) -> bool:
    targets = group.get("targets") or []
    return (by_class and "Linear" in targets) or any(_matches(target, name) for target in targets)


def _matches(entry: str, name: str) -> bool:
    return re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name


def _with(entries: Iterable[str] | None, new: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*(entries or []), *new]))


def _others(spelling: Spelling) -> list[str]:
    """What SGLang calls the block where that is another name."""
    return ["model.decoder."] if spelling.name == "deepseek" else []


def _with_joined(modules: Iterable[str]) -> list[str]:
    names = list(modules)
    for name in list(names):
        parent, _, last = name.rpartition(".")
        names += [f"{parent}.{joined}" for joined, parts in JOINED.items() if last in parts and ".experts." not in name]
    return list(dict.fromkeys(names))
