# The profiler: a trace and a table of the steps that were asked for, and the weights of a run without it.

import gzip
import json

import pytest

from drafters.errors import ConfigError
from drafters.training.optim import OptimConfig
from drafters.training.profiling import ProfilerConfig, StepProfiler, build_profiler
from tests.training_doubles import LIGHTNING_NOISE, ToyRun, same_weights

pytestmark = [*LIGHTNING_NOISE, pytest.mark.filterwarnings("ignore:.*warm-up steps in a run")]


def profiled(folder, *, trainer=None, **settings):
    run = ToyRun(folder, trainer=trainer)
    config = ProfilerConfig(**settings)
    run.trainer.callbacks += build_profiler(config, folder, optim=run.optim, console=run.console)
    return run


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trace_and_a_table_of_the_steps_asked_for(tmp_path, accumulate):
    # A validation lies among the steps.
    trainer = {"accumulate_grad_batches": accumulate}
    run = profiled(tmp_path / "with", trainer=trainer, skip_steps=2, warmup_steps=1, steps=3, top=5).fit()
    folder = tmp_path / "with" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["operators-rank0.txt", "trace-rank0.json.gz"]
    with gzip.open(folder / "trace-rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    assert "aten::mm" in names or "aten::addmm" in names
    lines = (folder / "operators-rank0.txt").read_text().splitlines()
    assert lines[0] == "steps 4 to 6, rank 0"
    assert "Self CPU" in "\n".join(lines)
    assert "profile: " in run.console.export_text()
    assert same_weights(run.module, ToyRun(tmp_path / "without", trainer=trainer).fit().module)


def test_a_run_that_ends_before_says_so(tmp_path):
    with pytest.warns(
        UserWarning, match="profiler: 8 steps were trained, but .* end with step 55; lower profiler.skip"
    ):
        profiled(tmp_path).fit()
    assert not (tmp_path / "profile").exists()


def test_a_run_that_fails_while_profiled_leaves_the_profiler_off(tmp_path):
    run = profiled(tmp_path, skip_steps=1, warmup_steps=1, steps=5)

    def fail():
        raise KeyError("broken")

    run.module.on_validation_epoch_start = fail
    with pytest.raises(KeyError, match="broken"):
        run.fit()
    assert run.callback(StepProfiler)._profiler is None
    profiled(tmp_path / "next", skip_steps=1, warmup_steps=1, steps=1).fit()
    assert (tmp_path / "next" / "profile" / "trace-rank0.json.gz").is_file()


@pytest.mark.parametrize("name", ["skip_steps", "warmup_steps", "steps", "top"])
def test_a_setting_that_makes_no_sense_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: got -1; accepted: [01] or more"):
        ProfilerConfig(**{name: -1})


def test_a_time_budget_is_not_measured_under_the_profiler(tmp_path):
    timed = OptimConfig(minutes=1.0, warmup_steps=50)
    with pytest.raises(ConfigError, match=r"profiler\.skip_steps: got 3; with optim\.minutes at least 45"):
        build_profiler(ProfilerConfig(skip_steps=3), tmp_path, optim=timed, console=None)
    assert build_profiler(ProfilerConfig(), tmp_path, optim=timed, console=None)
    assert build_profiler(None, tmp_path, optim=timed, console=None) == []
