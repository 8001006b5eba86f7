# Runs the phases of a measurement as units of work: a few prompts of one source and turn, decoded together by one
# contestant. Units are journaled, so that a half-done measurement goes on, and shared over ranks, so that several
# processes give the numbers of one. Contestants take turns on every unit: a machine that slows down slows all.

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from drafters.chat import EncodeError
from drafters.decoding import metrics
from drafters.decoding.dialogue import Dialogue
from drafters.decoding.journal import Journal, UnitKey, UnitResult
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.records import Generation, Round, RoundCost, RunTimings
from drafters.decoding.tree import Tree
from drafters.distributed import Ranks
from drafters.heads.base import Drafter

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["PLAIN", "Execution", "Item", "Progress", "Run", "Runner", "Unit", "in_turns", "units_of"]

T = TypeVar("T")
PLAIN = ""  # the autoregressive baseline among the contestants, all of which have names
LAPS = 8  # times that prompts are decoded again where there are too few to time every draft length
UNIT_BATCHES = 4  # batches that a unit of a batched measurement fills, so that its emptying end weighs little
Progress = Callable[[str, int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a measurement is carried out. With a `journal`, units that it holds are not run again; `ranks` share the
    units; `progress(phase, done, total, accepted_length)` is called after every unit."""

    journal: Journal | None = None
    ranks: Ranks = field(default_factory=Ranks)
    progress: Progress = lambda *_: None


class Item(NamedTuple):
    """A prompt to measure: turn `turn` of a dialogue. `number` gives its seed."""

    number: int
    dialogue: int
    turn: int
    source: str
    tokens: Tensor


@dataclass(frozen=True)
class Unit:
    """Prompts of one source and turn that are decoded together."""

    index: int
    items: tuple[Item, ...]

    @property
    def source(self) -> str:
        return self.items[0].source

    @property
    def turn(self) -> int:
        return self.items[0].turn


@dataclass(frozen=True)
class Run:
    """What decoding a unit gave; `rows[i]` belongs to `unit.items[i]`."""

    unit: Unit
    rows: list[Generation]
    timings: RunTimings

    @property
    def rounds(self) -> list[Round]:
        return [r for row in self.rows for r in row.rounds]

    @property
    def num_tokens(self) -> int:
        """New tokens that rounds gave: the first token of each row is prefill's."""
        return sum(len(row.tokens) - 1 for row in self.rows)

    @property
    def total_s(self) -> float:
        """Seconds with prefill."""
        return self.timings.prefill_s + self.timings.decode_s


def units_of(items: Sequence[Item], batch_size: int) -> list[Unit]:
    """Units of one source and turn each, sources taking turns, so that any first part of the list is a mix."""
    size = 1 if batch_size == 1 else UNIT_BATCHES * batch_size
    groups: dict[tuple[int, str], list[Item]] = {}
    for item in items:
        groups.setdefault((item.turn, item.source), []).append(item)
    queues = [[rows[i : i + size] for i in range(0, len(rows), size)] for rows in groups.values()]
    return [Unit(index, tuple(rows)) for index, rows in enumerate(in_turns(queues))]


def in_turns(queues: Sequence[Sequence[T]]) -> list[T]:
    """The first of every queue, then the second of every queue that has one, and so on."""
    return [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]


def _rotated(items: Sequence[T], turn: int) -> tuple[T, ...]:
    """The same order, begun by another one each turn."""
    shift = turn % len(items)
    return (*items[shift:], *items[:shift])


class Runner:
    """`contestants`: drafters by name. Every method that runs a phase returns the same on every rank."""

    def __init__(
        self,
        target: "FrozenTarget",
        contestants: Mapping[str, Drafter],
        config: DecodeConfig,
        execution: Execution,
    ) -> None:
        self.target, self.config = target, config
        self.contestants: dict[str, Drafter | None] = {**contestants, PLAIN: None}
        self.journal, self.ranks, self.progress = execution.journal, execution.ranks, execution.progress

    def run(self, phase: str, name: str, unit: Unit, **changes: Any) -> Run:
        """Decode one unit, or read what the journal says of it; `changes` replace fields of the settings."""
        # With the changes: resumed by another number of ranks, other lengths and trees may be chosen.
        what = f"{phase} {changes}" if changes else phase
        key = UnitKey(what, name, unit.turn, tuple(item.number for item in unit.items))
        found = None if self.journal is None else self.journal.get(key)
        if found is None:
            timings = RunTimings()
            prompts = [item.tokens for item in unit.items]
            config = replace(self.config, numbers=key.prompts, **changes)
            rows = decode(self.target, self.contestants[name], prompts, config, timings=timings)
            found = UnitResult(rows, timings)
            if self.journal is not None:
                self.journal.add(key, found)
        return Run(unit, found.rows, found.timings)

    def warm_up(self, unit: Unit) -> None:
        """First calls allocate, compile and page weights in; they are not measured."""
        few = replace(self.config, max_new_tokens=min(8, self.config.max_new_tokens))
        for drafter in self.contestants.values():
            decode(self.target, drafter, [item.tokens for item in unit.items[: few.batch_size]], few)

    def each(
        self, phase: str, units: Sequence[Unit], names: Sequence[str], changes: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, list[Run]]:
        """Runs of every unit by every named contestant, who take turns in going first; `changes` by contestant."""
        mine = self.ranks.mine(units)
        done: list[tuple[str, Run]] = []
        rounds: list[Round] = []
        for count, unit in enumerate(mine, start=1):
            for name in _rotated(names, unit.index):
                run = self.run(phase, name, unit, **changes.get(name, {}))
                done.append((name, run))
                rounds += run.rounds if name == names[0] else []
            self.progress(phase, count, len(mine), metrics.accepted_length(rounds))
        return self._merged(done, names)

    def turns(
        self,
        phase: str,
        dialogues: Sequence[Dialogue],
        names: Sequence[str],
        changes: Mapping[str, Mapping[str, Any]],
        *,
        items: list[Item] | None = None,
    ) -> dict[str, list[Run]]:
        """Runs of every turn of `dialogues`, turn after turn; the first contestant's answers are what the next turns of
        all follow. `items`: their first turns, where they were made before."""
        found: dict[str, list[Run]] = {name: [] for name in names}
        answers: dict[int, list[list[int]]] = {}
        room = self.target.spec.max_position - self.config.max_new_tokens
        items, turn, offset = first_items(dialogues) if items is None else items, 0, 0
        while items:
            units = units_of(items, self.config.batch_size)
            units = [Unit(offset + unit.index, unit.items) for unit in units]
            runs = self.each(phase if turn == 0 else f"{phase}, turn {turn + 1}", units, names, changes)
            for name in names:
                found[name] += runs[name]
            for run in runs[names[0]]:
                for item, row in zip(run.unit.items, run.rows, strict=True):
                    answers.setdefault(item.dialogue, []).append(row.tokens)
            turn, offset = turn + 1, offset + len(units)
            items = next_items(dialogues, answers, turn=turn, room=room)
        return found

    def until(self, phase: str, units: Sequence[Unit], name: str, enough: int, **changes: Any) -> list[Run]:
        """Runs of the first units by one contestant until they hold `enough` full rounds."""
        done: list[tuple[str, Run]] = []
        count = 0
        share = -(-enough // self.ranks.size)
        for unit in self.ranks.mine(units):
            if count >= share:
                break
            run = self.run(phase, name, unit, **changes)
            done.append((name, run))
            count += len(metrics.full_rounds(run.rounds))
            self.progress(phase, min(count, share), share, float("nan"))
        return self._merged(done, [name])[name]

    def profile(
        self, units: Sequence[Unit], shapes: Mapping[str, Sequence[int | Tree]], num_rounds: int
    ) -> dict[str, list[RoundCost]]:
        """Costs of real rounds of every contestant whose drafts take its `shapes` in turn (chain lengths, or trees,
        whose lengths in the costs are their sizes), beside the baseline on the same prompts, until each was timed
        `num_rounds` times; prompts are decoded up to LAPS times for it."""
        costs: dict[str, list[RoundCost]] = {name: [] for name in (*shapes, PLAIN)}
        mine = self.ranks.mine(units) or units[:1]
        for lap, unit in ((lap, unit) for lap in range(LAPS) for unit in mine):
            phase = f"costs {lap}" if lap else "costs"
            for name, wanted in shapes.items():
                turns = {"length" if isinstance(wanted[0], int) else "tree": _rotated(wanted, unit.index + lap)}
                costs[name] += self.run(phase, name, unit, **turns).timings.rounds
            costs[PLAIN] += self.run(phase, PLAIN, unit).timings.rounds
            fewest = min(
                sum(cost.length == (one if isinstance(one, int) else one.size) for cost in costs[name])
                for name, wanted in shapes.items()
                for one in wanted
            )
            self.progress("costs", min(fewest, num_rounds), num_rounds, float("nan"))
            if fewest >= num_rounds:
                break
        everyone = self.ranks.gather([costs])
        return {name: [cost for part in everyone for cost in part[name]] for name in costs}

    def _merged(self, done: list[tuple[str, Run]], names: Sequence[str]) -> dict[str, list[Run]]:
        everything = sorted(self.ranks.gather(done), key=lambda pair: pair[1].unit.index)
        return {name: [run for one, run in everything if one == name] for name in names}


def first_items(dialogues: Sequence[Dialogue]) -> list[Item]:
    """The first turn of every dialogue."""
    return [Item(i, i, 0, dialogue.source, dialogue.encode(())) for i, dialogue in enumerate(dialogues)]


def next_items(
    dialogues: Sequence[Dialogue], answers: Mapping[int, Sequence[Sequence[int]]], *, turn: int, room: int
) -> list[Item]:
    """Turn number `turn` of the dialogues that have one, after `answers` (by dialogue) to the turns before. Warns of
    those left out: more than `room` tokens, or refused by the chat template."""
    items, left_out = [], 0
    for i, dialogue in enumerate(dialogues):
        if dialogue.num_turns <= turn or len(answers.get(i, ())) < turn:
            continue
        try:
            tokens = dialogue.encode(answers[i])
        except EncodeError:
            left_out += 1
            continue
        if len(tokens) > room:
            left_out += 1
            continue
        items.append(Item(turn * len(dialogues) + i, i, turn, dialogue.source, tokens))
    if left_out:
        warnings.warn(
            f"prompts: turn {turn + 1} of {left_out} dialogues left out: longer than the {room} tokens that "
            "max_new_tokens leaves of the target's positions, or refused by the chat template",
            stacklevel=3,
        )
    return items
