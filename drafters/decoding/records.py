# What decoding leaves behind: rounds, their costs, and the text of each row. Plain values that can be stored, merged
# and counted.

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Generation", "Round", "RoundCost", "RunTimings"]


class Round(NamedTuple):
    """One round of one row. `gained` tokens entered the text: `accepted` + 1, or fewer when a stop token or the token
    limit cut the row, or when rounds may not advance that far. `full`: the whole draft and the bonus token would have
    fitted under the limit, and no stop token cut it. Only full rounds count for acceptance. `context`: tokens of the
    text before the round, the anchor included. `slots`: the accepted slots of a draft tree, () for a chain.
    `confidences`: what the drafter itself said of each proposed draft, where that is recorded: the probability that it
    stands if all before it do; `likeliest`: how probable the likeliest token was (see `Proposal.signal`)."""

    proposed: int
    accepted: int
    gained: int
    full: bool
    context: int
    slots: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    likeliest: tuple[float, ...] = ()


class RoundCost(NamedTuple):
    """Seconds of one round of `rows` rows that were asked for `length` drafts each (a drafter may propose fewer).
    Draft: propose and extend. Verify: the target's pass. Overhead: everything else in the loop."""

    rows: int
    length: int
    draft_s: float
    verify_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.draft_s + self.verify_s + self.overhead_s


@dataclass
class RunTimings:
    """Where the seconds of one or more `decode` calls went. Prefill (the prompts' pass, the drafter's reading of the
    prompt, the first token, a row's place in the batch) stands apart from the rounds."""

    prefill_s: float = 0.0
    rounds: list[RoundCost] = field(default_factory=list)

    @property
    def draft_s(self) -> float:
        return sum(cost.draft_s for cost in self.rounds)

    @property
    def verify_s(self) -> float:
        return sum(cost.verify_s for cost in self.rounds)

    @property
    def overhead_s(self) -> float:
        return sum(cost.overhead_s for cost in self.rounds)

    @property
    def decode_s(self) -> float:
        """All seconds after prefill."""
        return self.draft_s + self.verify_s + self.overhead_s

    @property
    def steps(self) -> int:
        """Target passes after prefill."""
        return len(self.rounds)


@dataclass
class Generation:
    """New tokens of prompt number `prompt`, the stop token included. The first token comes from prefill and belongs
    to no round. `finish_reason`: "stop" or "length"."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
