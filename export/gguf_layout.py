# Which tensors a GGUF draft for llama.cpp holds, from numbers alone, and how our tensors become them and come back.
# Names and shapes are those of its architectures `dflash` (DFlash; with Markov tensors DSpark) and `eagle3`.

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.spec import TargetSpec
from export.families import family_of
from export.shapes import shapes_of
from export.source import Source
from export.target_rows import embedding_rows, head_rows

__all__ = ["Entry", "frequency_factors", "kind_of", "layout", "our_tensors", "tensors_of"]

_TOP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "vocab.d2t": "d2t",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
ROPE, OUTPUT, EMBEDDING, W1, W2 = (
    "rope_freqs.weight",
    "output.weight",
    "token_embd.weight",
    "markov_w1.weight",
    "markov_w2.weight",
)
CONFIDENCE = "conf_proj.weight"
# Rank of the Markov head of zeros that stands for none.
NO_RANK = 1


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: `shape` as we write shapes (GGUF counts dimensions the other way round); `role` decides
    its type: projection, fusion, output, markov, embedding, confidence, norm or ids."""

    shape: tuple[int, ...]
    role: str


def kind_of(node: Mapping[str, Any]) -> str:
    """What llama.cpp calls the drafter (`--spec-type draft-<kind>`): eagle3, dspark or dflash.

    Of a DFlash it reads the slots after the anchor and no confidence. A parallel drafter whose anchor drafts, or that
    has a confidence head, is therefore a dspark whose Markov head is zero: the same drafts, exactly.
    """
    if family_of(node) == "eagle3":
        return "eagle3"
    plain = node["sequential"] is None and not node["confidence"] and not node["sample_from_anchor"]
    return "dflash" if plain else "dspark"


def layout(node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Entry]:
    """Every tensor that the file of a drafter of these settings must hold."""
    shapes = {_theirs(name): shape for name, shape in shapes_of(node, spec).items()}
    num_draft = node["draft_vocab_size"] or spec.vocab_size
    if _padded(node):
        shapes |= {W1: (spec.vocab_size, NO_RANK), W2: (num_draft, NO_RANK)}
        if node["confidence"]:
            shapes[CONFIDENCE] = (1, spec.hidden_size + NO_RANK)
    if _brings_output(node, spec):
        shapes[OUTPUT] = (num_draft, spec.hidden_size)
    if _brings_embedding(node, spec):
        shapes[EMBEDDING] = (spec.vocab_size, spec.hidden_size)
    if frequency_factors(spec) is not None:
        shapes[ROPE] = (spec.head_dim // 2,)
    return {name: Entry(shape, _role(name)) for name, shape in shapes.items()}


def tensors_of(source: Source) -> dict[str, Tensor]:
    """The tensors of `layout`, float32 (`d2t` int64: absolute ids). Raises ConfigError where rows of the target are
    needed and its folder is not at hand."""
    node, spec = source.node, source.spec
    ours = source.tensors
    made = {_theirs(name): tensor if name == "vocab.d2t" else tensor.float() for name, tensor in ours.items()}
    if kind_of(node) == "eagle3":
        for name, num_heads in _rotated(spec).items():
            made[name] = _interleave(made[name], num_heads)
    if _padded(node):
        num_draft = node["draft_vocab_size"] or spec.vocab_size
        made |= {W1: torch.zeros(spec.vocab_size, NO_RANK), W2: torch.zeros(num_draft, NO_RANK)}
        if node["confidence"]:
            made[CONFIDENCE] = torch.nn.functional.pad(made[CONFIDENCE], (0, NO_RANK))
    if _brings_output(node, spec):
        made[OUTPUT] = head_rows(source.target_folder, spec, ids_V=ours.get("vocab.d2t"))
    if _brings_embedding(node, spec):
        made[EMBEDDING] = embedding_rows(source.target_folder, spec).float()
    factors = frequency_factors(spec)
    return made if factors is None else {**made, ROPE: factors}


def our_tensors(tensors: Mapping[str, Tensor], node: Mapping[str, Any], spec: TargetSpec) -> dict[str, Tensor]:
    """Inverse of `tensors_of`: by our own names, without what belongs to the target."""
    made = dict(tensors)
    if kind_of(node) == "eagle3":
        for name, num_heads in _rotated(spec).items():
            made[name] = _separate(made[name], num_heads)
    if _padded(node):
        del made[W1], made[W2]
        if node["confidence"]:
            made[CONFIDENCE] = made[CONFIDENCE][:, : spec.hidden_size]
    if kind_of(node) != "eagle3":
        made.pop(OUTPUT, None)
    made.pop(EMBEDDING, None)
    made.pop(ROPE, None)
    return {_ours(name, kind_of(node)): tensor.contiguous() for name, tensor in made.items()}


def frequency_factors(spec: TargetSpec) -> Tensor | None:
    """What llama.cpp divides the plain frequencies of theta by [head_dim / 2], None where they are plain."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    factors = spec.rope_theta**-exponents / torch.tensor(spec.rope_inv_freq, dtype=torch.float64)
    if bool(((factors - 1).abs() < 1e-5).all()):
        return None
    return factors.float()


def _padded(node: Mapping[str, Any]) -> bool:
    """Whether the file holds a Markov head that the drafter does not have."""
    return kind_of(node) == "dspark" and node["sequential"] is None


def _brings_output(node: Mapping[str, Any], spec: TargetSpec) -> bool:
    """Whether rows of the target's output projection come along: for a vocabulary of its own, and for a scale of the
    logits, which llama.cpp does not apply to drafts."""
    return kind_of(node) != "eagle3" and (node["draft_vocab_size"] is not None or spec.logit_scale != 1.0)


def _brings_embedding(node: Mapping[str, Any], spec: TargetSpec) -> bool:
    """Whether the target's embedding comes along, scaled: `eagle3` knows no scale of it, `dflash` does."""
    return kind_of(node) == "eagle3" and spec.embed_scale != 1.0


def _rotated(spec: TargetSpec) -> dict[str, int]:
    """The weights of `eagle3` whose rows are rotated, and their heads."""
    return {"blk.0.attn_q.weight": spec.num_heads, "blk.0.attn_k.weight": spec.num_kv_heads}


def _interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from halves (our pairs are i and i + H / 2) to neighbours (2i and 2i + 1), as llama.cpp
    rotates in Llama's family."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _separate(weight: Tensor, num_heads: int) -> Tensor:
    """Inverse of `_interleave`."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _theirs(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"(?:layers\.(\d+)|midlayer)\.(.+)\.weight", name)
    assert found is not None, name
    return f"blk.{found[1] or 0}.{_LAYER[found[2]]}.weight"


def _ours(name: str, kind: str) -> str:
    if name in _TOP_BACK:
        return _TOP_BACK[name]
    found = re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", name)
    assert found is not None, name
    prefix = "midlayer" if kind == "eagle3" else f"layers.{found[1]}"
    return f"{prefix}.{_LAYER_BACK[found[2]]}.weight"


def _role(name: str) -> str:
    known = {
        "fc.weight": "fusion",
        OUTPUT: "output",
        EMBEDDING: "embedding",
        W1: "markov",
        W2: "markov",
        "d2t": "ids",
    }
    if name in known:
        return known[name]
    if name.startswith("conf_proj"):
        return "confidence"
    return "norm" if "norm" in name or name == ROPE else "projection"
