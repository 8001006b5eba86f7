# Where greedy decoding with a drafter left the baseline's text, and how close the call was. In float32 it never does;
# in bf16 a pass over several tokens rounds otherwise than a pass over one, and near-ties flip.

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["first_difference", "logit_margin"]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, None where the texts are equal. A text that ends early differs there."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def logit_margin(target: "FrozenTarget", prompt: Tensor, tokens: Sequence[int]) -> float:
    """The target's best logit minus its second after `prompt` [T] and `tokens`, in one pass."""
    text_1T = torch.cat([prompt.cpu(), torch.tensor(tokens, dtype=torch.int64)])[None].to(target.device)
    logits_V = target.step(text_1T, target.new_cache(1), logits="last").logits_BSV[0, 0]
    best = logits_V.topk(2).values
    return float(best[0] - best[1])
