# Weights of the loss that move during training: the line that they follow, and that a run follows it step by step, also
# after it was stopped.

import math
import re
import signal
from dataclasses import replace

import pytest

from drafters.losses import LossWeights
from drafters.training.saving import TrainingInterrupted
from tests.training_doubles import LIGHTNING_NOISE, ToyData, ToyDrafter, ToyRun

pytestmark = LIGHTNING_NOISE


def test_a_straight_line_from_the_first_weights_to_the_last():
    weights = LossWeights(ce=0.2, l1=1.0, kl=0.4, first={"ce": 1.0, "kl": 0.0}, first_share=0.5)
    for progress, ce, kl in ((0.0, 1.0, 0.0), (0.25, 0.6, 0.2), (0.5, 0.2, 0.4), (0.9, 0.2, 0.4), (1.0, 0.2, 0.4)):
        now = weights.at(progress)
        assert (now.ce, now.l1, now.kl) == (pytest.approx(ce), 1.0, pytest.approx(kl))
        assert now.first is None


def test_without_a_schedule_nothing_moves():
    weights = LossWeights()
    assert weights.at(0.0) is weights
    assert replace(weights, first={}).at(0.3).first == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": {"mse": 1.0}}, "first: unknown term 'mse'; accepted: ce, l1, kl, lk, confidence"),
        ({"first": {"ce": -1.0}}, "first.ce: got -1.0; accepted: 0 (off) or more"),
        ({"first": {"ce": math.nan}}, "first.ce: got nan; accepted: 0 (off) or more, finite"),
        ({"first": {"kl": math.inf}}, "first.kl: got inf; accepted: 0 (off) or more, finite"),
        ({"l1": math.nan}, "l1: got nan; accepted: 0 (off) or more, finite"),
        ({"gamma": math.nan}, "gamma: got nan; accepted: above 0, or null"),
        ({"kl": 0.0, "first": {"l1": 0.0}}, "ce, l1, kl, lk: all 0 where `first` begins; at least one of them"),
        ({"first_share": 0.0}, "first_share: got 0.0; accepted: above 0, at most 1"),
        ({"first_share": 1.5}, "first_share: got 1.5; accepted: above 0, at most 1"),
    ],
)
def test_wrong_schedules_are_named(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LossWeights(**settings)


@pytest.fixture
def seen(monkeypatch):
    """The progress of each batch that a drafter learns from, and of each that it is validated on."""
    found, honest = {True: [], False: []}, ToyDrafter.loss

    def loss(self, batch, target_head):
        found[self.training].append(batch.progress)
        return honest(self, batch, target_head)

    monkeypatch.setattr(ToyDrafter, "loss", loss)
    return found


def test_a_run_tells_its_batches_how_far_it_is(tmp_path, seen):
    ToyRun(tmp_path, max_steps=8).fit()
    assert seen[True] == [step / 8 for step in range(8)]
    assert set(seen[False]) == {1.0}


def test_accumulated_batches_are_of_one_step(tmp_path, seen):
    ToyRun(tmp_path, max_steps=4, trainer={"accumulate_grad_batches": 2}).fit()
    assert seen[True] == [step / 4 for step in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_a_resumed_run_goes_on_in_the_line(tmp_path, seen):
    ToyRun(tmp_path / "whole", max_steps=8).fit()
    whole = list(seen[True])
    seen[True].clear()

    def stop_in_the_fourth(batch):
        if len(seen[True]) == 3:
            signal.raise_signal(signal.SIGTERM)
        return batch

    with pytest.raises(TrainingInterrupted):
        ToyRun(tmp_path / "parts", max_steps=8).fit(ToyData(on_batch=stop_in_the_fourth))
    assert len(seen[True]) < 8
    ToyRun(tmp_path / "parts", max_steps=8).fit(resume=True)
    assert seen[True] == whole


def test_training_moves_the_weights_and_validation_has_the_last(tmp_path, monkeypatch):
    """Through a drafter whose loss is made of the terms: what they weigh in each step, and in validation."""
    weights = LossWeights(ce=0.0, l1=2.0, kl=0.0, first={"ce": 1.0, "l1": 0.0}, first_share=0.5)
    found = {True: [], False: []}

    def loss(self, batch, target_head):
        now = weights.at(batch.progress)
        found[self.training].append((now.ce, now.l1))
        return honest(self, batch, target_head)

    honest = ToyDrafter.loss
    monkeypatch.setattr(ToyDrafter, "loss", loss)
    ToyRun(tmp_path, max_steps=8).fit()
    assert found[True] == [(1.0, 0.0), (0.75, 0.5), (0.5, 1.0), (0.25, 1.5), *[(0.0, 2.0)] * 4]
    assert set(found[False]) == {(0.0, 2.0)}
