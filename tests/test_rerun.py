# train.py run=: a run once more, by its own settings, bit for bit; what may be changed, and what is refused.

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir

import train
from drafters.config import to_plain
from drafters.environment import read_environments
from drafters.errors import CheckpointError, ConfigError
from drafters.rerun import CONFIG, check_composed, following, stored_node
from drafters.runs import read_steps, write_steps
from tests.door_world import ROOT, contents, make_run, same_weights, train_settings


@pytest.fixture
def composed(monkeypatch):
    """What the door composes for a command."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        train.compose_run()
        assert sys.argv[1:3] == ["--config-name", CONFIG]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose(CONFIG, list(words))

    return call


@pytest.fixture(scope="module")
def begun(world):
    """A run that was not trained."""
    return make_run(world, "begun")


def settings_of(run):
    return (run / ".hydra" / "settings.json").read_text()


def write_settings(run, **changes):
    path = run / ".hydra" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_once_more_is_the_same_to_the_bit(world, first, composed, capsys):
    before = contents(first)
    train.train(composed(f"run={first}", "name=once-more"))
    again = world / "outputs" / "once-more"
    assert same_weights(first, again)
    expected = settings_of(first).replace('"name": "first"', '"name": "once-more"').replace("/first", "/once-more")
    assert settings_of(again) == expected
    out = capsys.readouterr().out
    assert f"Once more {first}: the same settings" in out
    assert "Its environment: the same as now" in out
    assert contents(first) == before
    (entry,) = read_environments(again / ".hydra" / "environment.json")
    assert entry["repeats"] == str(first)


@pytest.mark.usefixtures("no_cublas")
def test_a_deterministic_run_is_the_same_and_says_so(world, first):
    train.train(train_settings(world, "name=fixed", "seed=0", "deterministic=true", "report.num_prompts=0"))
    run = world / "outputs" / "fixed"
    assert same_weights(first, run)
    (entry,) = read_environments(run / ".hydra" / "environment.json")
    assert (entry["seed"], entry["deterministic"]) == (0, True)


def test_a_run_keeps_its_environment_and_a_resumed_one_adds_to_it(world, first, tmp_path):
    (entry,) = read_environments(first / ".hydra" / "environment.json")
    assert entry["environment"]["code"]["version"]
    assert (entry["seed"], entry["deterministic"], entry["processes"]) == (0, False, 1)
    assert json.loads((first / "report.json").read_text())["provenance"]["environment"] == ".hydra/environment.json"
    shutil.copytree(first, tmp_path / "again")
    (tmp_path / "again" / "report.json").unlink()
    train.train(train_settings(world, f"outputs={tmp_path}", "name=again"))
    both = read_environments(tmp_path / "again" / ".hydra" / "environment.json")
    assert both[0] == entry
    assert len(both) == 2


def test_the_settings_are_those_of_the_run_not_of_today(begun, composed):
    stored = json.loads(settings_of(begun))
    cfg = to_plain(composed(f"run={begun}", "name=x"))
    own = {"name": "x", "run_dir": f"{stored['outputs']}/x", "run": str(begun)}
    same = {key: value for key, value in stored.items() if key not in ("cwd", "logger")}
    assert {key: value for key, value in cfg.items() if key != "logger"} == same | own
    assert cfg["logger"] == stored["logger"] | {"save_dir": own["run_dir"]}


def test_single_settings_go_over_them_and_copies_follow(begun, composed):
    cfg = to_plain(composed(f"run={begun}", "name=x", "optim.lr=0.5", "loss.kl=0.25", "drafter.num_layers=3"))
    assert (cfg["optim"]["lr"], cfg["drafter"]["num_layers"]) == (0.5, 3)
    assert cfg["drafter"]["loss"]["kl"] == cfg["loss"]["kl"] == 0.25


def test_what_does_not_change_learning_may_be_chosen_anew(begun, composed):
    cfg = to_plain(composed(f"run={begun}", "name=x", "logger=wandb", "profiler=torch", "report=none"))
    assert cfg["logger"]["_target_"].endswith("wandb_logger")
    assert cfg["logger"]["name"] == "x"
    assert cfg["report"]["num_prompts"] == 0
    assert cfg["profiler"]["_target_"]


def test_text_that_looks_like_an_interpolation_stays_text(begun, tmp_path, composed):
    shutil.copytree(begun, tmp_path / "odd")
    source = json.loads(settings_of(begun))["source"]
    write_settings(tmp_path / "odd", source={**source, "template": "${x} {{ q }}"})
    assert to_plain(composed(f"run={tmp_path / 'odd'}", "name=x"))["source"]["template"] == "${x} {{ q }}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"name: missing; .*name=begun-again"),
        (["name=x", "drafter=eagle3"], r"drafter: got 'eagle3' with run=.*drafter\.SETTING=VALUE"),
        (["name=x", "+experiment=ci"], r"experiment: got 'ci' with run="),
        (["name=x", "optim=cosine"], r"optim: got 'cosine'"),
    ],
)
def test_words_against_it_are_refused(begun, words, message):
    with pytest.raises(ConfigError, match=message):
        stored_node([f"run={begun}", *words])


def test_no_run_is_none():
    assert stored_node(["name=x", "drafter=markov"]) is None
    assert stored_node(["run=null"]) is None
    with pytest.raises(ConfigError, match="run: got 'a' in a YAML"):
        check_composed("a", "train")


def test_folders_that_cannot_be_repeated_are_refused(begun, tmp_path):
    def refused(message, folder=tmp_path / "run"):
        with pytest.raises(CheckpointError, match=message):
            stored_node([f"run={folder}", "name=x"])

    refused("no folder", tmp_path / "nothing")
    shutil.copytree(begun, tmp_path / "run")
    path = tmp_path / "run" / ".hydra" / "settings.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "optim"}))
    refused(r"settings\.json lacks optim; it is damaged or of another version")
    path.write_text("{")
    refused("damaged")
    path.unlink()
    refused("not a run of train.py")


@pytest.mark.parametrize(
    "changes",
    [
        *({"logger": {"_target_": f"lightning.pytorch.loggers.{name}"}} for name in ("CSVLogger", "TensorBoardLogger")),
        {"logger": {"_target_": "drafters.training.loggers.wandb_logger", "name": "x"}},
        {"logger": None},
        *(
            {
                "trainer": {
                    "_target_": "lightning.pytorch.Trainer",
                    "strategy": {"_target_": f"drafters.training.strategies.{name}"},
                }
            }
            for name in ("ShardedStrategy", "ZeroStrategy")
        ),
    ],
)
def test_what_runs_have_called_may_be_called_again(begun, tmp_path, changes):
    shutil.copytree(begun, tmp_path / "run")
    write_settings(tmp_path / "run", **changes)
    assert stored_node([f"run={tmp_path / 'run'}", "name=x"])


@pytest.mark.parametrize(
    ("group", "node", "name"),
    [
        ("logger", {"_target_": "os.system", "command": "true"}, "os.system"),
        ("logger", {"_target_": "lightning.pytorch.loggers.CSVLogger.x"}, "CSVLogger.x"),
        ("logger", {"_target_": ["os.system"]}, r"\['os.system'\]"),
        ("trainer", {"_target_": "subprocess.run"}, "subprocess.run"),
        (
            "trainer",
            {"_target_": "lightning.pytorch.Trainer", "plugins": [{"_target_": "builtins.exec"}]},
            "builtins.exec",
        ),
    ],
)
def test_a_folder_does_not_say_what_is_called(begun, tmp_path, group, node, name):
    shutil.copytree(begun, tmp_path / "run")
    write_settings(tmp_path / "run", **{group: node})
    with pytest.raises(CheckpointError, match=rf"names {group}\._target_=.*{name}, which is not called because a fold"):
        stored_node([f"run={tmp_path / 'run'}", "name=x"])


def test_another_logger_of_the_command_is_called_in_its_place(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    write_settings(tmp_path / "run", logger={"_target_": "os.system"})
    assert "logger" not in stored_node([f"run={tmp_path / 'run'}", "name=x", "logger=csv"])


def test_code_of_a_targets_folder_is_trusted_by_the_command_alone(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    target = json.loads(settings_of(begun))["target"]
    write_settings(tmp_path / "run", target={**target, "trust_remote_code": True})
    words = [f"run={tmp_path / 'run'}", "name=x"]
    with pytest.raises(ConfigError, match=r"target\.trust_remote_code: .* was trained with true; say"):
        stored_node(words)
    assert stored_node([*words, "target.trust_remote_code=true"])
    assert stored_node([*words, "target.trust_remote_code=false"])


def test_a_run_is_not_repeated_into_itself(first, composed):
    with pytest.raises(ConfigError, match=r"name: got the name of .*first itself"):
        train.train(composed(f"run={first}", "name=first"))


def test_a_drafter_that_is_not_importable_is_named(begun, tmp_path, composed):
    shutil.copytree(begun, tmp_path / "mine")
    drafter = json.loads(settings_of(begun))["drafter"]
    write_settings(tmp_path / "mine", drafter={**drafter, "_target_": "not_here.Mine"})
    with pytest.raises(ConfigError, match=r"drafter\._target_: no module 'not_here'.*PYTHONPATH"):
        train.train(composed(f"run={tmp_path / 'mine'}", "name=x"))


def test_relative_paths_are_meant_from_where_it_was_begun(begun, tmp_path, monkeypatch):
    shutil.copytree(begun, tmp_path / "run")
    (tmp_path / "there").mkdir()
    write_settings(tmp_path / "run", cwd=str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path)
    with following("run") as origin:
        assert os.getcwd() == str(tmp_path / "there")
        assert origin.run.folder == tmp_path / "run"
        lines = list(origin.told(origin.settings, steps=None, processes=2))
        assert f"Works in {tmp_path / 'there'}, where it was begun" in lines[1]
    assert os.getcwd() == str(tmp_path)
    write_settings(tmp_path / "run", cwd=str(tmp_path / "gone"))
    with following("run") as origin:
        assert os.getcwd() == str(tmp_path)
        lines = list(origin.told({**origin.settings, "cwd": str(tmp_path)}, steps=None))
    assert any("which is not here: relative paths are meant from" in line for line in lines)
    assert any("was not recorded" in line for line in lines)


def test_minutes_are_the_steps_that_they_were(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    optim = {**json.loads(settings_of(begun))["optim"], "minutes": 2.0, "max_steps": None}
    write_settings(tmp_path / "run", optim=optim)
    with following(tmp_path / "run") as origin:
        new = {**origin.settings, "name": "x"}
        target = type(origin.run)(tmp_path / "x")
        with pytest.raises(CheckpointError, match="did not come so far that its 2 minutes"):
            origin.take_steps(target, new)
        # As earlier versions left it.
        (tmp_path / "run" / "checkpoints").mkdir()
        torch.save({"drafters": {"total_steps": 70}}, tmp_path / "run" / "checkpoints" / "last.ckpt")
        assert origin.take_steps(target, new) == 70
        write_steps(origin.run, minutes=2.0, steps=80)
        assert origin.take_steps(target, new) == 80
        assert read_steps(target, minutes=2.0) == 80
        assert any("2 minutes were 80 steps" in line for line in origin.told(new, steps=80))
        changed = {**new, "optim": {**optim, "minutes": 3.0}}
        assert origin.take_steps(target, changed) is None
        assert any("optim.minutes was 2.0, now 3.0" in line for line in origin.told(changed, steps=None))


def test_the_effective_config_is_shown(begun):
    words = [sys.executable, "train.py", f"run={begun}", "name=x", "optim.lr=0.5", "--cfg", "job", "--resolve"]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  lr: 0.5$", done.stdout, re.MULTILINE)
    assert re.search(r"^  block_size: 3$", done.stdout, re.MULTILINE)
    assert f"run_dir: {json.loads(settings_of(begun))['outputs']}/x" in done.stdout


def test_a_sweep_over_a_run_is_composed_as_one(begun, composed):
    cfg = composed(f"run={begun}", "optim.lr=0.5", "name='x-${optim.lr}'")
    assert to_plain(cfg)["run_dir"].endswith("/x-0.5")


def test_todays_settings_give_a_run_no_traces_of_it(world, first):
    assert "run" not in json.loads(settings_of(first))
    assert train_settings(world).run is None
