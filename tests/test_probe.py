# Real decoding in training: what the probe measures, that it can choose the weights that are kept, in one go or with
# stops, and that it is seen beside the teacher-forced number.

import csv
import logging
import os
import signal
import warnings
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from drafters.checkpoint import load_drafter, read_config
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.probe import acceptance_probe
from drafters.errors import ConfigError
from drafters.training.curve import read_curve
from drafters.training.module import DistillModule
from drafters.training.probing import CAUSES, WARN_EVERY, AcceptanceProbe
from drafters.training.saving import SaveDrafter, TrainingInterrupted
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter, sharp_target
from tests.training_doubles import LIGHTNING_NOISE, SPEC, ToyData, ToyHead, ToyRun, same_weights, toy

pytestmark = [*LIGHTNING_NOISE, pytest.mark.filterwarnings("ignore:.*warm-up steps in a run")]

PROBED = {"monitor": "probe/accepted_length", "probe_every_n_steps": 2}


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=64, scale=30)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0)], ids=["greedy", "t1"])
def test_the_probe_counts_what_decoding_does(target, sampling):
    drafter = CopyDrafter(sharp_target(vocab_size=64, scale=30, noise=0.3), block_size=3)
    prompts = [torch.arange(3, 9), torch.arange(20, 31), torch.arange(40, 44)]
    found = acceptance_probe(target, prompts, sampling=sampling, max_new_tokens=24)(drafter)
    config = DecodeConfig(max_new_tokens=24, sampling=sampling or Sampling(), batch_size=3)
    rounds = [r for row in decode(target, drafter, prompts, config) for r in row.rounds if r.full]
    # The naive twin: counts, round by round.
    assert found["rounds"] == len(rounds) > 5
    assert found["accepted_length"] == pytest.approx(1 + sum(r.accepted for r in rounds) / len(rounds))
    for k in (1, 2, 3):
        reached = [r for r in rounds if r.accepted >= k - 1]
        assert found[f"acceptance@{k}"] == pytest.approx(sum(r.accepted >= k for r in reached) / len(reached))
    assert set(found) == {"accepted_length", "acceptance@1", "acceptance@2", "acceptance@3", "rounds"}
    assert 1 < found["accepted_length"] < 4


def test_the_probe_repeats_itself_and_gives_nan_where_nothing_came(target):
    probe = acceptance_probe(target, [torch.arange(3, 9)], sampling=Sampling(temperature=1.0))
    drafter = CopyDrafter(target, block_size=3)
    assert probe(drafter) == probe(drafter)
    hopeless = CopyDrafter(target, block_size=3, support=torch.tensor([5]))
    found = acceptance_probe(target, [torch.arange(3, 9)], max_new_tokens=16)(hopeless)
    assert found["acceptance@3"] != found["acceptance@3"]


def test_the_probe_makes_fewer_tokens_where_a_prompt_leaves_no_more(target):
    prompt = torch.arange(3, 63).repeat(9)[: target.spec.max_position - 20]
    found = acceptance_probe(target, [prompt, prompt[:40]])(CopyDrafter(target, block_size=3))
    assert found["accepted_length"] >= 1


class Scripted:
    """A probe that says what is written for each step, and keeps the weights that it saw."""

    def __init__(self, values):
        self.values, self.run, self.seen = values, None, {}

    def __call__(self, drafter):
        step = self.run.trainer.global_step
        self.seen[step] = {name: value.clone() for name, value in drafter.state_dict().items()}
        return {"accepted_length": self.values[step]}


def scripted(folder, values, *, config=PROBED, sampling=None, **options):
    """(run, probe) of a run whose probe says `values` by step."""
    probe = Scripted(values)
    pair = (probe, sampling or Sampling())
    probe.run = ToyRun(folder, probe=pair, config={"save_every_n_steps": 1, **config}, **options)
    return probe.run, probe


VALUES = {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.5}


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5}, {"trainer": {"limit_val_batches": 0}}], ids=str)
@pytest.mark.parametrize("best", [2, 4, 8])
def test_the_weights_of_the_best_probe_are_kept(tmp_path, best, options):
    run, probe = scripted(tmp_path, {**VALUES, best: 3.5}, **options)
    run.fit()
    saver = run.callback(SaveDrafter)
    assert (saver.best, saver.best_step) == (3.5, best)
    assert list(probe.seen) == [2, 4, 6, 8]
    kept = load_drafter(tmp_path / "drafter", spec=SPEC).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in probe.seen[best].items())
    others = [step for step in probe.seen if step != best]
    assert not any(torch.equal(kept["out.weight"], probe.seen[step]["out.weight"]) for step in others)
    facts = read_config(tmp_path / "drafter")["provenance"]
    assert facts["monitor"] == "probe/accepted_length"
    assert facts["probe"] == {"probe/accepted_length": 3.5}
    assert facts["step"] == best


def test_the_last_weights_are_probed_whatever_the_pace(tmp_path):
    run, probe = scripted(tmp_path, {5: 1.0, 8: 2.0}, config={**PROBED, "probe_every_n_steps": 5})
    run.fit()
    assert list(probe.seen) == [5, 8]
    assert run.callback(SaveDrafter).best_step == 8


def stop_at(batch_number):
    left = [batch_number]

    def on_batch(batch):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    return ToyData(on_batch=on_batch)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.5}], ids=str)
@pytest.mark.parametrize("at", [1, 3, 4, 5, 7, 8])
def test_a_stopped_and_resumed_run_keeps_the_same_weights(tmp_path, at, options):
    whole, _ = scripted(tmp_path / "whole", VALUES, **options)
    whole.fit()
    run, _ = scripted(tmp_path / "stopped", VALUES, **options)
    with pytest.raises(TrainingInterrupted):
        run.fit(stop_at(at))
    run, probe = scripted(tmp_path / "stopped", VALUES, **options)
    run.fit(resume=True)
    assert all(step > at for step in probe.seen)
    assert (run.callback(SaveDrafter).best, run.callback(SaveDrafter).best_step) == (3.0, 4)
    first, second = (load_drafter(tmp_path / name / "drafter", spec=SPEC) for name in ("whole", "stopped"))
    assert same_weights(first, second)


def test_another_monitor_begins_anew(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="drafters")
    run, _ = scripted(tmp_path, {2: 9.0, 4: 9.5}, max_steps=4)
    run.fit()
    run, _ = scripted(tmp_path, VALUES, config={"monitor": "val/accepted_length"}, max_steps=8)
    run.fit(resume=True)
    assert run.callback(SaveDrafter).best < 9
    assert read_config(tmp_path / "drafter")["provenance"]["step"] == 8
    assert "callbacks.monitor was probe/accepted_length, now val/accepted_length" in caplog.text


def test_a_probe_without_the_number_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no metric 'probe/accepted_length'; accepted: .*probe/tokens"):
        ToyRun(tmp_path, probe=lambda drafter: {"tokens": 1.0}, config=PROBED).fit()


def test_without_a_finite_probe_the_last_weights_are_saved(tmp_path):
    run, _ = scripted(tmp_path, dict.fromkeys(VALUES, float("nan")))
    with pytest.warns(UserWarning, match="no probe gave a finite probe/accepted_length"):
        run.fit()
    assert same_weights(load_drafter(tmp_path / "drafter", spec=SPEC), run.module.drafter)


def rows_of(run):
    run.trainer.logger.save()
    with open(run.trainer.logger.log_dir + "/metrics.csv") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def test_the_probe_runs_logs_and_costs_no_budget(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("drafters.training.budget.time.perf_counter", lambda: now[0])
    calls = []

    def probe(drafter):
        assert not drafter.training
        assert not torch.is_grad_enabled()
        now[0] += 500
        calls.append(run.trainer.global_step)
        return {"accepted_length": 1.9, "acceptance@2": float("nan"), "rounds": 64.0}

    options = {"logger": CSVLogger(tmp_path), "accumulate_grad_batches": 2}
    run = ToyRun(tmp_path, probe=probe, config={"probe_every_n_steps": 3, "probe_tolerance": 0.9}, trainer=options)
    run.fit()
    assert calls == [3, 6, 8]
    assert run.module.clock.seconds == 0
    assert run.module.drafter.training
    rows = rows_of(run)
    probed = [row for row in rows if "probe/accepted_length" in row]
    assert [row["step"] for row in probed] == [2, 5, 7]
    assert [row["probe/accepted_length"] for row in probed] == [1.9] * 3
    assert not any("probe/acceptance@2" in row for row in rows)
    measured = [row for row in rows if "val/accepted_length" in row or "probe/accepted_length" in row]
    assert len(measured) == 4 + 3
    assert all(row["positions"] > 0 and "minutes" in row for row in measured)


@pytest.mark.parametrize(
    ("sampling", "forced"),
    [(Sampling(), "val/accepted_length_greedy"), (Sampling(temperature=1.0), "val/accepted_length")],
    ids=["greedy", "t1"],
)
def test_both_numbers_stand_side_by_side(tmp_path, caplog, sampling, forced):
    class Forced(DistillModule):
        """What validation finds: 2 after step 4, 4 after step 8."""

        def on_validation_epoch_end(self):
            found = {
                "val/accepted_length": 9.0,
                "val/accepted_length_greedy": 9.0,
                forced: self.trainer.global_step / 2,
            }
            self.log_dict(found | self.progress())

    caplog.set_level(logging.INFO, logger="drafters")
    values = {2: 1.5, 4: 1.5, 6: 1.5, 8: 3.0}
    options = {"trainer": {"logger": CSVLogger(tmp_path, name="logs")}, "sampling": sampling}
    run, _ = scripted(tmp_path, values, config={"probe_every_n_steps": 2}, **options)
    run.module = Forced(toy(), ToyHead(), run.optim)
    run.fit()
    probed = [row for row in rows_of(run) if "probe/accepted_length" in row]
    assert [row["probe/accepted_length"] for row in probed] == [1.5, 1.5, 1.5, 3.0]
    assert [row.get(forced) for row in probed] == [None, 2.0, 2.0, 4.0]
    assert [row.get("probe/gap") for row in probed] == [None, 0.5, 0.5, pytest.approx(1 / 3)]
    # A validation in the same step comes before the probe; else the latest counts, and its step is named.
    assert [row.get("probe/validated_step") for row in probed] == [None, 3, 3, 7]
    assert [row["step"] for row in probed] == [1, 3, 5, 7]
    said = [one.getMessage() for one in caplog.records if "decoded" in one.getMessage()]
    assert said == [
        "step 2: accepted length 1.50 decoded",
        "step 4: accepted length 1.50 decoded, 2.00 teacher-forced",
        "step 6: accepted length 1.50 decoded, 2.00 teacher-forced at step 4",
        "step 8: accepted length 3.00 decoded, 4.00 teacher-forced",
    ]
    # The picture shows each validation once, at its own place.
    drawn = read_curve(tmp_path)
    assert [row[forced] for row in drawn if forced in row] == [2.0, 4.0]
    assert len([row for row in drawn if "probe/accepted_length" in row]) == 4


def gaps_said(folder, real, *, max_steps, resume=False, tolerance=0.5, least=0.0):
    """(steps that warned, messages) of a run that probes every step and validates every second one."""
    config = {"probe_every_n_steps": 1, "probe_tolerance": tolerance}
    options = {"max_steps": max_steps, "trainer": {"val_check_interval": 2}}
    run, _ = scripted(folder, dict.fromkeys(range(1, max_steps + 1), real), config=config, **options)
    with warnings.catch_warnings(record=True) as caught, patch("drafters.training.probing.LEAST", least):
        warnings.simplefilter("always")
        run.fit(resume=resume)
    said = [str(one.message) for one in caught if "in real decoding" in str(one.message)]
    return [int(text.split()[1].rstrip(":")) for text in said], said


def test_a_gap_beyond_the_bound_warns_with_both_numbers_the_bound_and_causes(tmp_path):
    steps, said = gaps_said(tmp_path, 1.0, max_steps=3)
    assert steps == [2]
    assert "accepted length is 1.00 in real decoding but 1." in said[0]
    assert "teacher-forced: " in said[0]
    assert "% fewer drafts, beyond callbacks.probe_tolerance=0.5. Likely causes: training sees later context" in said[0]
    assert all(cause in said[0] for cause in CAUSES)
    assert "100% fewer drafts" in said[0]
    # Teacher forcing says about 1.09.
    assert gaps_said(tmp_path / "wide", 1.03, max_steps=3, tolerance=0.9)[0] == []
    assert gaps_said(tmp_path / "close", 1.06, max_steps=3)[0] == []
    assert gaps_said(tmp_path / "noise", 1.0, max_steps=3, least=0.2)[0] == []
    assert gaps_said(tmp_path / "better", 9.0, max_steps=3)[0] == []


def test_a_gap_that_stays_is_said_again_after_a_while_also_across_a_resume(tmp_path):
    assert gaps_said(tmp_path, 1.0, max_steps=4)[0] == [2]
    first, second = gaps_said(tmp_path, 1.0, max_steps=14, resume=True)[0]
    assert first >= 2 + WARN_EVERY
    assert second == first + WARN_EVERY


def test_a_run_without_a_pace_has_no_probe(tmp_path):
    assert not any(isinstance(one, AcceptanceProbe) for one in ToyRun(tmp_path, probe=lambda drafter: {}).callbacks)
