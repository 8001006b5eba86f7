# What watches a run: best and last, averaging, the probe, the table and the bar, the target's bits, and the loggers.

import csv
import io
import logging

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from drafters.checkpoint import load_drafter, read_config
from drafters.errors import ConfigError
from drafters.training.callbacks import AcceptanceProbe, CallbackConfig, TargetUnchanged, build_callbacks
from drafters.training.loggers import has_wandb_account, wandb_logger
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from drafters.training.saving import SaveDrafter
from tests.training_doubles import LIGHTNING_NOISE, SPEC, ToyData, ToyHead, toy, toy_trainer

pytestmark = [*LIGHTNING_NOISE, pytest.mark.filterwarnings("ignore:.*warm-up steps in a run")]


class Run:
    """One fit in `folder` with all callbacks a real run has."""

    def __init__(self, folder, *, probe=None, config=None, head=None, trainer=None, **optim):
        settings = {"max_steps": 8, "warmup_steps": 2, "precision": "float32", "lr": 0.05, **optim}
        self.optim, self.folder = OptimConfig(**settings), folder
        self.console = Console(record=True, width=100, file=io.StringIO())
        self.module = DistillModule(toy(), head or ToyHead(), self.optim)
        self.callbacks = build_callbacks(
            folder,
            optim=self.optim,
            config=CallbackConfig(**config or {}),
            console=self.console,
            probe=probe,
            provenance={"seed": 0},
        )
        self.trainer = toy_trainer(folder, callbacks=self.callbacks, **trainer or {})

    def fit(self, data=None):
        self.trainer.fit(self.module, data or ToyData())
        return self

    def callback(self, kind):
        return next(one for one in self.trainer.callbacks if isinstance(one, kind))


def same_weights(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_run_leaves_a_checkpoint_and_a_drafter(tmp_path):
    run = Run(tmp_path).fit()
    assert run.trainer.global_step == 8
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 8
    assert state["drafters"]["total_steps"] == 8
    assert all(name.startswith("drafter.") for name in state["state_dict"])
    assert load_drafter(tmp_path / "drafter", spec=SPEC).config == run.module.drafter.config
    facts = read_config(tmp_path / "drafter")["provenance"]
    assert facts["seed"] == 0
    assert facts["validation"]["val/accepted_length"] == pytest.approx(run.callback(SaveDrafter).best)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "drafter"]


def test_the_best_validation_is_kept(tmp_path):
    class Peak(DistillModule):
        peaks = iter([1.0, 3.0, 2.0])

        def on_validation_epoch_end(self):
            self.log("val/accepted_length", next(self.peaks))
            if self.trainer.global_step == 4:
                self.best_state = {k: v.clone() for k, v in self.drafter.state_dict().items()}

    run = Run(tmp_path, trainer={"val_check_interval": 2}, max_steps=6)
    run.module = Peak(toy(), ToyHead(), run.optim)
    run.fit()
    saver = run.callback(SaveDrafter)
    assert (saver.best, saver.best_step) == (3.0, 4)
    loaded = load_drafter(tmp_path / "drafter", spec=SPEC)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in run.module.best_state.items())


def test_the_last_step_is_always_validated(tmp_path):
    run = Run(tmp_path, max_steps=7, trainer={"val_check_interval": 5})
    steps = []
    run.module.on_validation_start = lambda: steps.append(run.trainer.global_step)
    run.fit()
    assert steps == [5, 7]


def test_without_validation_the_last_weights_are_saved(tmp_path):
    run = Run(tmp_path, trainer={"limit_val_batches": 0})
    with pytest.warns(UserWarning, match="no validation ran"):
        run.fit()
    assert same_weights(load_drafter(tmp_path / "drafter", spec=SPEC), run.module.drafter)


def test_without_a_finite_validation_the_last_weights_are_saved(tmp_path):
    class Lost(DistillModule):
        def on_validation_epoch_end(self):
            self.log("val/accepted_length", float("nan"))

    run = Run(tmp_path)
    run.module = Lost(toy(), ToyHead(), run.optim)
    with pytest.warns(UserWarning, match="no validation gave a finite val/accepted_length"):
        run.fit()
    assert same_weights(load_drafter(tmp_path / "drafter", spec=SPEC), run.module.drafter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_every_n_steps": 0}, "save_every_n_steps: got 0; accepted: 1 or more"),
        ({"save_every_minutes": 0}, "save_every_minutes: got 0; must be above 0"),
        ({"probe_every_n_steps": 0}, "probe_every_n_steps: got 0; accepted: 1 or more, or null for never"),
    ],
    ids=str,
)
def test_a_pace_of_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CallbackConfig(**settings)


def test_an_unknown_monitor_lists_the_metrics(tmp_path):
    with pytest.raises(ConfigError, match=r"no metric 'val/speed'; accepted: .*val/accepted_length"):
        Run(tmp_path, config={"monitor": "val/speed"}).fit()


def test_the_saved_drafter_and_the_probe_see_averaged_weights(tmp_path):
    # A naive twin of the average: the first step copies, later ones mix.
    raw, average, probed = [], {}, {}
    run = Run(
        tmp_path,
        ema_decay=0.9,
        max_steps=4,
        config={"probe_every_n_steps": 4},
        probe=lambda drafter: probed.update({k: v.clone() for k, v in drafter.state_dict().items()}) or {},
    )
    run.module.on_train_batch_end = lambda *args: raw.append(
        {name: p.detach().clone() for name, p in run.module.drafter.named_parameters()}
    )
    run.fit()
    for weights in raw:
        mixed = {name: 0.9 * average[name] + 0.1 * new for name, new in weights.items()} if average else weights
        average = mixed
    loaded = load_drafter(tmp_path / "drafter", spec=SPEC).state_dict()
    for name, expected in average.items():
        torch.testing.assert_close(loaded[name], expected, msg=name)
        torch.testing.assert_close(probed[name], expected, msg=name)
        assert not torch.equal(expected, raw[-1][name])
    # Token ids are copied. The float average of 12 and 12 is 11.999, another token.
    assert torch.equal(loaded["d2t"], toy().d2t)


def test_the_probe_runs_logs_and_costs_no_budget(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("drafters.training.budget.time.perf_counter", lambda: now[0])
    calls = []

    def probe(drafter):
        assert not drafter.training
        assert not torch.is_grad_enabled()
        now[0] += 500
        calls.append(run.trainer.global_step)
        return {"accepted_length": 1.9, "tokens": 64.0}

    logger = {"logger": CSVLogger(tmp_path, flush_logs_every_n_steps=1)}
    run = Run(tmp_path, probe=probe, config={"probe_every_n_steps": 3}, trainer=logger | {"accumulate_grad_batches": 2})
    run.fit()
    assert calls == [3, 6]
    assert run.module.clock.seconds == 0
    assert run.module.drafter.training
    with open(run.trainer.logger.log_dir + "/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["probe/accepted_length"]) for row in rows if row["probe/accepted_length"]] == [1.9, 1.9]
    measured = [row for row in rows if row["val/accepted_length"] or row["probe/accepted_length"]]
    assert len(measured) == 4 + 2
    assert all(float(row["positions"]) > 0 and row["minutes"] for row in measured)


def test_a_probe_far_below_the_teacher_forced_number_warns(tmp_path):
    run = Run(tmp_path, probe=lambda drafter: {"accepted_length": 0.1}, config={"probe_every_n_steps": 8})
    with pytest.warns(UserWarning, match="accepted length is 0.10 in real decoding but .* look for a leak"):
        run.fit()


def test_a_step_without_a_probe_has_none(tmp_path):
    assert not any(isinstance(one, AcceptanceProbe) for one in Run(tmp_path, probe=lambda drafter: {}).callbacks)


def test_the_table_counts_what_is_trained_and_what_is_frozen(tmp_path):
    run = Run(tmp_path)
    run.module.drafter.proj.requires_grad_(False)
    run.fit()
    text = run.console.export_text()
    cells = [[cell.strip() for cell in line.split("│")[1:5]] for line in text.splitlines() if "│" in line]
    rows = {name: counts for name, *counts in cells}
    assert rows["proj"] == ["0", "72", "float32"]
    assert rows["out"] == ["64", "0", "float32"]
    assert rows["drafter, all"] == ["80", "72", "float32"]
    assert rows["target head"] == ["0", "128", "float32"]
    assert "8/8" in text


def test_a_target_that_moves_fails_the_run(tmp_path):
    head = ToyHead()

    def nudge(batch):
        with torch.no_grad():
            head.lm_head_VD[3, 3] += 1e-6
        return batch

    with pytest.raises(RuntimeError, match=r"training changed the frozen target: .'embedding'."):
        Run(tmp_path, head=head).fit(ToyData(on_batch=nudge))


def test_the_bits_of_every_dtype_are_read():
    head = ToyHead()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        head.embedding_VD = head.lm_head_VD = torch.randn(4, 4).to(dtype)
        guard = TargetUnchanged()
        module = DistillModule(toy(), head, OptimConfig(max_steps=1))
        guard.on_fit_start(None, module)
        guard.on_train_end(None, module)
        head.embedding_VD[0, 0] += 1
        with pytest.raises(RuntimeError):
            guard.on_train_end(None, module)


def test_wandb_is_offline_without_an_account(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    assert not has_wandb_account()
    assert wandb_logger(save_dir=str(tmp_path), name="run")._offline
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password secret\n")
    assert has_wandb_account()
    assert not wandb_logger(save_dir=str(tmp_path), name="run")._offline


def test_progress_messages_are_logged_not_printed(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, logger="drafters")
    Run(tmp_path, probe=lambda drafter: {"accepted_length": 1.5}, config={"probe_every_n_steps": 8}).fit()
    assert any("decoded" in record.getMessage() for record in caplog.records)
    assert capsys.readouterr().out == ""
