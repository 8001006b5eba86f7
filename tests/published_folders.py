# Folders as others publish them: configs and tensors' names of DeepSpec, z-lab, SpecForge and speculators, at the sizes
# of the tiny target of `published_doubles`.

import json

import torch
from safetensors.torch import save_file

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEEPSPEC = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["full_attention"] * 2,
    "block_size": 4,
    "mask_token_id": 3,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 512,
    "torch_dtype": "bfloat16",
}
Z_LAB = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["full_attention"] * 2,
    "block_size": 5,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}
SPECFORGE = {
    **QWEN3,
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "dflash_config": {
        "projector_type": "dspark",
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
    },
}
LLAMA = {**QWEN3, "model_type": "llama", "num_hidden_layers": 1}
EAGLE3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
BACKBONE = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
MARKOV = {"markov_head.markov_w1.weight": (128, 6), "markov_head.markov_w2.weight": (128, 6)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 38), "confidence_head.proj.bias": (1,)}


def layer(prefix, width=32, **more):
    projections = {"q": (32, width), "k": (16, width), "v": (16, width), "o": (32, 32)}
    shapes = {f"{prefix}.self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    shapes |= {f"{prefix}.mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
    shapes |= {f"{prefix}.mlp.down_proj.weight": (32, 64)}
    shapes |= {f"{prefix}.{name}.weight": (32,) for name in ("input_layernorm", "post_attention_layernorm", *more)}
    return shapes


def qwen3_layers():
    shapes = {}
    for index in range(2):
        shapes |= layer(f"layers.{index}")
        shapes |= {f"layers.{index}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
    return shapes


def eagle3_shapes(prefix="midlayer"):
    heads = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (64, 32)}
    return {**heads, **layer(prefix, 64, hidden_norm=True)}


def random_tensors(shapes, *, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(4)
    return {name: (0.3 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def odd_ids():
    """Draft id d is the target's 2 d + 1."""
    tensors = {"d2t": torch.arange(64) + 1, "t2d": torch.zeros(128, dtype=torch.bool)}
    tensors["t2d"][1::2] = True
    return tensors


def published(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def dspark_tensors(**more):
    return {**random_tensors({**BACKBONE, **qwen3_layers(), **MARKOV, **CONFIDENCE}), **more}


def eagle3_tensors(prefix="midlayer", **more):
    return {**random_tensors(eagle3_shapes(prefix)), **odd_ids(), **more}


def envelope(kind, layers, **keys):
    """As speculators' trainer writes it."""
    return {
        "architectures": ["Any"],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "org/target"},
        },
        **keys,
    }
