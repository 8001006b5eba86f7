# Real decoding of a few held-out prompts, small enough to run in the middle of training.

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.metrics import accepted_length, conditional_acceptance
from drafters.heads.base import Drafter

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["acceptance_probe"]


def acceptance_probe(
    target: "FrozenTarget", prompts: Sequence[Tensor], *, max_new_tokens: int = 64
) -> Callable[[Drafter], dict[str, float]]:
    """A function that decodes `prompts` greedily at the full block and returns `accepted_length` (bonus included) and
    the conditional acceptance of the first draft. Where a prompt leaves less room, fewer tokens are made."""

    room = target.spec.max_position - max(len(prompt) for prompt in prompts)
    config = DecodeConfig(max_new_tokens=min(max_new_tokens, room), batch_size=len(prompts))

    def probe(drafter: Drafter) -> dict[str, float]:
        # As at the end of the run: in the target's own dtype, whatever training computes in.
        with torch.autocast(target.device.type, enabled=False):
            rounds = [r for row in decode(target, drafter, prompts, config) for r in row.rounds]
        first = conditional_acceptance(rounds, drafter.block_size)[0]
        return {"accepted_length": accepted_length(rounds), "acceptance@1": first}

    return probe
