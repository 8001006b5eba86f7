# What measuring a profile times and what it leaves as it was, on tiny targets and a clock that only the models and the
# acceptance test move: the seconds that come out are known to the last digit.

import time
from dataclasses import replace
from functools import cache
from statistics import median

import pytest
import torch

from drafters.decoding import batch
from drafters.errors import ConfigError, DataError
from drafters.scheduling import profiler
from drafters.scheduling.profile import CostProfile
from drafters.scheduling.profiler import ProfileConfig, measure_profile
from drafters.types import Needs, Sampling
from tests.contract_cases import tiny_world
from tests.copy_drafter import CopyDrafter, sharp_target

STEP_S, TOKEN_S, COPY_S, LOOP_S = 16.0, 0.25, 2.0, 0.125
CONFIG = ProfileConfig(rows=(1, 3), repeats=3, warmup=1, max_new_tokens=24)
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7, 8, 9], [3, 4], [9])]


class Clock:
    """Stands still but where a model is asked to work. `steps` are those of the target: rows, tokens a row, the cache's
    lengths before, the logits."""

    def __init__(self):
        self.now, self.drift, self.steps = 0.0, 0.0, []

    def __call__(self):
        return self.now

    def charge(self, monkeypatch, model, cost, *, record=False):
        real = model.step

        def step(tokens_BS, cache, **rest):
            before, dense = cache.lengths_B.tolist(), cache.num_slots
            out = real(tokens_BS, cache, **rest)
            self.now += cost(tokens_BS.numel()) + self.drift * len(self.steps)
            if record and rest.get("logits") == "all":
                self.steps.append((*tokens_BS.shape, before, dense, out.logits_BSV.clone(), rest.get("needs")))
            return out

        monkeypatch.setattr(model, "step", step)


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(time, "perf_counter", one)
    return one


@cache
def pair():
    return sharp_target(vocab_size=64, scale=6), sharp_target(vocab_size=64, scale=6, noise=0.1)


def models(clock, monkeypatch, *, block_size=3, **settings):
    """A target whose steps take STEP_S and TOKEN_S a token, and a drafter whose copy takes COPY_S a step."""
    target, copy = pair()
    clock.charge(monkeypatch, target, lambda tokens: STEP_S + TOKEN_S * tokens, record=True)
    clock.charge(monkeypatch, copy, lambda tokens: COPY_S)
    real = batch.verify_chain

    def verify_chain(*given):
        clock.now += LOOP_S
        return real(*given)

    monkeypatch.setattr(batch, "verify_chain", verify_chain)
    return target, CopyDrafter(copy, block_size=block_size, **settings)


def test_points_are_the_seconds_that_models_take(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch, needs=Needs(layer_ids=(1,), last=True))
    profile = measure_profile(target, drafter, PROMPTS, CONFIG)
    assert [(p.rows, p.tokens) for p in profile.verify] == [(r, r * w) for r in (1, 3) for w in (1, 2, 3, 4)]
    for point in profile.verify:
        want = STEP_S + TOKEN_S * point.tokens
        assert (point.low, point.seconds, point.high, point.count) == (want, want, want, 3)
    # One step of the copy for each draft, and one to read; what is not drafted on is read later.
    assert [(p.rows, p.length, p.seconds) for p in profile.draft] == [
        (r, n, COPY_S * (n + 1) if n else 0.0) for r in (1, 3) for n in range(4)
    ]
    assert [(p.rows, p.seconds) for p in profile.overhead] == [(1, LOOP_S), (3, LOOP_S)]
    assert profile.layout == "padded"
    assert {step[5] for step in clock.steps} == {Needs(layer_ids=(1,), last=True)}


@pytest.fixture
def timed(monkeypatch):
    """The costs that rounds gave, in their order."""
    costs = []
    real = profiler._Rows.round

    def noted(rows, length):
        costs.append(real(rows, length))
        return costs[-1]

    monkeypatch.setattr(profiler._Rows, "round", noted)
    return costs


def test_every_lap_has_every_point_in_another_order(clock, monkeypatch, timed):
    target, drafter = models(clock, monkeypatch)
    measure_profile(target, drafter, PROMPTS, replace(CONFIG, repeats=4, seed=2))
    places = [(cost.rows, cost.length) for cost in timed]
    laps = [places[i : i + 8] for i in range(0, len(places), 8)]
    assert all(sorted(lap) == [(r, n) for r in (1, 3) for n in range(4)] for lap in laps)
    assert len(set(map(tuple, laps))) == len(laps) == 5


def test_medians_and_quartiles_leave_the_warm_up_out(clock, monkeypatch, timed):
    target, drafter = models(clock, monkeypatch)
    clock.drift = 1.0
    profile = measure_profile(target, drafter, PROMPTS, replace(CONFIG, repeats=5))
    seconds = {}
    for cost in timed[8:]:
        seconds.setdefault((cost.rows, cost.rows * (1 + cost.length)), []).append(cost.verify_s)
    for point in profile.verify:
        found = sorted(seconds[point.rows, point.tokens])
        assert len(found) == point.count == 5
        assert point.seconds == median(found)
        assert (point.low, point.high) == (found[1], found[3])


def test_caches_are_those_of_rows_that_come_and_go(clock, monkeypatch):
    """Rows advance by different counts, which leaves holes, and end, where others take their places."""
    target, drafter = models(clock, monkeypatch)
    measure_profile(target, drafter, PROMPTS, replace(CONFIG, repeats=20))
    steps = [step for step in clock.steps if step[0] == 3]
    assert any(slots > max(before) for _, _, before, slots, *_ in steps)
    assert any(max(before) - min(before) > 10 for _, _, before, *_ in steps)
    assert {tokens for _, tokens, *_ in steps} == {1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_are_of_every_width_whatever_the_drafter_proposes(clock, monkeypatch, temperature):
    target, drafter = models(clock, monkeypatch, ragged=True)
    config = replace(CONFIG, sampling=Sampling(temperature=temperature))
    profile = measure_profile(target, drafter, PROMPTS, config)
    assert all(point.low == point.high == STEP_S + TOKEN_S * point.tokens for point in profile.verify)


def test_without_a_drafter_the_target_alone_is_measured(clock, monkeypatch):
    target, _ = models(clock, monkeypatch)
    profile = measure_profile(target, None, PROMPTS, replace(CONFIG, max_length=2, rows=(2,)))
    assert [(p.rows, p.tokens, p.seconds) for p in profile.verify] == [
        (2, 2 * w, STEP_S + TOKEN_S * 2 * w) for w in (1, 2, 3)
    ]
    assert profile.draft == ()
    assert [(p.rows, p.seconds) for p in profile.overhead] == [(2, LOOP_S)]
    assert profile.drafter == {}


def test_prompts_are_repeated_where_there_are_too_few(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    config = replace(CONFIG, rows=(5,), max_length=1)
    measure_profile(target, drafter, PROMPTS[:2], config)
    assert sorted(clock.steps[0][2]) in ([2, 2, 2, 5, 5], [2, 2, 5, 5, 5])


def test_progress_reaches_its_total(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    calls = []
    measure_profile(target, drafter, PROMPTS, CONFIG, progress=lambda *call: calls.append(call[:3]))
    assert calls == [("rounds", done, 4) for done in (1, 2, 3, 4)]


def test_a_measured_profile_survives_the_disk(tmp_path):
    """With real seconds, on a drafter of the package."""
    world = tiny_world()
    prompts = [example.tokens_T[:6] for example in world.examples[:2]]
    config = ProfileConfig(rows=(1, 2), repeats=2, warmup=0, max_new_tokens=12)
    profile = measure_profile(world.target, world.drafter("ngram", block_size=2), prompts, config)
    profile.save(tmp_path / "profile.json")
    assert CostProfile.load(tmp_path / "profile.json") == profile
    assert all(p.low <= p.seconds <= p.high for p in profile.verify)
    assert profile.target["weights_hash"] == world.target.spec.weights_hash
    assert {"device", "num_threads"} == set(profile.hardware)
    assert profile.conditions["mean_prompt_tokens"] == 6
    assert profile.round_s(torch.tensor([2, 1]), 2) > 0


WRONG = {
    "no rows": (dict(rows=()), ConfigError, r"rows: got \[\]"),
    "zero rows": (dict(rows=(0, 1)), ConfigError, r"rows: got \[0, 1\]"),
    "rows twice": (dict(rows=(2, 2)), ConfigError, r"rows: got \[2, 2\]"),
    "repeats": (dict(repeats=0), ConfigError, "repeats: got 0; accepted: 1 or more"),
    "warmup": (dict(warmup=-1), ConfigError, "warmup: got -1; accepted: 0 or more"),
    "too long": (dict(max_length=4), ConfigError, "max_length: got 4; accepted: 1 to 3, the drafter's block size"),
    "too short": (dict(max_length=0), ConfigError, "max_length: got 0"),
    "few tokens": (dict(max_new_tokens=5), ConfigError, "max_new_tokens: got 5; accepted: 6 or more"),
    "many tokens": (dict(max_new_tokens=510), DataError, "prompt 0: it has 5 tokens; accepted: 1 to 2, "),
    "no prompts": (dict(prompts=[]), DataError, "prompts: there are none"),
    "no tokens": (dict(prompts=[torch.tensor([], dtype=torch.int64)]), DataError, "prompt 0: it has 0 tokens"),
    "no length": (dict(drafter=None), ConfigError, "max_length: got null without a drafter"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_out_of_range_are_refused(case, clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    changes, error, message = WRONG[case]
    changes = dict(changes)
    prompts, drafter = changes.pop("prompts", PROMPTS), changes.pop("drafter", drafter)
    with pytest.raises(error, match=message):
        measure_profile(target, drafter, prompts, replace(CONFIG, **changes))
    assert not clock.steps
