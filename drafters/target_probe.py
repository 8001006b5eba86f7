# Reading numbers from any causal LM, and the self-check at start. Embedding scale and logit scale are written in
# many places by many families (Gemma's sqrt(D), Granite's multipliers): they are measured on the model, in its own
# arithmetic, and snapped to the number the config suggests; `check` then proves the whole wrapper on real passes.

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafters.errors import ConfigError
from drafters.spec import TargetSpec
from drafters.types import Needs

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["check", "read_spec", "rope_numbers"]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@torch.inference_mode()
def read_spec(model: Any, *, mask_token_id: int) -> TargetSpec:
    """The target's numbers, without template and weights hashes. Raises ConfigError for a model that does not fit."""
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or not hasattr(model.get_decoder(), "layers"):
        raise ConfigError(f"target: {type(model).__name__} is not a causal LM with decoder layers and an output head")
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"target: {type(model).__name__} has a biased output head, which drafters cannot share")
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    theta, inv_freq, scaling = rope_numbers(config, head_dim=head_dim)
    softcap = getattr(config, "final_logit_softcapping", None)
    embed_scale, logit_scale = _measure_scales(model, softcap)
    eos = getattr(model.generation_config, "eos_token_id", None) or config.eos_token_id
    return TargetSpec(
        hidden_size=config.hidden_size,
        num_layers=len(model.get_decoder().layers),
        vocab_size=head.weight.shape[0],
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_inv_freq=inv_freq,
        rope_scaling=scaling,
        max_position=int(config.max_position_embeddings),
        tied_head=head.weight.data_ptr() == embedding.weight.data_ptr(),
        logit_scale=logit_scale,
        logit_softcap=None if softcap is None else float(softcap),
        embed_scale=embed_scale,
        bos_id=config.bos_token_id,
        eos_ids=tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (int(eos),)),
        mask_token_id=mask_token_id,
        template_hash="",
        weights_hash="",
        dtype=str(embedding.weight.dtype).removeprefix("torch."),
    )


def rope_numbers(config: Any, *, head_dim: int) -> tuple[float, tuple[float, ...], dict[str, Any] | None]:
    """(theta, inverse frequencies, scaling) from either spelling of transformers: `rope_parameters` (flat, or one set
    per attention type, of which full attention counts) or `rope_theta` with `rope_scaling`.

    Scaled frequencies are the target's own where its rotation covers the whole head; else plain theta ones.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(getattr(config, "rope_parameters", None) or {})
    nested = [v for v in parameters.values() if isinstance(v, dict) and ("rope_theta" in v or "rope_type" in v)]
    if nested:
        parameters = dict(parameters.get("full_attention") or nested[0])
    if "rope_theta" not in parameters:
        parameters = {**(getattr(config, "rope_scaling", None) or {}), **parameters}
    theta = float(parameters.pop("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    scaling = {k: v for k, v in parameters.items() if k not in ("type", "rope_type", "partial_rotary_factor")}
    plain = tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    if kind == "default":
        return theta, plain, None
    scaling["rope_type"] = kind
    if kind not in ROPE_INIT_FUNCTIONS or nested or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return theta, plain, scaling
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if inv_freq.shape[0] != head_dim // 2 or not math.isclose(factor, 1.0):
        return theta, plain, scaling
    return theta, tuple(float(x) for x in inv_freq), scaling


def check(target: "FrozenTarget") -> None:
    """Prove the wrapper on real passes; raises ConfigError that says which part is wrong.

    head(last) reproduces the model's own logits; captured layers equal `output_hidden_states` (the last one after the
    final norm); embed equals what enters the first layer; a padded batch equals single rows; cached equals uncached.
    """
    tokens_BT = _probe_tokens(target.model)
    layers = tuple(range(target.spec.num_layers))
    needs = Needs(layer_ids=layers, last=True)
    states = target.states(tokens_BT, needs=needs)
    with torch.inference_mode():
        out = target.model(tokens_BT, output_hidden_states=True, use_cache=False)
    assert states.aux_BTLD is not None and states.last_BTD is not None
    close(target.head.logits(states.last_BTD), out.logits, "head(last) and the model's own logits")
    close(states.last_BTD, out.hidden_states[-1], "the last state and hidden_states[-1] (after the final norm)")
    for layer in layers[:-1]:
        close(states.aux_BTLD[:, :, layer], out.hidden_states[layer + 1], f"layer {layer} and hidden_states[{layer + 1}]")
    close(target.embed(tokens_BT), out.hidden_states[0], "embed(tokens) and hidden_states[0]")
    single = target.states(tokens_BT[1:, :5], needs=needs).last_BTD
    assert single is not None
    close(states.last_BTD[1:, :5], single, "a row in a padded batch and the same row alone")
    cache = target.new_cache(tokens_BT.shape[0])
    target.step(tokens_BT[:, :4], cache, logits="none")
    later = target.step(tokens_BT[:, 4:], cache)
    close(later.logits_BSV, out.logits[:, 4:], "cached and uncached logits")


def close(got: Tensor, expected: Tensor, what: str) -> None:
    """Raises ConfigError unless the tensors agree within what their dtype allows (relative to the largest entry)."""
    tolerance = TOLERANCE[expected.dtype if expected.dtype in TOLERANCE else torch.float32]
    if got.dtype in TOLERANCE:
        tolerance = max(tolerance, TOLERANCE[got.dtype])
    scale = max(float(expected.float().abs().max()), 1e-6)
    error = float((got.float() - expected.float()).abs().max()) / scale
    if not error <= tolerance:
        raise ConfigError(
            f"target: self-check failed: {what} differ by {error:.1e} of the largest entry (allowed {tolerance:.0e}); "
            "this model does something that the wrapper does not reproduce, so no drafter can be trained on it"
        )


def _probe_tokens(model: Any) -> Tensor:
    device, vocab = model.get_input_embeddings().weight.device, model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (2, 9), generator=generator).to(device)


def _measure_scales(model: Any, softcap: float | None) -> tuple[float, float]:
    """(embed_scale, logit_scale), measured on one pass and snapped to the numbers that configs suggest."""
    config = model.config.get_text_config()
    tokens = _probe_tokens(model)
    out = model(tokens, output_hidden_states=True, use_cache=False)
    raw = model.get_input_embeddings().weight[tokens].float()
    embed_scale = _ratio(out.hidden_states[0].float(), raw)
    own = (out.hidden_states[-1] @ model.get_output_embeddings().weight.T).float()
    logits = out.logits.float()
    if softcap is not None:
        logits = softcap * torch.atanh((logits / softcap).clamp(-0.9999, 0.9999))
    names = ("embedding_multiplier", "logit_scale", "logits_scaling", "scale_emb")
    known = [float(v) for name in names if (v := getattr(config, name, None))]
    candidates = [1.0, math.sqrt(config.hidden_size), *known, *(1 / v for v in known)]
    return _snap(embed_scale, candidates), _snap(_ratio(logits, own), candidates)


def _ratio(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (b * b).sum().clamp_min(1e-20))


def _snap(value: float, candidates: list[float]) -> float:
    nearest = min(candidates, key=lambda c: abs(c - value))
    return nearest if abs(nearest - value) <= 0.01 * abs(value) else value
