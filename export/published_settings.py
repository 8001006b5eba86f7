# From a published config to settings of ours. A number may stand in several places and be counted in several ways; what
# our classes cannot be is named. All that is wrong is collected, so that one message says it.

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from drafters.spec import TargetSpec
from drafters.target_probe import rope_numbers
from export.families import BLOCK, EAGLE3, MEDUSA, SEQUENTIAL
from export.published import HEAD_TYPES, layer_outputs

__all__ = ["Facts", "block_node", "eagle3_node", "medusa_node"]

NESTED = ("dspark_config", "dflash_config")
# Keys of what our draft layers do not have, and the values at which it is absent.
ABSENT: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "use_gemma_norm": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "partial_rotary_factor": (1.0,),
    "hidden_act": ("silu", "swish"),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "projector_type": ("dflash", "dspark"),
    "use_aux_hidden_state": (True,),
    "input_embedding_scale": (1.0,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
    "norm_output": (False,),
    "parallel_drafting": (False,),
    "pard_token": (),
    "ptd_token_id": (),
}
GIVEN = ("layer_ids", "block_size", "sample_from_anchor", "norm_before_residual")


@dataclass
class Facts:
    """A published draft's config beside the target's numbers. `given`: settings that the caller knows better; they
    stand for what the config says. `problems` fills up."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    spec: TargetSpec
    is_envelope: bool
    given: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` from wherever readers look: nested, with the prefix `dspark_`, or plainly."""
        found = {f"{place}.{key}": (self.config.get(place) or {}).get(key) for place in (*NESTED, "eagle_config")}
        found |= {name: self.config.get(name) for name in (f"dspark_{key}", key)}
        found = {name: value for name, value in found.items() if value is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            said = ", ".join(f"{name} = {value}" for name, value in found.items())
            self.problems.append(f"it says two things of {key}: {said}")
        return values[0] if values else default

    def need(self, key: str, default: Any = None) -> Any:
        """As `get`, or what the caller gives; a problem where neither has it."""
        if key in self.given:
            return self.given[key]
        value = self.get(key, default)
        if value is None:
            self.problems.append(f"{key} is missing" + (f"; give +given.{key}=" if key in GIVEN else ""))
        return value

    def same(self, key: str, wanted: Any, *, default: Any = None) -> None:
        """A problem unless the config says what the target has."""
        value = self.get(key, default)
        if value is None:
            self.problems.append(f"{key} is missing")
        elif not (math.isclose(value, wanted, rel_tol=1e-5) if isinstance(wanted, float) else value == wanted):
            self.problems.append(f"{key} is {value}, but our drafters take the target's {wanted}")

    def check_common(self) -> None:
        """Sizes, rotary embedding, and what our layers do not have."""
        spec = self.spec
        heads = self.get("num_attention_heads") or spec.num_heads
        self.same("hidden_size", spec.hidden_size)
        self.same("intermediate_size", spec.intermediate_size)
        self.same("num_attention_heads", spec.num_heads)
        self.same("num_key_value_heads", spec.num_kv_heads, default=heads)
        self.same("head_dim", spec.head_dim, default=(self.get("hidden_size") or 0) // heads)
        self.same("vocab_size", spec.vocab_size)
        self.same("rms_norm_eps", spec.rms_norm_eps, default=1e-6)
        self.same("target_hidden_size", spec.hidden_size, default=spec.hidden_size)
        self.same("num_target_layers", spec.num_layers, default=spec.num_layers)
        for key, absent in ABSENT.items():
            value = self.get(key)
            if value is not None and value not in absent:
                accepted = ", ".join(map(str, absent)) or "none"
                self.problems.append(f"{key} is {value}, which our drafters cannot be (accepted: {accepted})")
        self._check_rope()

    def _check_rope(self) -> None:
        keys = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
        said = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        said.setdefault("max_position_embeddings", self.spec.max_position)
        try:
            theta, frequencies, scaling = rope_numbers(SimpleNamespace(**said), head_dim=self.spec.head_dim)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            self.problems.append(f"its rotary settings cannot be read: {error}")
            return
        parameters = said.get("rope_parameters") or said.get("rope_scaling") or {}
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        partial = float(parameters.get("partial_rotary_factor") or 1.0)
        # Of these the frequencies are not all: the numbers above leave them out.
        if partial != 1.0 or (scaling is None and kind not in ("default", "linear", "llama3")):
            self.problems.append(f"its rotary scaling '{kind}' of {partial:g} of a head is none that our layers have")
            return
        close = (math.isclose(a, b, rel_tol=1e-4) for a, b in zip(frequencies, self.spec.rope_inv_freq, strict=True))
        if not all(close):
            self.problems.append(
                f"its rotary embedding (rope_theta {theta:g}, scaling {scaling}) is not the target's (rope_theta "
                f"{self.spec.rope_theta:g}, scaling {self.spec.rope_scaling})"
            )

    def draft_vocab_size(self) -> int | None:
        """None for the whole vocabulary."""
        size = self.get("draft_vocab_size")
        ids = self.tensors.get("d2t")
        if ids is None:
            if size not in (None, self.spec.vocab_size):
                self.problems.append(f"draft_vocab_size is {size}, but it holds no d2t")
            return None
        if size is not None and size != len(ids):
            self.problems.append(f"draft_vocab_size is {size}, but d2t holds {len(ids)} ids")
        is_whole = len(ids) == self.spec.vocab_size and not ids.any()
        return None if is_whole else len(ids)


def block_node(facts: Facts) -> dict[str, Any]:
    """Settings of a DFlash or DSpark draft."""
    facts.check_common()
    spec = facts.spec
    if facts.need("mask_token_id") not in (None, spec.mask_token_id):
        given = facts.get("mask_token_id")
        facts.problems.append(
            f"mask_token_id is {given}, the target's {spec.mask_token_id}; give target.mask_token={given}"
        )
    _check_logits(facts)
    sequential = _sequential(facts)
    is_dspark = facts.get("markov_rank") is not None or sequential is not None
    # Engines take false for DFlash where nothing is said, true for a flat DSpark; of an envelope of DSpark vLLM takes
    # false, the trainer true.
    first = facts.need("sample_from_anchor", None if is_dspark and facts.is_envelope else is_dspark)
    slots = facts.get("block_size")
    if slots is None and "block_size" not in facts.given:
        facts.problems.append("block_size is missing; give +given.block_size=, the tokens that it drafts at a time")
    drafts = facts.given.get("block_size", (slots or 2) - (not first))
    layers = facts.need("num_hidden_layers") or 1
    if layers > len(facts.tensors):
        facts.problems.append(f"num_hidden_layers is {layers}, but it holds {len(facts.tensors)} tensors")
    family = "parallel" if sequential is None else HEAD_TYPES[facts.get("markov_head_type", "vanilla")]
    return {
        "_target_": BLOCK,
        "name": family,
        "layer_ids": _block_layers(facts),
        "num_layers": layers,
        "block_size": drafts,
        "sample_from_anchor": bool(first),
        "window": _window(facts, layers),
        "sequential": sequential,
        "confidence": "confidence_head.proj.weight" in facts.tensors,
        "draft_vocab_size": facts.draft_vocab_size(),
    }


def _check_logits(facts: Facts) -> None:
    """Full logits are the target's head's, so they are scaled and capped as the target's; rows that a draft brings
    along hold the scale already."""
    spec, is_own = facts.spec, "lm_head.weight" in facts.tensors
    for key in ("logit_scale", "output_multiplier"):
        value = facts.get(key)
        wanted = (1.0,) if is_own else (1.0, spec.logit_scale)
        if value is not None and not any(math.isclose(value, one, rel_tol=1e-5) for one in wanted):
            facts.problems.append(f"{key} is {value}, but the target's logits are scaled by {spec.logit_scale}")
    softcap = facts.get("final_logit_softcapping")
    if softcap and softcap != spec.logit_softcap:
        facts.problems.append(f"final_logit_softcapping is {softcap}, but the target's is {spec.logit_softcap}")


def _block_layers(facts: Facts) -> list[int]:
    """Layers as ours count, from either way of counting; where both stand, they must agree."""
    if "layer_ids" in facts.given:
        return list(facts.given["layer_ids"])
    outputs = facts.get("target_layer_ids")
    indices = facts.config.get("aux_hidden_state_layer_ids") or facts.config.get("eagle_aux_hidden_state_layer_ids")
    found = layer_outputs(indices or [k + 1 for k in outputs or []])
    if outputs and indices and list(found) != list(outputs):
        facts.problems.append(f"its layers are {outputs} by output, but {indices} by hidden state, which is one more")
    _check_layers(facts, found)
    return list(found)


def _check_layers(facts: Facts, found: tuple[int, ...]) -> None:
    if not found:
        facts.problems.append(
            "the target's layers that it reads are missing (for EAGLE-3 most engines guess the outputs of layers 1, "
            "N // 2 - 1 and N - 4 of N); give +given.layer_ids="
        )
    if -1 in found:
        facts.problems.append("it reads the target's embedding, which our drafters cannot")
    if list(found) != sorted(set(found)) or any(k >= facts.spec.num_layers for k in found):
        last = facts.spec.num_layers - 1
        facts.problems.append(f"it reads layers {list(found)}; accepted: ascending, distinct, of 0 to {last}")


def _sequential(facts: Facts) -> dict[str, Any] | None:
    first = facts.tensors.get("markov_head.markov_w1.weight")
    if first is None:
        if facts.get("markov_rank"):
            facts.problems.append(f"markov_rank is {facts.get('markov_rank')}, but it holds no Markov head")
        return None
    rank = first.shape[-1]
    if facts.get("markov_rank", rank) != rank:
        facts.problems.append(f"markov_rank is {facts.get('markov_rank')}, but its Markov head has rank {rank}")
    kind = facts.get("markov_head_type", "vanilla")
    parts = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
    held = next((other for other, name in parts.items() if name in facts.tensors), "vanilla")
    if kind != held:
        facts.problems.append(f"markov_head_type is {kind}, but its tensors are of the type {held}")
    return {"_target_": SEQUENTIAL[HEAD_TYPES[held]], "rank": rank}


def _window(facts: Facts, num_layers: int) -> int | None:
    types = facts.get("layer_types") or []
    if not types and facts.get("use_sliding_window") and facts.get("sliding_window") is not None:
        # What a Qwen3 config makes of it: the layers from max_window_layers on slide.
        first = facts.get("max_window_layers", 28)
        types = ["full_attention" if k < first else "sliding_attention" for k in range(num_layers)]
    sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding) and facts.get("use_swa"):
        sliding = [True] * num_layers
    _check_causal(facts, is_sliding=any(sliding), by_types="sliding_attention" in types)
    if not any(sliding):
        return None
    if not all(sliding):
        facts.problems.append(f"layer_types are {types}; our drafters have one window for all layers")
    size = facts.get("swa_window_size") or facts.get("sliding_window")
    if size is None:
        facts.problems.append("sliding_window is missing, though layers slide")
        return None
    # Engines count the position that looks; speculators' trainer does not.
    return int(size) - (not facts.is_envelope)


def _check_causal(facts: Facts, *, is_sliding: bool, by_types: bool) -> None:
    causal = facts.get("is_causal")
    if causal is None:
        causal = facts.get("causal")
    if causal is None and is_sliding and facts.config.get("sliding_window_non_causal") is not None:
        causal = not facts.config["sliding_window_non_causal"]
    if causal is None:
        causal = is_sliding and by_types
    if causal:
        facts.problems.append("its block is causal (is_causal, causal, or sliding layers without either); ours are not")


def eagle3_node(facts: Facts) -> dict[str, Any]:
    """Settings of an EAGLE-3 draft."""
    facts.check_common()
    facts.same("num_hidden_layers", 1)
    # Engines take false where a flat config says nothing; of an envelope vLLM takes true, the trainer false.
    before = facts.need("norm_before_residual", None if facts.is_envelope else False)
    methods = (facts.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafts = facts.given.get("block_size") or facts.get("block_size") or methods[0].get("speculative_tokens")
    return {
        "_target_": EAGLE3,
        "name": "eagle3",
        "layer_ids": _eagle3_layers(facts),
        "norm_before_residual": bool(before),
        "draft_vocab_size": facts.draft_vocab_size(),
        **({} if drafts is None else {"block_size": drafts}),
    }


def _eagle3_layers(facts: Facts) -> list[int]:
    """The same key counts differently by where it stands: at the top an index into the hidden states (vLLM), in
    `eagle_config` the number of the layer whose output is taken (SGLang)."""
    if "layer_ids" in facts.given:
        return list(facts.given["layer_ids"])
    key = "eagle_aux_hidden_state_layer_ids"
    top, nested = facts.config.get(key), (facts.config.get("eagle_config") or {}).get(key)
    found = layer_outputs(top) if top else tuple(nested or ())
    if top and nested and list(found) != list(nested):
        facts.problems.append(f"{key} is {top}, so eagle_config.{key} should be one less each, but is {nested}")
    _check_layers(facts, found)
    return list(found)


def medusa_node(facts: Facts) -> dict[str, Any]:
    """Settings of Medusa heads; their numbers are counted among the tensors."""
    blocks = [name.split(".") for name in facts.tensors if name.startswith("blocks.")]
    facts.same("hidden_size", facts.spec.hidden_size, default=facts.spec.hidden_size)
    facts.same("vocab_size", facts.spec.vocab_size, default=facts.spec.vocab_size)
    if "token_map" in facts.tensors:
        facts.problems.append("it drafts over a reduced vocabulary (token_map), which is read of no Medusa")
    return {
        "_target_": MEDUSA,
        "name": "medusa",
        "block_size": 1 + max((int(parts[1]) for parts in blocks), default=0),
        "num_layers": 1 + max((int(parts[3]) for parts in blocks), default=0),
        "own_projection": not facts.config.get("original_lm_head", False),
        "draft_vocab_size": None,
    }
