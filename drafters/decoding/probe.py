# Real decoding of a few held-out prompts, small enough to run in the middle of training: the evaluator's loop and its
# formulas, without its clocks.

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from torch import Tensor

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.metrics import accepted_length, conditional_acceptance, full_rounds
from drafters.heads.base import Drafter
from drafters.types import Sampling

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["acceptance_probe"]


def acceptance_probe(
    target: "FrozenTarget",
    prompts: Sequence[Tensor],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> Callable[[Drafter], dict[str, float]]:
    """A function that decodes `prompts` (int64 ids [T]) in one batch at the full block, in the target's own dtype.

    It returns `accepted_length` (bonus included), `acceptance@k` (conditional) for each position k, and `rounds`, the
    number of rounds that these are counted on; NaN where no round came so far. `sampling` None is greedy; the same
    seed each time. Where a prompt leaves less room than `max_new_tokens`, fewer tokens are made.
    """
    room = target.spec.max_position - max(len(prompt) for prompt in prompts)
    config = DecodeConfig(
        max_new_tokens=min(max_new_tokens, room),
        sampling=sampling or Sampling(),
        seed=seed,
        batch_size=len(prompts),
    )

    def probe(drafter: Drafter) -> dict[str, float]:
        if any(p.device != target.device for p in drafter.parameters()):  # the target has a device of its own
            drafter = deepcopy(drafter).to(target.device)
        rounds = [r for row in decode(target, drafter, prompts, config) for r in row.rounds]
        by_position = conditional_acceptance(rounds, drafter.block_size)
        return {
            "accepted_length": accepted_length(rounds),
            **{f"acceptance@{k}": value for k, value in enumerate(by_position, start=1)},
            "rounds": float(len(full_rounds(rounds))),
        }

    return probe
