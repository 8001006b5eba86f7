# What engines would do with a draft that training did not: found before anything is written, since an engine that does
# it loads the folder all the same and only accepts less.

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from drafters.errors import ConfigError
from drafters.spec import TargetSpec
from drafters.target_probe import rope_numbers
from export.families import SEQUENTIAL, family_of
from export.published import num_slots, rope_keys
from export.published_tensors import row_shapes
from export.quantize import scheme_of
from export.source import Source

__all__ = ["check_anchor", "check_quant", "check_served"]


def check_quant(quant: str, family: str) -> None:
    """Raises ConfigError for an unknown `quant`, and for any of a family that engines hold as floats."""
    if quant == "none":
        return
    scheme_of(quant)
    if family == "medusa":
        raise ConfigError(f"quant: got '{quant}' for medusa, whose layers engines hold as floats; accepted: none")


def check_anchor(node: Mapping[str, Any], to: str) -> None:
    """Raises ConfigError for a parallel drafter whose anchor drafts."""
    if family_of(node) == "parallel" and node["sample_from_anchor"]:
        raise ConfigError(
            f"to={to}: got drafter.sample_from_anchor=true without a sequential head, but of DFlash engines take the "
            "slots after the anchor only; accepted for it: to=packed; or train it again with "
            "drafter.sample_from_anchor=false"
        )


def check_served(source: Source, to: str, *, reach: int) -> None:
    """Raises ConfigError where attention, logits or rotary embedding would be others than in training, and where rows
    of the target are needed that are not at hand. `reach`: what the format adds to a window (`window_keys`)."""
    _check_window(source.node, to, reach)
    _check_logits(source, to)
    if family_of(source.node) != "medusa":
        _check_rope(source.spec, to)
    if source.target_folder is None and (needed := [name for name, _ in row_shapes(source.node, source.spec)]):
        raise ConfigError(
            f"target: its folder is needed, since the draft brings {', '.join(needed)} along, which are the target's "
            "own rows; give the folder with its config.json and .safetensors files"
        )


def _check_window(node: Mapping[str, Any], to: str, reach: int) -> None:
    """In engines a window holds inside the block too."""
    window = node.get("window")
    if window is not None and window + reach < num_slots(node):
        raise ConfigError(
            f"to={to}: got drafter.window={window} for a block of {num_slots(node)} slots; engines would hide parts of "
            f"the block from each other; accepted: {num_slots(node) - reach} or more, or null; or to=packed"
        )


def _check_logits(source: Source, to: str) -> None:
    """Raises ConfigError where engines would make other logits of a block drafter's states than training did: they cap
    none, and scale a Markov head's bias along with what the target's head gives."""
    spec, family = source.spec, family_of(source.node)
    if family not in SEQUENTIAL:
        return
    reason = None
    if spec.logit_softcap is not None:
        reason = f"caps its logits at {spec.logit_softcap:g} before the Markov head's bias is added"
    elif spec.logit_scale != 1.0 and source.node["draft_vocab_size"] is None:
        reason = f"scales its logits by {spec.logit_scale:g}, the Markov head's bias not"
    if reason is not None:
        raise ConfigError(
            f"to={to}: the target {reason}, and engines that read this format do not do the same; accepted for it: "
            "to=packed, or a parallel or eagle3 drafter"
        )


def _check_rope(spec: TargetSpec, to: str) -> None:
    """The config must say the very frequencies that the drafter was trained with."""
    said = SimpleNamespace(**rope_keys(spec), max_position_embeddings=spec.max_position)
    _, frequencies, _ = rope_numbers(said, head_dim=spec.head_dim)
    close = (math.isclose(a, b, rel_tol=1e-5) for a, b in zip(frequencies, spec.rope_inv_freq, strict=True))
    if not all(close):
        raise ConfigError(
            f"to={to}: the drafter's rotary frequencies are not those of theta {spec.rope_theta:g} and scaling "
            f"{spec.rope_scaling}, so no config of this format can say them; accepted for it: to=packed"
        )
