# The schedule as a pure function, the parameter groups, the settings' errors, and how a time budget becomes steps.

import math

import pytest
import torch
from torch import nn

from drafters.config import typed
from drafters.errors import ConfigError
from drafters.runs import Run, read_steps, write_steps
from drafters.training.budget import StepBudget, Stopwatch
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig, build_optimizer, parameter_groups, schedule_factor
from tests.training_doubles import LIGHTNING_NOISE, ToyData, ToyHead, toy, toy_trainer

pytestmark = LIGHTNING_NOISE


def config(**changes):
    return OptimConfig(**{"max_steps": 100, "warmup_steps": 10, **changes})


def test_wsd_warms_up_stays_and_decays_to_the_end():
    factors = [schedule_factor(step, 100, config(decay_fraction=0.2)) for step in range(100)]
    assert factors[:10] == pytest.approx([(k + 1) / 10 for k in range(10)])
    assert factors[10:81] == [1.0] * 71
    assert factors[80:] == pytest.approx([1 - k / 20 for k in range(20)])


def test_cosine_falls_from_the_warm_up_to_the_final_factor():
    settings = config(schedule="cosine", final_factor=0.1)
    assert schedule_factor(55, 100, settings) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert schedule_factor(100, 100, settings) == pytest.approx(0.1)
    assert schedule_factor(9, 100, settings) == 1.0


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_unknown_length_only_warms_up_and_does_not_jump_when_it_becomes_known(schedule):
    settings = config(schedule=schedule, warmup_steps=30)
    unknown = [schedule_factor(step, None, settings) for step in range(26)]
    assert unknown == [schedule_factor(step, 1000, settings) for step in range(26)]
    assert unknown[-1] == pytest.approx(26 / 30)


def test_a_run_shorter_than_its_warm_up_is_continuous():
    factors = [schedule_factor(step, 5, config(decay_fraction=0.4)) for step in range(6)]
    assert factors == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.0])


def test_norms_biases_and_embeddings_do_not_decay():
    module = nn.ModuleDict({"emb": nn.Embedding(4, 3), "fc": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})
    module["frozen"] = nn.Linear(3, 3).requires_grad_(False)
    decayed, plain = parameter_groups(module, weight_decay=0.1)
    assert [id(p) for p in decayed["params"]] == [id(module["fc"].weight)]
    assert len(plain["params"]) == 4
    assert plain["weight_decay"] == 0.0


def test_adamw_equals_its_formula():
    module = nn.Linear(3, 2, bias=False).double()
    optimizer = build_optimizer(module, config(lr=0.1, weight_decay=0.01, betas=(0.8, 0.9)))
    weight = module.weight.detach().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in (1, 2, 3):
        gradient = torch.full_like(weight, 0.5 * step)
        module.weight.grad = gradient.clone()
        optimizer.step()
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
        weight = weight * (1 - 0.1 * 0.01) - 0.1 * update
    torch.testing.assert_close(module.weight.detach(), weight)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schedule": "step"}, "schedule: got 'step'; accepted: wsd, cosine, constant"),
        ({"precision": "fp16"}, "precision: got 'fp16'; accepted: bf16, float32"),
        ({"minutes": 3.0}, "give one and set the other to null"),
        ({"max_steps": None}, "give one and set the other to null"),
        ({"max_steps": None, "minutes": 3.0}, "warmup_steps: got 10; with `minutes` at least 45"),
        ({"ema_decay": 1.5}, "ema_decay: got 1.5"),
        ({"max_steps": 0}, "must be above 0"),
        ({"lr": "fast"}, "optim.lr"),
        ({"learning_rate": 1.0}, "optim.learning_rate: unknown setting"),
    ],
)
def test_bad_settings_name_the_key(changes, says):
    with pytest.raises(ConfigError, match="optim") as caught:
        typed(OptimConfig, {"max_steps": 100, "warmup_steps": 10, **changes}, key="optim")
    assert says in str(caught.value)


def test_stopwatch_counts_only_what_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("drafters.training.budget.time.perf_counter", lambda: now[0])
    clock = Stopwatch()
    with clock.paused():
        now[0] += 100  # stands: pausing does not start it
    assert clock.seconds == 0
    clock.start()
    now[0] += 2
    with clock.paused(), clock.paused():
        now[0] += 100
    now[0] += 3
    clock.stop()
    now[0] += 100
    assert clock.seconds == 5


def fit_minutes(tmp_path, monkeypatch, *, minutes, accumulate=1, extra=0, run=None):
    """A run on a clock where every batch takes one second and a validation takes a thousand."""
    now = [0.0]
    monkeypatch.setattr("drafters.training.budget.time.perf_counter", lambda: now[0])

    class Timed(DistillModule):
        def training_step(self, batch, batch_idx):
            now[0] += 1
            if self.global_step == 20:  # a step that reads a shard for the first time
                now[0] += extra
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            now[0] += 1000
            return super().validation_step(batch, batch_idx)

    module = Timed(toy(), ToyHead(), OptimConfig(minutes=minutes, warmup_steps=45, precision="float32"))
    trainer = toy_trainer(tmp_path, callbacks=[StepBudget(run)], accumulate_grad_batches=accumulate)
    trainer.fit(module, ToyData())
    return trainer, module


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 120), (2, 60)])
def test_minutes_become_steps_and_validation_does_not_count(tmp_path, monkeypatch, accumulate, steps):
    trainer, module = fit_minutes(tmp_path, monkeypatch, minutes=2.0, accumulate=accumulate)
    assert module.total_steps == trainer.global_step == steps
    assert module.clock.seconds == 120


def test_the_steps_of_a_budget_are_kept_and_taken_by_a_run_that_repeats_it(tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    fit_minutes(tmp_path / "a", monkeypatch, minutes=1.0, run=run)
    assert read_steps(run, minutes=1.0) == 60
    assert read_steps(run, minutes=2.0) is None
    write_steps(run, minutes=1.0, steps=52)
    trainer, module = fit_minutes(tmp_path / "b", monkeypatch, minutes=1.0, run=run)
    assert module.total_steps == trainer.global_step == 52


def test_a_single_slow_step_does_not_shorten_the_run(tmp_path, monkeypatch):
    _, module = fit_minutes(tmp_path, monkeypatch, minutes=2.0, extra=20)
    assert module.total_steps == 100  # 45 steps took 65 seconds, 55 are left at one second each


def test_a_budget_too_short_to_measure_says_so(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="optim.minutes: 0.1 minutes were over after 45 steps"):
        trainer, _ = fit_minutes(tmp_path, monkeypatch, minutes=0.1)
    assert trainer.global_step == 45


def test_a_run_that_ends_in_its_warm_up_warns(tmp_path):
    module = DistillModule(toy(), ToyHead(), OptimConfig(max_steps=2, warmup_steps=5))
    with pytest.warns(UserWarning, match="never reaches lr"):
        toy_trainer(tmp_path, callbacks=[StepBudget()]).fit(module, ToyData())
    assert module.trainer.global_step == 2
