# How a measurement is cut into units, shared among contestants and processes, and taken up again after a kill at any
# point.

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch

from drafters.decoding.journal import Journal
from drafters.decoding.measure import Contestant
from drafters.decoding.runner import Item, next_items, units_of
from drafters.door import Place, measure_and_write
from drafters.errors import DataError
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter, sharp_target
from tests.measure_cases import CONFIG, Killed, dialogue, dialogues_of, in_ranks, measured, steady

SHORT = replace(CONFIG, max_new_tokens=14, profile_rounds=2)


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=64, scale=30)


@pytest.fixture(scope="module")
def drafter(target):
    return CopyDrafter(sharp_target(vocab_size=64, scale=30, noise=0.3), block_size=3)


@pytest.fixture(scope="module")
def memory():
    """What was decoded once is not decoded again in this file."""
    return {}


@pytest.fixture
def decoding(monkeypatch, memory):
    one = steady(monkeypatch)
    one.memory = memory
    return one


def items_of(*groups):
    """(source, turn, count) each; numbers in their order."""
    found = []
    for source, turn, count in groups:
        for _ in range(count):
            found.append(Item(len(found), len(found), turn, source, torch.tensor([1])))
    return found


def numbers(units):
    return [[item.number for item in unit.items] for unit in units]


def test_units_hold_one_source_and_turn_and_sources_take_turns():
    items = items_of(("maths", 0, 5), ("chat", 0, 2))
    units = units_of(items, 1)
    assert [(unit.index, unit.source, [item.number for item in unit.items]) for unit in units] == [
        (0, "maths", [0]),
        (1, "chat", [5]),
        (2, "maths", [1]),
        (3, "chat", [6]),
        (4, "maths", [2]),
        (5, "maths", [3]),
        (6, "maths", [4]),
    ]
    assert numbers(units_of(items_of(("maths", 0, 9), ("maths", 1, 1), ("chat", 0, 3)), 2)) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [9],
        [10, 11, 12],
        [8],
    ]
    assert units_of([], 2) == []


def test_later_turns_have_numbers_of_their_own():
    dialogues = dialogues_of(3, turns=2)
    answers = {i: [[9, i]] for i in range(3)}
    items = next_items(dialogues, answers, turn=1, room=99)
    assert [(item.number, item.dialogue, item.turn) for item in items] == [(3, 0, 1), (4, 1, 1), (5, 2, 1)]
    assert items[2].tokens.tolist() == [*dialogues[2].encode(()).tolist(), 9, 2, 5]
    assert next_items(dialogues, {i: [[9], [9]] for i in range(3)}, turn=2, room=99) == []
    # A dialogue whose second turn was left out has no third one.
    assert [one.dialogue for one in next_items(dialogues_of(3, turns=3), {1: [[9], [9]]}, turn=2, room=99)] == [1]


def test_left_out_turns_are_counted():
    dialogues = [dialogue([1], turns=2), dialogue([1], turns=2, more=(5,) * 9), dialogue([1], turns=2, refuses=True)]
    with pytest.warns(UserWarning, match=r"prompts: turn 2 of 2 dialogues left out: longer than the 9 tokens"):
        (item,) = next_items(dialogues, {i: [[9]] for i in range(3)}, turn=1, room=9)
    assert item.dialogue == 0


def test_contestants_take_turns_on_the_same_prompts_and_the_baseline_runs_once(target, decoding):
    twins = {
        name: CopyDrafter(sharp_target(vocab_size=64, scale=30, noise=0.3), block_size=3) for name in ("a", "b", "c")
    }
    config = replace(SHORT, sampling=Sampling(temperature=1.0), length=2)
    reports = measured(target, twins, dialogues_of(4), config)
    names = {id(twin): name for name, twin in twins.items()} | {id(None): "plain"}
    calls = [(names[id(who)], done[0], config.length) for who, done, config in decoding.calls if done is not None]
    order = [0, 2, 1, 3]  # units: maths, chat, maths, chat
    assert [(name, number) for name, number, length in calls if length is None][:12] == [
        *(("a", 0), ("b", 0), ("c", 0)),
        *(("b", 2), ("c", 2), ("a", 2)),
        *(("c", 1), ("a", 1), ("b", 1)),
        *(("a", 3), ("b", 3), ("c", 3)),
    ]
    timed = calls[-16:]
    assert [number for _, number, _ in timed] == [number for number in order for _ in range(4)]
    assert " ".join(name for name, _, _ in timed) == "a b c plain b c plain a c plain a b plain a b c"
    plain = [number for name, number, _ in calls if name == "plain"]
    profiled = plain[: -len(order)]
    assert len(set(profiled)) == len(profiled), "the baseline is profiled once for all contestants"
    # The same prompts, seeds and drafts: only their names differ.
    one, *others = ({**report.to_dict(), "name": ""} for report in reports.values())
    assert others == [one, one]


def texts(reports):
    """Reports as text: equal to the last digit."""
    return json.dumps([report.to_dict() for report in reports.values()], sort_keys=True)


@pytest.mark.parametrize(
    "kind", ["chains", *(pytest.param(one, marks=pytest.mark.slow) for one in ("trees", "sampled"))]
)
def test_a_measurement_that_is_killed_anywhere_goes_on_to_the_same_report(target, drafter, decoding, tmp_path, kind):
    changes = {
        "chains": {},
        "trees": {"tree": "auto", "num_speed_prompts": 2},
        "sampled": {"sampling": Sampling(temperature=1.0), "batch_size": 2},
    }[kind]
    config = replace(SHORT, **changes)
    contestants = {"one": drafter} if kind == "trees" else {"one": drafter, "two": CopyDrafter(target, block_size=2)}
    dialogues = dialogues_of(2, num_chat=1) if kind == "trees" else dialogues_of(3, turns=2, num_chat=1)
    warm_ups = 1 + len(contestants)

    def run(folder, *, resume=True, dies_at=None):
        decoding.begin(dies_at)
        with Journal(folder, "f", resume=resume) as journal:
            return measured(target, contestants, dialogues, config, journal=journal)

    whole = texts(run(tmp_path / "whole"))
    units = len(decoding.calls) - warm_ups
    assert units > 10
    for done in range(units):
        folder = tmp_path / str(done)
        with pytest.raises(Killed):
            run(folder, dies_at=warm_ups + done)
        assert texts(run(folder)) == whole
        assert len(decoding.calls) - warm_ups == units - done, "finished units are not run again"
    # Killed again and again, one unit further each time; and once all is done nothing is decoded.
    for _ in range(units - 1):
        with pytest.raises(Killed):
            run(tmp_path / "often", dies_at=warm_ups + 1)
    for left in (1, 0):
        assert texts(run(tmp_path / "often")) == whole
        assert len(decoding.calls) == warm_ups + left


def test_measured_seconds_survive_a_kill_too(target, drafter, tmp_path, monkeypatch):
    monkeypatch.setattr("drafters.decoding.summary.dispatch_share", lambda *_: 0.3)
    found = []
    for _ in range(2):
        with Journal(tmp_path, "f", resume=True) as journal:
            found.append(texts({"one": measured(target, drafter, dialogues_of(2), SHORT, journal=journal)}))
    assert found[0] == found[1]


def rounded(value):
    """The same with floats of ten digits: sums of seconds in another order differ in the last."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


@pytest.mark.parametrize("size", [2, 3, 5])
def test_several_ranks_give_the_numbers_of_one(target, drafter, decoding, size):
    """More ranks than units of work, too."""
    contestants = {"one": drafter, "two": CopyDrafter(target, block_size=2)}
    dialogues = dialogues_of(4, turns=2)
    config = replace(SHORT, length=2)
    alone = measured(target, contestants, dialogues, config)
    first, *others = in_ranks(size, lambda ranks: measured(target, contestants, dialogues, config, ranks=ranks))
    assert others == [{}] * (size - 1)
    for name, report in first.items():
        values, expected = report.to_dict(), alone[name].to_dict()
        assert values["processes"] == size
        # Ranks profile other prompts: as many rounds or more.
        same = {"processes": 1, "costs": None, "predicted_speedup": None}
        assert rounded({**values, **same}) == rounded({**expected, **same})
        assert [cost["predicted_speedup"] for cost in values["costs"]] == pytest.approx(
            [cost["predicted_speedup"] for cost in expected["costs"]]
        )


def test_a_tree_is_chosen_alike_on_every_rank(target, drafter, decoding):
    config = replace(SHORT, tree="auto", num_speed_prompts=2)
    alone = measured(target, drafter, dialogues_of(4), config)
    first, _ = in_ranks(2, lambda ranks: measured(target, {"one": drafter}, dialogues_of(4), config, ranks=ranks))
    assert first["one"].tree == alone.tree
    assert first["one"].accepted_histogram == alone.accepted_histogram


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(target, drafter, decoding, tmp_path, before, after):
    """What was finished is finished, whoever did it. Lengths that would be chosen otherwise are not mixed."""
    dialogues = dialogues_of(4)

    def run(size, dies_at=None):
        decoding.begin(dies_at)

        def one(ranks):
            with Journal(tmp_path / "shared", "f", resume=True, ranks=ranks) as journal:
                return measured(target, {"one": drafter}, dialogues, SHORT, journal=journal, ranks=ranks)

        return in_ranks(size, one) if size > 1 else [one(None)]

    whole = measured(target, {"one": drafter}, dialogues, SHORT)
    with pytest.raises(Killed):
        run(before, dies_at=9)
    finished = decoding.units(drafter)
    assert len(finished) > 1
    found = run(after)[0]
    assert found["one"].accepted_histogram == whole["one"].accepted_histogram
    assert found["one"].speedup == pytest.approx(whole["one"].speedup)


class World:
    """A measurement with its folder, as doors make it."""

    def __init__(self, target, drafter, out):
        self.target, self.out = target, out
        self.contestants = {"one": Contestant(drafter=drafter, provenance={"sha256": "a"})}
        self.dialogues, self.config = dialogues_of(3), SHORT

    def run(self, *, resume):
        place = Place(out=self.out, resume=resume)
        return measure_and_write(self.target, self.contestants, self.dialogues, self.config, place)

    def progress(self):
        return sorted(path.name for path in self.out.glob("progress*"))


@pytest.fixture
def killed(target, drafter, decoding, tmp_path):
    world = World(target, drafter, tmp_path / "out")
    decoding.begin(dies_at=5)
    with pytest.raises(Killed):
        world.run(resume=False)
    decoding.begin()
    assert world.progress() == ["progress.jsonl"]
    return world


CHANGES = {
    "setting": lambda world: {"config": replace(SHORT, seed=1)},
    "prompt": lambda world: {"dialogues": [*world.dialogues[:2], dialogue([9, 9], source="chat")]},
    "weights": lambda world: {
        "contestants": {"one": Contestant(drafter=world.contestants["one"].drafter, provenance={"sha256": "b"})}
    },
    "name": lambda world: {"contestants": {"two": world.contestants["one"]}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_with_something_else_is_refused_and_changes_nothing(killed, change, decoding):
    before = (killed.out / "progress.jsonl").read_bytes()
    vars(killed).update(CHANGES[change](killed))
    with pytest.raises(
        DataError, match=r"^resume: .*other settings, prompts or weights; .*resume=false .*anew$"
    ) as told:
        killed.run(resume=True)
    assert "\n" not in str(told.value)
    assert (killed.out / "progress.jsonl").read_bytes() == before
    assert decoding.calls == []


def test_progress_is_kept_until_the_report_is_written(killed, decoding, capsys, monkeypatch):
    def full(report, folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("drafters.decoding.report.Report.save", full)
        with pytest.raises(Exception, match="no space left"):
            killed.run(resume=True)
    assert killed.progress() == ["progress.jsonl"]
    assert f"3 finished parts of the measurement are taken from {killed.out}" in capsys.readouterr().out
    decoding.begin()
    report = killed.run(resume=True)["one"]
    assert decoding.units(killed.contestants["one"].drafter) == []
    assert killed.progress() == []
    assert math.isfinite(report.speedup)
    assert (killed.out / "report.json").is_file()
    assert "accepted length" in capsys.readouterr().out


def test_without_resume_everything_is_done_again(killed, decoding, capsys):
    killed.run(resume=False)
    assert [0] in decoding.units(killed.contestants["one"].drafter)
    assert "finished parts" not in capsys.readouterr().out
    assert killed.progress() == []


def test_a_measurement_warns_of_nothing(target, drafter, decoding):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured(target, drafter, dialogues_of(2), SHORT)
