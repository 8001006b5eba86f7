# Each scheduler against its naive twin on thousands of random cases, ties included; what it asks for, what it refuses,
# and that it does better than the rules it replaces where costs say so.

import pytest
import torch

from drafters.config import build_config
from drafters.errors import ConfigError, DataError
from drafters.scheduling.schedulers import Asynchronous, Fixed, Off, Prefix, StepTable, Threshold
from tests.scheduling_doubles import (
    TableCosts,
    jagged,
    naive_budget,
    naive_prefix,
    naive_threshold,
    outcome,
    random_steps,
    random_survival,
    roofline,
)

LAYOUTS = ["padded", "ragged"]
EVERY = [Off(), Fixed(), Fixed(length=2), Threshold(threshold=0.6), Prefix(), Asynchronous()]


def case(seed, layout):
    """Random costs and a generator for survivals, on a grid of eighths in half of the cases."""
    generator = torch.Generator().manual_seed(seed)
    steps = [random_steps(80, generator), roofline(80, flat=1 + seed % 13), jagged(80, tile=1 + seed % 7)][seed % 3]
    costs = TableCosts(steps_s=steps, layout=layout, per_draft_s=0.01 * (seed % 4), rest_s=0.1 * (seed % 2))
    num_rows, num_slots = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
    return costs, num_rows, num_slots, generator, 8 if seed % 2 else None


def run(schedule, survival_RS):
    """The lengths of one round, told as what became of it."""
    lengths_R = schedule.lengths(survival_RS)
    zeros = [0] * len(survival_RS)
    schedule.observe(outcome(lengths_R.tolist(), zeros, drafted=survival_RS.shape[1]))
    return lengths_R.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole_round", [True, False])
def test_prefix_equals_the_naive_loop(layout, whole_round):
    seen = set()
    for seed in range(1500):
        costs, num_rows, num_slots, generator, grid = case(seed, layout)
        survival_RS = random_survival(num_rows, num_slots, generator, grid=grid)
        lengths = Prefix(whole_round=whole_round).begin(costs, num_slots).lengths(survival_RS).tolist()
        assert lengths == naive_prefix(survival_RS.tolist(), costs, whole_round=whole_round), seed
        seen.add(sum(lengths) / (num_rows * num_slots))
    assert {0.0, 1.0} < seen
    assert len(seen) > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_asynchronous_equals_the_naive_loop(layout):
    """Of one number of rows: the first two rounds stop early, later ones spend the budget of two rounds before."""
    crossed = 0
    for seed in range(400):
        costs, num_rows, num_slots, generator, grid = case(seed, layout)
        schedule = Asynchronous().begin(costs, num_slots)
        rounds = [random_survival(num_rows, num_slots, generator, grid=grid) for _ in range(5)]
        found = [run(schedule, survival_RS) for survival_RS in rounds]
        plain = [survival_RS.tolist() for survival_RS in rounds]
        assert found[:2] == [naive_prefix(survival, costs) for survival in plain[:2]], seed
        budgets = [naive_budget(survival, costs) for survival in plain[:-2]]
        twins = zip(plain[2:], budgets, strict=True)
        assert found[2:] == [naive_prefix(survival, costs, budget=budget) for survival, budget in twins], seed
        count = max if layout == "padded" else sum
        stopped = [count(naive_prefix(survival, costs)) for survival in plain[:-2]]
        crossed += sum(early < budget for early, budget in zip(stopped, budgets, strict=True))
    assert crossed > 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_asynchronous_budget_scales_with_the_rows(layout):
    """Rows like those of two rounds ago, twice as many or half: as if each had come twice then, or one of each pair."""
    for seed in range(200):
        costs, num_rows, num_slots, generator, _ = case(seed, layout)
        few = random_survival(num_rows, num_slots, generator)
        many = few.repeat_interleave(2, 0)
        for before, today in ((few, many), (many, few)):
            schedule = Asynchronous().begin(costs, num_slots)
            for survival_RS in (before, before):
                run(schedule, survival_RS)
            budget = naive_budget(today.tolist(), costs)
            assert run(schedule, today) == naive_prefix(today.tolist(), costs, budget=budget), seed


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_threshold_equals_the_naive_loop(threshold):
    for seed in range(500):
        costs, num_rows, num_slots, generator, grid = case(seed, "ragged")
        survival_RS = random_survival(num_rows, num_slots, generator, grid=grid)
        lengths = Threshold(threshold=threshold).begin(costs, num_slots).lengths(survival_RS)
        assert lengths.tolist() == naive_threshold(survival_RS.tolist(), threshold), seed


def test_what_is_asked_of_the_drafter():
    costs = TableCosts(steps_s=(1.0,))
    assert [scheduler.begin(costs, 5).want(3) for scheduler in EVERY] == [0, 5, 2, 5, 5, 5]
    assert [Fixed(length=0).begin(costs, 5).want(3), Fixed(length=5).begin(costs, 5).want(3)] == [0, 5]


def test_off_and_fixed_do_not_look():
    costs = TableCosts(steps_s=(1.0,))
    survival_RS = random_survival(4, 5, torch.Generator().manual_seed(0))
    assert run(Off().begin(costs, 5), survival_RS) == [0] * 4
    assert run(Fixed().begin(costs, 5), survival_RS) == [5] * 4
    assert run(Fixed(length=3).begin(costs, 5), survival_RS) == [3] * 4
    assert run(Fixed(length=3).begin(costs, 5), survival_RS[:, :2]) == [2] * 4  # near the end of a text


def test_of_equals_the_earlier_slot_comes_first_and_then_the_earlier_row():
    """Steps of up to six tokens cost the same: room for two drafts of four rows, for three of three."""
    costs = TableCosts(steps_s=(1.0,) * 7 + (9.0,) * 20)
    assert run(Prefix().begin(costs, 3), torch.full((4, 3), 0.5)) == [1, 1, 0, 0]
    survival_RS = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.9, 0.5], [0.5, 0.5, 0.5]])
    assert run(Prefix().begin(costs, 3), survival_RS) == [1, 2, 0]


def test_admitted_drafts_are_prefixes():
    """No draft of a row is worth more than an admitted one before it, also where many are worth the same."""
    for seed in range(300):
        costs, num_rows, num_slots, generator, _ = case(seed, "ragged")
        survival_RS = random_survival(num_rows, num_slots, generator, grid=4)
        lengths = run(Prefix().begin(costs, num_slots), survival_RS)
        taken = [a for row, n in zip(survival_RS.tolist(), lengths, strict=True) for a in row[:n]]
        left = [a for row, n in zip(survival_RS.tolist(), lengths, strict=True) for a in row[n:]]
        assert min(taken, default=1.0) >= max(left, default=0.0), seed


def test_drafting_that_is_paid_makes_longer_prefixes_pay():
    """A step that doubles with every draft is worth no draft alone, but it is after drafting for as long as nine."""
    steps, survival_RS = (0.0, 1.0, 2.0, 3.0, 4.0), torch.tensor([[0.9, 0.8, 0.1]])
    costs = TableCosts(steps_s=steps, per_draft_s=3.0)
    assert run(Prefix(whole_round=False).begin(costs, 3), survival_RS) == [0]
    assert run(Prefix().begin(costs, 3), survival_RS) == [2]
    rate = {n: (1 + sum(survival_RS[0, :n].tolist())) / (steps[1 + n] + 9.0) for n in range(4)}
    assert max(rate, key=rate.__getitem__) == 2


def test_the_asynchronous_budget_crosses_a_dip_that_stops_the_prefix():
    costs = TableCosts(steps_s=(0.0, 1.0, 2.0, 2.0, 2.0))
    survival_RS = torch.tensor([[0.9, 0.85, 0.8]])
    schedule = Asynchronous().begin(costs, 3)
    assert [run(schedule, survival_RS) for _ in range(4)] == [[0], [0], [3], [3]]
    assert run(Prefix().begin(costs, 3), survival_RS) == [0]


def test_padded_rows_are_as_long_as_the_widest():
    """Where a column costs as much as R drafts, one sure row does not pay for its companions, but many do."""
    costs = TableCosts(steps_s=tuple(1 + n / 8 for n in range(40)), layout="padded")
    sure, unsure = [0.99, 0.98, 0.97], [0.05, 0.01, 0.0]
    assert run(Prefix().begin(costs, 3), torch.tensor([sure] + [unsure] * 7)) == [0] * 8
    assert run(Prefix().begin(costs, 3), torch.tensor([sure] * 7 + [unsure])) == [3] * 8
    ragged = TableCosts(steps_s=costs.steps_s)
    assert run(Prefix().begin(ragged, 3), torch.tensor([sure] + [unsure] * 7)) == [3] + [0] * 7


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheduler", EVERY, ids=repr)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 0)])
def test_nothing_to_schedule(scheduler, layout, shape):
    schedule = scheduler.begin(TableCosts(steps_s=(1.0,) * 30, layout=layout), 3)
    for _ in range(4):
        lengths_R = schedule.lengths(torch.zeros(shape))
        assert lengths_R.dtype == torch.int64
        assert lengths_R.tolist() == [0] * shape[0]
    assert len(run(schedule, torch.full((2, 3), 0.5))) == 2


@pytest.mark.parametrize("scheduler", EVERY, ids=repr)
@pytest.mark.parametrize(
    ("bad", "slots"),
    [(float("nan"), (0, 1, 2)), (-0.1, (0, 1, 2)), (1.1, (0, 1, 2)), (float("inf"), (0, 1, 2)), (0.55, (1, 2))],
)
def test_survivals_that_are_none_are_refused(scheduler, bad, slots):
    """0.55 is more than the 0.5 before it."""
    schedule = scheduler.begin(TableCosts(steps_s=(1.0,) * 30), 3)
    for slot in slots:
        survival_RS = torch.tensor([[0.5, 0.5, 0.4], [0.5, 0.5, 0.4]])
        survival_RS[1, slot] = bad
        with pytest.raises(DataError, match=rf"survival: got .* at row 1, draft {slot + 1}"):
            schedule.lengths(survival_RS)
    with pytest.raises(DataError, match=r"\[rows, slots\]"):
        schedule.lengths(survival_RS[0])


def test_a_product_may_rise_by_its_rounding():
    survival_RS = torch.tensor([[0.7, 0.70000005, 0.4], [1.0000001, 1.0, 1.0]])
    assert survival_RS[0, 1] > survival_RS[0, 0]
    assert run(Threshold(threshold=1.0).begin(TableCosts(steps_s=(1.0,)), 3), survival_RS) == [0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_survivals_of_any_width(dtype):
    survival_RS = random_survival(5, 4, torch.Generator().manual_seed(1), grid=8)
    for scheduler in EVERY:
        costs = TableCosts(steps_s=roofline(30, flat=8))
        found = [run(scheduler.begin(costs, 4), values) for values in (survival_RS, survival_RS.to(dtype))]
        assert found[0] == found[1]


def test_a_table_forgets_old_numbers_of_rows():
    table = StepTable(TableCosts(steps_s=roofline(500)))
    first = table.seconds(1, 4)
    for num_rows in range(2, 100):
        assert len(table.seconds(num_rows, 4)) == 4 * num_rows + 1
    torch.testing.assert_close(table.seconds(1, 4), first)


HERE = "drafters.scheduling.schedulers"


@pytest.mark.parametrize(
    ("node", "built"),
    [
        ({"_target_": f"{HERE}.Off"}, Off()),
        ({"_target_": f"{HERE}.Fixed", "length": 3}, Fixed(length=3)),
        ({"_target_": f"{HERE}.Fixed", "length": None}, Fixed()),
        ({"_target_": f"{HERE}.Threshold", "threshold": 0.25}, Threshold(threshold=0.25)),
        ({"_target_": f"{HERE}.Prefix", "whole_round": False}, Prefix(whole_round=False)),
        ({"_target_": f"{HERE}.Asynchronous"}, Asynchronous()),
    ],
)
def test_settings_build_schedulers(node, built):
    assert build_config(node, key="schedule")[1] == built


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Fixed", {"length": -1}, r"schedule.length: got -1; accepted: 0 or more"),
        ("Threshold", {"threshold": 1.5}, r"schedule.threshold: got 1.5; accepted: 0 to 1"),
        ("Threshold", {"threshold": float("nan")}, r"threshold: got nan"),
        ("Prefix", {"early": True}, r"schedule.early: unknown setting; accepted: whole_round"),
    ],
)
def test_wrong_settings_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config({"_target_": f"{HERE}.{name}", **settings}, key="schedule")


def test_more_drafts_than_the_drafter_makes_are_refused():
    with pytest.raises(ConfigError, match=r"length: got 6; accepted: 0 to 5"):
        Fixed(length=6).begin(TableCosts(steps_s=(1.0,)), 5)
