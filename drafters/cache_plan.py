# Which samples make a shard, and which make a batch. It follows from the examples alone, so that a shard made again has
# the same bytes, on any number of processes.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafters.cache_manifest import example_digest
from drafters.types import Example

__all__ = ["ShardPlan", "plan_shards", "split_places"]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Positions in the list of examples; the rows of a shard follow the order of its batches."""

    batches: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples of the shard, in order."""
        return tuple(i for batch in self.batches for i in batch)


def split_places(ordered: Sequence[int], splits: Mapping[str, Sequence[Example]]) -> dict[str, list[int]]:
    """Where the samples of each split stand in `ordered`, a list of positions in all splits one after the other."""
    place = {i: rank for rank, i in enumerate(ordered)}
    members: dict[str, list[int]] = {}
    start = 0
    for name, examples in splits.items():
        members[name] = sorted(place[i] for i in range(start, start + len(examples)))
        start += len(examples)
    return members


def plan_shards(examples: Sequence[Example], *, tokens_per_shard: int, batch_tokens: int) -> list[ShardPlan]:
    """Shards of about `tokens_per_shard` tokens, each in batches of at most `batch_tokens` tokens, padding included
    (one sample may exceed either).

    The order of `examples` does not matter: samples are dealt out by their digest, so each shard is a fair mix, and
    sorted by length inside it, the longest first, so that a batch that does not fit into memory fails at once.
    """
    digests = [example_digest(example) for example in examples]
    shards: list[list[int]] = [[]]
    room = tokens_per_shard
    for i in sorted(range(len(examples)), key=lambda i: digests[i]):
        length = len(examples[i].tokens_T)
        if length > room and shards[-1]:
            shards.append([])
            room = tokens_per_shard
        shards[-1].append(i)
        room -= length
    plans = []
    for shard in shards:
        batches: list[list[int]] = []
        for i in sorted(shard, key=lambda i: (-len(examples[i].tokens_T), digests[i])):
            width = len(examples[batches[-1][0]].tokens_T) if batches else 0
            if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
                batches.append([])
            batches[-1].append(i)
        plans.append(ShardPlan(batches=tuple(map(tuple, batches))))
    return plans
