# Whether to draft at all: the account against one that is kept by hand, what it guarantees whatever happens, how close
# it comes to the better of always and never, and that it turns round when acceptance does.

import math
from itertools import pairwise

import pytest
import torch

from drafters.config import build_config
from drafters.errors import ConfigError
from drafters.scheduling.gate import Gated
from drafters.scheduling.schedulers import Fixed, Prefix, Schedule, Scheduler, Threshold
from tests.scheduling_doubles import TableCosts, outcome, random_survival, roofline

G = 4
STEPS = roofline(400, flat=8)


def never_rate(costs, num_rows):
    """Tokens per second of rounds without drafts."""
    return num_rows / (costs.step_s(num_rows, num_rows) + costs.draft_s(num_rows, 0) + costs.overhead_s(num_rows))


def drafted_s(costs, lengths):
    num_rows = len(lengths)
    step_s = costs.step_s(num_rows, costs.tokens_of(torch.tensor(lengths)))
    return step_s + costs.draft_s(num_rows, G) + costs.overhead_s(num_rows)


def accepted_counts(num_rows, p, generator):
    """Of G drafts that stand with probability `p` each, given that those before did."""
    return (torch.rand(num_rows, G, generator=generator) < p).long().cumprod(1).sum(1).tolist()


class Day:
    """A run of rounds, and what it came to. `p` is the acceptance of each draft, or of each round in turn."""

    def __init__(self, schedule, costs, *, seed=0):
        self.schedule, self.costs = schedule, costs
        self.generator = torch.Generator().manual_seed(seed)
        self.drafted, self.seconds, self.gained, self.never = [], 0.0, 0.0, 0.0

    def round(self, num_rows, p):
        wanted = self.schedule.want(num_rows)
        lengths = [wanted] * num_rows
        accepted = accepted_counts(num_rows, p, self.generator) if wanted else [0] * num_rows
        seconds = drafted_s(self.costs, lengths) if wanted else num_rows / never_rate(self.costs, num_rows)
        self.schedule.observe(outcome(lengths, accepted, drafted=wanted))
        self.drafted.append(wanted > 0)
        self.seconds += seconds
        self.gained += num_rows + sum(accepted)
        self.never += seconds * never_rate(self.costs, num_rows)


def by_hand(config, costs, past, num_rows):
    """Whether to draft, from the whole past [(lengths, accepted, drafted)] of one number of rows."""
    balance, start = 0.0, config.credit / 16
    for lengths, accepted, drafted in past:
        if drafted:
            balance += num_rows + sum(accepted) - never_rate(costs, num_rows) * drafted_s(costs, lengths)
        else:
            balance += config.probe_share * num_rows
        lent = max(0.0, min(start, -balance))
        balance, start = min(balance + lent, config.credit), start - lent
    return balance >= 0


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_the_account_is_the_one_kept_by_hand(layout):
    seen = set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        costs = TableCosts(steps_s=STEPS, layout=layout, per_draft_s=0.01, read_s=0.02, rest_s=0.1)
        config = Gated(credit=20.0, probe_share=0.2)
        schedule, num_rows = config.begin(costs, G), 1 + seed % 8
        past = []
        for _ in range(60):
            wanted = schedule.want(num_rows)
            assert (wanted == G) == by_hand(config, costs, past, num_rows)
            lengths = accepted = [0] * num_rows
            if wanted:
                survival_RS = random_survival(num_rows, G, generator)
                lengths = schedule.lengths(survival_RS).tolist()
                assert lengths == config.inner.begin(costs, G).lengths(survival_RS).tolist()
                accepted = [min(n, a) for n, a in zip(lengths, accepted_counts(num_rows, 0.3, generator), strict=True)]
            past.append((lengths, accepted, wanted))
            schedule.observe(outcome(lengths, accepted, drafted=wanted))
            seen.add(wanted)
    assert seen == {0, G}


def loads(costs):
    """Numbers of rows, and an acceptance for each at which drafting is as good as never drafting, times 0.85 to 1.3."""
    for num_rows in (1, 6, 24):
        even = num_rows / never_rate(costs, num_rows)
        for relative in (0.6, 0.9, 0.98, 1.0, 1.03, 1.08, 1.3):
            tau = relative * drafted_s(costs, [G] * num_rows) / even
            if 1 < tau < 1 + G:
                yield num_rows, tau, relative


def acceptance_of(tau):
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(1, G + 1)) < tau - 1 else (low, middle)
    return low


def test_within_three_percent_of_the_better_of_always_and_never():
    """Stationary acceptance, at each load. Rates are those expected of the decisions taken, so that luck with drafts
    does not count."""
    costs = TableCosts(steps_s=STEPS, per_draft_s=0.05, read_s=0.005, rest_s=0.05)
    shares, cases = {}, list(loads(costs))
    for num_rows, tau, relative in cases:
        day = Day(Gated(inner=Fixed()).begin(costs, G), costs)
        for _ in range(2000):
            day.round(num_rows, acceptance_of(tau))
        drafted = sum(day.drafted)
        tokens = num_rows * (drafted * tau + len(day.drafted) - drafted)
        always = num_rows * tau / drafted_s(costs, [G] * num_rows)
        best = max(always, never_rate(costs, num_rows))
        assert tokens / day.seconds > 0.97 * best, (num_rows, relative)
        shares.setdefault(relative, []).append(drafted / len(day.drafted))
    assert {num_rows for num_rows, _, _ in cases} == {1, 6, 24}
    assert max(shares[0.6]) < 0.1
    assert min(shares[1.3]) > 0.9


def test_never_more_than_the_probes_are_lost_whatever_happens():
    """Acceptance and load change as they like, worst of all with the gate: it is high while it does not draft."""
    costs = TableCosts(steps_s=STEPS, per_draft_s=0.05, rest_s=0.05)
    config = Gated(inner=Fixed(), probe_share=0.02, credit=40.0)
    for seed in range(20):
        day = Day(config.begin(costs, G), costs, seed=seed)
        num_rows, met = 1, {}
        for turn in range(1500):
            if turn % (7 + seed) == 0:
                num_rows = int(torch.randint(1, 13, (1,), generator=day.generator))
            day.round(num_rows, 0.9 if day.drafted and not day.drafted[-1] else 0.1 * (seed % 4))
            met[num_rows] = drafted_s(costs, [G] * num_rows) * never_rate(costs, num_rows)
        slack = config.credit / 16 + sum(met.values())
        assert day.gained > (1 - config.probe_share) * day.never - slack
        assert any(day.drafted)


def test_all_loads_together_lose_no_more_than_the_start():
    """A batch that empties, with drafts that never stand: a fresh load costs one round, and not another start."""
    costs = TableCosts(steps_s=(1.0,) * 100, per_draft_s=0.02)
    day = Day(Gated(inner=Fixed(), credit=160.0).begin(costs, G), costs)
    for num_rows in range(16, 0, -1):
        for _ in range(40):
            day.round(num_rows, 0.0)
    lost = {n: n * (drafted_s(costs, [G] * n) - 1.0) for n in range(1, 17)}
    assert 10 < day.never - day.gained < 10 + sum(lost.values()) + 0.01 * day.never


def test_it_turns_off_and_on_as_acceptance_changes():
    """On again with the next probe: one loses 2 * 1.85 tokens, which 185 rounds of 2 * 0.01 pay for."""
    costs = TableCosts(steps_s=STEPS, per_draft_s=0.2)
    day = Day(Gated(inner=Fixed(), credit=100.0).begin(costs, G), costs)
    shares = []
    for p in (0.9, 0.0, 0.9):
        start = len(day.drafted)
        for _ in range(1200):
            day.round(2, p)
        shares.append(sum(day.drafted[start:]) / 1200)
    assert shares[0] == 1.0
    assert shares[1] < 0.15
    assert shares[2] > 1 - 186 / 1200


def test_probes_are_as_rare_as_they_are_dear():
    """Drafts that never stand: what probes lose is the share that was allowed."""
    for share in (0.01, 0.05):
        costs = TableCosts(steps_s=(1.0,) * 40, per_draft_s=0.125)
        day = Day(Gated(inner=Fixed(), probe_share=share).begin(costs, G), costs)
        for _ in range(1000):  # what is laid by for the start is spent
            day.round(2, 0.0)
        lost, rounds = day.never - day.gained, len(day.drafted)
        for _ in range(4000):
            day.round(2, 0.0)
        assert (day.never - day.gained - lost) / (day.never * 4000 / 5000) == pytest.approx(share, rel=0.1)
        probes = [turn for turn in range(rounds, len(day.drafted)) if day.drafted[turn]]
        assert {b - a - round(1 / share) for a, b in pairwise(probes)} <= {0, 1, 2}


def test_loads_have_accounts_of_their_own():
    """Drafts pay for one row and not for many, in turns of 20 rounds: gains at one pay for no loss at the other."""
    costs = TableCosts(steps_s=roofline(400, flat=64))
    day = Day(Gated(inner=Fixed()).begin(costs, G), costs)
    by_load = {1: [], 24: []}
    for turn in range(2000):
        num_rows = 1 if turn % 40 < 20 else 24
        day.round(num_rows, 0.4)
        by_load[num_rows].append(day.drafted[-1])
    assert all(by_load[1])
    assert 0 < sum(by_load[24]) < 0.1 * len(by_load[24])


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_a_load_where_not_even_full_acceptance_pays_is_not_probed(layout):
    costs = TableCosts(steps_s=tuple(max(n, 1) / 8 for n in range(400)), layout=layout, per_draft_s=0.01)
    schedule = Gated(inner=Fixed()).begin(costs, G)
    for _ in range(500):
        assert schedule.want(16) == 0
        schedule.observe(outcome([0] * 16, [0] * 16, drafted=0))


def test_what_drafting_costs_while_off_is_charged_to_being_off():
    """A drafter that reads either way, at nearly the price of drafting, is used if one draft in ten rounds stands."""
    for read_s, pays in ((0.0, False), (0.4, True)):
        costs = TableCosts(steps_s=(1.0,) * 40, read_s=read_s, per_draft_s=0.11 - read_s / 4)
        day = Day(Gated(inner=Fixed()).begin(costs, G), costs)
        for _ in range(1000):
            day.round(1, 0.1)
        assert sum(day.drafted) > 900 if pays else sum(day.drafted) < 100


class Spy(Scheduler, Schedule):
    """Writes down what it is asked and told."""

    def __init__(self, drafts):
        self.drafts, self.heard = drafts, []

    def begin(self, costs, num_slots):
        self.heard.append(("begin", num_slots))
        return self

    def want(self, num_rows):
        self.heard.append(("want", num_rows))
        return self.drafts

    def lengths(self, survival_RS):
        self.heard.append(("lengths", survival_RS))
        return torch.tensor([1, 0])

    def observe(self, outcome):
        self.heard.append(("observe", outcome))


@pytest.mark.parametrize("drafts", [0, 3])
def test_it_asks_and_tells_the_scheduler_inside(drafts):
    spy = Spy(drafts)
    schedule = Gated(inner=spy).begin(TableCosts(steps_s=(1.0,) * 40), G)
    assert schedule.want(2) == drafts
    survival_RS, told = torch.full((2, 3), 0.5), outcome([1, 0], [1, 0], drafted=3)
    assert schedule.lengths(survival_RS).tolist() == [1, 0]
    schedule.observe(told)
    assert spy.heard == [("begin", G), ("want", 2), ("lengths", survival_RS), ("observe", told)]


def test_no_rows():
    schedule = Gated().begin(TableCosts(steps_s=STEPS), G)
    assert schedule.want(0) == 0
    schedule.observe(outcome([], [], drafted=0))
    assert schedule.want(2) == G


HERE = "drafters.scheduling"


def test_settings_build_a_gate():
    node = {"_target_": f"{HERE}.gate.Gated", "inner": {"_target_": f"{HERE}.schedulers.Threshold", "threshold": 0.7}}
    built = build_config({**node, "probe_share": 0.02, "credit": 100}, key="schedule")[1]
    assert built == Gated(inner=Threshold(threshold=0.7), probe_share=0.02, credit=100.0)
    assert build_config({"_target_": f"{HERE}.gate.Gated"}, key="schedule")[1].inner == Prefix()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe_share": 0.0}, r"schedule.probe_share: got 0.0; accepted: above 0 and below 1"),
        ({"credit": math.inf}, r"schedule.credit: got inf; accepted: a number of tokens above 0"),
        ({"inner": 3}, r"schedule.inner: got 3; accepted: a scheduler"),
        ({"inner": {"_target_": f"{HERE}.schedulers.Fixed", "length": -1}}, r"schedule.inner.length: got -1"),
        ({"inner": {"_target_": f"{HERE}.schedulers.Fixd"}}, r"schedule.inner._target_: module .* has no 'Fixd'"),
        ({"probes": 1}, r"schedule.probes: unknown setting"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config({"_target_": f"{HERE}.gate.Gated", **settings}, key="schedule")
