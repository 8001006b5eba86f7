# What checkpoints call the parts of a multi-token-prediction module, family by family, and the way between those names
# and ours. A family is told by the `model_type` of the target's config; which settings of a drafter it can hold is
# written here as data. Engines load nothing but these spellings.

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError

__all__ = [
    "Spelling",
    "from_file",
    "has_experts",
    "model_type_of",
    "module_prefix",
    "spelling_of",
    "text_section",
    "to_file",
    "with_count",
]

NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
# Published modules hold these too; engines take the target's own instead, and so does the drafter.
SHARED = re.compile(r"(?:shared_head\.head|embed_tokens)\.weight$|rotary_emb\.")


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How a family writes MTP modules. `module` is the prefix of module `i`, counted on from the target's layers where
    it says `layer`; `block` comes before the names of the block in it; `parts` maps our names to theirs. `order` is of
    the two halves that are projected. `offset_norms`: these norms are stored as gain - 1 (GemmaRMSNorm). `count_key` is
    the number of modules in a config.

    `everything` are regular expressions of what engines call the modules of a block, and `roots` of what comes before
    the block's own names there: vLLM first, where SGLang has names of its own these next. `architecture`: what a config
    must say for engines to see the modules, None where it says so already. `num_modules` is how many a file can hold.
    """

    name: str
    module: str
    parts: Mapping[str, str]
    order: str
    everything: tuple[str, ...]
    roots: tuple[str, ...]
    block: str = ""
    offset_norms: bool = False
    count_key: str = "num_nextn_predict_layers"
    architecture: str | None = None
    num_modules: int | None = None


DEEPSEEK = Spelling(
    name="deepseek",
    module="model.layers.{layer}.",
    parts={
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    },
    order="embedding_first",
    everything=(r".*layers\.{layer}\..*", r"model\.decoder\..*"),
    roots=(r".*layers\.{layer}\.", r"model\.decoder\."),
)
QWEN3_NEXT = Spelling(
    name="qwen",
    module="mtp.",
    parts={
        "token_layernorm": "pre_fc_norm_embedding",
        "hidden_layernorm": "pre_fc_norm_hidden",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
    order="embedding_first",
    block="layers.0.",
    offset_norms=True,
    everything=(r".*mtp.*",),
    roots=(r".*mtp\.layers\.0\.",),
    num_modules=1,
)
QWEN3_5 = Spelling(**{**vars(QWEN3_NEXT), "count_key": "mtp_num_hidden_layers"})
MIMO = Spelling(
    name="mimo",
    module="model.mtp_layers.{i}.",
    parts={name: name for name in (*NORMS, "input_proj")},
    order="hidden_first",
    everything=(r".*mtp_layers.*", r"self_attn\..*", r"mlp\..*"),
    roots=(r".*mtp_layers\.0\.", ""),
    architecture="MiMoForCausalLM",
)
# MiMo is Qwen2 with such modules: engines load it by its architecture, transformers by its model type.
MODEL_TYPES = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "qwen2": MIMO,
    "mimo": MIMO,
}


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    section: Mapping[str, Any] = config.get("text_config") or config
    return section


def model_type_of(config: Mapping[str, Any]) -> str:
    """The `model_type` of the language model of a config.json."""
    return str(text_section(config).get("model_type"))


def spelling_of(model_type: str) -> Spelling:
    """Raises ConfigError for a model type that no engine loads MTP modules for."""
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"to=mtp: got a target of model type '{model_type}', in whose checkpoints no engine looks for modules; "
            f"accepted: {', '.join(MODEL_TYPES)}; or train another drafter for it, such as drafter=markov, and export "
            "that with to=hf"
        )
    return MODEL_TYPES[model_type]


def module_prefix(spelling: Spelling, i: int, *, num_layers: int) -> str:
    """What the names of module `i` begin with, for a target of `num_layers` layers."""
    return spelling.module.format(layer=num_layers + i, i=i)


def with_count(config: Mapping[str, Any], spelling: Spelling, count: int) -> dict[str, Any]:
    """A config.json that says how many modules there are, under the key and the architecture that engines look for."""
    counts: dict[str, Any] = {spelling.count_key: count}
    if "num_mtp_layers" in text_section(config):
        counts["num_mtp_layers"] = count
    new = {**config}
    if config.get("text_config"):
        new["text_config"] = {**config["text_config"], **counts}
    else:
        new.update(counts)
    if count and spelling.architecture:
        new["architectures"] = [spelling.architecture]
    return new


def has_experts(section: Mapping[str, Any], model_type: str) -> bool:
    """Whether engines give the MTP block of a target with this text config experts (vLLM: `deepseek_v2.py`,
    `glm4_moe.py`, `qwen3_next.py`)."""
    if model_type in ("deepseek_v3", "glm4_moe"):
        at, every = section["num_hidden_layers"], section.get("moe_layer_freq") or 1
        is_far = at >= section.get("first_k_dense_replace", 0)
        return bool(section.get("n_routed_experts")) and is_far and at % every == 0
    if model_type == "qwen3_next":
        first_is_dense = 0 in (section.get("mlp_only_layers") or [])
        return bool(section.get("num_experts")) and not first_is_dense and section.get("decoder_sparse_step", 1) == 1
    return model_type == "qwen3_5_moe_text"


def to_file(tensors: Mapping[str, Tensor], spelling: Spelling, *, num_layers: int) -> dict[str, Tensor]:
    """The tensors of a drafter (`depths.<i>.` ...) by the names of a checkpoint: experts one by one, norms as the
    family stores them. Views where nothing has to be computed."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, number, part, *rest = name.split(".", 3)
        prefix = module_prefix(spelling, int(number), num_layers=num_layers)
        if part == "block":
            for inner, one in _split(rest[0], tensor).items():
                renamed[f"{prefix}{spelling.block}{inner}"] = one
        else:
            stored = tensor - 1 if spelling.offset_norms and part in NORMS else tensor
            renamed[f"{prefix}{spelling.parts[part]}.{rest[0]}"] = stored
    return renamed


def from_file(tensors: Mapping[str, Tensor], spelling: Spelling, *, num_layers: int, count: int) -> dict[str, Tensor]:
    """The way back, for `count` modules. Raises CheckpointError where experts are incomplete."""
    ours: dict[str, Tensor] = {}
    for i in range(count):
        prefix = module_prefix(spelling, i, num_layers=num_layers)
        inner = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for part, theirs in spelling.parts.items():
            if (stored := inner.pop(f"{theirs}.weight", None)) is not None:
                gain = stored + 1 if spelling.offset_norms and part in NORMS else stored
                ours[f"depths.{i}.{part}.weight"] = gain
        block = {name.removeprefix(spelling.block): t for name, t in inner.items() if not SHARED.search(name)}
        ours.update({f"depths.{i}.block.{name}": one for name, one in _joined(block).items()})
    return ours


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts are one tensor in transformers, and matrices of their own in checkpoints."""
    parent, _, kind = name.rpartition(".")
    if not parent.endswith("experts") or kind not in ("gate_up_proj", "down_proj"):
        return {name: tensor}
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return {
        f"{parent}.{e}.{each}.weight": matrix
        for e, expert in enumerate(tensor)
        for each, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True)
    }


def _joined(block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in block.items():
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight", name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            joined[name] = tensor
    for parent, matrices in experts.items():
        numbers = range(1 + max(e for e, _ in matrices))
        for e in numbers:
            for kind in ("gate_proj", "up_proj", "down_proj"):
                if (e, kind) not in matrices:
                    raise CheckpointError(f"{parent}.{e}.{kind}: missing in the file; export it again")
        joined[f"{parent}.gate_up_proj"] = torch.stack(
            [torch.cat([matrices[e, "gate_proj"], matrices[e, "up_proj"]]) for e in numbers]
        )
        joined[f"{parent}.down_proj"] = torch.stack([matrices[e, "down_proj"] for e in numbers])
    return joined
