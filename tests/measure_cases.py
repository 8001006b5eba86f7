# For tests of whole measurements: dialogues without a tokenizer, and a decode whose seconds follow from its rounds, so
# that two measurements are alike to the last number.

import copy
import itertools

import torch

from drafters.chat import EncodeError
from drafters.decoding import runner
from drafters.decoding.dialogue import Dialogue
from drafters.decoding.journal import Journal
from drafters.decoding.measure import Contestant, Execution, MeasureConfig, measure
from drafters.decoding.records import Generation, Round, RoundCost, RunTimings
from drafters.distributed import Ranks

GAMMA = 3
CONFIG = MeasureConfig(max_new_tokens=24, stop_ids=(), profile_rounds=4)
STEP_S, DRAFT_S, TOKEN_S, LOOP_S = 0.020, 0.001, 0.002, 0.0005  # of the seconds that `Steady` gives


def dialogue(prompt, *, source="maths", turns=1, more=(5,), refuses=False):
    """Prompts are token ids; each later turn asks `more`, after the answers before it."""

    def encode(answers):
        if answers and refuses:
            raise EncodeError("refused by the test", reason="refused")
        tokens = list(prompt)
        for answer in answers:
            tokens += [*answer, *more]
        return torch.tensor(tokens)

    return Dialogue(source=source, key=f"{source} {list(prompt)} {turns}", num_turns=turns, encode=encode)


def dialogues_of(num, *, turns=1, num_chat=2):
    """The last `num_chat` are of another source than the rest."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 64, (4 + i,), generator=generator).tolist() for i in range(num)]
    sources = ["maths"] * (num - num_chat) + ["chat"] * num_chat
    return [dialogue(prompt, source=source, turns=turns) for prompt, source in zip(prompts, sources, strict=True)]


def measured(target, drafters, dialogues, config=CONFIG, **rest):
    """Reports by name; of one drafter, its report."""
    named = drafters if isinstance(drafters, dict) else {"one": drafters}
    contestants = {name: Contestant(drafter=drafter) for name, drafter in named.items()}
    given = {name: value for name, value in rest.items() if value is not None}
    reports = measure(target, contestants, dialogues, config, Execution(**given))
    return reports if isinstance(drafters, dict) else reports["one"]


class Killed(Exception):
    """What stops a measurement in these tests."""


class Steady:
    """A `decode` with the real tokens and made-up seconds. It remembers what it decoded before, counts its `calls`, and
    raises Killed in place of call number `dies_at`."""

    def __init__(self, decode):
        self.decode, self.memory = decode, {}
        self.calls, self.dies_at = [], None

    def __call__(self, target, drafter, prompts, config, *, timings=None):
        if len(self.calls) == self.dies_at:
            raise Killed
        key = (id(drafter), tuple(tuple(prompt.tolist()) for prompt in prompts), repr(config))
        self.calls.append((drafter, config.numbers, config))
        if key not in self.memory:
            inner = RunTimings()
            rows = self.decode(target, drafter, prompts, config, timings=inner)
            self.memory[key] = rows, inner, config
        rows, inner, _ = copy.deepcopy(self.memory[key])
        if timings is not None:
            timings.prefill_s += 0.03 * len(prompts)
            timings.rounds += [
                cost._replace(draft_s=DRAFT_S * cost.length, verify_s=STEP_S + TOKEN_S * cost.length, overhead_s=LOOP_S)
                for cost in inner.rounds
            ]
        return rows

    def rounds_of(self, drafter, number, *, length=None):
        """The rounds of a prompt, decoded with drafts of this length."""
        found = [
            rows[0].rounds
            for (one, _, _), (rows, _, config) in self.memory.items()
            if one == id(drafter) and config.numbers == (number,) and config.length == length
        ]
        return found[0]

    def begin(self, dies_at=None):
        """Count anew."""
        self.calls, self.dies_at = [], dies_at

    def units(self, drafter):
        """The prompts of the calls with this drafter, in their order, without warm-ups."""
        return [list(numbers) for one, numbers, _ in self.calls if one is drafter and numbers is not None]


class Scripted:
    """A `decode` without a model: prompt number n has `accepted[n]` drafts of every round accepted, as far as there are
    so many. Seconds as of Steady."""

    def __init__(self, accepted):
        self.accepted = accepted

    def __call__(self, target, drafter, prompts, config, *, timings=None):
        numbers = range(len(prompts)) if config.numbers is None else config.numbers
        assert config.batch_size == 1
        rows = [Generation(i, [7], [], "length") for i in range(len(prompts))]
        timings = RunTimings() if timings is None else timings
        for row, number, prompt in zip(rows, numbers, prompts, strict=True):
            lengths = itertools.cycle(self.lengths(drafter, config))
            while len(row.tokens) < config.max_new_tokens:
                asked, left = next(lengths), config.max_new_tokens - len(row.tokens)
                length = min(asked, left - 1)
                accepted = min(self.accepted[number], length)
                context = len(prompt) + len(row.tokens)
                row.rounds.append(Round(length, accepted, accepted + 1, asked < left, context))
                row.tokens += [7] * (accepted + 1)
                timings.rounds.append(RoundCost(1, length, DRAFT_S * length, STEP_S + TOKEN_S * length, LOOP_S))
        return rows

    def lengths(self, drafter, config):
        asked = 0 if drafter is None else drafter.block_size if config.length is None else config.length
        return asked if isinstance(asked, tuple) else (asked,)


def steady(monkeypatch):
    """Put a Steady in place of the real decode."""
    one = Steady(runner.decode)
    monkeypatch.setattr(runner, "decode", one)
    monkeypatch.setattr("drafters.decoding.summary.dispatch_share", lambda *_: 0.3)
    return one


def in_ranks(size, run):
    """What `run(ranks)` gives on each of `size` ranks of this process, one after the other: every exchange is played
    again until all ranks have said their part."""
    told = []  # by exchange, by rank
    while True:
        results = [_Replayed.run(run, rank, size, told) for rank in range(size)]
        if all(done for done, _ in results):
            return [result for _, result in results]


class _Waiting(Exception):
    pass


class _Replayed(Ranks):
    """A rank that stops where another has not spoken yet, and begins again from the start."""

    def __init__(self, rank, size, told):
        super().__init__(rank=rank, size=size)
        self.told, self.at = told, 0

    @classmethod
    def run(cls, run, rank, size, told):
        try:
            return True, run(cls(rank, size, told))
        except _Waiting:
            return False, None

    def barrier(self):
        """Nobody to wait for: ranks come one after the other."""

    def _exchange(self, name, value, error=None):
        if self.at == len(self.told):
            self.told.append({})
        said = self.told[self.at]
        said.setdefault(self.rank, value)
        self.at += 1
        if len(said) < self.size:
            raise _Waiting
        return [said[rank] for rank in range(self.size)]


def journal_of(folder, *, resume, fingerprint="f", ranks=None):
    return Journal(folder, fingerprint, resume=resume, ranks=ranks)
