# Which conversations make a step. An epoch is an order of all of them and where it is cut: a pure function of (seed,
# lengths), the same on every rank, with as many steps in each epoch. Nothing here reads a state.

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from drafters.errors import ConfigError

__all__ = ["Epoch", "EvenSteps", "LengthBuckets", "StepPlan", "batch_seed", "check_batch_size", "parts_of", "share"]

# Conversations of one bucket are at least this share, in percent, as long as its longest.
NEAR = 95


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """`order`: positions in the list of conversations; `cuts[k]` to `cuts[k + 1]` of it are step k."""

    order: Sequence[int]
    cuts: Sequence[int]

    @classmethod
    def of(cls, steps: Sequence[Sequence[int]]) -> "Epoch":
        cuts = [0]
        for step in steps:
            cuts.append(cuts[-1] + len(step))
        return cls(order=[i for step in steps for i in step], cuts=cuts)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    @property
    def sizes(self) -> Iterator[int]:
        """Conversations of each step."""
        return (stop - start for start, stop in pairwise(self.cuts))


class StepPlan(Protocol):
    """How an epoch is cut into steps."""

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, the same in all."""

    def epoch(self, seed: int | None) -> Epoch:
        """The epoch that this seed draws; None: not shuffled."""


class EvenSteps:
    """Steps of `batch_size` conversations or a few more, in an order that does not look at lengths."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.num_samples, self.num_steps = num_samples, max(1, num_samples // batch_size)

    def epoch(self, seed: int | None) -> Epoch:
        order = range(self.num_samples) if seed is None else shuffled(self.num_samples, torch.Generator(), seed)
        cuts = [share(self.num_samples, step, self.num_steps)[0] for step in range(self.num_steps)]
        return Epoch(order=order, cuts=[*cuts, self.num_samples])


class LengthBuckets:
    """Steps of conversations of similar length, `max_tokens` at most in rows x longest; a longer conversation is alone.

    Each epoch draws who is with whom. What a bucket has left over goes on top of the next longer one; what is left at
    the end takes conversations from the step before, so that no step is nearly empty.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int) -> None:
        """`lengths`: tokens of each conversation."""
        self.lengths, self.max_tokens = lengths, max_tokens
        self._buckets: list[list[int]] = []  # the shortest first, each from its longest down
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            if not self._buckets or 100 * lengths[i] < NEAR * lengths[self._buckets[-1][0]]:
                self._buckets.append([])
            self._buckets[-1].append(i)
        self._buckets.reverse()
        sizes = list(self.epoch(None).sizes)
        self.num_steps, self.smallest = len(sizes), min(sizes, default=0)

    def epoch(self, seed: int | None) -> Epoch:
        generator = torch.Generator()
        steps: list[list[int]] = []
        rest: list[int] = []
        for number, bucket in enumerate(self._buckets):
            order = range(len(bucket)) if seed is None else shuffled(len(bucket), generator, batch_seed(seed, number))
            rows, size = [*rest, *(bucket[i] for i in order)], self._most(bucket)
            num_whole = len(rows) // size
            steps += [rows[k * size : (k + 1) * size] for k in range(num_whole)]
            rest = rows[num_whole * size :]
        if rest:
            steps.append(rest)
            self._even_out(steps)
        if seed is not None:
            steps = [steps[k] for k in shuffled(len(steps), generator, batch_seed(seed, "steps"))]
        return Epoch.of(steps)

    def check(self, num_ranks: int) -> None:
        """Raises ConfigError where a step has fewer conversations than ranks."""
        if self.smallest < num_ranks:
            raise ConfigError(
                f"data.max_tokens: got {self.max_tokens} for {num_ranks} ranks; it counts the tokens of a step over "
                f"all ranks, and a step of {self.smallest} leaves one without a conversation: accepted is "
                f"{2 * num_ranks * max(self.lengths)} or more (twice the ranks times the longest, "
                f"{max(self.lengths)} tokens); or use fewer devices, or a lower data.max_length"
            )

    def _most(self, bucket: Sequence[int]) -> int:
        return max(1, self.max_tokens // self.lengths[bucket[0]])

    def _even_out(self, steps: list[list[int]]) -> None:
        """Give the last step the longest conversations of the one before, up to half of the difference."""
        if len(steps) < 2:
            return
        before, last = steps[-2:]
        moved = min((len(before) - len(last)) // 2, self._most(self._buckets[-1]) - len(last))
        if moved > 0:
            by_length = sorted(before, key=lambda i: (-self.lengths[i], i))
            steps[-2:] = [by_length[moved:], [*last, *by_length[:moved]]]


def parts_of(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The rows of a step, by the tokens of each, dealt out to ranks: as many rows each, or one more, with sums of
    tokens that differ by no more than the longest. Rows of a part keep their order."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    # From the longest down to the shortest, back and forth over the ranks.
    for place, row in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        turn, rank = divmod(place, num_ranks)
        parts[rank if turn % 2 == 0 else num_ranks - 1 - rank].append(row)
    return [sorted(part) for part in parts]


def batch_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def check_batch_size(batch_size: int, num_ranks: int) -> None:
    """Raises ConfigError where a step has fewer conversations than ranks."""
    if batch_size < num_ranks:
        raise ConfigError(
            f"data.batch_size: got {batch_size} for {num_ranks} ranks; it counts the conversations of a step over all "
            f"ranks: accepted is {num_ranks} or more"
        )


def share(total: int, part: int, num_parts: int) -> tuple[int, int]:
    """Begin and end of one of `num_parts` even, contiguous parts of `total` things."""
    return part * total // num_parts, (part + 1) * total // num_parts


def shuffled(count: int, generator: torch.Generator, seed: int) -> list[int]:
    """A permutation of `range(count)` that depends on `seed` alone."""
    order: list[int] = torch.randperm(count, generator=generator.manual_seed(seed)).tolist()
    return order
