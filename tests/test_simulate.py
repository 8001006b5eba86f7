# Simulated load against closed forms, where acceptance and costs are constant, and against a twin that follows one
# request after the other; replayed rounds, arrivals, the same requests for all schedulers.

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.errors import ConfigError
from drafters.scheduling.calibration import identity
from drafters.scheduling.gate import Gated
from drafters.scheduling.observations import Observations
from drafters.scheduling.profile import CostProfile, DraftPoint, OverheadPoint, VerifyPoint
from drafters.scheduling.schedulers import Asynchronous, Fixed, Off, Outcome, Prefix, Schedule, Scheduler, Threshold
from drafters.scheduling.simulate import (
    NO_DRAFTER,
    Replay,
    SimulateConfig,
    _Requests,
    frontier,
    simulate,
)
from drafters.types import Sampling

STEP_S, DRAFT_S, READ_S, LOOP_S = 0.5, 0.25, 0.0625, 0.03125
CONFIG = SimulateConfig(tokens_per_request=24, num_steps=300, warmup_steps=60, num_seeds=2)


def constant(layout="padded"):
    """Steps cost the same whatever they hold; drafting costs by length, reading alone READ_S."""
    return CostProfile(
        layout=layout,
        verify=(VerifyPoint(tokens=1, seconds=STEP_S), VerifyPoint(tokens=10_000, seconds=STEP_S)),
        draft=(DraftPoint(length=0, seconds=READ_S), DraftPoint(length=8, seconds=READ_S + 8 * DRAFT_S)),
        overhead=(OverheadPoint(seconds=LOOP_S),),
    )


def rising(layout):
    """Steps that cost more from some tokens on, with a dip."""
    points = ((1, 1.0), (8, 1.1), (16, 1.9), (20, 1.7), (40, 4.0), (400, 40.0))
    return replace(constant(layout), verify=tuple(VerifyPoint(tokens=n, seconds=s) for n, s in points))


def recorded(accepted, *, num_slots=4, confidence=0.7, proposed=None, prompts=None):
    """Rounds with one confidence everywhere."""
    accepted_N = torch.tensor(accepted)
    proposed_N = torch.full_like(accepted_N, num_slots) if proposed is None else torch.tensor(proposed)
    slots_G = torch.arange(num_slots)
    confidence_NG = torch.full((len(accepted), num_slots), confidence, dtype=torch.float64)
    return Observations(
        confidence_NG=confidence_NG.masked_fill(slots_G >= proposed_N[:, None], math.nan),
        likeliest_NG=(confidence_NG / 2).masked_fill(slots_G >= proposed_N[:, None], math.nan),
        accepted_N=accepted_N,
        proposed_N=proposed_N,
        prompt_N=torch.zeros_like(accepted_N) if prompts is None else torch.tensor(prompts),
        context_N=1 + torch.cat([torch.zeros(1, dtype=torch.int64), (accepted_N + 1).cumsum(0)[:-1]]),
    )


def random_rounds(num_prompts=7, num_slots=4, seed=0):
    """Acceptance follows the confidence; some rounds propose less than the block. They are some places apart."""
    generator = np.random.default_rng(seed)
    confidence, accepted, proposed, prompts, contexts = [], [], [], [], []
    for prompt in range(num_prompts):
        place = int(generator.integers(1, 50))
        for _ in range(generator.integers(1, 9)):
            place += int(generator.integers(1, 4))
            contexts.append(place)
            row = generator.uniform(0.2, 1.0, size=num_slots)
            count = int(generator.integers(0, num_slots + 1))
            stands = generator.uniform(size=num_slots) < row
            row[count:] = np.nan
            confidence.append(row)
            proposed.append(count)
            accepted.append(int(stands[:count].cumprod().sum()))
            prompts.append(prompt)
    return Observations(
        confidence_NG=torch.tensor(np.array(confidence)),
        likeliest_NG=torch.tensor(np.array(confidence)) / 2,
        accepted_N=torch.tensor(accepted),
        proposed_N=torch.tensor(proposed),
        prompt_N=torch.tensor(prompts),
        context_N=torch.tensor(contexts),
    )


@pytest.mark.parametrize(("length", "gain"), [(0, 1), (1, 2), (2, 3), (4, 3)])
@pytest.mark.parametrize("concurrency", [1, 6])
def test_constant_acceptance_and_costs_have_a_closed_form(length, gain, concurrency):
    """Two drafts always stand. All requests go on at the same pace: nothing is left to chance."""
    replay = Replay(recorded([2] * 5))
    for layout in ("padded", "ragged"):
        found = simulate(replay, constant(layout), Fixed(length=length), concurrency=concurrency, config=CONFIG)
        round_s = STEP_S + READ_S + length * DRAFT_S + LOOP_S
        # Of requests already on their way some end on the way to a whole gain, but only before the steps that count.
        assert found.tokens_per_second.value == pytest.approx(concurrency * gain / round_s)
        assert found.tokens_per_second_per_user.value == pytest.approx(gain / round_s)
        assert found.accepted_length.value == pytest.approx(gain)
        assert found.drafts_per_row.value == length
        assert found.verified_tokens.value == found.paid_tokens.value == concurrency * (1 + length)
        assert found.rows.value == concurrency
        assert found.not_drafting.value == (length == 0)
        assert found.waiting.value == 0


def test_a_drafter_that_is_not_used_still_reads():
    replay = Replay(recorded([2] * 5))
    off = simulate(replay, constant(), Off(), concurrency=2, config=CONFIG)
    none = simulate(replay, constant(), None, concurrency=2, config=CONFIG)
    assert off.tokens_per_second.value == pytest.approx(2 / (STEP_S + READ_S + LOOP_S))
    assert none.tokens_per_second.value == pytest.approx(2 / (STEP_S + LOOP_S))
    assert (off.name, none.name) == ("Off", NO_DRAFTER)


class Greedy(Scheduler, Schedule):
    """Asks for two drafts, looks at what it is shown, and admits more than there are."""

    def begin(self, costs, num_slots):
        self.seen = []
        return self

    def want(self, num_rows):
        return 2

    def lengths(self, survival_RS):
        self.seen.append(survival_RS)
        return torch.full((len(survival_RS),), 9)

    def observe(self, outcome):
        assert outcome.drafted == 2
        assert set(outcome.proposed_R.tolist()) <= {1, 2}
        assert bool((outcome.accepted_R <= outcome.proposed_R).all())


def test_a_schedule_is_shown_what_was_drafted_and_gets_no_more():
    scheduler = Greedy()
    replay = Replay(recorded([1, 4], proposed=[1, 4], confidence=0.5))
    found = simulate(replay, constant(), scheduler, concurrency=3, config=replace(CONFIG, num_seeds=1))
    assert {tuple(row) for survival_RS in scheduler.seen for row in survival_RS.tolist()} == {(0.5, 0.0), (0.5, 0.25)}
    assert found.drafts_per_row.value == pytest.approx(1.5, abs=0.1)
    assert found.accepted_length.value == pytest.approx(2.5, abs=0.1)


def test_random_acceptance_has_the_mean_of_a_geometric_law():
    chance = 0.6
    generator = np.random.default_rng(4)
    stands = generator.uniform(size=(20_000, 4)) < chance
    replay = Replay(recorded(stands.cumprod(1).sum(1).tolist(), confidence=chance))
    config = replace(CONFIG, num_steps=600, num_seeds=5, tokens_per_request=300)
    for length in (1, 3, 4):
        found = simulate(replay, constant(), Fixed(length=length), concurrency=20, config=config)
        want = (1 - chance ** (length + 1)) / (1 - chance)
        assert found.accepted_length.value == pytest.approx(want, rel=0.02)
        assert found.tokens_per_second.value == pytest.approx(
            20 * want / (STEP_S + READ_S + length * DRAFT_S + LOOP_S), rel=0.02
        )
        low, high = found.accepted_length[1:]
        assert low < found.accepted_length.value < high
        assert high - low < 0.1


def test_arrivals_at_low_load_follow_littles_law():
    """What comes must leave; requests in work are rate x time in the system, as steps cost the same for all."""
    replay = Replay(recorded([1] * 5))
    costs = replace(constant(), draft=(), overhead=())
    rate, tokens = 0.8, 24
    config = SimulateConfig(rate=rate, tokens_per_request=tokens, num_steps=4000, warmup_steps=100, num_seeds=3)
    found = simulate(replay, costs, Fixed(length=1), concurrency=100, config=config)
    in_work_s = tokens / 2 * STEP_S
    assert found.tokens_per_second.value == pytest.approx(rate * tokens, rel=0.05)
    assert found.rows.value == pytest.approx(rate * in_work_s, rel=0.06)
    # A request that comes in the middle of a step waits for the next one, half a step on the mean.
    assert found.tokens_per_second_per_user.value == pytest.approx(tokens / (in_work_s + STEP_S / 2), rel=0.01)
    assert found.waiting.value == 0


def test_arrivals_beyond_capacity_wait():
    replay = Replay(recorded([1] * 5))
    config = replace(CONFIG, rate=50.0, tokens_per_request=4)
    open_loop = simulate(replay, constant(), Fixed(length=1), concurrency=3, config=config)
    closed = simulate(replay, constant(), Fixed(length=1), concurrency=3, config=replace(config, rate=None))
    assert open_loop.tokens_per_second.value == pytest.approx(closed.tokens_per_second.value)
    assert open_loop.rows.value == 3
    seconds = 210 * (STEP_S + READ_S + DRAFT_S + LOOP_S)  # in the middle of the steps that count
    taken = 1.5 / (STEP_S + READ_S + DRAFT_S + LOOP_S)
    assert open_loop.waiting.value == pytest.approx((50 - taken) * seconds, rel=0.05)
    assert open_loop.tokens_per_second_per_user.value < closed.tokens_per_second_per_user.value / 10


class Twin:
    """One run by plain loops: a list of requests, each followed by itself. For the same requests it asks _Requests."""

    def __init__(self, observations, survival, costs, scheduler, concurrency, config):
        self.rounds = {}
        for n, prompt in enumerate(observations.prompt_N.tolist()):
            proposed = int(observations.proposed_N[n])
            known = [float(a) if k < proposed else 0.0 for k, a in enumerate(survival[n])]
            place = int(observations.context_N[n])
            self.rounds.setdefault(prompt, []).append((known, proposed, int(observations.accepted_N[n]), place))
        self.named = [(prompt, at) for prompt, rounds in sorted(self.rounds.items()) for at in range(len(rounds))]
        self.costs, self.concurrency, self.config = costs, concurrency, config
        self.schedule = scheduler.begin(costs, observations.num_slots)
        self.places, self.now, self.began = [None] * concurrency, 0.0, 0.0
        self.tokens = self.row_steps = self.drafts = self.accepted = self.idle = 0
        self.rates = []

    def run(self, replay):
        config = self.config
        requests = _Requests(replay, config.rate, config.seed)
        left = np.random.default_rng([config.seed, 1]).integers(1, config.tokens_per_request + 1, size=self.concurrency)
        for step in range(-config.warmup_steps, config.num_steps):
            is_first = step == -config.warmup_steps
            self.began = self.now if step == 0 else self.began
            if config.rate is not None and all(one is None for one in self.places):
                self.now = max(self.now, requests.first().arrived_s)
            for place in range(self.concurrency):
                if self.places[place] is None and requests.first().arrived_s <= self.now:
                    new = requests.take()
                    tokens = int(left[place]) if is_first and config.rate is None else config.tokens_per_request
                    since = self.now if config.rate is None else new.arrived_s
                    prompt, at = self.named[new.round]
                    self.places[place] = [prompt, at, tokens, since, step >= 0 and not is_first]
            self.step(counts=step >= 0)
        return self

    def step(self, *, counts):
        rows = [place for place, one in enumerate(self.places) if one is not None]
        found = [self.rounds[self.places[row][0]][self.places[row][1]] for row in rows]
        drafted = self.schedule.want(len(rows))
        lengths = [0] * len(rows)
        if drafted:
            asked = torch.tensor([known[:drafted] for known, *_ in found], dtype=torch.float64)
            lengths = self.schedule.lengths(asked).tolist()
            lengths = [min(n, proposed, drafted) for n, (_, proposed, *_) in zip(lengths, found, strict=True)]
        accepted = [min(n, stood) for n, (_, _, stood, _) in zip(lengths, found, strict=True)]
        tokens = len(rows) * (1 + max(lengths)) if self.costs.layout == "padded" else len(rows) + sum(lengths)
        seconds = self.costs.step_s(len(rows), tokens) + self.costs.draft_s(len(rows), drafted)
        seconds += self.costs.overhead_s(len(rows))
        self.now += seconds
        self.schedule.observe(
            Outcome(drafted=drafted, proposed_R=torch.tensor(lengths), accepted_R=torch.tensor(accepted))
        )
        for row, stood in zip(rows, accepted, strict=True):
            prompt, at, left, since, is_timed = self.places[row]
            gained = min(stood + 1, left)
            self.tokens += gained * counts
            goal = self.rounds[prompt][at][3] + stood + 1
            later = [i for i, one in enumerate(self.rounds[prompt]) if one[3] >= goal]
            self.places[row] = [prompt, later[0] if later else 0, left - gained, since, is_timed]
            if left == gained:
                self.places[row] = None
                if is_timed:
                    self.rates.append(self.config.tokens_per_request / (self.now - since))
        if counts:
            self.row_steps += len(rows)
            self.drafts += sum(lengths)
            self.accepted += sum(accepted)
            self.idle += drafted == 0


SCHEDULERS = {
    "threshold": Threshold(threshold=0.55),
    "prefix": Prefix(),
    "asynchronous": Asynchronous(),
    "gated": Gated(),
    "fixed": Fixed(length=2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("layout", "rate"), [("padded", None), ("ragged", None), ("ragged", 0.05), ("padded", 0.4)])
def test_a_run_is_that_of_its_twin(name, layout, rate):
    observations = random_rounds()
    replay, costs = Replay(observations), rising(layout)
    config = SimulateConfig(rate=rate, tokens_per_request=13, num_steps=120, warmup_steps=15, num_seeds=1, seed=3)
    found = simulate(replay, costs, SCHEDULERS[name], concurrency=9, config=config)
    survival = observations.confidence_NG.cumprod(1).tolist()
    twin = Twin(observations, survival, costs, SCHEDULERS[name], 9, config).run(replay)
    assert found.rows.value == pytest.approx(twin.row_steps / 120)
    assert found.drafts_per_row.value == pytest.approx(twin.drafts / twin.row_steps)
    assert found.accepted_length.value == pytest.approx(1 + twin.accepted / twin.row_steps)
    assert found.not_drafting.value == pytest.approx(twin.idle / 120)
    assert len(twin.rates) > 10
    assert found.tokens_per_second_per_user.value == pytest.approx(np.mean(twin.rates))
    assert found.tokens_per_second.value == pytest.approx(twin.tokens / (twin.now - twin.began))


def test_only_full_rows_of_the_same_prompt_follow_each_other():
    """Prompt 3 always has one draft accepted, prompt 5 none; their rounds are mixed in the record."""
    observations = recorded([1, 0, 1, 0, 1], prompts=[3, 5, 3, 5, 3])
    replay = Replay(observations)
    assert replay.accepted_N.tolist() == [1, 1, 1, 0, 0]
    assert (replay.start_P.tolist(), replay.count_P.tolist()) == ([0, 3], [3, 2])
    config = replace(CONFIG, tokens_per_request=8, num_steps=1000)
    found = simulate(replay, constant(), Fixed(length=1), concurrency=1, config=config)
    # Three requests in five begin in prompt 3 and take 4 rounds, the others take 8.
    assert found.accepted_length.value == pytest.approx(8 / (0.6 * 4 + 0.4 * 8), abs=0.05)


def test_survivals_are_calibrated_and_end_where_the_proposal_does():
    observations = recorded([0, 1], proposed=[2, 4], confidence=0.8)
    survival_NG = Replay(observations).survival_NG
    assert survival_NG.tolist()[0] == pytest.approx([0.8, 0.64, 0, 0])
    assert survival_NG.tolist()[1] == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    plain = identity(4, sampling=Sampling(), drafter_sha256="d", target_hash="t")
    calibration = replace(plain, temperatures=(2.0,) * 4, method="temperature")
    softer = torch.sigmoid(torch.logit(torch.tensor(0.8, dtype=torch.float64)) / 2).item()
    found = Replay(observations, calibration).survival_NG
    assert found.tolist()[0] == pytest.approx([softer, softer**2, 0, 0])


def test_the_same_seed_gives_the_same_and_another_seed_another():
    replay = Replay(random_rounds())
    one, again, other = (
        simulate(replay, rising("ragged"), Prefix(), concurrency=5, config=replace(CONFIG, seed=seed))
        for seed in (0, 0, 7)
    )
    assert one == again
    assert one.tokens_per_second != other.tokens_per_second
    single = simulate(replay, rising("ragged"), Prefix(), concurrency=5, config=replace(CONFIG, num_seeds=1))
    assert math.isnan(single.tokens_per_second.low)


def test_intervals_are_those_of_students_law():
    replay = Replay(random_rounds())
    runs = [
        simulate(replay, rising("ragged"), Prefix(), concurrency=3, config=replace(CONFIG, seed=n, num_seeds=1))
        for n in range(4)
    ]
    values = [run.accepted_length.value for run in runs]
    found = simulate(replay, rising("ragged"), Prefix(), concurrency=3, config=replace(CONFIG, num_seeds=4))
    half = 3.182446 * np.std(values, ddof=1) / 2  # of 3 degrees of freedom
    want = (np.mean(values), np.mean(values) - half, np.mean(values) + half)
    assert found.accepted_length == pytest.approx(want, rel=1e-6)


def test_requests_are_the_same_whoever_serves_them():
    replay = Replay(random_rounds())
    for rate in (None, 2.0):
        fast, slow = _Requests(replay, rate, 5), _Requests(replay, rate, 5)
        slow.num_waiting(3000.0) if rate else slow.first()
        assert [fast.take() for _ in range(3000)] == [slow.take() for _ in range(3000)]
    gaps = np.diff([fast.take().arrived_s for _ in range(4000)])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.05)


def test_results_can_be_stored():
    found = simulate(Replay(recorded([0])), constant(), Off(), concurrency=2, config=replace(CONFIG, num_seeds=1))
    values = found.to_dict()
    assert (values["name"], values["concurrency"]) == ("Off", 2)
    assert values["rows"] == {"value": 2.0, "low": None, "high": None}
    json.dumps(values, allow_nan=False)


def test_a_frontier_has_every_scheduler_and_no_drafter_at_every_concurrency():
    replay, calls = Replay(random_rounds()), []
    config = replace(CONFIG, num_steps=60, warmup_steps=5)
    found = frontier(
        replay,
        rising("ragged"),
        {"all": Fixed(length=4), "prefix": Prefix()},
        [1, 8],
        config,
        progress=lambda *c: calls.append(c),
    )
    assert [(one.name, one.concurrency) for one in found] == [
        (name, count) for name in (NO_DRAFTER, "all", "prefix") for count in (1, 8)
    ]
    assert calls == [(n, 6) for n in range(1, 7)]
    alone = simulate(replay, rising("ragged"), Prefix(), concurrency=8, config=config)
    assert found[-1] == replace(alone, name="prefix")
    json.dumps([one.to_dict() for one in found], allow_nan=False)


def test_out_of_range_is_refused():
    replay = Replay(recorded([1]))
    with pytest.raises(ConfigError, match="concurrency: got 0; accepted: 1 or more"):
        simulate(replay, constant(), Off(), concurrency=0, config=CONFIG)
    for name, value in (
        ("rate", 0.0),
        ("rate", math.inf),
        ("tokens_per_request", 0),
        ("num_steps", 0),
        ("num_steps", 511),
        ("warmup_steps", -1),
        ("num_seeds", 0),
    ):
        with pytest.raises(ValueError, match=f"{name}: got {value}; accepted"):
            SimulateConfig(**{name: value})
