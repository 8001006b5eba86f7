# Draft trees: several candidates at a position, verified in one masked pass of the target. A tree is a fixed shape,
# the same for every row; which tokens it holds is the drafter's affair. Shapes are written down by a person, or chosen
# from the acceptances that a probe tree measured.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.errors import ConfigError

if TYPE_CHECKING:
    from drafters.decoding.records import Round

__all__ = [
    "MAX_SLOTS",
    "Tree",
    "ancestors",
    "chain_tree",
    "choose_tree",
    "expected_length",
    "paths",
    "probe_tree",
    "rank_acceptances",
    "static_tree",
]

MAX_SLOTS = 256  # a pass over more is no longer the price of a step on any machine

# acceptances[d][r]: the probability that, given that a slot of depth d stands (0 = the anchor, which always does), its
# child of rank r is the one accepted. NaN: never measured.
Acceptances = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Tree:
    """Slot s drafts child number `ranks[s]` (0 = the first drawn, or the most probable) of slot `parents[s]` (-1 = the
    anchor). Parents come before their children; siblings stand in the order of their ranks, which count from 0.
    Raises ValueError for anything else."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise ValueError(f"tree: got {len(self.parents)} parents and {len(self.ranks)} ranks; accepted: one each")
        born = [0] * (self.size + 1)
        for slot, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if not -1 <= parent < slot:
                raise ValueError(f"tree: slot {slot} has parent {parent}; accepted: -1 (the anchor) to {slot - 1}")
            if rank != born[parent + 1]:
                raise ValueError(
                    f"tree: slot {slot} has rank {rank}; accepted: {born[parent + 1]}, as the next child of {parent}"
                )
            born[parent + 1] += 1

    @classmethod
    def of(cls, parents: Sequence[int]) -> "Tree":
        """The tree with these parents; siblings are ranked in their order."""
        return cls(tuple(parents), tuple(list(parents[:slot]).count(parent) for slot, parent in enumerate(parents)))

    @property
    def size(self) -> int:
        """Number of drafted tokens."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each slot; a child of the anchor has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest slot; 0 for a tree without slots."""
        return max(self.depths, default=0)

    @property
    def ancestors_SS(self) -> Tensor:
        """See `ancestors`."""
        return ancestors(self.parents)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        lists: list[list[int]] = [[] for _ in range(self.size + 1)]
        for slot, parent in enumerate(self.parents):
            lists[parent + 1].append(slot)
        return tuple(map(tuple, lists))

    def children(self, slot: int) -> tuple[int, ...]:
        """Slots whose parent is `slot` (-1 = the anchor), in the order of their ranks."""
        return self._children[slot + 1]


@lru_cache(maxsize=64)
def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Bool [S, S]: whether slot t (second axis) is on the way from the anchor to slot s, s included. Read only."""
    table_SS = torch.eye(len(parents), dtype=torch.bool)
    for slot, parent in enumerate(parents):
        if parent >= 0:
            table_SS[slot] |= table_SS[parent]
    return table_SS


@lru_cache(maxsize=64)
def paths(parents: tuple[int, ...]) -> Tensor:
    """Int64 [1 + S, D]: the slots from the anchor to each slot, by depth, then -1; row 0 is the anchor's. Read only."""
    rows = [row.nonzero()[:, 0].tolist() for row in ancestors(parents)]
    depth = max(map(len, rows), default=0)
    return torch.tensor([[-1] * depth, *(row + [-1] * (depth - len(row)) for row in rows)], dtype=torch.int64)


def chain_tree(length: int) -> Tree:
    """A tree of one branch."""
    return Tree(tuple(range(-1, length - 1)), (0,) * length)


def static_tree(spec: object) -> Tree:
    """The full tree in which every slot of depth d has `spec[d]` children: [3, 2, 1] has 3 + 6 + 6 slots.

    Raises ConfigError naming `tree` for counts below 1 or more than MAX_SLOTS slots.
    """
    accepted = f"a list of children a slot for each depth, such as [3, 2, 1], of at most {MAX_SLOTS} slots in all"
    counts = list(spec) if isinstance(spec, list | tuple) else []
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise ConfigError(f"tree: got {spec!r}; accepted: {accepted}")
    size = sum(math.prod(counts[: depth + 1]) for depth in range(len(counts)))
    if size > MAX_SLOTS:
        raise ConfigError(f"tree: {counts} makes {size} slots; accepted: {accepted}")
    parents: list[int] = []
    level = [-1]
    for count in counts:
        start = len(parents)
        parents += [parent for parent in level for _ in range(count)]
        level = list(range(start, len(parents)))
    return Tree.of(parents)


def probe_tree(depth: int, width: int) -> Tree:
    """A small tree to measure acceptances with: `width` children of the anchor and of every slot of first rank, down to
    `depth`."""
    first = [-1, *(width * level for level in range(depth - 1))]
    return Tree(tuple(parent for parent in first[:depth] for _ in range(width)), tuple(range(width)) * depth)


def rank_acceptances(rounds: Sequence["Round"], tree: Tree) -> list[list[float]]:
    """Measured acceptances [D, R] of `tree` (see Acceptances), from full rounds that verified it.

    A slot that stood, or the anchor, is one try for each child that it had in that round (a row may have drafted only
    the first `proposed` slots) and a hit for the one that was accepted. NaN where there was no try.
    """
    width = max(tree.ranks, default=-1) + 1
    tries = [[0] * width for _ in range(tree.max_depth)]
    hits = [[0] * width for _ in range(tree.max_depth)]
    for one in rounds:
        if not one.full:
            continue
        for parent in (-1, *one.slots):
            depth = 0 if parent < 0 else tree.depths[parent]
            for child in tree.children(parent):
                if child < one.proposed:
                    tries[depth][tree.ranks[child]] += 1
                    hits[depth][tree.ranks[child]] += child in one.slots
    return [
        [hit / tried if tried else math.nan for hit, tried in zip(*pair, strict=True)]
        for pair in zip(hits, tries, strict=True)
    ]


def expected_length(tree: Tree, acceptances: Acceptances) -> float:
    """Tokens a round, the target's own included: 1 + the sum over slots of the product of the acceptances on the way to
    it, taking a slot's acceptance to depend on its depth and rank alone. The tree must lie within the acceptances."""
    chances: list[float] = []
    for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
        chances.append((1.0 if parent < 0 else chances[parent]) * acceptances[depth - 1][rank])
    return 1.0 + sum(chances)


def choose_tree(acceptances: Acceptances, num_nodes: int) -> Tree:
    """The tree of `num_nodes` slots with the greatest `expected_length`.

    Dynamic programming (Sequoia 2402.12374, with acceptances that also depend on depth): the best n slots among ranks r
    and above, below a slot of depth d, are m of them in the branch of rank r and n - m beside it. Taking the likeliest
    slots one by one (Medusa 2401.10774) agrees where acceptances fall with rank; measured ones need not. What was never
    measured (NaN) is not used. Raises ConfigError when what was measured has no room for `num_nodes`.
    """
    if not 1 <= num_nodes <= MAX_SLOTS:
        raise ConfigError(f"tree: got {num_nodes} slots; accepted: 1 to {MAX_SLOTS}")
    impossible = [0.0] + [-math.inf] * num_nodes
    below, splits = impossible, []
    for row in reversed(acceptances):
        beside, ways = impossible, []
        for chance in reversed(list(takewhile(lambda a: not math.isnan(a), row))):
            branch = [-math.inf, *(chance * (1.0 + below[m]) if below[m] >= 0 else -math.inf for m in range(num_nodes))]
            best = [max((branch[m] + beside[n - m], m) for m in range(1, n + 1)) for n in range(1, num_nodes + 1)]
            beside = [0.0, *(value for value, _ in best)]
            ways.append([0, *(m for _, m in best)])
        below = beside
        splits.append(ways[::-1])
    if below[num_nodes] < 0:
        most = max(n for n in range(num_nodes) if below[n] >= 0)
        raise ConfigError(
            f"tree: got {num_nodes} slots; accepted: 1 to {most}, all that the measured acceptances cover; "
            "ask for a smaller tree or measure more rounds"
        )
    return _grown(splits[::-1], num_nodes)


def _grown(splits: list[list[list[int]]], num_nodes: int) -> Tree:
    """The tree of `splits[d][r][n]`: of n slots for ranks r and above at depth d, how many the branch of rank r has."""
    parents: list[int] = []
    level = [(-1, num_nodes)]
    for ways in splits:
        following = []
        for parent, left in level:
            for way in ways:
                if left == 0:
                    break
                following.append((len(parents), way[left] - 1))
                parents.append(parent)
                left -= way[left]
        level = following
    return Tree.of(parents)
