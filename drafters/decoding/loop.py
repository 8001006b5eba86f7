# The decode loop, one for every drafter and for the autoregressive baseline (which drafts nothing). Rows of a batch
# advance by different counts; finished ones leave, and prompts that wait take their places. The same shortcuts serve
# both sides, so that a speed-up is measured against the same code.

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.decoding.batch import LiveBatch, OnRound
from drafters.decoding.records import Generation, Round, RoundCost, RunTimings
from drafters.decoding.sampling import check_sampling
from drafters.decoding.tree import Tree
from drafters.errors import ConfigError, DataError
from drafters.heads.base import Drafter
from drafters.types import Sampling

if TYPE_CHECKING:
    from drafters.scheduling.policy import Policy
    from drafters.target import FrozenTarget

__all__ = ["DecodeConfig", "Generation", "OnRound", "Round", "RoundCost", "RunTimings", "decode"]


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. `length` is the number of drafts a round: None = the drafter's block size, 0 = none, a tuple is
    cycled round by round (how costs are profiled). `tree` drafts that tree (or these in turn) instead. `stop_ids` None
    = the target's end-of-sequence ids. `batch_size` rows are decoded at a time. `numbers` tell prompts apart that have
    the same seed, one each; None = their places. `policy` chooses, round by round, whether to draft and
    how many of the drafts to verify; without one all are. `record_confidence` keeps what the drafter says of its own
    drafts, by every signal. `advance` is the most tokens that a round may add to the text, which goes on as it would:
    what else was accepted is counted and drafted anew (1: rounds from every place of a text); None = all."""

    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    length: int | tuple[int, ...] | None = None
    tree: Tree | tuple[Tree, ...] | None = None
    seed: int = 0
    numbers: tuple[int, ...] | None = None
    stop_ids: tuple[int, ...] | None = None
    batch_size: int = 1
    policy: "Policy | None" = None
    record_confidence: bool = False
    advance: int | None = None


def decode(
    target: "FrozenTarget",
    drafter: Drafter | None,
    prompts: Sequence[Tensor],
    config: DecodeConfig,
    *,
    on_round: OnRound | None = None,
    timings: RunTimings | None = None,
) -> list[Generation]:
    """Continue each prompt (int64 ids [T], at least one). `drafter` None decodes one token a pass.

    At temperature 0 the tokens are the target's own greedy ones (exactly in float32); above, their law is the
    target's. A row's random numbers come from `config.seed` and its number in `config.numbers` alone, so that it is the
    same in any batch (under a policy, which weighs rows against each other, only its law is, above temperature 0).
    `on_round(prompt, round, new_tokens, drafts)` is called for every row of every round. Times are added to `timings`.
    The rows come back in the order of `prompts`. Raises ConfigError and DataError for settings out of range and for
    prompts that do not fit.
    """
    shapes = _shapes(drafter, config)
    drafter = None if shapes == (0,) else drafter
    _check(target, prompts, config)
    numbers = range(len(prompts)) if config.numbers is None else config.numbers
    waiting = deque(
        (i, prompt, (config.seed << 32) + number)
        for i, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
    )
    num_slots = max(shape if isinstance(shape, int) else shape.size for shape in shapes)
    timings = RunTimings() if timings is None else timings
    batch = LiveBatch(target, drafter, config, num_slots=num_slots, timings=timings)
    num_rounds = 0
    with torch.inference_mode():
        while waiting or batch.live:
            while waiting and len(batch.live) < config.batch_size:
                count = min(config.batch_size - len(batch.live), len(waiting))
                batch.admit([waiting.popleft() for _ in range(count)])
            if batch.live:
                asked = batch.schedule.want(len(batch.live)) if batch.schedule else shapes[num_rounds % len(shapes)]
                batch.round(asked, on_round)
                num_rounds += 1
    return sorted(batch.done, key=lambda generation: generation.prompt)


def _shapes(drafter: Drafter | None, config: DecodeConfig) -> tuple[int | Tree, ...]:
    """What is drafted, round by round in turn: chains of these lengths, or trees."""
    if drafter is None:
        return (0,)
    if config.tree is not None:
        trees = config.tree if isinstance(config.tree, tuple) else (config.tree,)
        if not drafter.drafts_trees:
            raise ConfigError(f"tree: {type(drafter).__name__} drafts no trees; accepted: null, for chains")
        deepest = max(tree.max_depth for tree in trees)
        if deepest > drafter.block_size:
            raise ConfigError(
                f"tree: it has {deepest} levels; accepted: up to {drafter.block_size}, the drafter's block size"
            )
        return trees
    asked = drafter.block_size if config.length is None else config.length
    lengths = asked if isinstance(asked, tuple) else (asked,)
    for length in lengths:
        if not 0 <= length <= drafter.block_size:
            raise ConfigError(f"length: got {length}; accepted: 0 to {drafter.block_size}, the drafter's block size")
    return lengths


def _check(target: "FrozenTarget", prompts: Sequence[Tensor], config: DecodeConfig) -> None:
    check_sampling(config.sampling)
    for name in ("max_new_tokens", "batch_size", "advance"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: got {value}; accepted: 1 or more")
    if config.advance is not None and config.tree is not None:
        raise ConfigError("advance: got a number with a tree; accepted: null for trees")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(f"prompt {i}: it has no tokens; give at least one")
        if len(prompt) + config.max_new_tokens > target.spec.max_position:
            raise DataError(
                f"prompt {i}: {len(prompt)} tokens and max_new_tokens={config.max_new_tokens} pass the target's "
                f"{target.spec.max_position} positions; shorten the prompt or lower max_new_tokens"
            )
