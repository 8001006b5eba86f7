# One measurement of one or more drafters, by real target passes. First trees, where one is to be chosen; then
# acceptance at the full block, turn after turn; then what drafts and passes cost here; then, at the draft length that
# these make best, the speed of both loops, interleaved.

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from drafters.decoding import metrics
from drafters.decoding.dialogue import Dialogue
from drafters.decoding.loop import DecodeConfig
from drafters.decoding.records import RoundCost
from drafters.decoding.report import Report
from drafters.decoding.runner import (
    PLAIN,
    Execution,
    Item,
    Progress,
    Run,
    Runner,
    Unit,
    first_items,
    in_turns,
    units_of,
)
from drafters.decoding.sampling import check_sampling
from drafters.decoding.summary import Found, report_of
from drafters.decoding.tree import Tree, choose_tree, expected_length, probe_tree, rank_acceptances, static_tree
from drafters.errors import ConfigError, DataError
from drafters.heads.base import Drafter
from drafters.scheduling.check import check_confidence
from drafters.types import Sampling

if TYPE_CHECKING:
    from drafters.scheduling.policy import Policy
    from drafters.target import FrozenTarget

__all__ = ["Contestant", "Execution", "MeasureConfig", "Progress", "check_settings", "measure", "tree_of"]

TREE_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64)  # what tree=auto chooses from
TREE_WIDTH = 4  # candidates a position that it measures
TREE_ROUNDS = 600  # rounds that it measures them on


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """`length`: drafts a round in the speed runs, or "auto". `tree`: null drafts chains; a list of children counts by
    depth is a fixed tree; "auto" chooses one from measured acceptances and costs. `profile_rounds`: rounds timed at
    each draft length. `num_speed_prompts`: prompts in the speed runs, spread over the sources; None = all."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    length: int | str = "auto"
    tree: Any = None
    batch_size: int = 1
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    profile_rounds: int = 24
    num_speed_prompts: int | None = None

    def decoding(self, **changes: Any) -> DecodeConfig:
        """How all of it decodes, with these changes."""
        names = ("max_new_tokens", "sampling", "seed", "stop_ids", "batch_size")
        return DecodeConfig(**{name: getattr(self, name) for name in names} | changes)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A drafter to measure, and what reports say of where it comes from. Its speed is measured under `policy`."""

    drafter: Drafter
    provenance: Mapping[str, Any] = field(default_factory=dict)
    policy: "Policy | None" = None


def measure(
    target: "FrozenTarget",
    contestants: Mapping[str, Contestant],
    dialogues: Sequence[Dialogue],
    config: MeasureConfig,
    execution: Execution | None = None,
) -> dict[str, Report]:
    """Decode `dialogues` plainly and with every drafter, and report acceptance and speed of each.

    Of several ranks the first one returns the reports of all, the others none. Raises ConfigError for settings out of
    range and DataError when there is too little text to measure.
    """
    drafters = {name: contestant.drafter for name, contestant in contestants.items()}
    for drafter in drafters.values():
        check_settings(drafter, dialogues, config)
    _check_trees(drafters, config)
    if any(one.policy is not None for one in contestants.values()) and (config.tree, config.length) != (None, "auto"):
        raise ConfigError(
            f"schedule: it decides how many drafts are verified, got length={config.length} and tree={config.tree} as "
            "well; accepted: length=auto, tree=null"
        )
    execution = execution or Execution()
    for contestant in contestants.values():
        if contestant.policy is not None and contestant.policy.reads_confidence:
            check_confidence(target, contestant.drafter, dialogues[0].encode(()))
    runner = Runner(target, drafters, config.decoding(), execution)
    policies = {
        name: one.policy.going_on(one.drafter.block_size) for name, one in contestants.items() if one.policy is not None
    }
    stages = _Stages(runner, drafters, dialogues, config, policies=policies)
    found = stages.run()
    if not execution.ranks.is_first:
        return {}
    return {
        name: report_of(target, found[name], config, provenance=contestants[name].provenance, name=name)
        for name in contestants
    }


class _Stages:
    """The stages of a measurement, in their order."""

    def __init__(
        self,
        runner: Runner,
        drafters: Mapping[str, Drafter],
        dialogues: Sequence[Dialogue],
        config: MeasureConfig,
        *,
        policies: Mapping[str, "Policy"],
    ) -> None:
        self.policies = policies
        self.runner, self.drafters, self.dialogues, self.config = runner, drafters, dialogues, config
        self.names = list(drafters)
        self.trees: dict[str, Tree] = {}
        self.tree_costs: dict[str, tuple[metrics.Costs, dict[int, float]]] = {}

    def run(self) -> dict[str, Found]:
        items = first_items(self.dialogues)
        units = units_of(items, self.config.batch_size)
        self.runner.warm_up(units[0])
        for name in self.names:
            if self.config.tree is not None and self.drafters[name].drafts_trees:
                self._choose_tree(name, units)
        acceptance = self._acceptance(items)
        everything = [run.unit for run in acceptance[self.names[0]]]
        costs, taus = self._costs(acceptance, units)
        lengths = {name: self._length(name, costs[name], taus[name]) for name in self.names}
        changes = {name: self._shape(name, lengths[name]) for name in self.names}
        speed_units = _spread(everything, self.config.num_speed_prompts)
        speed = self.runner.each("speed", speed_units, [*self.names, PLAIN], changes)
        if not all(any(run.timings.rounds for run in runs) for runs in speed.values()):
            raise DataError(
                "num_speed_prompts: the answers of the prompts that were timed ended with their first token; take more"
            )
        return {
            name: Found(
                drafter=self.drafters[name],
                acceptance=acceptance[name],
                costs=costs[name],
                accepted_lengths=taus[name],
                length=lengths[name],
                tree=self.trees.get(name),
                policy=self.policies.get(name),
                speed=list(zip(speed[name], speed[PLAIN], strict=True)),
                num_ranks=self.runner.ranks.size,
            )
            for name in self.names
        }

    def _shape(self, name: str, length: int) -> dict[str, Any]:
        if name in self.policies:
            return {"policy": self.policies[name]}
        return {"tree": self.trees[name]} if name in self.trees else {"length": length}

    def _acceptance(self, items: list[Item]) -> dict[str, list[Run]]:
        """Every prompt at the full block (or the tree)."""
        changes = {name: {"tree": tree} for name, tree in self.trees.items()}
        found = self.runner.turns("acceptance", self.dialogues, self.names, changes, items=items)
        for name in self.names:
            self._check_rounds(name, [r for run in found[name] for r in run.rounds])
        return found

    def _check_rounds(self, name: str, rounds: Sequence[Any]) -> None:
        if not metrics.full_rounds(rounds):
            raise DataError(
                f"max_new_tokens: no round of {self.drafters[name].block_size} drafts ran uncut within "
                f"{self.config.max_new_tokens} new tokens on {len(self.dialogues)} prompts; raise it, or give prompts "
                "with longer answers"
            )

    def _choose_tree(self, name: str, units: list[Unit]) -> None:
        """The tree of the settings, or the one with the best predicted speed-up."""
        self.runner.target.check_trees()
        fixed = tree_of(self.config)
        if fixed is not None:
            self.trees[name] = fixed
            return
        probe = probe_tree(self.drafters[name].block_size, TREE_WIDTH)
        runs = self.runner.until("tree acceptance", units, name, TREE_ROUNDS, tree=probe)
        rounds = metrics.full_rounds(r for run in runs for r in run.rounds)
        self._check_rounds(name, rounds)
        accepted_DR = rank_acceptances(rounds, probe)
        most = _most_slots(accepted_DR)
        sizes = [size for size in TREE_SIZES if size <= most] or [most]
        trees = [choose_tree(accepted_DR, size) for size in sizes]
        found = self.runner.profile(units, {name: trees}, self.config.profile_rounds)
        costs = _costs(found[name], found[PLAIN])
        taus = {tree.size: expected_length(tree, accepted_DR) for tree in trees}
        size = metrics.choose_length(costs, taus)
        self.trees[name] = next(tree for tree in trees if tree.size == size)
        self.tree_costs[name] = costs, taus

    def _costs(
        self, acceptance: Mapping[str, list[Run]], units: list[Unit]
    ) -> tuple[dict[str, metrics.Costs], dict[str, dict[int, float]]]:
        """Costs by shape, and the accepted length that each shape should have."""
        shapes: dict[str, Sequence[int | Tree]] = {}
        for name in self.names:
            if name not in self.trees:
                shapes[name] = range(1, self.drafters[name].block_size + 1)
            elif name not in self.tree_costs:
                shapes[name] = [self.trees[name]]
        found = self.runner.profile(units, shapes, self.config.profile_rounds) if shapes else {}
        costs, taus = {}, {}
        for name in self.names:
            rounds = [r for run in acceptance[name] for r in run.rounds]
            if name in self.tree_costs:
                costs[name], taus[name] = self.tree_costs[name]
                taus[name] = {**taus[name], self.trees[name].size: metrics.accepted_length(rounds)}
                continue
            costs[name] = _costs(found[name], found[PLAIN])
            if name in self.trees:
                taus[name] = {self.trees[name].size: metrics.accepted_length(rounds)}
            else:
                taus[name] = {k: metrics.accepted_length(rounds, k) for k in shapes[name] if isinstance(k, int)}
        return costs, taus

    def _length(self, name: str, costs: metrics.Costs, taus: Mapping[int, float]) -> int:
        if name in self.policies:
            return self.drafters[name].block_size
        if name in self.trees:
            return self.trees[name].size
        if isinstance(self.config.length, int):
            return min(self.config.length, self.drafters[name].block_size)
        return metrics.choose_length(costs, taus)


def _check_trees(drafters: Mapping[str, Drafter], config: MeasureConfig) -> None:
    chains = [name for name, drafter in drafters.items() if not drafter.drafts_trees]
    if config.tree is None or not chains:
        return
    if len(chains) == len(drafters):
        raise ConfigError(
            f"tree: got {config.tree!r}, but {', '.join(chains)} drafts no trees; accepted: null, for chains"
        )
    warnings.warn(f"tree: {', '.join(chains)} drafts no trees and is measured with chains", stacklevel=3)


def _costs(drafted: list[RoundCost], plain: list[RoundCost]) -> metrics.Costs:
    if not plain or not any(cost.length for cost in drafted):
        raise DataError("max_new_tokens: answers were too short to time a round; raise it, or give other prompts")
    return metrics.costs_from(drafted, plain)


def _most_slots(accepted_DR: Sequence[Sequence[float]]) -> int:
    """Slots of the largest tree whose acceptances were all measured."""
    total, level = 0, 1
    for row in accepted_DR:
        level *= sum(1 for _ in takewhile(lambda a: a == a, row))
        total += level
    return total


def _spread(units: list[Unit], num_prompts: int | None) -> list[Unit]:
    """The first units with `num_prompts` prompts, turns taking turns."""
    if num_prompts is None:
        return units
    by_turn: dict[int, list[Unit]] = {}
    for unit in units:
        by_turn.setdefault(unit.turn, []).append(unit)
    taken, count = [], 0
    for unit in in_turns(list(by_turn.values())):
        if count >= num_prompts:
            break
        taken.append(unit)
        count += len(unit.items)
    return taken


def tree_of(config: MeasureConfig) -> Tree | None:
    """The fixed tree of the settings; None for chains and for a tree that is yet to be chosen. Raises ConfigError."""
    return None if config.tree in (None, "auto") else static_tree(config.tree)


def check_settings(drafter: Drafter, dialogues: Sequence[Dialogue], config: MeasureConfig, *, key: str = "") -> None:
    """Raises ConfigError for settings out of range and DataError without prompts; `key` is where the settings stand."""
    if not dialogues:
        raise DataError("prompts: there are none to measure on; name a source that has some")
    prefix = f"{key}." if key else ""
    check_sampling(config.sampling, key=key)
    is_auto = config.length == "auto"
    if not is_auto and not (isinstance(config.length, int) and 1 <= config.length <= drafter.block_size):
        got = repr(config.length) if isinstance(config.length, str) else config.length
        raise ConfigError(f"{prefix}length: got {got}; accepted: 'auto' or 1 to {drafter.block_size}")
    for name in ("max_new_tokens", "profile_rounds", "batch_size", "num_speed_prompts"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{prefix}{name}: got {value}; accepted: 1 or more")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"{prefix}seed: got {config.seed}; accepted: 0 to {2**32 - 1}")
    tree = tree_of(config)
    if tree is not None and drafter.drafts_trees and tree.max_depth > drafter.block_size:
        raise ConfigError(
            f"{prefix}tree: got {config.tree!r}, of {tree.max_depth} levels; accepted: up to {drafter.block_size}, the "
            "drafter's block size"
        )
    if config.tree is not None and not is_auto:
        raise ConfigError(f"{prefix}length: got {config.length} with a tree; accepted: auto, since the tree decides")
    least = drafter.block_size + 2  # the first token comes from the prompt's pass, the last is the bonus
    if config.max_new_tokens < least:
        raise ConfigError(
            f"{prefix}max_new_tokens: got {config.max_new_tokens}; accepted: {least} or more, since only rounds "
            f"in which a whole block of {drafter.block_size} drafts fits are measured"
        )
