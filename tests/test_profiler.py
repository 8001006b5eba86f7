# What measuring a profile times and what it leaves as it was, on tiny targets and a clock that only the models and the
# acceptance test move: the seconds that come out are known to the last digit.

import time
from dataclasses import replace
from functools import cache
from statistics import median

import pytest
import torch

from drafters.decoding import batch, loop
from drafters.errors import ConfigError, DataError
from drafters.scheduling.profile import CostProfile
from drafters.scheduling.profiler import ProfileConfig, measure_profile
from drafters.types import Needs
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
    # One step of the copy for each draft, and one to read.
    assert [(p.rows, p.length, p.seconds) for p in profile.draft] == [
        (r, n, COPY_S * (n + 1)) for r in (1, 3) for n in range(4)
    ]
    assert [(p.rows, p.seconds) for p in profile.overhead] == [(1, LOOP_S), (3, LOOP_S)]
    assert profile.layout == "padded"
    assert {step[5] for step in clock.steps} == {Needs(layer_ids=(1,), last=True)}


def timed(clock, config):
    """The steps that were timed on filled caches: they come before all decoding."""
    return clock.steps[: (config.warmup + config.repeats) * len(config.rows) * 4]


def test_every_step_begins_at_the_same_cache(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    measure_profile(target, drafter, PROMPTS, CONFIG)
    first = {}
    for rows, width, before, slots, logits_BSV, _ in timed(clock, CONFIG):
        assert before == [len(prompt) for prompt in PROMPTS[:rows]]
        assert slots == 5
        assert torch.allclose(logits_BSV, first.setdefault((rows, width), logits_BSV), atol=1e-5)
    assert len(first) == 8


def test_every_lap_has_another_order(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    config = replace(CONFIG, repeats=4, seed=2)
    measure_profile(target, drafter, PROMPTS, config)
    places = [(rows, width) for rows, width, *_ in timed(clock, config)]
    laps = [places[i : i + 8] for i in range(0, len(places), 8)]
    assert all(sorted(lap) == sorted(laps[0]) for lap in laps)
    assert len(set(map(tuple, laps))) == len(laps) == 5


def test_medians_and_quartiles_leave_the_warm_up_out(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    clock.drift = 1.0
    config = replace(CONFIG, repeats=5)
    profile = measure_profile(target, drafter, PROMPTS, config)
    seconds = {}
    for i, (rows, width, *_) in enumerate(timed(clock, config)):
        if i >= 8:
            seconds.setdefault((rows, rows * width), []).append(STEP_S + TOKEN_S * rows * width + i)
    for point in profile.verify:
        found = sorted(seconds[point.rows, point.tokens])
        assert point.seconds == median(found)
        assert (point.low, point.high) == (found[1], found[3])


def test_rounds_of_every_length_are_timed_in_shuffled_order(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    asked = []
    real = loop.LiveBatch.round

    def noted(live, shape, on_round):
        asked.append((len(live.live), shape))
        clock.now += 0.5  # before the round's clock begins, so it counts for nothing
        return real(live, shape, on_round)

    monkeypatch.setattr(loop.LiveBatch, "round", noted)
    measure_profile(target, drafter, PROMPTS, replace(CONFIG, warmup=0))
    for rows in (1, 3):
        lengths = [length for count, length in asked if count == rows]
        assert all(lengths.count(length) >= 3 for length in range(4))
        assert lengths[:12] != sorted(lengths[:12])


def test_reading_is_timed_even_where_nothing_else_is_left(clock, monkeypatch):
    """Decoding with drafts of length 0 alone has no drafter at all, so reading would seem free."""
    target, drafter = models(clock, monkeypatch, block_size=1)
    for seed in range(6):
        config = ProfileConfig(rows=(1,), repeats=1, warmup=0, max_new_tokens=4, seed=seed)
        profile = measure_profile(target, drafter, PROMPTS, config)
        assert [(p.length, p.seconds) for p in profile.draft] == [(0, COPY_S), (1, 2 * COPY_S)]


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
    assert clock.steps[0][2] == [5, 2, 5, 2, 5]


def test_progress_reaches_its_total(clock, monkeypatch):
    target, drafter = models(clock, monkeypatch)
    calls = []
    measure_profile(target, drafter, PROMPTS, CONFIG, progress=lambda *call: calls.append(call[:3]))
    for phase, total in (("target steps", 4 * 8), ("rounds", 3 * 8)):
        done = [call[1] for call in calls if call[0] == phase]
        assert done == sorted(done)
        assert done[-1] == total
        assert {call[2] for call in calls if call[0] == phase} == {total}


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
