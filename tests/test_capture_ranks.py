# One cache, captured by several processes: the bytes of one, also after a rank was killed; what records are believed;
# disks without locks; the door under torchrun, into a URL.

import errno
import json
import os
import subprocess
import sys

import pytest

from drafters import storage
from drafters.cache import HiddenCache, Manifest
from drafters.storage import LocalFolder
from tests.cache_cases import Recorder, captured, content
from tests.door_world import make_world
from tests.processes import torchrun
from tests.tiny import tiny_target

SCRIPT = """
import json, os, signal, socket, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from drafters import files, storage
from drafters.cache_writer import Crew
from drafters.distributed import Ranks
from drafters.door import door
from tests.cache_cases import Recorder, captured, examples
from tests.tiny import tiny_target

target, root, data = tiny_target(), Path(sys.argv[1]), examples(40)
real_save, saves = files.save_file, []

def dying(tensors, path, metadata=None):
    saves.append(path)
    real_save(tensors, path, metadata=metadata)
    if len(saves) == 2:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

def full(tensors, path, metadata=None):
    raise OSError(28, "No space left on device")

def no_locks(file, how):
    raise OSError(37, "No locks available")

def child(rank, size, port, name, fault):
    os.environ.update(WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    watcher = Recorder()
    if fault == "alone without locks":
        os.environ["WORLD_SIZE"] = "1"
        storage.fcntl.flock = no_locks
    elif fault and rank == 1:
        files.save_file = {"dying": dying, "full": full}[fault]
    with door(), Ranks.from_environment() as ranks:
        cache = captured(target, root / name, data=data, ranks=ranks, watcher=watcher if ranks.is_first else None)
        ranks.gather([len(cache)])
    if watcher.begun:
        said = {"steps": watcher.steps, "processes": watcher.begun[0].num_processes}
        (root / f"{name}-{size}.said").write_text(json.dumps(said))

def started(size, name, fault=None):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 70
            try:
                child(rank, size, port, name, fault)
                code = 0
            except SystemExit as stop:
                code = stop.code
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

def records(name):
    return {p.name: p.stat().st_mtime_ns for p in (root / name).glob("shard-*.json")}

assert started(1, "one") == [0]
assert started(2, "two") == [0, 0]
assert started(3, "three") == [0, 0, 0]
code, killed = started(2, "killed", "dying")
assert (code, killed) == (1, -signal.SIGKILL), (code, killed)
left = records("killed")
assert left, "nothing was finished"
assert list((root / "killed" / "partial").rglob("*.safetensors"))
assert started(3, "killed") == [0, 0, 0]
assert left.items() <= records("killed").items(), "a finished shard was made again"
sys.stderr.write("FULL\\n")
assert started(2, "full", "full") == [1, 0]
sys.stderr.write("AFTER\\n")
assert records("full")
assert started(1, "full") == [0]
started(2, "both", "alone without locks")
assert started(1, "both") == [0]
"""


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_any_number_of_processes_give_the_bytes_of_one(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr
    one = content(tmp_path / "one")
    num_shards = sum(name.endswith(".safetensors") for name in one)
    assert num_shards >= 8
    for name in ("two", "three", "killed", "full", "both"):
        assert content(tmp_path / name) == one, name
    total = sum(HiddenCache.open(tmp_path / "one").lengths)
    for size in (1, 2, 3):
        said = json.loads((tmp_path / f"{['one', 'two', 'three'][size - 1]}-{size}.said").read_text())
        assert said["processes"] == size
        assert said["steps"][-1][:2] == [total, total]
        assert sum(step[2] for step in said["steps"]) == total
        assert [step[0] for step in said["steps"]] == sorted(step[0] for step in said["steps"])
    # One rank's full disk ends both with one message.
    said = ran.stderr.split("FULL\n")[1].split("AFTER\n")[0]
    assert said.count("error: cache: no space left on the disk of") == 1
    assert "Traceback" not in said


def without_shard_in_manifest(folder, number):
    manifest = Manifest.load(folder)
    manifest.with_shards({number: None}).save(LocalFolder(folder))


def test_a_recorded_shard_is_kept_where_its_checksum_is_right(target, tmp_path):
    captured(target, tmp_path)
    before = content(tmp_path)
    without_shard_in_manifest(tmp_path, 1)
    watcher = Recorder()
    captured(target, tmp_path, watcher=watcher)
    assert not watcher.begun
    assert content(tmp_path) == before


@pytest.mark.parametrize("what", ["shard", "record", "digest"])
def test_a_record_that_does_not_fit_is_not_believed(target, tmp_path, what):
    captured(target, tmp_path)
    before = content(tmp_path)
    without_shard_in_manifest(tmp_path, 1)
    path = tmp_path / ("shard-00001.safetensors" if what == "shard" else "shard-00001.json")
    damaged = bytearray(path.read_bytes())
    if what == "shard":
        damaged[-3] ^= 1
    elif what == "record":
        damaged = damaged[:20]
    else:
        damaged = json.dumps({**json.loads(damaged), "content_digest": "of other layers"}).encode()
    path.write_bytes(damaged)
    watcher = Recorder()
    captured(target, tmp_path, watcher=watcher)
    (estimate,) = watcher.begun
    assert estimate.num_tokens == Manifest.load(tmp_path).shards[1].num_tokens
    assert content(tmp_path) == before


def test_a_disk_without_locks_gets_a_warning(target, tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    captured(target, tmp_path / "locked")
    monkeypatch.setattr(storage.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"knows no locks \(No locks available\); see to it that one command") as told:
        captured(target, tmp_path / "c")
    assert len(told) == 1
    assert content(tmp_path / "c") == content(tmp_path / "locked")


@pytest.mark.slow
def test_the_door_in_two_processes_into_a_url(tmp_path):
    world = make_world(tmp_path)
    settings = [f"target.weights={world}/target", "target.name=tiny", "target.sha256=null", "target.mask_token=0"]
    settings += ["target.layer_ids=[0,2]", "target.dtype=float32", "source=jsonl", f"source.path={world}/chats.jsonl"]
    settings += ["cache.tokens_per_shard=200", "data.validation=0.2", "device=cpu"]
    runs = {}
    for size, root in ((1, tmp_path / "local"), (2, f"file://{tmp_path}/store")):
        command = ["-m", "data.capture", *settings, f"cache.root={root}"]
        runs[size] = torchrun(*command, size=size, timeout=150, DRAFTERS_CACHE=str(tmp_path / "d"))
        assert runs[size].returncode == 0, runs[size].stderr
    (local,), (stored,) = (tmp_path / "local").iterdir(), (tmp_path / "store").iterdir()
    one, two = content(local), content(stored)
    one.pop(".lock")
    assert two == one
    assert len([name for name in one if name.endswith(".safetensors")]) > 2
    out, err = runs[2].stdout, runs[2].stderr
    assert out.count("train: 16 of 16 conversations") == out.count("states of 20 conversations, layers [0, 2]: ") == 1
    assert f"file://{stored}" in out
    assert err.count("capture: 20 conversations") == err.count(", 2 processes") == 1
