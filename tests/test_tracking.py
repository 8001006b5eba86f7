# A whole training with wandb, offline: settings, scalars, the report with its pictures and the drafter are one wandb
# run; the profiler and the meter leave their files. And a sweep is one wandb run for each job, in one group.

import json
import os

import pytest
import wandb

import train
from drafters.config import to_plain
from tests.door_world import STEPS, train_settings
from tests.wandb_records import history_names, of_run


@pytest.fixture(scope="module")
def tracked(world, one_thread):
    """The folder of a finished run that logged to wandb under the profiler."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB")]:
            patch.delenv(name)
        patch.setenv("HOME", str(world / "home"))
        patch.setenv("NETRC", str(world / "no-netrc"))
        patch.setenv("WANDB_SILENT", "true")
        chosen = ("logger=wandb", "logger.log_drafter=true", "profiler=torch", "profiler.skip_steps=3")
        train.train(train_settings(world, *chosen, "name=tracked", "callbacks.probe_every_n_steps=null"))
        if wandb.run is not None:
            wandb.run.finish()
        os.environ.pop("WANDB_MODE", None)  # Lightning sets it
    return world / "outputs" / "tracked"


@pytest.fixture(scope="module")
def found(tracked):
    return of_run(tracked)


def kind(found, name):
    return [getattr(one, name) for one in found if one.WhichOneof("record_type") == name]


def test_a_training_and_its_report_are_one_wandb_run(tracked, found):
    (begin,) = kind(found, "run")
    assert begin.run_id == json.loads((tracked / ".hydra" / "wandb.json").read_text())["id"]
    assert (begin.display_name, begin.run_group) == ("tracked", "markov-tiny")
    report = json.loads((tracked / "report.json").read_text())
    summary = {}
    for one in kind(found, "summary"):
        summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.update}
    assert summary["report/accepted_length"] == pytest.approx(report["accepted_length"])
    names = history_names(found)
    wanted = ("train/loss", "val/accepted_length", "val/confidence_ece@1", "throughput/tokens_per_second")
    assert {*wanted, "throughput/data_wait", "throughput/mfu", "train/grad_norm"} <= names
    pictures = {f"report/{path.stem}" for path in tracked.glob("*.png")}
    assert pictures
    assert {f"{one}/path" for one in pictures} <= names


def test_every_setting_is_in_the_config(tracked, found):
    config = {}
    for update in [kind(found, "run")[0].config.update, *(one.update for one in kind(found, "config"))]:
        config |= {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in update}
    settings = json.loads((tracked / ".hydra" / "settings.json").read_text())
    assert {name: config[name] for name in settings} == settings
    stored = json.loads((tracked / "drafter" / "config.json").read_text())
    assert config["target_spec"]["weights_hash"] == stored["target"]["weights_hash"]
    assert config["drafter_parameters"]["trainable"] > 0


def test_the_drafter_is_an_artifact_with_what_it_is_worth(tracked, found):
    (artifact,) = kind(found, "artifact")
    report, stored = (json.loads((tracked / one).read_text()) for one in ("report.json", "drafter/config.json"))
    assert (artifact.name, artifact.type) == ("tracked", "drafter")
    facts = json.loads(artifact.metadata)
    assert facts["accepted_length"] == pytest.approx(report["accepted_length"])
    assert facts["target_weights_hash"] == stored["target"]["weights_hash"]
    assert facts["weights_sha256"] == stored["weights"]["sha256"]
    assert {one.path for one in artifact.manifest.contents} == {"config.json", "model.safetensors"}


def test_the_meter_and_the_profiler_leave_their_files(tracked):
    facts = json.loads((tracked / "throughput.json").read_text())
    assert facts["measured"]["steps"] == STEPS - 2
    assert 0 < facts["data_wait"] < 1
    assert facts["mfu"] > 0
    assert (tracked / "profile" / "trace-rank0.json.gz").is_file()
    assert (tracked / "profile" / "operators-rank0.txt").read_text().startswith("steps 6 to 8, rank 0\n")


def test_a_finished_run_may_be_asked_again_without_the_profiler(tracked, world):
    # What watches a run is no part of what it learns.
    again = to_plain(train_settings(world, "name=tracked", "callbacks.probe_every_n_steps=null"))
    assert "profiler" not in again
    train.train(train_settings(world, "name=tracked", "callbacks.probe_every_n_steps=null"))
