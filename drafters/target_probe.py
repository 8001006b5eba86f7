# Reading numbers from any causal LM, and the self-check at start. Embedding scale and logit scale are written in
# many places by many families (Gemma's sqrt(D), Granite's multipliers): they are measured on the model, in its own
# arithmetic, and snapped to the number the config suggests; `check` then proves the whole wrapper on real passes.

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.errors import ConfigError
from drafters.spec import TargetSpec
from drafters.target_loading import head_is_tied, head_tensors, input_device
from drafters.types import Needs

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["check", "read_spec", "rope_numbers"]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# Other kinds of layers (linear attention, state spaces) fold the past into a state that cannot be rolled back.
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@torch.inference_mode()
def read_spec(model: Any, *, mask_token_id: int, is_outline: bool = False) -> TargetSpec:
    """The target's numbers, without template and weights hashes. An outline is a model without weights: its two scales,
    which are measured, are 1 then. Raises ConfigError for a model that does not fit."""
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    _check_kind(model, config, mask_token_id)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    theta, inv_freq, scaling = rope_numbers(config, head_dim=head_dim)
    softcap = getattr(config, "final_logit_softcapping", None)
    embed_scale, logit_scale = (1.0, 1.0) if is_outline else _measure_scales(model, softcap)
    eos = model.generation_config.eos_token_id
    eos = config.eos_token_id if eos is None else eos
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
        tied_head=head_is_tied(model),
        logit_scale=logit_scale,
        logit_softcap=None if softcap is None else float(softcap),
        embed_scale=embed_scale,
        bos_id=config.bos_token_id,
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        mask_token_id=mask_token_id,
        template_hash="",
        weights_hash="",
        dtype=str(embedding.weight.dtype).removeprefix("torch."),
    )


def _check_kind(model: Any, config: Any, mask_token_id: int) -> None:
    """Raises ConfigError unless drafters can share this model's head and its cache can be rolled back."""
    kind, head, decoder = type(model).__name__, model.get_output_embeddings(), model.get_decoder()
    if head is None or model.get_input_embeddings() is None or not hasattr(decoder, "layers"):
        raise ConfigError(f"target: {kind} is not a causal LM with decoder layers and an output head")
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"target: {kind} has a biased output head, which drafters cannot share")
    if other := set(getattr(config, "layer_types", None) or ()) - ATTENTION:
        raise ConfigError(f"target: {kind} has {', '.join(sorted(other))} layers, whose state cannot be rolled back")
    if not 0 <= mask_token_id < head.weight.shape[0]:
        raise ConfigError(
            f"target.mask_token: id {mask_token_id} is not in the vocabulary; accepted: 0..{head.weight.shape[0] - 1}"
        )


def rope_numbers(config: Any, *, head_dim: int) -> tuple[float, tuple[float, ...], dict[str, Any] | None]:
    """(theta, inverse frequencies, scaling) from either spelling of transformers: `rope_parameters` (flat, or one set
    per attention type, of which full attention counts) or `rope_theta` with `rope_scaling`.

    The target's scaling is taken over where it is nothing but other frequencies for the whole head. Where it rotates a
    part of the head, scales the result (YaRN) or depends on the length, the frequencies are plain and scaling is None.
    """
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    if nested := [v for v in parameters.values() if isinstance(v, dict)]:
        parameters = dict(parameters.get("full_attention") or nested[0])
    theta = float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    kind = parameters.pop("type", "default")
    parameters = {"rope_type": kind, **parameters, "rope_theta": theta}
    plain = tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    partial = parameters.pop("partial_rotary_factor", None) or 1.0
    if parameters["rope_type"] not in ROPE_INIT_FUNCTIONS or partial != 1.0:
        return theta, plain, None
    sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1}
    sizes["max_position_embeddings"] = config.max_position_embeddings
    flat = PreTrainedConfig(**sizes, rope_parameters=dict(parameters))
    scaled, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](flat, torch.device("cpu"))
    inv_freq = tuple(scaled.tolist())
    if factor != 1.0 or all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(inv_freq, plain, strict=True)):
        return theta, plain, None
    return theta, inv_freq, {k: v for k, v in parameters.items() if k != "rope_theta"}


@torch.inference_mode()
def check(target: "FrozenTarget") -> None:
    """Prove the wrapper on real passes; raises ConfigError that says which part is wrong.

    Captured layers equal `output_hidden_states` (the last one after the final norm); head(last) reproduces the model's
    own logits; embed equals what enters the first layer; a padded batch equals single rows; ragged cached decoding with
    rollback equals one uncached pass.
    """
    tokens_BT = _probe_tokens(target.model)
    layers = tuple(range(target.spec.num_layers))
    with target.capture(layers) as captured:
        out = target.model(tokens_BT, output_hidden_states=True, use_cache=False)
    # The same pass, so these are equal to the bit, or else another layer's.
    for layer in layers[:-1]:
        expected = out.hidden_states[layer + 1].to(target.device)
        if layer not in captured or not torch.equal(captured[layer], expected):
            raise _failed(f"captured layer {layer} is not hidden_states[{layer + 1}]")
    if norm := getattr(target.decoder, "norm", None):
        close(
            norm(captured[layers[-1]]).to(target.device),
            out.hidden_states[-1],
            "the normed last layer and hidden_states[-1]",
        )
    close(target.embed(tokens_BT), out.hidden_states[0], "embed(tokens) and hidden_states[0]")
    last_BTD = target.states(tokens_BT, needs=Needs(last=True)).last_BTD
    single = target.states(tokens_BT[1:, :5], needs=Needs(last=True)).last_BTD
    assert last_BTD is not None
    assert single is not None
    close(last_BTD, out.hidden_states[-1], "the last state and hidden_states[-1] (after the final norm)")
    close(target.head.logits(last_BTD), out.logits, "head(last) and the model's own logits")
    close(last_BTD[1:, :5], single, "a row in a padded batch and the same row alone")
    _check_cache(target, tokens_BT, out.logits)


def _check_cache(target: "FrozenTarget", tokens_BT: Tensor, logits_BTV: Tensor) -> None:
    """Two rows of unlike length, each one token rolled back, then four more at once."""
    kept_B = torch.tensor([4, 2], device=tokens_BT.device)
    cache = target.new_cache(2)
    target.step(tokens_BT[:, :5], cache, lengths_B=kept_B + 1, logits="none")
    cache.rollback(kept_B)
    index_BS = kept_B[:, None] + torch.arange(4, device=tokens_BT.device)
    got_BSV = target.step(tokens_BT.gather(1, index_BS), cache).logits_BSV
    expected_BSV = logits_BTV.to(target.device).gather(1, index_BS[:, :, None].expand(-1, -1, logits_BTV.shape[2]))
    close(got_BSV, expected_BSV, "ragged cached decoding after a rollback and one uncached pass")


def close(got: Tensor, expected: Tensor, what: str) -> None:
    """Raises ConfigError unless |got - expected| / |expected| is within what the narrower dtype of the two allows."""
    tolerance = max(TOLERANCE[got.dtype], TOLERANCE[expected.dtype])
    expected = expected.to(got.device)
    error = float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6))
    # Not `error > tolerance`, which NaN would pass.
    if not error <= tolerance:
        raise _failed(f"{what} differ by {error:.1e}, relatively (allowed {tolerance:.0e})")


def _failed(what: str) -> ConfigError:
    return ConfigError(
        f"target: self-check failed: {what}; this model does something that the wrapper does not reproduce, "
        "so no drafter can be trained on it"
    )


def _probe_tokens(model: Any) -> Tensor:
    device, vocab = input_device(model), model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (2, 9), generator=generator).to(device)


def _measure_scales(model: Any, softcap: float | None) -> tuple[float, float]:
    """(embed_scale, logit_scale), measured on one pass and snapped to the numbers that configs suggest."""
    config = model.config.get_text_config()
    weight, head_VD = head_tensors(model)
    tokens = _probe_tokens(model)
    out = model(tokens, output_hidden_states=True, use_cache=False)
    embed_scale = _ratio(out.hidden_states[0].to(weight.device).float(), weight[tokens].float())
    own = (out.hidden_states[-1].to(weight.device) @ head_VD.T).float()
    logits = out.logits.to(weight.device).float()
    if softcap is not None:
        logits = softcap * torch.atanh((logits / softcap).clamp(-0.9999, 0.9999))
    names = ("embedding_multiplier", "logit_scale", "logits_scaling", "scale_emb")
    known = [float(v) for name in names if (v := getattr(config, name, None))]
    candidates = [1.0, math.sqrt(config.hidden_size), *known, *(1 / v for v in known)]
    # Families that hold a scale as a tensor round it to the weights' dtype.
    candidates += torch.tensor(candidates).to(weight.dtype).tolist()
    return _snap(embed_scale, candidates), _snap(_ratio(logits, own), candidates)


def _ratio(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (b * b).sum().clamp_min(1e-20))


def _snap(value: float, candidates: list[float]) -> float:
    nearest = min(candidates, key=lambda c: abs(c - value))
    return nearest if abs(nearest - value) <= 0.005 * abs(value) else value
