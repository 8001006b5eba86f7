# The main job on a finished cache without the target's layers in memory, for every family of drafters: the weights are
# those of a run that has the whole target, and nothing but what is needed is read.

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import data.capture
import drafters.cache_writer
import evaluate
import train
from drafters.batches import StatesLoader
from drafters.cache_target import SPEC
from drafters.errors import CheckpointError
from drafters.weight_files import SOURCE_FILE
from tests.door_world import ROOT, contents, make_world, same_weights, settings, train_overrides

pytestmark = pytest.mark.usefixtures("one_thread")

NOT_LOADED = "The target's layers are not loaded: nothing of this run decodes with them"
LOADED = "The target's layers are loaded"
HEAD_ONLY = ("report=none", "callbacks.probe_every_n_steps=null")
OWN = ("drafter.draft_vocab_size=64", "drafter.num_anchors=8")
DRAFTERS = {
    "markov": ("drafter.block_size=3", "drafter.sequential.rank=4"),
    "gated": ("drafter.block_size=3", "drafter.sequential.rank=4"),
    "eagle3": ("drafter.block_size=3", "drafter.layer_ids=[0,2]"),
    "medusa": ("drafter.block_size=2",),
    "mtp": ("drafter.block_size=2",),
    "mtp-target": ("drafter.block_size=2", "drafter.block=target"),
    "exit": ("drafter.block_size=2", "drafter.exit_layer=0", "drafter.adapter.size=16"),
}


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    """A world whose target has a fixed fingerprint, so that its tensors may go."""
    world = make_world(tmp_path_factory.mktemp("lean"))
    (world / "target" / SOURCE_FILE).write_text(json.dumps({"sha256": "0" * 64}))
    trained(world, "begun", "markov", "optim.max_steps=1", "optim.warmup_steps=0")
    return world


def overrides(world, name, drafter, *more):
    base = [one for one in train_overrides(world) if not one.startswith(("drafter.", "name=", "report.", "callbacks."))]
    kind = drafter.partition("-")[0]
    own = DRAFTERS[drafter] + OWN
    ends = ("optim.max_steps=4", "report.max_new_tokens=12", "logger=none")
    return [*base, f"drafter={kind}", *own, f"name={name}", *ends, *more]


def trained(world, name, drafter, *more):
    train.train(settings("train", *overrides(world, name, drafter, *HEAD_ONLY, *more)))
    return world / "outputs" / name


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_weights_are_those_of_a_run_with_the_layers(lean, drafter, capsys):
    alone = trained(lean, f"{drafter}-head", drafter)
    assert NOT_LOADED in capsys.readouterr().out
    whole = trained(lean, f"{drafter}-whole", drafter, "callbacks.probe_every_n_steps=4")
    assert NOT_LOADED not in capsys.readouterr().out
    assert same_weights(alone, whole)
    mine, other = (json.loads((run / "drafter" / "config.json").read_text()) for run in (alone, whole))
    for one in ("drafter", "target"):
        assert mine[one] == other[one]


@pytest.mark.parametrize("drafter", ["markov", "exit"])
def test_layers_that_no_one_asks_for_need_not_be_there(lean, drafter, tmp_path, monkeypatch):
    shutil.copytree(lean, tmp_path / "world")
    path = tmp_path / "world" / "target" / "model.safetensors"
    start = {"markov": ("model.layers.3.", "model.layers.2."), "exit": ()}[drafter]
    kept = {name: t for name, t in load_file(path).items() if name.startswith(start) or ".layers." not in name}
    assert len(kept) == {"markov": 21, "exit": 3}[drafter]
    save_file(kept, path, {"format": "pt"})
    here = (f"target.weights={tmp_path}/world/target", f"cache.root={tmp_path}/world/states")
    expected = trained(lean, f"{drafter}-all", drafter)
    found = trained(lean, f"{drafter}-few", drafter, *here)
    assert same_weights(expected, found)
    with pytest.raises(CheckpointError, match="tensors are missing"):
        trained(lean, f"{drafter}-none", drafter, *here, "callbacks.probe_every_n_steps=4")


def test_a_run_ends_with_how_to_measure_it_and_may_be_measured_both_ways(lean, capsys):
    run = trained(lean, "later", "markov")
    assert f"python evaluate.py run={run} does it" in " ".join(capsys.readouterr().out.split())
    assert not (run / "report.json").exists()
    before = contents(run / "drafter")
    trained(lean, "later", "markov")  # again: nothing is left to do
    asked = (f"source.path={lean}/maths.jsonl", "source=jsonl", "max_new_tokens=12", "num_prompts=1", "device=cpu")
    evaluate.evaluate(settings("evaluate", f"run={run}", *asked, "num_speed_prompts=1", "profile_rounds=1"))
    assert "accepted length" in capsys.readouterr().out
    # The same command with a report measures, and trains nothing.
    measuring = ("report=default", "report.num_prompts=1", "report.num_speed_prompts=1")
    trained(lean, "later", "markov", *measuring)
    assert (run / "report.json").is_file()
    assert contents(run / "drafter") == before


@pytest.mark.parametrize("first", ["head", "whole"])
def test_a_run_goes_on_with_and_without_the_layers(lean, first, monkeypatch):
    batches, left = StatesLoader.batch, [3]

    def stop_in_the_middle(loader, epoch, step):
        left[0] -= loader.finished is not None
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return batches(loader, epoch, step)

    ways = {"head": (), "whole": ("callbacks.probe_every_n_steps=4",)}
    second = {"head": "whole", "whole": "head"}[first]
    monkeypatch.setattr(StatesLoader, "batch", stop_in_the_middle)
    name, kind = f"stopped-{first}", "mtp-target"
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        trained(lean, name, kind, *ways[first])
    step = torch.load(lean / "outputs" / name / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < step < 4
    found = trained(lean, name, kind, *ways[second])
    assert same_weights(found, trained(lean, f"through-{first}", kind))


def test_a_run_may_begin_from_another(lean):
    old = trained(lean, "old", "markov")
    ways = [("new-head", ()), ("new-whole", ("callbacks.probe_every_n_steps=4",))]
    new, whole = (trained(lean, name, "markov", f"warm_start={old}", "data.seed=1", *more) for name, more in ways)
    assert same_weights(new, whole)
    assert not same_weights(new, old)


def test_states_that_are_missing_are_captured_by_the_whole_target(lean, tmp_path, capsys, monkeypatch):
    own = f"cache.root={tmp_path}/states"
    first = trained(lean, "captures", "markov", own)
    assert f"{LOADED}: cache: no cache.json in" in capsys.readouterr().out
    (spec,) = (tmp_path / "states").glob(f"*/{SPEC}")
    monkeypatch.setattr(drafters.cache_writer, "target_states", None)
    # A cache of an earlier version says nothing of its target; a capture, which finds nothing to do, adds it.
    spec.unlink()
    command = [one for one in overrides(lean, "x", "markov", own) if one.startswith(("target.", "source", "cache."))]
    trained(lean, "loads", "markov", own)
    assert f"{SPEC} is not there (a cache of an earlier version)" in capsys.readouterr().out
    spec.unlink()
    data.capture.run(settings("capture", *command, "data.validation=0.2", "device=cpu"))
    assert spec.is_file()
    capsys.readouterr()
    again = trained(lean, "reads", "markov", own)
    assert NOT_LOADED in capsys.readouterr().out
    assert same_weights(first, again)


def test_states_made_in_the_step_need_the_target(lean, capsys):
    trained(lean, "online", "markov", "data=online")
    out = capsys.readouterr().out
    assert NOT_LOADED not in out
    assert "not measured (report.num_prompts=0)" in out


@pytest.mark.slow
def test_two_processes_train_without_the_layers(lean):
    command = [sys.executable, str(ROOT / "train.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    more = ("trainer=ddp", "trainer.devices=2")
    runs = []
    for name, ways in (("two-head", ()), ("two-whole", ("callbacks.probe_every_n_steps=4",))):
        given = overrides(lean, name, "markov", *HEAD_ONLY, *ways, *more)
        done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(NOT_LOADED) == (name == "two-head")
        runs.append(lean / "outputs" / name)
    assert same_weights(*runs)
