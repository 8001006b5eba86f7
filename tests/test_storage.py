# Caches behind a URL: written, finished and read through a mirror; what is damaged, absent or full is told in one line,
# without secrets.

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from drafters import storage, storage_remote
from drafters.cache import HiddenCache
from drafters.cache_writer import CaptureConfig, cache_folder
from drafters.errors import ConfigError, DataError
from drafters.storage_remote import RemoteFolder, without_secrets
from tests.cache_cases import CONFIG, Recorder, captured, content, examples, key_of
from tests.tiny import tiny_target

URL = "memory://bucket/states/tiny"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def store(monkeypatch, tmp_path):
    """An empty store behind memory://, and a mirror of its own."""
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "own"))
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


@pytest.fixture
def stored(store, made):
    """The finished cache, behind URL."""
    for name, text in content(made.folder).items():
        store.pipe_file(f"/bucket/states/tiny/{name}", text)
    return store


def names(store):
    return {path.rpartition("/")[2]: store.cat_file(path) for path in store.find("/bucket")}


def test_a_capture_into_a_store_has_the_bytes_of_a_local_one(target, made, store, tmp_path):
    watcher = Recorder()
    cache = captured(target, URL, watcher=watcher)
    local = content(made.folder)
    local.pop(".lock")
    assert names(store) == local
    assert watcher.begun[0].free_bytes is None
    for index in range(len(made)):
        for field in ("tokens_T", "loss_mask_T", "aux_TLD", "last_TD", "lse_T"):
            assert torch.equal(getattr(cache[index], field), getattr(made[index], field))
    again = Recorder()
    captured(target, URL, watcher=again)
    assert not again.begun
    assert str(cache.folder) == URL


def test_a_store_is_finished_where_shards_are_missing(target, store):
    captured(target, URL)
    before = names(store)
    store.rm_file("/bucket/states/tiny/shard-00001.safetensors")
    store.pipe_file("/bucket/states/tiny/.partial-abc-shard-00001.safetensors", b"half")
    with pytest.raises(DataError, match=f"{URL}/shard-00001.safetensors is missing"):
        HiddenCache.open(URL)
    watcher = Recorder()
    captured(target, URL, watcher=watcher)
    assert watcher.begun[0].num_tokens < watcher.steps[-1][1] + 1
    assert names(store) == before


def test_each_shard_is_fetched_once_when_first_read(stored, made, monkeypatch, tmp_path):
    fetched = []
    real = storage_remote._download
    monkeypatch.setattr(storage_remote, "_download", lambda f, path, to: fetched.append(path) or real(f, path, to))
    cache = HiddenCache.open(URL)
    assert not fetched
    assert torch.equal(cache[0].last_TD, made[0].last_TD)
    assert len(fetched) == 1
    for _ in range(2):
        HiddenCache.open(URL).read(range(len(made)))
    assert len(fetched) == len(set(fetched)) == len(made.shards)
    (mirror,) = (tmp_path / "own" / "mirror").iterdir()
    assert {path.name for path in mirror.iterdir()} == {shard.name for shard in made.shards}
    folder = RemoteFolder(URL, mirror=str(tmp_path / "elsewhere"))
    assert HiddenCache.open(folder)[0].index == 0
    assert folder.disk.parent == tmp_path / "elsewhere"


def test_a_damaged_mirror_is_fetched_again_and_a_damaged_store_refused(stored, made, monkeypatch):
    HiddenCache.open(URL)[0]
    mirrored = RemoteFolder(URL).disk / made.shards[0].name
    damaged = bytearray(mirrored.read_bytes())
    damaged[-3] ^= 1
    mirrored.write_bytes(damaged)
    monkeypatch.setattr(storage, "_verified", set())
    assert torch.equal(HiddenCache.open(URL)[0].last_TD, made[0].last_TD)
    path = f"/bucket/states/tiny/{made.shards[1].name}"
    stored.pipe_file(path, bytes(reversed(stored.cat_file(path))))
    with pytest.raises(DataError, match=f"shard {URL}/shard-00001.safetensors is damaged"):
        HiddenCache.open(URL)[made.shards[0].num_samples]
    assert not (RemoteFolder(URL).disk / made.shards[1].name).exists()


def test_readers_that_fetch_at_once_do_not_clash(stored, made):
    together, found = threading.Barrier(4), []

    def read():
        cache = HiddenCache.open(URL)
        together.wait()
        found.append(all(torch.equal(cache[i].last_TD, made[i].last_TD) for i in range(len(made))))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert {path.name for path in RemoteFolder(URL).disk.iterdir()} == {shard.name for shard in made.shards}


@pytest.mark.parametrize("where", ["folder", "write"])
def test_a_full_mirror_is_told(stored, monkeypatch, where):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if where == "folder":
        monkeypatch.setattr(storage.tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(full))
    else:
        real = Path.open

        class Full:
            def __init__(self, file):
                self.file = file

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self.file.close()

            def write(self, block):
                raise full

        monkeypatch.setattr(Path, "open", lambda path, *how: Full(real(path, *how)) if how else real(path))
    with pytest.raises(DataError, match=rf"no space left on the disk of .*shards of {URL} .*cache\.mirror="):
        HiddenCache.open(URL)[0]


def test_a_mirror_that_cannot_be_written_is_told(stored, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*file/.*another place with cache\.mirror="):
        HiddenCache.open(RemoteFolder(URL, mirror=str(tmp_path / "file")))[0]


def test_urls_that_nothing_reads_are_refused_at_once(monkeypatch):
    with pytest.raises(ConfigError, match=r"cache\.root: got 'nowhere://a/b': unknown protocol 'nowhere'; accepted: a"):
        CaptureConfig(root="nowhere://a/b")
    missing = {"class": "no_such_driver.Store", "err": "Install no_such_driver to use it"}
    monkeypatch.setitem(known_implementations, "tstore", missing)
    with pytest.raises(
        ConfigError, match=r"'tstore://\*\*\*@h/b': the driver of tstore:// .*pip install no_such_driver"
    ):
        HiddenCache.open("tstore://me:secret@h/b")
    with pytest.warns(UserWarning, match=r"cache\.mirror: ignored, since cache\.root is no URL"):
        CaptureConfig(mirror="m")


def test_the_folder_at_a_url(tmp_path):
    key = key_of(tiny_target(), examples())
    folder = cache_folder(CaptureConfig(name="tiny", root="memory://a/b/", mirror=str(tmp_path)), key)
    assert str(folder) == f"memory://a/b/tiny-{key.digest[:12]}"
    assert folder.disk.parent == tmp_path


def test_what_a_store_refuses_is_told_without_secrets(target, monkeypatch, tmp_path):
    class Refusing(MemoryFileSystem):
        protocol = "refusing"

        def ls(self, path, detail=True, **how):
            raise OSError("login as me with pa55%2F failed: refusing://me:pa55%2F@host/c?sig=abc (or pa55/)")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(DataError) as told:
        captured(target, "refusing://me:pa55%2F@host/c")
    text = str(told.value)
    assert text.startswith("cache: cannot list refusing://***@host/c: login as me with *** failed")
    assert "pa55" not in text
    assert "abc" not in text
    assert without_secrets("s3://b/c and sftp://u:p@h/x?a=b.") == "s3://b/c and sftp://***@h/x?***"


def test_a_full_scratch_disk_ends_a_capture_and_loses_nothing(target, made, store, monkeypatch):
    real, left = storage_remote.RemoteFolder.put, [5]

    def put(self, source, name):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, source, name)

    with monkeypatch.context() as patch:
        patch.setattr(storage_remote.RemoteFolder, "put", put)
        with pytest.raises(DataError, match=r"no space left on the disk of .*mirror/.*the same command goes on"):
            captured(target, URL)
    assert "shard-00000.json" in names(store)
    with pytest.raises(DataError, match="is unfinished"):
        HiddenCache.open(URL)
    captured(target, URL)
    local = content(made.folder)
    local.pop(".lock")
    assert names(store) == local


def test_a_local_cache_is_mapped_where_it_is(made, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "own"))
    copy = shutil.copytree(made.folder, tmp_path / "copy")
    cache = HiddenCache.open(copy)
    cache.read(range(len(cache)))
    assert not (tmp_path / "own").exists()
    with pytest.raises(DataError, match="codec fp32 instead of bf16"):
        HiddenCache.open(copy, expect=replace(cache.manifest.key, codec="bf16"))
    assert CONFIG.codec == "fp32"
