# What an evaluation is asked to measure: names become runs and baselines, and one target for all.

import json
import shutil

import pytest

from drafters.contestants import Entry, find_entries, target_node
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.block import BlockDrafter
from drafters.heads.ngram import NgramDrafter
from tests.door_world import make_run
from tests.tiny import tiny_target

BASELINES = {
    "ngram": {"_target_": "drafters.heads.ngram.NgramDrafter", "max_ngram": 2},
    "draft_model": {"_target_": "drafters.heads.draft_model.DraftModel"},
}


@pytest.fixture(scope="module")
def run(world):
    return make_run(world, "run")


@pytest.fixture(scope="module")
def target(world):
    from drafters.target import FrozenTarget

    return FrozenTarget.load(str(world / "target"), name="tiny", mask_token=0, dtype="float32", device="cpu")


def found(*names):
    return find_entries(names, BASELINES, key="compare")


def test_runs_and_baselines_keep_their_order_and_names(run):
    entries = found("ngram", str(run), "draft_model")
    assert [entry.name for entry in entries] == ["ngram", "run", "draft_model"]
    assert [entry.run is None for entry in entries] == [True, False, True]
    assert entries[1].run.folder == run
    assert entries[1].settings["name"] == "run"
    assert entries[0].settings == BASELINES["ngram"]


def test_folders_of_one_name_are_told_apart_by_their_paths(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "run")
    assert [entry.name for entry in found(str(run), str(other), "ngram")] == [str(run), str(other), "ngram"]
    called = shutil.copytree(run, tmp_path / "ngram")
    assert [entry.name for entry in found(str(called), "ngram")] == [str(called), "ngram"]


def test_a_folder_is_found_from_inside_it(run, monkeypatch):
    monkeypatch.chdir(run)
    assert [entry.name for entry in found(".")] == ["run"]


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], ConfigError, r"^compare: it is empty; accepted: run folders and baselines \(ngram, draft_model\)$"),
        (["ngram", "a", "ngram"], ConfigError, "^compare: 'ngram' is there twice; name each once$"),
        (["markov"], ConfigError, r"^compare: got 'markov', which is no folder and no baseline; accepted: .*outputs/"),
        (["outputs/absent"], CheckpointError, "no folder outputs/absent"),
    ],
)
def test_names_that_are_nothing_are_refused(names, error, message):
    with pytest.raises(error, match=message):
        found(*names)


def test_a_run_without_a_drafter_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "drafter")
    with pytest.raises(CheckpointError, match="has no drafter yet"):
        found(str(tmp_path / "run"))


def test_a_pattern_names_the_finished_runs_that_it_matches(run, tmp_path, monkeypatch):
    for name in ("b-tiny", "a-tiny", "other"):
        shutil.copytree(run, tmp_path / "outputs" / name)
    (tmp_path / "outputs" / "no-tiny" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert [entry.name for entry in found("outputs/*-tiny", "ngram")] == ["a-tiny", "b-tiny", "ngram"]
    assert [entry.name for entry in found(f"{tmp_path}/outputs/*-tiny")] == ["a-tiny", "b-tiny"]
    with pytest.raises(ConfigError, match=r"'outputs/z\*' matches no run with a drafter"):
        found("outputs/z*")
    with pytest.raises(ConfigError, match="there twice"):
        found("outputs/*-tiny", "outputs/a-tiny")


def test_the_target_is_the_given_one_or_that_of_the_first_run(run, tmp_path):
    second = shutil.copytree(run, tmp_path / "second")
    path = second / ".hydra" / "settings.json"
    settings = json.loads(path.read_text())
    settings["target"]["name"] = "another"
    path.write_text(json.dumps(settings))
    assert target_node(found("ngram", str(run), str(second)), None)["name"] == "tiny"
    assert target_node(found(str(second), str(run)), None)["name"] == "another"
    assert target_node(found(str(run)), {"name": "given"}) == {"name": "given"}
    assert target_node(found("ngram"), {"name": "given"}) == {"name": "given"}
    with pytest.raises(ConfigError, match=r"^target: missing; a baseline alone needs one of conf/target"):
        target_node(found("ngram", "draft_model"), None)


@pytest.mark.parametrize(("weights", "becomes"), [("target", "{world}/target"), ("org/model", "org/model")])
def test_relative_weights_are_meant_from_where_the_run_was_begun(world, run, tmp_path, monkeypatch, weights, becomes):
    (entry,) = found(str(run))
    entry.settings["target"]["weights"] = weights
    monkeypatch.chdir(tmp_path)
    node = target_node([entry], None)
    assert node["weights"] == becomes.format(world=world)
    assert entry.settings["target"]["weights"] == weights


def test_what_is_loaded_says_where_it_comes_from(run, target):
    ours, ngram = (entry.load(target) for entry in found(str(run), "ngram"))
    assert isinstance(ours.drafter, BlockDrafter)
    assert not ours.drafter.training
    config = json.loads((run / "drafter" / "config.json").read_text())
    assert ours.provenance["sha256"] == config["weights"]["sha256"]
    assert ours.provenance["class"] == "drafters.heads.block.BlockDrafter"
    assert isinstance(ngram.drafter, NgramDrafter)
    assert ngram.provenance["class"] == "drafters.heads.ngram.NgramDrafter"
    assert (ngram.provenance["config"]["max_ngram"], ngram.provenance["config"]["min_ngram"]) == (2, 1)


def test_wrong_settings_of_a_baseline_are_named(target):
    with pytest.raises(ConfigError, match=r"^baselines\.mine\.max: unknown setting; accepted: name, max_ngram"):
        Entry(name="mine", settings={**BASELINES["ngram"], "max": 1}).load(target)


def test_a_run_for_another_target_is_refused(run, target):
    (entry,) = found(str(run))
    other = tiny_target(seed=1, vocab_size=target.spec.vocab_size, mask_token_id=0)
    with pytest.raises(CheckpointError, match="allow_other_target=true"):
        entry.load(other)
    with pytest.warns(UserWarning, match="trained with chat template"):
        assert entry.load(other, allow_other_target=True).drafter.spec == other.spec
