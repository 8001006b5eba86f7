# The `drafter/` folder: round trip, every way it can be damaged or foreign, and a replacement that no crash halves.

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError

from drafters.checkpoint import load_drafter, read_config, save_drafter
from drafters.errors import CheckpointError
from tests.training_doubles import SPEC, toy


@pytest.fixture
def saved(tmp_path):
    drafter = toy(seed=3, width=12, layer_ids=(0, 2))
    return drafter, save_drafter(drafter, tmp_path / "drafter", spec=SPEC, provenance={"seed": 3})


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        section = config
        *path, last = key.split("__")
        for name in path:
            section = section[name]
        section[last] = value
    config.pop("checksum", None)
    (folder / "config.json").write_text(json.dumps(config))


def test_round_trip(saved):
    drafter, folder = saved
    loaded = load_drafter(folder, spec=SPEC)
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert not loaded.training
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


def test_config_describes_everything(saved):
    drafter, folder = saved
    config = read_config(folder)
    assert config["schema"] == 1
    assert config["drafter"]["_target_"] == "tests.training_doubles.ToyDrafter"
    assert config["drafter"]["layer_ids"] == [0, 2]
    assert config["target"]["weights_hash"] == "weights-a"
    assert config["draft_vocab_size"] == len(drafter.vocab.d2t)
    assert config["provenance"] == {"seed": 3}


def test_loads_without_a_target(saved):
    assert load_drafter(saved[1]).proj.out_features == 12


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: shutil.rmtree(f), "no such folder"),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "schema is None"),
        (lambda f: (f / "config.json").write_text('{"schema": 1}'), "no 'drafter' section"),
        (lambda f: rewrite(f, schema=2), "schema is 2; this version reads 1"),
        (lambda f: rewrite(f, drafter___target_="nowhere.at.All"), "no module 'nowhere'"),
        (lambda f: rewrite(f, drafter___target_="drafters.types.Batch"), "is not a Drafter class"),
        (lambda f: rewrite(f, drafter___target_="drafters.types.Nothing"), "has no 'Nothing'"),
        (lambda f: rewrite(f, drafter__width="wide"), "drafter.width"),
        (lambda f: rewrite(f, drafter__breadth=1), "drafter.breadth: unknown setting"),
        (lambda f: rewrite(f, drafter__width=13), "does not fit ToyDrafter"),
        (lambda f: rewrite(f, target__flavour="sweet"), "flavour"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_reason(saved, damage, says):
    damage(saved[1])
    with pytest.raises(CheckpointError) as caught:
        load_drafter(saved[1], spec=SPEC)
    assert says in str(caught.value)
    assert "drafter" in str(caught.value)


def test_one_flipped_bit_is_found(saved):
    path = saved[1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"sha256 is .* damaged"):
        load_drafter(saved[1], spec=SPEC)


def test_another_target_is_refused_with_both_names(saved):
    other = replace(SPEC, weights_hash="weights-b", name="fine-tune")
    says = "'toy', weights weights-a, but this target is 'fine-tune', weights weights-b"
    with pytest.raises(CheckpointError, match=says):
        load_drafter(saved[1], spec=other)
    assert load_drafter(saved[1], spec=other, allow_other_target=True).config.width == 12


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "logit_scale"])
def test_another_size_is_refused_even_when_other_targets_are_allowed(saved, name):
    other = replace(SPEC, **{name: 3})
    with pytest.raises(CheckpointError, match=f"{name} = .*but this target has 3"):
        load_drafter(saved[1], spec=other, allow_other_target=True)


def test_another_chat_template_warns(saved):
    with pytest.warns(UserWarning, match="trained with chat template template-a, this target uses template-b"):
        load_drafter(saved[1], spec=replace(SPEC, template_hash="template-b"))


def loads_as(folder):
    return load_drafter(folder, spec=SPEC).config.width


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", range(1, 12))
def test_a_crash_at_any_moment_leaves_the_old_or_the_new(saved, monkeypatch, call):
    _, folder = saved
    calls = [0]

    def dying(real):
        def wrapped(*args, **kwargs):
            calls[0] += 1
            if calls[0] == call:
                raise Killed
            return real(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace", "rmdir", "mkdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            save_drafter(toy(width=20), folder, spec=SPEC)
            finished = True
        except Killed:
            finished = False
    assert loads_as(folder) in ({20} if finished else {12, 20})
    save_drafter(toy(width=24), folder, spec=SPEC)
    assert loads_as(folder) == 24
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left (os error 28)")])
def test_a_full_disk_keeps_what_was_there(saved, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("drafters.files.save_file", full)
    with pytest.raises(CheckpointError, match="no space left on the disk; what was saved there before is unchanged"):
        save_drafter(toy(width=20), saved[1], spec=SPEC)
    assert loads_as(saved[1]) == 12
    assert [path.name for path in saved[1].parent.iterdir()] == ["drafter"]
