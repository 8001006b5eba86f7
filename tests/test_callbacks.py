# What watches a run: best and last, averaging, the table and the bar, the target's bits.

import logging
import shutil

import pytest
import torch

from drafters.checkpoint import load_drafter, read_config
from drafters.errors import ConfigError
from drafters.training.callbacks import CallbackConfig, TargetUnchanged
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from drafters.training.saving import SaveDrafter
from tests.training_doubles import LIGHTNING_NOISE, SPEC, ToyData, ToyHead, ToyRun, same_weights, toy

pytestmark = [*LIGHTNING_NOISE, pytest.mark.filterwarnings("ignore:.*warm-up steps in a run")]


def test_a_run_leaves_a_checkpoint_and_a_drafter(tmp_path):
    run = ToyRun(tmp_path).fit()
    assert run.trainer.global_step == 8
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 8
    assert state["drafters"]["total_steps"] == 8
    assert all(name.startswith("drafter.") for name in state["state_dict"])
    assert load_drafter(tmp_path / "drafter", spec=SPEC).config == run.module.drafter.config
    facts = read_config(tmp_path / "drafter")["provenance"]
    assert facts["seed"] == 0
    assert facts["validation"]["val/accepted_length"] == pytest.approx(run.callback(SaveDrafter).best)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "drafter", "throughput.json"]


def test_the_best_validation_is_kept(tmp_path):
    class Peak(DistillModule):
        peaks = iter([1.0, 3.0, 2.0])

        def on_validation_epoch_end(self):
            self.log("val/accepted_length", next(self.peaks))
            if self.trainer.global_step == 4:
                self.best_state = {k: v.clone() for k, v in self.drafter.state_dict().items()}

    run = ToyRun(tmp_path, trainer={"val_check_interval": 2}, max_steps=6)
    run.module = Peak(toy(), ToyHead(), run.optim)
    run.fit()
    saver = run.callback(SaveDrafter)
    assert (saver.best, saver.best_step) == (3.0, 4)
    loaded = load_drafter(tmp_path / "drafter", spec=SPEC)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in run.module.best_state.items())


def test_the_last_step_is_always_validated(tmp_path):
    run = ToyRun(tmp_path, max_steps=7, trainer={"val_check_interval": 5})
    steps = []
    run.module.on_validation_start = lambda: steps.append(run.trainer.global_step)
    run.fit()
    assert steps == [5, 7]


def test_without_validation_the_last_weights_are_saved(tmp_path):
    run = ToyRun(tmp_path, trainer={"limit_val_batches": 0})
    with pytest.warns(UserWarning, match="no validation gave a finite val/accepted_length"):
        run.fit()
    assert same_weights(load_drafter(tmp_path / "drafter", spec=SPEC), run.module.drafter)


def test_without_a_finite_validation_the_last_weights_are_saved(tmp_path):
    class Lost(DistillModule):
        def on_validation_epoch_end(self):
            self.log("val/accepted_length", float("nan"))

    run = ToyRun(tmp_path)
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
        ({"probe_tolerance": 0.0}, r"probe_tolerance: got 0\.0; must be in \(0, 1\)"),
        ({"probe_tolerance": 1.0}, r"probe_tolerance: got 1\.0; must be in \(0, 1\)"),
        ({"monitor": "accepted"}, "monitor: got 'accepted'; accepted: val/accepted_length, .*probe/accepted_length"),
        ({"monitor": "val/loss"}, "monitor: got 'val/loss'; .*the highest value wins"),
        ({"monitor": "probe/gap", "probe_every_n_steps": 5}, "monitor: got 'probe/gap'; accepted"),
        (
            {"monitor": "probe/accepted_length"},
            "monitor: got 'probe/accepted_length', but probe_every_n_steps is null.*or monitor=val/accepted_length",
        ),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CallbackConfig(**settings)


def test_an_unknown_monitor_lists_the_metrics(tmp_path):
    with pytest.raises(ConfigError, match=r"no metric 'val/speed'; accepted: .*val/accepted_length"):
        ToyRun(tmp_path, config={"monitor": "val/speed"}).fit()


def test_the_saved_drafter_and_the_probe_see_averaged_weights(tmp_path):
    # A naive twin of the average: the first step copies, later ones mix.
    raw, average, probed = [], {}, {}
    run = ToyRun(
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
    assert torch.equal(loaded["vocab.d2t"], toy().vocab.d2t)


def test_the_table_counts_what_is_trained_and_what_is_frozen(tmp_path):
    run = ToyRun(tmp_path)
    run.module.drafter.proj.requires_grad_(False)
    run.fit()
    text = run.console.export_text()
    cells = [[cell.strip() for cell in line.split("│")[1:5]] for line in text.splitlines() if "│" in line]
    rows = {name: counts for name, *counts in cells}
    assert rows["proj"] == ["0", "72", "float32"]
    assert rows["out"] == ["64", "0", "float32"]
    assert rows["drafter, all"] == ["80", "72", "float32"]
    assert rows["target head"] == ["0", "128", "float32"]


def test_a_target_that_moves_fails_the_run(tmp_path):
    head = ToyHead()

    def nudge(batch):
        with torch.no_grad():
            head.lm_head_VD[3, 3] += 1e-6
        return batch

    with pytest.raises(RuntimeError, match=r"training changed the frozen target: .'embedding'."):
        ToyRun(tmp_path, head=head).fit(ToyData(on_batch=nudge))


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


def test_progress_messages_are_logged_not_printed(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, logger="drafters")
    ToyRun(tmp_path, probe=lambda drafter: {"accepted_length": 1.5}, config={"probe_every_n_steps": 8}).fit()
    assert any("decoded" in record.getMessage() for record in caplog.records)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_finished_run_that_lost_its_drafter_writes_it_again(tmp_path, ema):
    options = {"ema_decay": ema, "trainer": {"val_check_interval": 2}}
    last = ToyRun(tmp_path, **options).fit().module.drafter  # with the averaged weights, once it is over
    shutil.rmtree(tmp_path / "drafter")
    with pytest.warns(UserWarning, match=r"drafter was lost: .* the last weights; the best ones were those of step \d"):
        ToyRun(tmp_path, **options).fit(resume=True)
    assert same_weights(load_drafter(tmp_path / "drafter", spec=SPEC), last)
    assert read_config(tmp_path / "drafter")["provenance"]["step"] == 8
