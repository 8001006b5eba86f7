# wandb without an account, and one wandb run for a run of ours: its resumed trainings and its evaluations. Offline.

import json
import os
from types import SimpleNamespace

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger

from drafters.training.loggers import has_wandb_account, log_evaluation, remember_wandb, wandb_logger

CHOSEN = {"logger": {"_target_": "drafters.training.loggers.wandb_logger", "save_dir": "x", "name": "run"}}


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No account, no settings of the machine."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture
def picture(tmp_path):
    from matplotlib.figure import Figure

    Figure(figsize=(1, 1)).savefig(tmp_path / "picture.png")
    return {"acceptance": tmp_path / "picture.png"}


def test_wandb_is_offline_without_an_account(tmp_path):
    assert not has_wandb_account()
    assert wandb_logger(save_dir=str(tmp_path), name="run")._offline
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password secret\n")
    assert has_wandb_account()
    assert not wandb_logger(save_dir=str(tmp_path), name="run")._offline


def test_a_training_and_its_evaluations_are_one_wandb_run(tmp_path, picture):
    run = tmp_path / "run"
    logger = wandb_logger(save_dir=str(run), name="run")
    remember_wandb(run, logger)
    known = json.loads((run / ".hydra" / "wandb.json").read_text())
    assert known["id"] == logger.experiment.id
    assert known["project"] == "drafters"
    # While the training's run is open, the evaluation joins it.
    assert log_evaluation(run, CHOSEN, {"mine/accepted_length": 2.5, "mine/nan": float("nan")}, picture)
    assert logger.experiment.summary["mine/accepted_length"] == 2.5
    assert "mine/nan" not in logger.experiment.summary.keys()  # noqa: SIM118  # wandb's summary is no dict
    assert list((run / "wandb").glob("*/files/media/images/acceptance*.png"))
    assert wandb.run is not None
    logger.experiment.finish()
    # Later, in a process of its own.
    assert log_evaluation(run, CHOSEN, {"code/accepted_length": 1.5}, {})
    written = [path.name for path in (run / "wandb").glob(f"offline-run-*/run-{known['id']}.wandb")]
    assert len(written) >= 1
    # A second run of the same second has a number behind its id.
    assert all(f"-{known['id']}" in path.name for path in (run / "wandb").glob("offline-run-*"))
    # And a resumed training goes on in it.
    assert wandb_logger(save_dir=str(run), name="run").version == known["id"]
    assert wandb_logger(save_dir=str(run), name="run", id="own").version == "own"
    assert wandb_logger(save_dir=str(tmp_path / "other"), name="run").version != known["id"]


def remembered(run):
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "wandb.json").write_text('{"id": "abc", "project": "drafters", "entity": "me"}')
    return run


class FakeRun:
    def __init__(self):
        self.summary, self.is_finished = {}, False

    def log(self, values):
        raise wandb.errors.CommError("the server does not answer")

    def finish(self):
        self.is_finished = True


def test_the_server_is_asked_for_the_same_run(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("machine api.wandb.ai login user password secret\n")
    calls, fake = [], FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(options) or fake)
    assert log_evaluation(remembered(tmp_path / "run"), CHOSEN, {"a": 1.0}, {})
    assert fake.summary == {"a": 1.0}
    assert fake.is_finished
    wanted = {"id": "abc", "project": "drafters", "entity": "me", "resume": "allow", "mode": "online"}
    assert wanted.items() <= calls[0].items()


def test_a_failure_of_wandb_warns_and_loses_nothing(tmp_path, monkeypatch, picture):
    run, fake = remembered(tmp_path / "run"), FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    with pytest.warns(UserWarning, match="wandb: the evaluation is not logged there: the server does not answer"):
        assert not log_evaluation(run, CHOSEN, {"a": 1.0}, picture)
    assert fake.is_finished
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.warns(UserWarning, match="wandb: the evaluation is not logged there: import of wandb"):
        assert not log_evaluation(run, CHOSEN, {"a": 1.0}, {})


@pytest.mark.parametrize("settings", [{}, {"logger": None}, {"logger": {"_target_": "lightning.CSVLogger"}}], ids=str)
def test_other_loggers_get_nothing(tmp_path, settings):
    assert not log_evaluation(remembered(tmp_path / "run"), settings, {"a": 1.0}, {})


def test_a_run_that_is_not_known_is_not_guessed(tmp_path):
    with pytest.warns(UserWarning, match=r"wandb\.json is missing, so the evaluation is not logged"):
        assert not log_evaluation(tmp_path, CHOSEN, {"a": 1.0}, {})
    remember_wandb(tmp_path, CSVLogger(tmp_path))
    remember_wandb(tmp_path, SimpleNamespace())
    remember_wandb(tmp_path, False)
    assert not (tmp_path / ".hydra").exists()
    (remembered(tmp_path / "run") / ".hydra" / "wandb.json").write_text("{")
    with pytest.warns(UserWarning, match="damaged"):
        assert wandb_logger(save_dir=str(tmp_path / "run"), name="run").version
