# Copies of a target's folder: shards linked or copied as they are, tensors as bytes, an index that holds, nothing that
# looks finished before it is; and modules that a quantized copy lost, brought back from where they were published.

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import export.stitch
from drafters.errors import CheckpointError, ConfigError
from export import to_mtp
from export.quantize import SCHEMES
from export.stitch import DTYPE_NAMES, Stitch, load_stored, restore, stitch, stored_metadata, stored_tensors
from tests.mtp_export_doubles import is_ignored, quantized_folder, save_target, world_of
from tests.test_export_mtp import AS_TRAINED, exported
from tests.test_mtp_target_block import target_of

INDEX = "model.safetensors.index.json"


@pytest.fixture
def target(tmp_path):
    """A small folder with one file of weights."""
    folder = tmp_path / "target"
    folder.mkdir()
    tensors = {f"layer.{i}": torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "of": "theirs"})
    (folder / "config.json").write_text("{}")
    for name in ("tokenizer.json", "chat_template.jinja", "modeling.py", "LICENSE"):
        (folder / name).write_text(name)
    for name in ("README.md", ".hidden", "model.gguf", "pytorch_model.bin", "drafters_source.json"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def out(tmp_path):
    """Where a copy goes."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def sharded(folder):
    """The same weights in two files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-0000{i + 1}-of-00002.safetensors": list(tensors)[2 * i : 2 * i + 2] for i in range(2)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in parts.items() for name in names}
    metadata = {"total_size": 512, "total_parameters": 128}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return folder


def contents(folder):
    """All tensors as the files hold them, by safetensors' own reader."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def check_index(folder):
    index = json.loads((folder / INDEX).read_text())
    where = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            where.update(dict.fromkeys(opened.keys(), file.name))
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in contents(folder).values())
    return index


@pytest.mark.parametrize("link", [True, False])
def test_one_file_becomes_the_first_of_two(target, out, link):
    stitch(target, out, Stitch(config={"new": 1}, tensors={"added": torch.ones(3)}), link=link)
    names = {path.name for path in out.iterdir()}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert names == {*shards, INDEX, "config.json", "tokenizer.json", "chat_template.jinja", "modeling.py", "LICENSE"}
    first = out / "model-00001-of-00002.safetensors"
    assert os.path.samefile(first, target / "model.safetensors") == link
    assert first.read_bytes() == (target / "model.safetensors").read_bytes()
    check_index(out)
    assert json.loads((out / "config.json").read_text()) == {"new": 1}
    assert torch.equal(contents(out)["added"], torch.ones(3))


def test_shards_keep_their_names(target, out):
    stitch(sharded(target), out, Stitch(config={}, tensors={"added": torch.ones(3)}))
    assert check_index(out)["metadata"] == {"total_size": 524, "total_parameters": 131}
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        assert os.path.samefile(out / name, target / name)
    assert load_file(out / "model-mtp.safetensors").keys() == {"added"}
    # Once more: what came in goes, and another comes.
    again = out.with_name("again")
    again.mkdir()
    stitch(out, again, Stitch(config={}, tensors={"other": torch.ones(2)}, drop=frozenset({"added"})))
    assert check_index(again)["metadata"] == {"total_size": 520, "total_parameters": 130}
    assert load_file(again / "model-mtp.safetensors").keys() == {"other"}


def test_nothing_added_stays_one_file(target, out):
    stitch(target, out, Stitch(config={}))
    assert os.path.samefile(out / "model.safetensors", target / "model.safetensors")
    assert not (out / INDEX).exists()


def test_dropped_tensors_leave_the_others_to_the_byte(target, out):
    before = contents(target)
    stitch(target, out, Stitch(config={}, drop=frozenset({"layer.1"})))
    assert stored_metadata(out / "model.safetensors") == {"format": "pt", "of": "theirs"}
    after = contents(out)
    assert after.keys() == before.keys() - {"layer.1"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert contents(target).keys() == before.keys()


def test_a_shard_with_nothing_left_is_gone(target, out):
    stitch(sharded(target), out, Stitch(config={}, drop=frozenset({"layer.0", "layer.1"})))
    assert [path.name for path in out.glob("*.safetensors")] == ["model-00002-of-00002.safetensors"]
    check_index(out)


def test_every_dtype_travels(target, out, tmp_path):
    """As tensors and as bytes of a file; a number, an empty tensor and odd sizes among them."""
    tensors = {name: torch.arange(5).to(dtype) for dtype, name in DTYPE_NAMES.items()}
    tensors |= {"number": torch.tensor(3.5), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    stitch(target, out, Stitch(config={}, tensors=tensors, metadata={"own": "words"}))
    added = out / "model-00002-of-00002.safetensors"
    assert stored_metadata(added) == {"format": "pt", "own": "words"}
    again = tmp_path / "again"
    again.mkdir()
    raw = {name: one for name, one in stored_tensors(out).items() if name in tensors}
    stitch(target, again, Stitch(config={}, tensors=raw))
    for folder in (out, again):
        found = contents(folder)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].float(), tensor.float()), name
    assert {name: one.dtype for name, one in raw.items() if name in DTYPE_NAMES.values()} == {
        name: name for name in DTYPE_NAMES.values()
    }
    assert all(torch.equal(tensor.float(), tensors[name].float()) for name, tensor in load_stored(raw).items())


def test_links_of_the_hub_s_cache_are_followed(target, out):
    blob = target.with_name("blob")
    (target / "model.safetensors").rename(blob)
    (target / "model.safetensors").symlink_to(blob)
    stitch(target, out, Stitch(config={}, tensors={"added": torch.ones(3)}))
    first = out / "model-00001-of-00002.safetensors"
    assert not first.is_symlink()
    assert os.path.samefile(first, blob)


def test_a_disk_that_takes_no_links_gets_copies(target, out, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    stitch(target, out, Stitch(config={}, tensors={"added": torch.ones(3)}))
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()


def test_space_is_counted_before_anything_is_copied(target, out, monkeypatch):
    usage = shutil.disk_usage(out)._replace(free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    what = Stitch(config={}, tensors={"added": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"needs 0\.00 GB, but 0\.00 GB are free; free some, or link=true"):
        stitch(target, out, what, link=False)
    with pytest.raises(CheckpointError, match="free some, or choose another folder"):
        stitch(target, out, Stitch(config={}, tensors={"added": torch.ones(300)}))
    assert not list(out.iterdir())
    stitch(target, out, what)


@pytest.mark.parametrize("step", ["_place", "_write", "_index", "_copy_rest", "_write_json"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_is_killed_in_the_middle_does_not_look_finished(target, out, monkeypatch, step, error):
    def stop(*_, **__):
        raise error

    monkeypatch.setattr(export.stitch, step, stop)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
        stitch(target, out, Stitch(config={}, tensors={"added": torch.ones(3)}))
    assert not (out / "config.json").exists()
    with pytest.raises((OSError, ValueError), match="config"):
        transformers.AutoConfig.from_pretrained(out)


def test_a_name_is_not_there_twice(target, out):
    with pytest.raises(CheckpointError, match=r"holds layer\.0 already"):
        stitch(target, out, Stitch(config={}, tensors={"layer.0": torch.ones(3)}))


def test_damaged_folders_are_refused(target, tmp_path):
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    for content, match in (
        (whole[:-8], "shorter than its header says"),
        (whole[:40], "its header is longer than the file"),
        (b"no weights at all, but some text", "no safetensors file"),
    ):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            stored_tensors(target)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        stored_tensors(target)
    (target / INDEX).write_text(json.dumps({"weight_map": {"layer.0": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="no such file, though the folder needs it"):
        stored_tensors(target)
    (target / "model-1.safetensors").write_bytes(whole)
    assert stored_tensors(target).keys() == {"layer.0"}
    (target / INDEX).write_text(json.dumps({"weight_map": {"layer.9": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names layer\.9, which its file does not hold"):
        stored_tensors(target)
    (target / INDEX).write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        stored_tensors(target)


@pytest.fixture(params=["deepseek_v3", "qwen3_next"])
def published(request, tmp_path):
    """A folder with modules, and a quantized copy that lost them, as saving with transformers does."""
    target, source = world_of(request.param, tmp_path)
    full = exported(source, tmp_path, AS_TRAINED)
    transformers.AutoModelForCausalLM.from_pretrained(full).save_pretrained(tmp_path / "saved")
    assert stored_tensors(tmp_path / "saved").keys() == stored_tensors(tmp_path / "target").keys()
    return target, source, full, quantized_folder(tmp_path / "saved", tmp_path / "quantized", SCHEMES["int8"])


def test_lost_modules_come_back_to_the_byte(published, tmp_path):
    target, source, full, quantized = published
    back = restore(quantized, full, tmp_path / "restored")
    assert set(back) == stored_tensors(full).keys() - stored_tensors(tmp_path / "target").keys()
    mine, theirs = stored_tensors(tmp_path / "restored"), stored_tensors(full)
    for name in back:
        ours, before = mine[name], theirs[name]
        assert ours.file.read_bytes()[ours.start : ours.stop] == before.file.read_bytes()[before.start : before.stop]
    config = json.loads((tmp_path / "restored" / "config.json").read_text())
    prefix = "mtp.layers.0." if "mtp.fc.weight" in back else "model.layers.4."
    assert is_ignored(config, f"{prefix}self_attn.o_proj")
    assert not is_ignored(config, "model.layers.3.self_attn.o_proj")
    assert config["num_nextn_predict_layers"] == 1
    _, tensors = to_mtp.read(tmp_path / "restored", spec=target.spec)
    assert all(torch.equal(tensor, source.tensors[name]) for name, tensor in tensors.items())
    assert not (tmp_path / "restored.tmp").exists()


def test_a_folder_that_is_not_quantized_gets_its_modules_back_too(published, tmp_path):
    _, _, full, _ = published
    restore(tmp_path / "saved", full, tmp_path / "restored", link=False)
    assert stored_tensors(tmp_path / "restored").keys() == stored_tensors(full).keys()
    assert "quantization_config" not in json.loads((tmp_path / "restored" / "config.json").read_text())


def test_what_cannot_be_restored_is_refused(published, tmp_path, monkeypatch):
    _, _, full, quantized = published
    with pytest.raises(CheckpointError, match=r"holds .* already; there is nothing to restore"):
        restore(full, full, tmp_path / "restored")
    with pytest.raises(CheckpointError, match="holds no MTP modules"):
        restore(quantized, tmp_path / "target", tmp_path / "restored")
    with pytest.raises(CheckpointError, match="exists; give a name that is free"):
        restore(quantized, full, quantized)
    other = save_target(target_of("mimo"), tmp_path / "other")
    with pytest.raises(ConfigError, match="model_type is qwen2"):
        restore(other, full, tmp_path / "restored")

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(export.stitch, "_copy_rest", stop)
    with pytest.raises(KeyboardInterrupt):
        restore(quantized, full, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    assert not (tmp_path / "restored.tmp").exists()


def test_modules_that_are_quantized_themselves_are_not_restored(published, tmp_path):
    _, _, full, quantized = published
    name = next(name for name in stored_tensors(full) if name.endswith(("eh_proj.weight", "fc.weight")))
    file = stored_tensors(full)[name].file
    tensors = load_file(file)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"is F8_E4M3; accepted: float tensors"):
        restore(quantized, full, tmp_path / "restored")
