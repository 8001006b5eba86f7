# wandb without an account, and one wandb run for a run of ours: its resumed trainings, its evaluations, its drafter.
# TensorBoard gets the same evaluations. Offline, and read back from the files.

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drafters.errors import ConfigError
from drafters.training.loggers import Evaluation, has_wandb_account, log_evaluation, remember_wandb, wandb_logger
from drafters.training.run_facts import log_facts
from tests.door_world import settings
from tests.training_doubles import LIGHTNING_NOISE, ToyRun, toy
from tests.wandb_records import history_names, of_run
from train import build_logger

pytestmark = [*LIGHTNING_NOISE, pytest.mark.filterwarnings("ignore:.*warm-up steps in a run")]

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
    assert log_evaluation(
        run, CHOSEN, Evaluation(values={"mine/accepted_length": 2.5, "mine/nan": float("nan")}, pictures=picture)
    )
    assert logger.experiment.summary["mine/accepted_length"] == 2.5
    assert "mine/nan" not in logger.experiment.summary.keys()  # noqa: SIM118  # wandb's summary is no dict
    assert list((run / "wandb").glob("*/files/media/images/acceptance*.png"))
    assert wandb.run is not None
    logger.experiment.finish()
    # Later, in a process of its own.
    assert log_evaluation(run, CHOSEN, Evaluation(values={"code/accepted_length": 1.5}))
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
    assert log_evaluation(remembered(tmp_path / "run"), CHOSEN, Evaluation(values={"a": 1.0}))
    assert fake.summary == {"a": 1.0}
    assert fake.is_finished
    wanted = {"id": "abc", "project": "drafters", "entity": "me", "resume": "allow", "mode": "online"}
    assert wanted.items() <= calls[0].items()


def test_a_failure_of_wandb_warns_and_loses_nothing(tmp_path, monkeypatch, picture):
    run, fake = remembered(tmp_path / "run"), FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    with pytest.warns(UserWarning, match="wandb: the evaluation is not logged there: the server does not answer"):
        assert not log_evaluation(run, CHOSEN, Evaluation(values={"a": 1.0}, pictures=picture))
    assert fake.is_finished
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.warns(UserWarning, match="wandb: the evaluation is not logged there: import of wandb"):
        assert not log_evaluation(run, CHOSEN, Evaluation(values={"a": 1.0}))


@pytest.mark.parametrize("settings", [{}, {"logger": None}, {"logger": {"_target_": "lightning.CSVLogger"}}], ids=str)
def test_other_loggers_get_nothing(tmp_path, settings):
    assert not log_evaluation(remembered(tmp_path / "run"), settings, Evaluation(values={"a": 1.0}))


def test_a_run_that_is_not_known_is_not_guessed(tmp_path):
    with pytest.warns(UserWarning, match=r"wandb\.json is missing, so the evaluation is not logged"):
        assert not log_evaluation(tmp_path, CHOSEN, Evaluation(values={"a": 1.0}))
    remember_wandb(tmp_path, CSVLogger(tmp_path))
    remember_wandb(tmp_path, SimpleNamespace())
    remember_wandb(tmp_path, False)
    assert not (tmp_path / ".hydra").exists()
    (remembered(tmp_path / "run") / ".hydra" / "wandb.json").write_text("{")
    with pytest.warns(UserWarning, match="damaged"):
        assert wandb_logger(save_dir=str(tmp_path / "run"), name="run").version


SETTINGS = {"name": "run", "optim": {"lr": 0.001, "minutes": None}, "drafter": {"name": "toy"}, "resume": False}


def begun(run, settings=SETTINGS):
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "settings.json").write_text(json.dumps(settings))
    return run


def test_wandb_holds_the_settings_and_what_training_logs(tmp_path):
    run = begun(tmp_path / "run")
    logger = wandb_logger(save_dir=str(run), name="run", group="a group")
    training = ToyRun(run, trainer={"logger": logger, "log_every_n_steps": 2})
    remember_wandb(run, logger)
    log_facts(run, logger, training.module)
    training.fit()
    logger.experiment.finish()
    found = of_run(run)
    (begin,) = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    assert begin.run_group == "a group"
    config = {}
    for update in [begin.config.update, *(one.config.update for one in found)]:
        config |= {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in update}
    assert config["optim"] == SETTINGS["optim"]
    assert config["drafter"] == {"name": "toy"}
    assert config["target_spec"]["weights_hash"] == "weights-a"
    assert config["drafter_parameters"]["trainable"] == sum(p.numel() for p in toy().parameters())
    assert {"drafters", "torch", "lightning", "transformers", "python"} == set(config["versions"])
    wanted = {"train/loss", "val/accepted_length", "val/acceptance@1", "throughput/tokens_per_second", "throughput/mfu"}
    assert wanted <= history_names(found)


def test_the_files_of_other_loggers_hold_the_settings(tmp_path):
    run = begun(tmp_path / "run")
    csv = CSVLogger(run, name="logs")
    board = TensorBoardLogger(run, name="board", version="", default_hp_metric=False)
    for logger in (csv, board):
        log_facts(run, logger, ToyRun(run).module)
        logger.save()
        assert "weights_hash: weights-a" in next((run / logger.name).rglob("hparams.yaml")).read_text()
    log_facts(run, False, ToyRun(run).module)
    board.finalize("success")
    plugins = EventAccumulator(str(run / "board")).Reload().summary_metadata
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(plugins)
    assert b"optim.lr" in plugins["_hparams_/session_start_info"].plugin_data.content


def test_the_jobs_of_a_sweep_are_runs_of_their_own(tmp_path):
    ids = []
    for name in ("lr0.001", "lr0.002"):
        logger = wandb_logger(save_dir=str(tmp_path / name), name=name)
        remember_wandb(tmp_path / name, logger)
        logger.log_metrics({"train/loss": 1.0}, step=1)
        ids.append(json.loads((tmp_path / name / ".hydra" / "wandb.json").read_text())["id"])
    logger.experiment.finish()
    assert len(set(ids)) == 2
    for name, own in zip(("lr0.001", "lr0.002"), ids, strict=True):
        (written,) = (tmp_path / name / "wandb").glob("offline-run-*/*.wandb")
        assert written.name == f"run-{own}.wandb"
        assert "train/loss" in history_names(of_run(tmp_path / name))


def test_the_settings_of_a_sweep_have_a_group():
    chosen = settings("train", "logger=wandb", "optim.lr=1e-3", "name=lr${optim.lr}")
    assert (chosen.logger.name, chosen.logger.group, chosen.logger.log_drafter) == ("lr0.001", "markov-smollm2", False)


def test_a_drafter_is_kept_as_an_artifact(tmp_path):
    run = remembered(tmp_path / "my run")
    (run / "drafter").mkdir()
    (run / "drafter" / "config.json").write_text("{}")
    (run / "drafter" / "model.safetensors").write_bytes(b"weights")
    facts = {"accepted_length": 2.5, "target_weights_hash": "abc", "weights_sha256": "0123456789abcdef"}
    evaluation = Evaluation(values={"report/accepted_length": 2.5}, drafter=run / "drafter", facts=facts)
    assert log_evaluation(run, CHOSEN, evaluation)
    # A later run replaces the folder as a whole; what is to be uploaded stays.
    (run / "drafter").rename(run / "drafter.old")
    (found,) = [one.artifact for one in of_run(run) if one.WhichOneof("record_type") == "artifact"]
    assert (found.name, found.type, json.loads(found.metadata)) == ("my-run", "drafter", facts)
    files = {one.path: Path(one.local_path) for one in found.manifest.contents}
    assert set(files) == {"config.json", "model.safetensors"}
    assert all(path.is_relative_to(run / "wandb") for path in files.values())
    assert files["model.safetensors"].read_bytes() == b"weights"
    # The same weights again.
    assert log_evaluation(run, CHOSEN, evaluation)


def test_a_key_is_no_setting(tmp_path):
    nodes = [
        {"api_key": "hidden123"},
        {"settings": {"api_key": "hidden123"}},
        {"settings": {"a": {"TOKEN": "hidden123"}}},
    ]
    for node in nodes:
        with pytest.raises(ValueError, match="WANDB_API_KEY") as caught:
            wandb_logger(save_dir=str(tmp_path), name="run", **node)
        assert "hidden123" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"logger: .*settings\.api_key: got a secret \(not shown\)") as caught:
        build_logger(settings("train", "logger=wandb", "+logger.settings.api_key=hidden123"))
    assert "hidden123" not in str(caught.value)


def test_an_account_s_key_is_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "f" * 39 + "e")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = begun(tmp_path / "run")
    logger = wandb_logger(save_dir=str(run), name="run")
    remember_wandb(run, logger)
    log_facts(run, logger, ToyRun(run).module)
    logger.experiment.finish()
    written = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    assert not any(b"f" * 39 in path.read_bytes() for path in written)


def test_tensorboard_gets_the_report_where_training_logged(tmp_path, picture):
    node = settings("train", "logger=tensorboard", f"outputs={tmp_path}", "name=run").logger
    logger = instantiate(node)
    logger.log_metrics({"train/loss": 1.0}, step=3)
    logger.finalize("success")
    evaluation = Evaluation(values={"report/accepted_length": 2.5}, pictures=picture, step=8)
    chosen = {"logger": {"_target_": node._target_, "name": node.name, "version": node.version}}
    assert log_evaluation(tmp_path / "run", chosen, evaluation)
    # A resumed training goes on in the same place.
    again = instantiate(node)
    again.log_metrics({"train/loss": 0.5}, step=9)
    again.finalize("success")
    board = EventAccumulator(str(tmp_path / "run" / "logs")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("report/accepted_length")] == [(8, 2.5)]
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(3, 1.0), (9, 0.5)]
    assert board.Tags()["images"] == ["acceptance"]


def test_a_rank_that_is_not_the_first_begins_no_wandb_run(tmp_path, monkeypatch):
    logger = wandb_logger(save_dir=str(tmp_path / "run"), name="run")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    remember_wandb(tmp_path / "run", logger)
    log_facts(tmp_path / "run", logger, None)
    assert not (tmp_path / "run").exists()
