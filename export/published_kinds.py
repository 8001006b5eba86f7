# What kind of value each key of a published config holds, wherever it stands. Checked before anything is worked out:
# a text where a number belongs would be an error far from its cause, a zero would be taken for nothing said.

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from export.published import HEAD_TYPES

__all__ = ["wrong_values"]


@dataclass(frozen=True)
class Kind:
    """`holds` says whether a value is of this kind; null is of every kind, since readers take it for an absent key."""

    accepted: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))


_COUNT = Kind("a whole number from 1 on", lambda value: _is_whole(value) and value >= 1)
_SIZE = Kind("a whole number from 0 on", lambda value: _is_whole(value) and value >= 0)
_WHOLE = Kind("a whole number", _is_whole)
_NUMBER = Kind("a number", _is_number)
_POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = Kind("a text", lambda value: isinstance(value, str))
_TEXTS = Kind("a list of texts", lambda value: _is_list(value, lambda one: isinstance(one, str)))
_LAYERS = Kind("a list of whole numbers", lambda value: _is_list(value, _is_whole))
_OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
_OBJECTS = Kind("a list of objects", lambda value: _is_list(value, lambda one: isinstance(one, Mapping)))
_HEAD = Kind(", ".join(HEAD_TYPES), lambda value: isinstance(value, str) and value in HEAD_TYPES)

_KEYS: tuple[tuple[Kind, str], ...] = (
    (_COUNT, "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"),
    (_COUNT, "vocab_size target_hidden_size num_target_layers max_position_embeddings block_size speculative_tokens"),
    (_SIZE, "markov_rank draft_vocab_size sliding_window swa_window_size mask_token_id max_window_layers"),
    (_WHOLE, "num_bits group_size"),
    (_NUMBER, "logit_scale output_multiplier final_logit_softcapping partial_rotary_factor attention_value_scale"),
    (_POSITIVE, "rms_norm_eps rope_theta"),
    (_FLAG, "sample_from_anchor norm_before_residual use_swa use_sliding_window is_causal causal"),
    (_FLAG, "sliding_window_non_causal original_lm_head"),
    (_TEXT, "speculators_model_type quant_method"),
    (_TEXTS, "architectures layer_types"),
    (_HEAD, "markov_head_type"),
    (_LAYERS, "layer_ids target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids"),
    (_OBJECT, "transformer_layer_config dflash_config dspark_config eagle_config speculators_config"),
    (_OBJECT, "quantization_config config_groups weights rope_parameters rope_scaling"),
    (_OBJECTS, "proposal_methods"),
)
_KINDS = {name: kind for kind, names in _KEYS for name in names.split()}


def wrong_values(config: Mapping[str, Any], key: str = "") -> Iterator[str]:
    """For each value that is not of its key's kind: where it stands, what it is, and what is accepted. Keys that are
    not known are left alone. `key`: where `config` itself stands, with a dot at the end."""
    for name, value in config.items():
        kind = _KINDS.get(name) or _KINDS.get(name.removeprefix("dspark_"))
        if kind is None or value is None:
            continue
        if not kind.holds(value):
            yield f"{key}{name} is {value!r}, accepted: {kind.accepted}"
        elif name == "config_groups":
            yield from _wrong_groups(value, f"{key}{name}.")
        elif kind is _OBJECT:
            yield from wrong_values(value, f"{key}{name}.")
        elif kind is _OBJECTS:
            for index, one in enumerate(value):
                yield from wrong_values(one, f"{key}{name}[{index}].")


def _wrong_groups(groups: Mapping[str, Any], key: str) -> Iterator[str]:
    for name, group in groups.items():
        if isinstance(group, Mapping):
            yield from wrong_values(group, f"{key}{name}.")
        else:
            yield f"{key}{name} is {group!r}, accepted: an object"
