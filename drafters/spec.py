# What a drafter may know of its target: numbers, no weights and no family names. Written into every cache and
# every `drafter/`, so that a foreign one is refused by comparing two of these.

import math
from dataclasses import MISSING, asdict, dataclass, fields
from types import UnionType
from typing import Any, get_args, get_origin

from drafters.errors import CheckpointError, ConfigError

__all__ = ["TargetSpec", "check_layer_ids"]


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Sizes and constants of a target. Logits are `softcap(logit_scale * hidden @ lm_head^T)`; the embedding that
    enters layer 0 is `embed_scale * embedding[token]`. `rope_inv_freq` holds head_dim / 2 inverse frequencies;
    `rope_scaling` is the config of the scaling in them, None where they are `rope_theta`'s plain ones."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_inv_freq: tuple[float, ...]
    max_position: int
    tied_head: bool
    logit_scale: float
    logit_softcap: float | None
    embed_scale: float
    bos_id: int | None
    eos_ids: tuple[int, ...]
    mask_token_id: int
    template_hash: str
    weights_hash: str
    dtype: str
    rope_scaling: dict[str, Any] | None = None
    name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TargetSpec":
        """Inverse of `to_dict`. Raises CheckpointError on a missing or unknown field (written by another version)
        and on a value of a wrong kind."""
        known = {f.name for f in fields(cls)}
        required = {f.name for f in fields(cls) if f.default is MISSING}
        if wrong := sorted((values.keys() - known) | (required - values.keys())):
            raise CheckpointError(
                f"target spec: fields {wrong} are unknown or missing; was it written by another version?"
            )
        fitted: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for field in fields(cls):
            if field.name in fitted and not _fits(fitted[field.name], field.type):
                raise CheckpointError(f"target spec: {field.name} is {values[field.name]!r}; the file is damaged")
        return cls(**fitted)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of the kind that a field declares; numbers are finite."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, get_origin(kind) or kind)


def check_layer_ids(layer_ids: tuple[int, ...], spec: TargetSpec, *, key: str = "target.layer_ids") -> None:
    """Raises ConfigError unless the ids are distinct, ascending and inside the target."""
    for layer in layer_ids:
        if not 0 <= layer < spec.num_layers:
            raise ConfigError(
                f"{key}: layer {layer} is out of range; the target has layers 0..{spec.num_layers - 1} "
                "(k means the output of decoder layer k, counted from 0)"
            )
    if list(layer_ids) != sorted(set(layer_ids)):
        raise ConfigError(f"{key}: got {list(layer_ids)}; the ids must be distinct and ascending")
