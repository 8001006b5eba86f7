# Names and numbers that the two published formats share. What differs by one between readers (layers, blocks, windows)
# is worked out here, each in a function that says what is counted; `importing` reads with their inverses.

import re
from collections.abc import Mapping, Sequence
from typing import Any

from drafters.spec import TargetSpec
from export.families import family_of

__all__ = [
    "HEAD_TYPES",
    "backbone",
    "dspark_keys",
    "dtype_keys",
    "eagle3_keys",
    "hidden_state_ids",
    "layer_outputs",
    "num_slots",
    "our_name",
    "published_name",
    "rope_keys",
    "window_keys",
]

# Families of sequential heads by `markov_head_type`.
HEAD_TYPES = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_MEDUSA = (
    (r"heads\.(\d+)\.blocks\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"heads\.(\d+)\.lm_head\.", r"lm_heads.\1."),
)
_MEDUSA_BACK = (
    (r"blocks\.(\d+)\.layers\.(\d+)\.", r"heads.\1.blocks.\2.linear."),
    (r"lm_heads\.(\d+)\.", r"heads.\1.lm_head."),
)


def published_name(name: str, family: str, *, eagle3_layer: str = "midlayer") -> str:
    """What engines call the tensor `name` of ours. `eagle3_layer`: "midlayer" (flat folders) or "layers.0"."""
    if family == "medusa":
        return _renamed(name, _MEDUSA)
    if name == "vocab.d2t":
        return "d2t"
    return name.replace("midlayer.", f"{eagle3_layer}.", 1) if name.startswith("midlayer.") else name


def our_name(name: str, family: str) -> str:
    """Inverse of `published_name`, for either spelling of EAGLE-3's layer."""
    if family == "medusa":
        return _renamed(name, _MEDUSA_BACK)
    if name == "d2t":
        return "vocab.d2t"
    return "midlayer." + name.removeprefix("layers.0.") if family == "eagle3" and name.startswith("layers.0.") else name


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(rf"^{pattern}", replacement, name)
    return name


def hidden_state_ids(layer_ids: Sequence[int]) -> list[int]:
    """Our layers (k = output of decoder layer k, from 0) as indices into `hidden_states`, where 0 is the embedding:
    k + 1. So count speculators' files and vLLM's `eagle_aux_hidden_state_layer_ids`."""
    return [k + 1 for k in layer_ids]


def layer_outputs(hidden_state_ids: Sequence[int]) -> tuple[int, ...]:
    """Inverse of `hidden_state_ids`; -1 stands for the embedding."""
    return tuple(k - 1 for k in hidden_state_ids)


def num_slots(node: Mapping[str, Any]) -> int:
    """Slots of a pass, which files call `block_size`: one a draft, and the anchor's where that drafts nothing. Ours
    counts drafts."""
    return int(node["block_size"]) + (not node["sample_from_anchor"])


def window_keys(window: int | None, num_layers: int, *, counts_itself: bool) -> dict[str, Any]:
    """How a config says that a block sees the `window` newest context positions. `counts_itself`: the number counts
    the position that looks (engines: position p sees p - n + 1 and later), else the context alone, from the anchor
    (speculators' trainer). In engines the window moves with the slot: the anchor's sees `window` positions, the j-th
    after it j fewer."""
    if window is None:
        types = {"layer_types": ["full_attention"] * num_layers}
        return {**types, "use_sliding_window": False, "sliding_window": None, "max_window_layers": num_layers}
    return {
        "layer_types": ["sliding_attention"] * num_layers,
        "use_sliding_window": True,
        "sliding_window": window + counts_itself,
        "max_window_layers": 0,
        # Without it engines make sliding layers causal, inside the block too.
        "is_causal": False,
    }


def rope_keys(spec: TargetSpec) -> dict[str, Any]:
    """The rotary embedding in both spellings: `rope_parameters` (transformers 5) and `rope_theta`, `rope_scaling`."""
    scaling = None if spec.rope_scaling is None else dict(spec.rope_scaling)
    old = None if scaling is None else {**scaling, "type": scaling["rope_type"]}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": spec.rope_theta}
    return {"rope_theta": spec.rope_theta, "rope_scaling": old, "rope_parameters": parameters}


def dtype_keys(dtype: str) -> dict[str, str]:
    """Both spellings of the dtype "bf16", "f16" or "f32"."""
    return {"dtype": _DTYPES[dtype], "torch_dtype": _DTYPES[dtype]}


def backbone(spec: TargetSpec, *, model_type: str, num_layers: int) -> dict[str, Any]:
    """Sizes of draft layers, which are the target's, under the names of a Llama or Qwen3 config."""
    eos = list(spec.eos_ids)
    return {
        "model_type": model_type,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "target_hidden_size": spec.hidden_size,
        "num_target_layers": spec.num_layers,
        **rope_keys(spec),
    }


def dspark_keys(node: Mapping[str, Any]) -> dict[str, Any]:
    """What DSpark adds to the config of a parallel backbone."""
    kind = next(kind for kind, family in HEAD_TYPES.items() if family == family_of(node))
    return {
        "markov_rank": node["sequential"]["rank"],
        "markov_head_type": kind,
        "enable_confidence_head": node["confidence"],
        "confidence_head_with_markov": node["confidence"],
    }


def eagle3_keys(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    """What EAGLE-3 adds to the config of a Llama layer; readers have different defaults for all of it."""
    return {
        "draft_vocab_size": node["draft_vocab_size"] or spec.vocab_size,
        "num_aux_hidden_states": len(node["layer_ids"]),
        "eagle_aux_hidden_state_layer_ids": hidden_state_ids(node["layer_ids"]),
        "norm_before_residual": node["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
