# Capturing: reuse, resume, a full disk, a folder in use, and that a capture killed anywhere ends with the same bytes.

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from data import capture as door
from drafters import cache_writer, files, storage
from drafters.cache import HiddenCache
from drafters.cache_writer import CaptureConfig, capture
from drafters.errors import ConfigError, DataError
from tests.cache_cases import CONFIG, Recorder, captured, content, examples, key_of
from tests.tiny import tiny_llama, tiny_target
from tests.tiny_chat import tiny_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def copy(made, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


# Reuse and resume


def test_a_finished_cache_is_reused_and_its_splits_may_change(target, made, copy):
    before, watcher = content(copy), Recorder()
    captured(target, copy, watcher=watcher)
    assert content(copy) == before
    assert not watcher.begun
    data = examples()
    again = capture(target, {"train": data[:12], "held": data[12:]}, copy, key=key_of(target, data), config=CONFIG)
    assert {again.ids[i] for i in again.split("held")} == {"c12", "c13"}
    assert {name: text for name, text in content(copy).items() if name != "splits.json"} == {
        name: text for name, text in before.items() if name != "splits.json"
    }
    with pytest.raises(DataError, match="no split 'validation'; it has train, held"):
        again.split("validation")


def test_fewer_layers_need_no_new_capture_and_more_are_an_error(target, copy):
    before = content(copy)
    captured(target, copy, config=replace(CONFIG, layer_ids=(2,)))
    assert content(copy) == before
    with pytest.raises(DataError, match=r"'cache.layer_ids=\[0, 1, 2, 3\]'"):
        captured(target, copy, config=replace(CONFIG, layer_ids=(1,)))


@pytest.mark.parametrize("name", ["samples.json", "splits.json", "shard-00001.safetensors"])
def test_the_capture_command_makes_what_was_removed_again(target, copy, name):
    before = content(copy)
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"{name}.*the capture command makes it again"):
        HiddenCache.open(copy)
    watcher = Recorder()
    captured(target, copy, watcher=watcher)
    assert content(copy) == before
    assert len(watcher.begun) == name.startswith("shard")


def test_progress_and_estimate(target, tmp_path):
    watcher = Recorder()
    cache = captured(target, tmp_path / "c", watcher=watcher)
    (estimate,) = watcher.begun
    total = sum(cache.lengths)
    assert estimate.num_tokens == total == cache.manifest.num_tokens
    assert estimate.num_samples == 14
    assert estimate.seconds > 0
    assert [step[0] for step in watcher.steps][-1] == total
    assert sum(step[2] for step in watcher.steps) == total
    on_disk = sum(shard.num_bytes for shard in cache.shards)
    assert estimate.num_bytes <= on_disk <= 1.2 * estimate.num_bytes + 1500 * len(cache.shards)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from drafters import files
from tests.cache_cases import captured
from tests.tiny import tiny_target

target, root = tiny_target(), Path(sys.argv[1])
saves, replaces, real_save, real_replace = [], [], files.save_file, os.replace
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def child(folder, point):
    def save_file(tensors, path, metadata=None):
        saves.append(path)
        if point == "in a shard" and len(saves) == 2:
            real_save(tensors, path)
            os.truncate(path, os.path.getsize(path) // 2)
            die()
        real_save(tensors, path)

    def replace(source, to):
        replaces.append(Path(to).name)
        if point == "before " + Path(to).name and replaces.count(Path(to).name) == point_count:
            die()
        real_replace(source, to)
        if point == "after " + Path(to).name and replaces.count(Path(to).name) == point_count:
            die()

    point_count = 2 if "cache.json" in point else 1
    files.save_file, os.replace = save_file, replace
    captured(target, folder)

def forked(folder, point):
    pid = os.fork()
    if pid == 0:
        child(folder, point)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

points = ["in a shard", "before shard-00001.safetensors", "after shard-00001.safetensors", "before shard-00001.json",
          "after shard-00001.json", "before cache.json",
          "after cache.json", "after samples.json", "after splits.json"]
assert forked(root / "whole", "never") == 0
for point in points:
    assert os.WTERMSIG(forked(root / point, point)) == signal.SIGKILL, point
    (root / point / "state-after-kill").write_text(" ".join(sorted(p.name for p in (root / point).rglob("*"))))
    assert forked(root / point, "never") == 0, point
"""


def test_a_capture_killed_anywhere_ends_with_the_same_bytes(tmp_path):
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    whole = content(tmp_path / "whole")
    killed = [folder for folder in tmp_path.iterdir() if folder.name != "whole"]
    assert len(killed) == 9
    for folder in killed:
        found = content(folder)
        left = found.pop("state-after-kill").decode()
        assert ("shard-00001.safetensors" in left) == (
            folder.name not in ("after samples.json", "after splits.json")
        ), left
        assert found == whole, folder.name


def test_a_capture_that_stopped_early_is_called_unfinished(target, tmp_path, monkeypatch):
    watcher = Recorder()
    monkeypatch.setattr(
        watcher, "advance", lambda done, total, tokens: done < 100 or os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        captured(target, tmp_path / "c", watcher=watcher)
    assert not (tmp_path / "c" / "partial").exists()
    with pytest.raises(DataError, match=r"is unfinished, \d+ of \d+ shards are to do"):
        HiddenCache.open(tmp_path / "c")
    with pytest.warns(
        UserWarning, match=r"begun with tokens_per_shard, batch_tokens = \(60, 40\).*\(60, 80\) is ignored"
    ):
        captured(target, tmp_path / "c", config=replace(CONFIG, batch_tokens=80))
    captured(target, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


# What is refused


def test_a_cache_of_another_target_names_the_field(target, copy):
    data = examples()
    with pytest.raises(DataError, match=r"weights_hash [0-9a-f]{12} instead of [0-9a-f]{12}\. Capture again"):
        HiddenCache.open(copy, expect=key_of(tiny_target(seed=1), data))
    key = replace(key_of(target, data), max_length=31, codec="bf16")
    with pytest.raises(DataError, match="max_length 32 instead of 31; codec fp32 instead of bf16"):
        capture(target, {"train": data}, copy, key=key, config=CONFIG)


def test_a_disk_too_small_is_refused_before_anything_is_stored(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage(10**9, 0, 2**26))
    watcher = Recorder()
    with pytest.raises(DataError, match=r"GB of states do not fit into .*: 0.07 GB are free"):
        captured(target, tmp_path / "c", watcher=watcher)
    assert not watcher.begun
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left (os error 28)")],
)
def test_a_disk_that_fills_up_loses_nothing(target, tmp_path, monkeypatch, error):
    real, saved = files.save_file, []

    def save_file(tensors, path, metadata=None):
        saved.append(path)
        real(tensors, path)
        if len(saved) == 3:
            raise error

    monkeypatch.setattr(files, "save_file", save_file)
    with pytest.raises(DataError, match=r"no space left on the disk of .*the same command goes on"):
        captured(target, tmp_path / "c")
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"shard-00000.json", "shard-00001.json"} <= names
    assert "shard-00002.json" not in names
    assert not (tmp_path / "c" / "partial").exists()
    captured(target, tmp_path / "c")
    captured(target, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_other_disk_errors(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*choose another cache.root"):
        captured(target, tmp_path / "file" / "c")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted" / "scratch")
    with pytest.raises(DataError, match=r"/link is a link to .*unmounted/scratch, which is not there; mount"):
        captured(target, tmp_path / "link" / "c")
    for number in (errno.EIO, errno.ESTALE):
        error = OSError(number, "broken")
        monkeypatch.setattr(cache_writer, "write_shard", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
        with pytest.raises(DataError, match=r"cannot write to .*broken; once that is mended .* command goes on"):
            captured(target, tmp_path / "c")
    for error in (OSError(errno.EINVAL, "wrong"), SafetensorError("something else")):
        monkeypatch.setattr(cache_writer, "write_shard", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            captured(target, tmp_path / "c")


def test_a_folder_in_use_is_refused(target, tmp_path):
    watcher = Recorder()

    def begin(estimate):
        with pytest.raises(DataError, match="is in use: another process captures into it"):
            captured(target, tmp_path / "c")
        watcher.begun.append(estimate)

    watcher.begin, begin_twice = begin, watcher.begun
    captured(target, tmp_path / "c", watcher=watcher)
    assert len(begin_twice) == 1


def test_bad_requests(target, tmp_path):
    with pytest.raises(ConfigError, match=r"cache.layer_ids: layer 4 is out of range; the target has layers 0..3"):
        captured(target, tmp_path / "c", config=replace(CONFIG, layer_ids=(1, 4)))
    with pytest.raises(DataError, match="there is no conversation to capture"):
        captured(target, tmp_path / "c", data=[])
    with pytest.raises(ValueError, match="tokens_per_shard"):
        CaptureConfig(tokens_per_shard=0)
    assert not (tmp_path / "c").exists()


def test_states_that_overflow_are_named(tmp_path):
    target = tiny_target()
    target.head.lm_head_VD[5] = float("inf")
    with pytest.raises(DataError, match=r"not finite in one of \['c\d+'.*use target.dtype=bfloat16"):
        captured(target, tmp_path / "c")


# The door


@pytest.fixture
def saved(tmp_path):
    """Overrides that name a tiny target's folder and a file of conversations."""
    tokenizer = tiny_tokenizer("chatml")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    turns = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]
    rows = [{"id": str(i), "messages": [*turns, *turns[: 2 * (i % 2)]]} for i in range(6)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = [f"target.weights={tmp_path / 'target'}", "target.sha256=null", "target.layer_ids=[1,3]"]
    target += ["target.name=tiny", "target.dtype=float32", "target.mask_token=0"]
    source = ["source=jsonl", f"source.path={tmp_path / 'chats.jsonl'}", "data.validation=0.3"]
    return [*target, *source, f"cache.root={tmp_path / 'states'}"]


def through_the_door(monkeypatch, *overrides):
    monkeypatch.setattr(sys, "argv", ["capture", *overrides])
    door.main()


def test_the_door_captures_and_the_second_time_does_not(saved, tmp_path, monkeypatch, capsys):
    through_the_door(monkeypatch, *saved)
    out, err = capsys.readouterr()
    (folder,) = (tmp_path / "states").iterdir()
    assert folder.name.startswith("tiny-")
    assert f"states of 6 conversations, layers [1, 3]: {folder}" in out
    assert out.startswith("train: 4 of 4 conversations; ")
    assert "capture: 6 conversations" in err
    assert "GB free)" in err
    cache = HiddenCache.open(folder)
    assert (len(cache.split("train")), len(cache.split("validation"))) == (4, 2)
    assert cache.manifest.key.max_length == 1024
    before = content(folder)
    through_the_door(monkeypatch, *saved, "data.seed=1", "cache.layer_ids=[3]")
    assert "GB free)" not in capsys.readouterr().err
    assert {**content(folder), "splits.json": b""} == {**before, "splits.json": b""}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.layer_ids=[9]", "error: cache.layer_ids: layer 9 is out of range; the target has layers 0..3"),
        ("cache.codec=int3", "error: cache.codec: got 'int3'; accepted: bf16, fp32"),
        ("cache.batch_tokens=abc", "error: cache.batch_tokens: got 'abc'"),
        ("+cache.shard=1", "error: cache.shard: unknown setting; accepted: name, root"),
        ("cache.tokens_per_shard=0", "error: cache.tokens_per_shard: got 0; accepted: 1 or more"),
        ("target.mask_token=9999", "error: target.mask_token: id 9999 is not in the vocabulary"),
        ("target.weights=/no/such/folder", "error: target.weights: '/no/such/folder' is not an existing folder"),
        ("source.path=/no/such/file.jsonl", "error: "),
        ("data.max_length=10", "error: no supervised token in"),
    ],
)
def test_bad_settings_are_one_line(saved, monkeypatch, capsys, override, message):
    with pytest.raises(SystemExit) as stopped:
        through_the_door(monkeypatch, *saved, override)
    err = capsys.readouterr().err
    assert stopped.value.code == 1
    assert err.startswith(message)
    assert err.count("\n") == 1
