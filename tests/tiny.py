# Tiny random targets for the fast tests: real transformers models, float32, seeded.

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.spec import TargetSpec
from drafters.target import FrozenTarget

SIZES: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def tiny_llama(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama; `sizes` override SIZES."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval().float()


def tiny_target(seed: int = 0, *, mask_token_id: int = 3, tokenizer: Any = None, **sizes: Any) -> FrozenTarget:
    """`tiny_llama` behind the target contract."""
    return FrozenTarget.from_model(tiny_llama(seed, **sizes), tokenizer=tokenizer, mask_token_id=mask_token_id)


def tiny_spec(**sizes: Any) -> TargetSpec:
    """The numbers of a tiny Llama."""
    return tiny_target(**sizes).spec
