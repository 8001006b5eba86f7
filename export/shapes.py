# What tensors a drafter of given settings has, by our own names, worked out from numbers alone. Two things are held
# against it: what an export wrote (engines do not notice a missing tensor) and what a published draft brings.

from collections.abc import Mapping
from typing import Any

from drafters.spec import TargetSpec
from export.families import family_of

__all__ = ["Shapes", "shapes_of"]

Shapes = dict[str, tuple[int, ...]]


def shapes_of(node: Mapping[str, Any], spec: TargetSpec) -> Shapes:
    """Shape of every tensor of a drafter of the block family, of EAGLE-3 or Medusa; `node` are its settings."""
    family = family_of(node)
    size = node.get("draft_vocab_size")
    num_draft = spec.vocab_size if size is None else size
    shapes: Shapes = {} if size is None else {"vocab.d2t": (size,)}
    if family == "eagle3":
        shapes |= _eagle3(node, spec, num_draft)
    elif family == "medusa":
        shapes |= _medusa(node, spec, num_draft)
    else:
        shapes |= _block(node, spec)
        if family != "parallel":
            shapes |= _sequential(family, node["sequential"]["rank"], spec, num_draft)
        if node["confidence"]:
            rank = 0 if family == "parallel" else node["sequential"]["rank"]
            shapes |= {"confidence_head.proj.weight": (1, spec.hidden_size + rank), "confidence_head.proj.bias": (1,)}
    return shapes


def _block(node: Mapping[str, Any], spec: TargetSpec) -> Shapes:
    hidden = spec.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, len(node["layer_ids"]) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(node["num_layers"]):
        prefix = f"layers.{index}."
        shapes |= _layer(prefix, spec, width=hidden)
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    return shapes


def _layer(prefix: str, spec: TargetSpec, *, width: int) -> Shapes:
    """A decoder layer whose attention reads inputs of `width`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (keys, width),
        f"{prefix}self_attn.v_proj.weight": (keys, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }


def _sequential(family: str, rank: int, spec: TargetSpec, num_draft: int) -> Shapes:
    hidden = spec.hidden_size
    shapes: Shapes = {"markov_head.markov_w1.weight": (spec.vocab_size, rank)}
    shapes["markov_head.markov_w2.weight"] = (num_draft, rank)
    if family == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if family == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    return shapes


def _eagle3(node: Mapping[str, Any], spec: TargetSpec, num_draft: int) -> Shapes:
    hidden = spec.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, len(node["layer_ids"]) * hidden)}
    shapes |= _layer("midlayer.", spec, width=2 * hidden)
    return shapes | {
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_draft, hidden),
    }


def _medusa(node: Mapping[str, Any], spec: TargetSpec, num_draft: int) -> Shapes:
    hidden = spec.hidden_size
    shapes: Shapes = {}
    for head in range(node["block_size"]):
        for layer in range(node["num_layers"]):
            prefix = f"heads.{head}.blocks.{layer}.linear."
            shapes |= {f"{prefix}weight": (hidden, hidden), f"{prefix}bias": (hidden,)}
        if node["own_projection"]:
            shapes[f"heads.{head}.lm_head.weight"] = (num_draft, hidden)
    return shapes
