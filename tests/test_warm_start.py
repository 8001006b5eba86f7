# Beginning from a trained drafter: what is taken, what is new and neutral, what is refused; and through the door.

import json
import logging
import shutil
import tempfile
import warnings
from dataclasses import replace

import pytest
import torch

import train
from drafters.checkpoint import load_drafter, read_config, save_drafter
from drafters.config import build_config
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.block import BlockDrafter
from drafters.warm_start import folder_of, load_warm_start, take_over
from tests.contract_cases import TRAINED, Reading, node_of, shaken, tiny_world
from tests.door_world import train_settings


@pytest.fixture(scope="module")
def tiny():
    return tiny_world()


def started(tiny, name, old, **settings):
    """A new drafter that begins from `old`, by way of its folder."""
    cls, config = build_config({**tiny.shrunk(node_of(name)), **settings}, key="drafter")
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(old, f"{folder}/drafter", spec=tiny.target.spec)
        warm = load_warm_start(folder, cls, config, tiny.target.spec)
    torch.manual_seed(5)
    drafter = cls.create(config, tiny.target.spec, replace(tiny.start, warm=warm))
    take_over(drafter, warm)
    return drafter.eval()


def proposed(tiny, drafter, length=None):
    reading = Reading(drafter, tiny.target, [example.tokens_T[:20] for example in tiny.examples[:3]])
    length = drafter.block_size if length is None else length
    return reading.propose(length, reading.uniforms(length))


@pytest.mark.parametrize(
    ("name", "settings", "old_name", "old_settings"),
    [
        ("markov", {}, "parallel", {"sample_from_anchor": True}),
        ("gated", {}, "parallel", {"sample_from_anchor": True}),
        ("rnn", {}, "parallel", {"sample_from_anchor": True}),
        ("parallel", {"num_layers": 3}, "parallel", {}),
        ("markov", {"num_layers": 3}, "markov", {"num_layers": 1}),
        ("markov", {"confidence": False}, "markov", {}),
    ],
)
def test_what_is_new_changes_nothing_at_first(tiny, name, settings, old_name, old_settings):
    old = shaken(tiny.drafter(old_name, **old_settings))
    new = started(tiny, name, old, **settings)
    before, after = proposed(tiny, old), proposed(tiny, new)
    assert torch.equal(before.tokens_BS, after.tokens_BS)
    torch.testing.assert_close(before.probs_BSV, after.probs_BSV, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_a_drafter_begins_as_one_of_its_kind(tiny, name):
    old = shaken(tiny.drafter(name))
    new = started(tiny, name, old)
    assert all(torch.equal(one, old.get_parameter(key)) for key, one in new.named_parameters())
    assert torch.equal(proposed(tiny, new).tokens_BS, proposed(tiny, old).tokens_BS)


def test_the_vocabulary_comes_with_it_and_is_not_counted_again(tiny, monkeypatch):
    old = shaken(tiny.drafter("parallel", sample_from_anchor=True))
    old.vocab.d2t[-1] = 127
    monkeypatch.setattr("drafters.heads.draft_vocab.count_vocab", None)
    assert torch.equal(started(tiny, "markov", old).vocab.ids_V, old.vocab.ids_V)
    monkeypatch.undo()
    for size in (50, None):
        with pytest.raises(ConfigError, match=rf"draft_vocab_size: got {size}, but .* accepted: .*=100$"):
            started(tiny, "markov", old, draft_vocab_size=size)
    whole = shaken(tiny.drafter("parallel", sample_from_anchor=True, draft_vocab_size=None))
    with pytest.raises(ConfigError, match=r"got 100, but .* has None, .*draft_vocab_size=null$"):
        started(tiny, "markov", whole)


def test_the_log_lists_what_was_taken_and_what_is_new(tiny, caplog):
    old = tiny.drafter(
        "markov", num_layers=1, sequential={"_target_": "drafters.heads.sequential.MarkovHead", "rank": 4}
    )
    with caplog.at_level(logging.INFO, logger="drafters"):
        started(tiny, "markov", old, num_layers=2, confidence=False)
    taken, new, left, *shapes = (line for line in caplog.messages if line.startswith("warm start"))
    assert taken == "warm start: taken fc.weight, hidden_norm.weight, layers.0 (11), norm.weight"
    assert new == "warm start: new layers.1 (11), markov_head (2)"
    assert left == "warm start: left behind confidence_head (2)"
    assert shapes[0] == "warm start: markov_head.markov_w1.weight is new since it was [128, 4], now [128, 6]"
    assert len(shapes) == 2


def test_the_log_names_what_is_half_taken(tiny, caplog):
    old = tiny.drafter("markov")
    with caplog.at_level(logging.INFO, logger="drafters"), pytest.warns(UserWarning, match="sequential"):
        started(tiny, "rnn", old)
    taken, new, _ = (line for line in caplog.messages if line.startswith("warm start"))
    assert "markov_head.markov_w1.weight, markov_head.markov_w2.weight" in taken
    assert new == "warm start: new markov_head.joint_proj.weight, markov_head.joint_proj.bias"


@pytest.mark.parametrize(("before", "after"), [({"share_depths": True}, {}), ({"block_size": 1}, {"block_size": 3})])
def test_new_depths_begin_as_the_deepest_known(tiny, before, after):
    old = shaken(tiny.drafter("mtp", **before))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="warm_start: drafter.share_depths")
        new = started(tiny, "mtp", old, **after)
    last = old.modules_in_order[-1].state_dict()
    for depth in new.modules_in_order:
        assert all(torch.equal(value, last[key]) for key, value in depth.state_dict().items())
    if before.get("share_depths"):
        assert torch.equal(proposed(tiny, new).tokens_BS, proposed(tiny, old).tokens_BS)


def test_a_drafter_without_weights_is_no_beginning(tiny):
    with pytest.raises(ConfigError, match="holds no weights to begin from; choose a trained drafter"):
        started(tiny, "exit", tiny.drafter("layer_skip"))


def test_equal_tensors_of_another_meaning_warn(tiny):
    old = tiny.drafter("parallel", layer_ids=[0, 1, 2])
    with pytest.warns(UserWarning, match=r"drafter\.layer_ids is \(1, 2, 3\), but was \(0, 1, 2\)"):
        started(tiny, "parallel", old, layer_ids=[1, 2, 3])
    old = tiny.drafter("mtp")
    with pytest.warns(UserWarning, match="drafter.order is hidden_first, but was embedding_first"):
        started(tiny, "mtp", old, order="hidden_first")
    with pytest.warns(UserWarning, match=r"drafter\.sequential is .*RNNHead, but was .*MarkovHead"):
        started(tiny, "rnn", tiny.drafter("markov"))


def test_another_family_is_refused(tiny):
    with pytest.raises(
        ConfigError, match=r"holds a MedusaDrafter \('medusa'\), of which a BlockDrafter \('markov'\) can"
    ):
        started(tiny, "markov", tiny.drafter("medusa"))
    with pytest.raises(ConfigError, match=r"holds a BlockDrafter \('markov'\), of which a Eagle3Drafter"):
        started(tiny, "eagle3", tiny.drafter("markov"))


def opened(tiny, path):
    drafter = tiny.drafter("parallel")
    return load_warm_start(str(path), type(drafter), drafter.config, tiny.target.spec)


def saved(tiny, folder, **changes):
    return save_drafter(tiny.drafter("parallel"), folder, spec=replace(tiny.target.spec, **changes))


def test_places(tiny, tmp_path):
    saved(tiny, tmp_path / "run" / "drafter")
    for path in (tmp_path / "run", tmp_path / "run" / "drafter"):
        assert folder_of(str(path)) == tmp_path / "run" / "drafter"
        assert isinstance(opened(tiny, path), BlockDrafter)
    with pytest.raises(ConfigError, match=r"warm_start: got '.*', where no drafter is; accepted: the folder of a"):
        folder_of(str(tmp_path))


def test_a_fine_tuned_target_warns_and_one_of_other_sizes_is_refused(tiny, tmp_path):
    saved(tiny, tmp_path / "drafter", weights_hash="other")
    with pytest.warns(UserWarning, match="was trained for a target with weights other, this one has"):
        opened(tiny, tmp_path)
    saved(tiny, tmp_path / "drafter", hidden_size=64)
    with pytest.raises(CheckpointError, match="hidden_size = 64"):
        opened(tiny, tmp_path)


def test_a_damaged_drafter_is_refused(tiny, tmp_path):
    folder = saved(tiny, tmp_path / "drafter")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")
    with pytest.raises(CheckpointError, match="sha256"):
        opened(tiny, tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        folder_of(str(tmp_path))


def test_a_run_begins_from_another_and_says_so(world, first, caplog):
    settings = train_settings(world, f"warm_start={first}", "name=warm", "optim.max_steps=3", "drafter.num_layers=3")
    with caplog.at_level(logging.INFO, logger="drafters"):
        train.train(settings)
    assert any(line.startswith("warm start: taken fc.weight") for line in caplog.messages)
    config = json.loads((world / "outputs" / "warm" / "drafter" / "config.json").read_text())
    old = json.loads((first / "drafter" / "config.json").read_text())
    assert config["provenance"]["warm_start"] == old["weights"]["sha256"]
    mine, theirs = (load_drafter(run / "drafter") for run in (world / "outputs" / "warm", first))
    assert torch.equal(mine.vocab.ids_V, theirs.vocab.ids_V)


def test_a_resumed_run_does_not_need_it_any_more(world, first, tmp_path):
    shutil.copytree(first / "drafter", tmp_path / "old" / "drafter")
    settings = [f"warm_start={tmp_path}/old", "name=goes-on", "optim.max_steps=3"]
    train.train(train_settings(world, *settings))
    shutil.rmtree(tmp_path / "old")
    train.train(train_settings(world, *settings[:2], "optim.max_steps=5", "resume=true"))
    config, old = (read_config(one / "drafter") for one in (world / "outputs" / "goes-on", first))
    assert config["provenance"]["warm_start"] == old["weights"]["sha256"]
    with pytest.raises(CheckpointError, match=r"cannot go on with another warm_start"):
        train.train(train_settings(world, f"warm_start={first}", *settings[1:2], "optim.max_steps=7", "resume=true"))


def test_what_does_not_fit_costs_nothing(world, first, monkeypatch):
    monkeypatch.setattr("data.capture.capture_states", lambda *args, **kwargs: pytest.fail("it was captured"))
    settings = [f"warm_start={first}", "name=never-too"]
    with pytest.raises(ConfigError, match=r"draft_vocab_size: got 32, but the drafter of warm_start has 64"):
        train.train(train_settings(world, *settings, "drafter.draft_vocab_size=32"))


def test_a_wrong_place_costs_nothing(world, monkeypatch):
    monkeypatch.setattr("drafters.door.load_target", lambda *args, **kwargs: pytest.fail("it was fetched"))
    with pytest.raises(ConfigError, match="warm_start: got 'nowhere', where no drafter is"):
        train.train(train_settings(world, "warm_start=nowhere", "name=never"))
