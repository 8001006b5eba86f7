# The doors, in process, on a tiny random target that lies in a folder as a real one would: the whole job, its resume,
# and what a user sees.

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb

import drafters.cache_writer
import evaluate
import train
from drafters.batches import StatesLoader
from drafters.config import to_plain
from drafters.decoding.report import CONTRACT_KEYS
from drafters.distributed import Ranks
from drafters.door import door
from drafters.errors import CheckpointError, ConfigError
from drafters.training.loggers import Evaluation, log_evaluation
from drafters.training.strategies import RanksEnvironment, placement
from tests.door_world import ROOT, STEPS, contents, same_weights, settings, train_settings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_leaves_a_drafter_and_a_report(first):
    report = json.loads((first / "report.json").read_text())
    assert set(report) >= CONTRACT_KEYS
    assert report["prompts"] == 2
    assert report["provenance"]["target"]["name"] == "tiny"
    assert report["provenance"]["weights"].endswith("/target")
    assert report["provenance"]["drafter"]["class"] == "drafters.heads.block.BlockDrafter"
    assert {"data_hash", "sha256", "step", "seed"} <= set(report["provenance"]["drafter"])
    page = (first / "report.md").read_text()
    assert "| tokens/s with and without |" in page
    for picture in ("acceptance.png", "training.png"):
        assert f"]({picture})" in page
        assert (first / picture).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (first / "drafter").iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in (first / "checkpoints").iterdir()] == ["last.ckpt"]
    assert "probe/accepted_length" in (first / "logs" / "version_0" / "metrics.csv").read_text()
    # Lightning's own ModelCheckpoint stays out.
    assert [path.relative_to(first) for path in first.rglob("*.ckpt")] == [Path("checkpoints/last.ckpt")]


def test_the_trainer_computes_where_the_target_is():
    def placed(*given):
        found = placement(*given)
        assert [type(one) for one in found.pop("plugins")] == [RanksEnvironment]
        return found

    one = {"num_nodes": 1, "strategy": "auto"}
    assert placed({}, Ranks(), torch.device("cuda:1")) == {"accelerator": "gpu", "devices": [1], **one}
    assert placed({}, Ranks(), torch.device("cpu")) == {"accelerator": "cpu", "devices": 1, **one}


def test_a_finished_run_is_left_alone(world, first, capsys):
    before = contents(first)
    train.train(train_settings(world))
    assert "is finished" in capsys.readouterr().out
    assert contents(first) == before


def test_a_second_name_takes_the_cache_and_repeats_the_first(world, first, monkeypatch):
    before = contents(first) | contents(world / "states")
    monkeypatch.setattr(drafters.cache_writer, "target_states", None)
    train.train(train_settings(world, "name=second", "logger=none"))
    second = world / "outputs" / "second"
    assert same_weights(first, second)
    assert not (second / "logs").exists()
    assert contents(first) | contents(world / "states") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_equals_uninterrupted(world, first, monkeypatch, number):
    batches = StatesLoader.batch
    left = [9]

    def stop_in_the_middle(loader, epoch, step):
        left[0] -= loader.finished is not None
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return batches(loader, epoch, step)

    name = f"name=stopped-{number.name}"
    monkeypatch.setattr(StatesLoader, "batch", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        train.train(train_settings(world, name))
    stopped = world / "outputs" / f"stopped-{number.name}"
    step = torch.load(stopped / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 5 < step < STEPS
    assert not (stopped / "report.json").exists()
    train.train(train_settings(world, name))
    assert same_weights(first, stopped)
    states = [
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (first, stopped)
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_run_that_was_killed_while_measuring_only_measures(world, first, tmp_path):
    shutil.copytree(first, tmp_path / "killed")
    (tmp_path / "killed" / "report.json").unlink()
    before = contents(tmp_path / "killed" / "drafter")
    train.train(train_settings(world, f"outputs={tmp_path}", "name=killed"))
    assert (tmp_path / "killed" / "report.json").is_file()
    assert contents(tmp_path / "killed" / "drafter") == before


def test_a_finished_run_that_lost_its_drafter_writes_it_again_and_measures_it(world, first, tmp_path):
    shutil.copytree(first, tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / "drafter")
    own = (f"outputs={tmp_path}", "name=lost")
    with pytest.warns(UserWarning, match="drafter was lost: it is written again with the last weights"):
        train.train(train_settings(world, *own))
    report = json.loads((tmp_path / "lost" / "report.json").read_text())
    assert report["provenance"]["drafter"]["step"] == STEPS
    # With nothing to write it from, the report is all there is: nothing is trained anew over it.
    shutil.rmtree(tmp_path / "lost" / "drafter")
    shutil.rmtree(tmp_path / "lost" / "checkpoints")
    before = contents(tmp_path / "lost")
    train.train(train_settings(world, *own))
    assert contents(tmp_path / "lost") == before


def test_the_weights_may_be_chosen_by_real_decoding(world, first, tmp_path):
    own = (f"outputs={tmp_path}", "name=probed", "callbacks.monitor=probe/accepted_length")
    train.train(train_settings(world, *own))
    facts = json.loads((tmp_path / "probed" / "report.json").read_text())["provenance"]["drafter"]
    assert facts["monitor"] == "probe/accepted_length"
    assert facts["probe"].keys() >= {"probe/accepted_length", "probe/acceptance@3", "probe/rounds"}
    rows = (tmp_path / "probed" / "logs" / "version_0" / "metrics.csv").read_text()
    assert "probe/validated_step" in rows


def test_a_run_with_wandb_is_found_again_by_its_evaluations(world, first, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    cfg = train_settings(world, f"outputs={tmp_path}", "name=logged", "logger=wandb")
    train.train(cfg)
    (run,) = (tmp_path / "logged").glob("wandb/offline-run-*")
    wandb.run.finish()
    run_id = json.loads((tmp_path / "logged" / ".hydra" / "wandb.json").read_text())["id"]
    assert run.name.endswith(run_id)
    evaluation = Evaluation(values={"code/accepted_length": 1.5})
    assert log_evaluation(tmp_path / "logged", to_plain(cfg), evaluation)
    assert all(path.name.endswith(run_id) for path in (tmp_path / "logged").glob("wandb/offline-run-*"))


def test_resume_goes_on_with_a_longer_budget_and_keeps_the_first_report(world, first, tmp_path):
    longer = (f"outputs={tmp_path}", "name=longer", f"optim.max_steps={STEPS + 3}")
    shutil.copytree(first, tmp_path / "longer")
    with pytest.raises(CheckpointError, match=r"optim\.max_steps was 14, now 17.*resume=true"):
        train.train(train_settings(world, *longer))
    train.train(train_settings(world, *longer, "resume=true"))
    assert torch.load(tmp_path / "longer" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == STEPS + 3
    files = {path.name for path in (tmp_path / "longer").glob("*.json")}
    assert files == {"report.json", "report.before.json", "throughput.json"}


@pytest.mark.parametrize(("length", "accepted"), [("auto", {1, 2, 3}), ("2", {2})])
def test_evaluate_measures_the_prompts_of_several_files(world, first, tmp_path, length, accepted):
    files = f"source.path=[{world}/maths.jsonl,{world}/code.jsonl]"
    out = [f"out={tmp_path}"] if length == "auto" else []
    own = (f"run={first}", "device=cpu", "source=jsonl", files, f"length={length}", "max_new_tokens=12", *out)
    evaluate.evaluate(settings("evaluate", *own))
    (folder,) = [tmp_path] if out else (first / "evaluate").glob("code-maths-length2-*")
    report = json.loads((folder / "report.json").read_text())
    assert set(report) >= CONTRACT_KEYS
    assert set(report["by_source"]) == {"maths", "code"}
    assert report["by_source"]["code"]["prompts"] == 2
    assert report["draft_length"] in accepted
    assert (folder / "acceptance.png").is_file()


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (ConfigError("optim.lr: got 0"), 1, "error: optim.lr: got 0\n"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.csv"), 1, "No space left on device: 'metrics.csv'"),
        (KeyboardInterrupt(), 130, "the same command goes on from there"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_door_says_one_line_and_the_exit_code(capsys, raised, code, text):
    with pytest.raises(SystemExit) as exit_info, door():
        raise raised
    err = capsys.readouterr().err
    assert exit_info.value.code == code
    assert text in err
    assert err.count("\n") == 1


def test_an_unknown_choice_lists_the_options_and_a_run_prints_no_chatter(world, first, tmp_path):
    command = [sys.executable, str(ROOT / "train.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "drafter=nope"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("error: drafter: got 'nope'; accepted: draft_model, eagle3, ")
    assert done.stderr.count("\n") == 1
    own = json.loads((first / ".hydra" / "settings.json").read_text())
    overrides = train_overrides(own, outputs=tmp_path)
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "accepted length (bonus included)" in done.stdout
    for noise in ("Warning", "Tip:", "GPU available", "LeafSpec", "workers", "Trainer.fit"):
        assert noise not in done.stdout + done.stderr


def train_overrides(own, *, outputs):
    """A command line for the settings of a run, elsewhere."""
    changed = {"target": ("weights", "name", "sha256", "mask_token", "layer_ids", "dtype"), "source": ("path",)}
    changed |= {"data": ("validation",), "cache": ("root",), "optim": ("minutes", "max_steps", "warmup_steps")}
    changed |= {"drafter": ("draft_vocab_size", "block_size"), "report": ("num_prompts", "max_new_tokens")}
    values = {f"{group}.{name}": own[group][name] for group, names in changed.items() for name in names}
    pairs = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    return ["source=jsonl", "device=cpu", f"outputs={outputs}", *pairs]
