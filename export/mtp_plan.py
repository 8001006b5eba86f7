# What a target with a stitched MTP module is made of, worked out from a drafter's settings and the target's files; and
# which settings no engine would run as they were trained. Engines run one module as the family's published modules are
# run, on the target's state after its final norm, and again on its own normed output for further drafts.

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.heads.mtp import MtpDrafter
from drafters.heads.mtp_block import TargetBlock
from export.compressed import tensors_of
from export.mtp_names import (
    Spelling,
    has_experts,
    model_type_of,
    module_prefix,
    spelling_of,
    text_section,
    to_file,
    with_count,
)
from export.mtp_quant import as_float, is_quantized, quantized_config, schemes_of
from export.quantize import DTYPES, Scheme, quantize
from export.source import Source
from export.stitch import CONFIG, DTYPE_NAMES, Stored, read_json, stored_tensors

__all__ = ["Options", "Plan", "check"]

MTP_QUANT = ("float", "quantized", "absent")
# Where a checkpoint keeps the layers of its language model.
LAYERS = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.")
# Routers choose experts by it: rounded, they choose others.
ALWAYS_F32 = ".e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class Options:
    """`dtype` of float tensors: "bf16", "f16", "f32", None = the target's. `mtp_quant` in a quantized target: "float",
    "quantized" as the target's own layers are, or "absent": a target without MTP that says so. `first_depth`: export
    the first of several depths alone. `replace`: modules that the target has of its own give way. `link`: hard links to
    the target's shards where the disk allows it, else copies."""

    dtype: str | None = None
    mtp_quant: str = "float"
    first_depth: bool = False
    replace: bool = False
    link: bool = True

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype: got '{self.dtype}'; accepted: null, {', '.join(DTYPES)}")
        if self.mtp_quant not in MTP_QUANT:
            raise ValueError(f"mtp_quant: got '{self.mtp_quant}'; accepted: {', '.join(MTP_QUANT)}")


def check(plan: "Plan") -> None:
    """Raises ConfigError for a drafter that no engine would run as it was trained, and for a target that it does not
    belong to or that has no place for it."""
    if plan.drafter.config.target_config is not None:
        _check_target(plan, plan.drafter.config.target_config)
    _check_settings(plan)
    _check_layer(plan)
    options = plan.options
    if options.mtp_quant == "quantized" and not is_quantized(plan.target, plan.config):
        raise ConfigError("mtp_quant: got 'quantized', but the target is not; accepted: float, absent")
    if plan.own and not options.replace and options.mtp_quant != "absent":
        raise ConfigError(
            f"replace: got false, and the target has modules of its own ({plan.own[0]}); accepted: true, ours take "
            "their place; or a target without"
        )
    if options.mtp_quant == "absent":
        return
    theirs, ours = plan.layer_modules(), plan.block_modules()
    if theirs != ours:
        raise ConfigError(
            f"to=mtp: the target's own layer in {plan.target} has other parts than the drafter's block "
            f"({', '.join(sorted(theirs ^ ours)[:4])}); accepted: the target that it was trained for"
        )
    plan.new_config()


def _check_settings(plan: "Plan") -> None:
    config, spelling, spec = plan.drafter.config, plan.spelling, plan.source.spec
    again = f"; accepted for a target of model type '{plan.model_type}'"
    if config.block != "target":
        raise ConfigError(
            f"drafter.block: got '{config.block}', a layer that engines do not build into this target{again}: target; "
            "train it again"
        )
    if config.order != spelling.order:
        raise ConfigError(
            f"drafter.order: got '{config.order}'; engines project the halves in the other order{again}: "
            f"{spelling.order}; train it again"
        )
    several = config.block_size > 1 and not plan.options.first_depth
    if several and not config.share_depths:
        raise ConfigError(
            f"drafter.block_size: got {config.block_size} modules; engines run the first one for every draft{again}: "
            "block_size=1, or share_depths=true with feedback=after_norm; train it again, or export with "
            "first_depth=true, which leaves the others out"
        )
    if several and config.feedback != "after_norm":
        raise ConfigError(
            f"drafter.feedback: got '{config.feedback}'; engines feed back the state after the final norm{again}: "
            "after_norm; train it again, or export with first_depth=true, for one draft"
        )
    for name, expected in (("embed_scale", 1.0), ("logit_scale", 1.0), ("logit_softcap", None)):
        if getattr(spec, name) != expected:
            raise ConfigError(
                f"to=mtp: the target has {name} {getattr(spec, name)}, which engines do not apply in these modules; "
                "accepted: targets without; or another drafter"
            )


def _check_target(plan: "Plan", mine: Mapping[str, Any]) -> None:
    if model_type_of(mine) != plan.model_type.replace("mimo", "qwen2"):
        raise ConfigError(
            f"to=mtp: the drafter was trained for a target of model type '{model_type_of(mine)}', {plan.target} is "
            f"'{plan.model_type}'; accepted: the target that it was trained for"
        )
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if mine[key] != plan.section.get(key):
            raise ConfigError(
                f"to=mtp: {key} is {mine[key]} in the drafter's target, {plan.section.get(key)} in {plan.target}; "
                "accepted: the target that it was trained for"
            )


def _check_layer(plan: "Plan") -> None:
    if "sliding_attention" in (plan.section.get("layer_types") or []):
        raise ConfigError(
            "to=mtp: the target has layers with a sliding window, and engines do not agree on the module's; accepted: "
            "targets with full attention; or another drafter"
        )
    if has_experts(plan.section, plan.model_type) != any("experts" in name for name in plan.matrices):
        raise ConfigError(
            "to=mtp: the layer that the drafter's block is of and the one that engines build after the last differ: "
            "one has experts, the other has not; accepted for this target: another drafter, such as drafter=markov"
        )


class Plan:
    """What a stitched folder is made of, worked out from settings and the target's files, each part when asked for."""

    def __init__(self, source: Source, options: Options) -> None:
        assert source.target_folder is not None
        self.target, self.options, self.source = source.target_folder, options, source
        self.drafter = cast(MtpDrafter, source.drafter)
        self.config = read_json(self.target / CONFIG)
        self.model_type = model_type_of(self.config)
        self.spelling: Spelling = spelling_of(self.model_type)
        self.section = text_section(self.config)
        self.num_layers: int = self.section["num_hidden_layers"]

    @cached_property
    def stored(self) -> dict[str, Stored]:
        return stored_tensors(self.target)

    @cached_property
    def own(self) -> list[str]:
        """Names of modules that the target has already."""
        count = self.section.get(self.spelling.count_key) or 1  # some configs do not say it
        prefixes = (module_prefix(self.spelling, i, num_layers=self.num_layers) for i in range(count))
        return [name for prefix in prefixes for name in self.stored if name.startswith(prefix)]

    @property
    def drop(self) -> frozenset[str]:
        return frozenset(self.own)

    @property
    def node(self) -> dict[str, Any]:
        """The settings of what is exported."""
        if not self.options.first_depth:
            return dict(self.source.node)
        return {**self.source.node, "block_size": 1, "share_depths": False, "depth_weights": None}

    @cached_property
    def blank(self) -> dict[str, Tensor]:
        """The tensors of one module by our names, without data, by the numbers of the settings."""
        hidden = self.source.spec.hidden_size
        kind = TargetBlock(cast(Mapping[str, Any], self.drafter.config.target_config))
        with torch.device("meta"):
            state = kind.new().state_dict()
            norms = {f"depths.0.{name}_layernorm.weight": torch.empty(hidden) for name in ("token", "hidden", "final")}
            projection = torch.empty(hidden, 2 * hidden)
        block = {f"depths.0.block.{name}": tensor for name, tensor in state.items()}
        return {**norms, "depths.0.input_proj.weight": projection, **block}

    def first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the module that is exported."""
        return {name: tensor for name, tensor in tensors.items() if name.startswith("depths.0.")}

    def is_offset(self, name: str) -> bool:
        """Whether the file holds this gain less one."""
        projection = f"{self.spelling.parts['input_proj']}.weight"
        return self.spelling.offset_norms and not name.startswith(self.block_prefix) and not name.endswith(projection)

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_file(tensors, self.spelling, num_layers=self.num_layers)

    @property
    def block_prefix(self) -> str:
        return f"{module_prefix(self.spelling, 0, num_layers=self.num_layers)}{self.spelling.block}"

    @cached_property
    def layer_prefix(self) -> str:
        """Of the target's own layer of the block's class, in its files."""
        index = cast(TargetBlock, self.drafter.kind).index
        for prefix in LAYERS:
            if any(name.startswith(f"{prefix}{index}.") for name in self.stored):
                return f"{prefix}{index}."
        raise CheckpointError(f"{self.target}: holds no tensors of layer {index}; accepted: names like {LAYERS[0]}0...")

    @cached_property
    def inner(self) -> dict[str, Tensor]:
        """The tensors of the block alone by their names in it, without data."""
        block = {name: tensor for name, tensor in self.blank.items() if name.startswith("depths.0.block.")}
        return {name.removeprefix(self.block_prefix): tensor for name, tensor in self.renamed(block).items()}

    @cached_property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the linear layers of the block, by their names in it."""
        named = ((name.removesuffix(".weight"), tensor) for name, tensor in self.inner.items())
        return {name: tuple(tensor.shape) for name, tensor in named if tensor.ndim == 2}

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        if self.options.mtp_quant != "quantized":
            return {}
        return schemes_of(self.config, self.stored, self.layer_prefix, self.matrices)

    def scheme(self, name: str) -> Scheme | None:
        """How the tensor of this name in the file is quantized, None where it is float."""
        return self.schemes.get(name.removeprefix(self.block_prefix).removesuffix(".weight"))

    def dtype_of(self, name: str) -> torch.dtype:
        if name.endswith(ALWAYS_F32):
            return torch.float32
        if self.options.dtype is not None:
            return DTYPES[self.options.dtype]
        # The norm of a layer is float in every target.
        like = self.stored[f"{self.layer_prefix}input_layernorm.weight"].dtype
        return next((dtype for dtype, spelled in DTYPE_NAMES.items() if spelled == like), torch.bfloat16)

    def stored_form(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What the file holds for a tensor."""
        scheme = self.scheme(name)
        if scheme is not None:
            module = name.removesuffix(".weight")
            return tensors_of(module, quantize(tensor, scheme, name=name), DTYPES[scheme.scale_dtype])
        rounded = tensor.to(self.dtype_of(name))
        if not rounded.isfinite().all():
            raise CheckpointError(f"{name}: not finite in {rounded.dtype}; accepted: dtype=f32, or train it again")
        return {name: rounded}

    def new_config(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """config.json, and further JSON files that say which modules are quantized."""
        if self.options.mtp_quant == "absent":
            return with_count(self.config, self.spelling, 0), {}
        config = with_count(self.config, self.spelling, 1)
        if self.options.mtp_quant == "quantized":
            config = quantized_config(
                config, self.spelling, num_layers=self.num_layers, schemes=self.schemes, shapes=self.matrices
            )
            return config, {}
        modules = [f"{self.block_prefix}{name}" for name in self.matrices]
        prefix = module_prefix(self.spelling, 0, num_layers=self.num_layers)
        modules.append(f"{prefix}{self.spelling.parts['input_proj']}")
        return as_float(self.target, config, self.spelling, modules, num_layers=self.num_layers)

    def block_modules(self) -> set[str]:
        """Modules of the block, experts as one."""
        return _modules(self.inner)

    def layer_modules(self) -> set[str]:
        """Modules of the target's own layer, experts as one."""
        prefix = self.layer_prefix
        return _modules(name.removeprefix(prefix) for name in self.stored if name.startswith(prefix))


def _modules(names: Iterable[str]) -> set[str]:
    """Without the names of parameters: a quantized layer has others of the same modules."""
    modules = (name.rpartition(".")[0] for name in names if "rotary_emb" not in name)
    return {re.sub(r"\.experts(\..*)?$", ".experts", name) for name in modules}
