# A run that is stopped (kill -9, SIGTERM, Ctrl-C) and started again ends with the weights of one that was not, bit for
# bit on the CPU: in the middle of an epoch, at its end, in an accumulation, with averaging, with a time budget.

import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console

from drafters.batches import BatchConfig, StatesDataModule
from drafters.checkpoint import load_drafter
from drafters.errors import CheckpointError
from drafters.training.callbacks import CallbackConfig, build_callbacks
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from drafters.training.saving import LastCheckpoint, TrainingInterrupted
from drafters.types import Needs
from tests.training_doubles import LIGHTNING_NOISE, SPEC, Source, ToyData, ToyHead, toy, toy_trainer

pytestmark = LIGHTNING_NOISE

STEPS = 14


class Stop:
    """Sends this process a signal when training asks for its `at`-th batch."""

    def __init__(self, at, number):
        self.left, self.number = at, number

    def __call__(self, batch):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        return batch


def train(folder, *, on_batch=None, minutes=None, max_steps=STEPS, **options):
    """One call of the same command: resumes when there is a checkpoint. 14 samples of 2: seven batches an epoch."""
    torch.set_num_threads(1)
    length = {"max_steps": max_steps} if minutes is None else {"minutes": minutes}
    o = {"accumulate": 1, "every": 3, "ema": None, "validate": 4, "val_batches": 1.0, "cached": False} | options
    warmup = 4 if minutes is None else 45
    optim = OptimConfig(**length, warmup_steps=warmup, precision="bf16", lr=0.05, ema_decay=o["ema"])
    module = DistillModule(toy(), ToyHead(), optim)
    config = CallbackConfig(save_every_n_steps=o["every"])
    callbacks = build_callbacks(folder, optim=optim, config=config, console=Console(file=io.StringIO()))
    pace = {"accumulate_grad_batches": o["accumulate"], "val_check_interval": o["validate"]}
    trainer = toy_trainer(folder, callbacks=callbacks, limit_val_batches=o["val_batches"], **pace)
    last = folder / "checkpoints/last.ckpt"
    if o["cached"]:
        source, needs = Source(18, on_read=on_batch), Needs(layer_ids=(1,), last=True)
        batches = BatchConfig(batch_size=2)
        data = StatesDataModule(source, train=range(14), validation=range(14, 18), needs=needs, config=batches)
    else:
        data = ToyData(num_samples=14, on_batch=on_batch)
    trainer.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=True)
    return trainer, module


def stopped(folder, *, at, number=signal.SIGTERM, **options):
    with pytest.raises(TrainingInterrupted) as caught:
        train(folder, on_batch=Stop(at, number), **options)
    return caught.value


def assert_equal_runs(folder, other):
    """All that training carries, to the bit: weights, moments, schedule, averages, progress; and the best drafter."""
    first, second = (torch.load(one / "checkpoints/last.ckpt", weights_only=True) for one in (folder, other))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "current_model_state", "averaging_state"):
        assert flat(first.get(key)) == flat(second.get(key)), key
    assert first["drafters"]["positions"] == second["drafters"]["positions"]
    best, other_best = (load_drafter(one / "drafter", spec=SPEC) for one in (folder, other))
    assert flat(best.state_dict()) == flat(other_best.state_dict())


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [flat(one) for one in value]
    return value


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders of uninterrupted runs, by their options."""
    made = {}

    def folder(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole")
            train(made[key], **options)
        return made[key]

    return folder


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"ema": 0.6}, {"validate": 7}, {"cached": True}], ids=str)
@pytest.mark.parametrize("at", [1, 2, 4, 5, 7, 8, 13, 14])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, whole, at, options):
    stopped(tmp_path, at=at, **options)
    train(tmp_path, **options)
    assert_equal_runs(tmp_path, whole(**options))


def test_stopped_many_times_equals_uninterrupted(tmp_path, whole):
    for _ in range(4):
        stopped(tmp_path, at=3)
    train(tmp_path)
    assert_equal_runs(tmp_path, whole())


def test_ctrl_c_saves_at_the_end_of_the_step_and_says_how_to_go_on(tmp_path):
    stop = stopped(tmp_path, at=5, number=signal.SIGINT, every=1000)
    assert stop.step == 5
    assert str(stop) == f"stopped after step 5; saved {tmp_path}/checkpoints/last.ckpt; the same command resumes"
    assert torch.load(stop.checkpoint, weights_only=True)["global_step"] == 5


def test_a_stop_inside_an_accumulation_waits_for_its_step(tmp_path):
    assert stopped(tmp_path, at=3, accumulate=2, every=1000).step == 2


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice(batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return batch

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train(tmp_path, on_batch=twice)
    assert not (tmp_path / "checkpoints").exists()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(tmp_path / "a")
    stopped(tmp_path / "b", at=2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_finished_run_stays_finished(tmp_path):
    _, first = train(tmp_path)
    trainer, again = train(tmp_path)
    assert trainer.global_step == STEPS
    assert flat(again.state_dict()) == flat(first.state_dict())


def test_more_steps_go_on_from_a_finished_run(tmp_path):
    train(tmp_path, max_steps=6)
    assert train(tmp_path, max_steps=9)[0].global_step == 9


def test_a_time_budget_is_measured_once_and_stored(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("drafters.training.budget.time.perf_counter", lambda: now[0])

    def seconds_per_batch(seconds, stop=None):
        def tick(batch):
            now[0] += seconds
            return stop(batch) if stop else batch

        return tick

    with pytest.raises(TrainingInterrupted):
        train(tmp_path, on_batch=seconds_per_batch(1, Stop(50, signal.SIGTERM)), minutes=1)
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["drafters"]
    assert state["total_steps"] == 60
    assert state["seconds"] == pytest.approx(50, abs=1)
    trainer, module = train(tmp_path, on_batch=seconds_per_batch(50), minutes=1)  # a slower machine, the same run
    assert trainer.global_step == module.total_steps == 60
    trainer, module = train(tmp_path, on_batch=seconds_per_batch(50), minutes=1)
    assert trainer.global_step == 60


def test_a_run_killed_before_its_budget_was_known_measures_it_anew(tmp_path):
    stopped(tmp_path, at=10, minutes=0.02)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optim.minutes")  # the budget may be over by then on a slow machine
        trainer, module = train(tmp_path, minutes=0.02)
    assert trainer.global_step == module.total_steps >= 55


def test_a_foreign_checkpoint_is_refused(tmp_path):
    train(tmp_path, max_steps=5)
    path = tmp_path / "checkpoints/last.ckpt"
    state = torch.load(path, weights_only=True)
    del state["drafters"]
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="not written by this trainer"):
        train(tmp_path)


def test_a_full_disk_stops_with_the_last_good_checkpoint(tmp_path, monkeypatch):
    train(tmp_path, max_steps=6)
    before = (tmp_path / "checkpoints/last.ckpt").read_bytes()

    def full(temp, final):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafters.training.saving.replace_path", full)
    with pytest.raises(CheckpointError, match=r"last.ckpt: cannot be written: no space left on the disk"):
        train(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    assert (tmp_path / "checkpoints/last.ckpt").read_bytes() == before


def interrupted_validation(step, number):
    """A `validation_step` that sends this process a signal in the validation after `step`."""
    plain = DistillModule.validation_step

    def validation_step(self, batch, batch_idx):
        if self.trainer.global_step == step and batch_idx == 1:
            os.kill(os.getpid(), number)
        return plain(self, batch, batch_idx)

    return validation_step


def test_ctrl_c_in_the_last_validation_stops_after_it(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(DistillModule, "validation_step", interrupted_validation(STEPS, signal.SIGINT))
        with pytest.raises(TrainingInterrupted) as caught:
            train(tmp_path)
    assert caught.value.step == STEPS
    assert train(tmp_path)[0].global_step == STEPS
    assert_equal_runs(tmp_path, whole())


def test_without_validation_the_drafter_is_there_before_the_last_checkpoint(tmp_path, monkeypatch):
    save, found = LastCheckpoint.save, []

    def spy(self, trainer, module):
        found.append((trainer.global_step, (tmp_path / "drafter").is_dir()))
        save(self, trainer, module)

    monkeypatch.setattr(LastCheckpoint, "save", spy)
    with pytest.warns(UserWarning, match="no validation gave a finite"):
        train(tmp_path, val_batches=0)
    assert found == [(3, False), (6, False), (9, False), (12, False), (STEPS, True)]


def killed(folder, call, *setup):
    """Runs `setup` and `train(folder, <call>)` in a process of its own, which has to end by kill -9."""
    lines = [
        "import signal, warnings",
        "from pathlib import Path",
        "from tests.test_resume import DistillModule, Stop, interrupted_validation, train",
        'warnings.simplefilter("ignore")',
        *setup,
        f"train(Path({str(folder)!r}), {call})",
    ]
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=root, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (folder / "checkpoints/last.ckpt").exists()


# The third: a validation between the batches of an accumulation, after a saved step.
@pytest.mark.parametrize(
    ("at", "options"),
    [
        pytest.param(10, {}, marks=pytest.mark.slow),
        pytest.param(12, {"accumulate": 2}, marks=pytest.mark.slow),
        (6, {"accumulate": 2, "validate": 5, "every": 2}),
    ],
    ids=str,
)
def test_kill_9_and_the_same_command_equals_uninterrupted(tmp_path, whole, at, options):
    killed(tmp_path, f"on_batch=Stop({at}, signal.SIGKILL), **{options}")
    train(tmp_path, **options)
    assert_equal_runs(tmp_path, whole(**options))


@pytest.mark.parametrize("step", [12, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_kill_9_in_a_validation_and_the_same_command_repeats_it(tmp_path, whole, monkeypatch, step):
    patched = f"DistillModule.validation_step = interrupted_validation({step}, signal.SIGKILL)"
    killed(tmp_path, "", patched)
    plain, validated = DistillModule.validation_step, []

    def validation_step(self, batch, batch_idx):
        validated.append(self.trainer.global_step)
        return plain(self, batch, batch_idx)

    monkeypatch.setattr(DistillModule, "validation_step", validation_step)
    train(tmp_path)
    assert step in validated
    assert_equal_runs(tmp_path, whole())
