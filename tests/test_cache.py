# The cache as files: what is stored, what a reader gets back, what is refused, and that a capture killed anywhere ends
# with the same bytes.

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from drafters import cache as cache_module
from drafters import cache_writer
from drafters.cache import CacheKey, HiddenCache, Manifest, data_hash
from drafters.cache_writer import CaptureConfig, Estimate, cache_folder, capture, plan_shards
from drafters.codecs import CODECS, find_codec
from drafters.errors import ConfigError, DataError
from drafters.types import Example, Needs
from tests.tiny import tiny_target

CONFIG = CaptureConfig(layer_ids=(0, 2, 3), codec="fp32", tokens_per_shard=60, batch_tokens=40)


def examples(num: int = 14, *, seed: int = 0, longest: int = 23) -> list[Example]:
    """Random conversations: a prompt, an answer, one token of end."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(num):
        length = int(torch.randint(4, longest + 1, (), generator=generator))
        mask_T = torch.arange(length) >= length // 3
        mask_T[-1] = i % 2 == 0
        tokens_T = torch.randint(0, 128, (length,), generator=generator)
        made.append(Example(id=f"c{i}", source=f"s{i % 3}", tokens_T=tokens_T, loss_mask_T=mask_T))
    return made


def key_of(target, data, *, codec: str = "fp32") -> CacheKey:
    return CacheKey.of(target.spec, data, template_hash="t", max_length=32, codec=codec)


def captured(target, folder: Path, data=None, config: CaptureConfig = CONFIG, **more) -> HiddenCache:
    data = examples() if data is None else data
    splits = {"train": data[:10], "validation": data[10:]}
    return capture(target, splits, folder, key=key_of(target, data, codec=config.codec), config=config, **more)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """A finished cache, for reading only."""
    return captured(target, tmp_path_factory.mktemp("cache") / "made")


@pytest.fixture
def copy(made, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


class Recorder:
    def __init__(self):
        self.begun: list[Estimate] = []
        self.steps: list[tuple[int, int, int]] = []

    def begin(self, estimate):
        self.begun.append(estimate)

    def advance(self, done, total, tokens):
        self.steps.append((done, total, tokens))


# What is stored


def test_states_are_those_of_each_conversation_alone(target, made):
    by_id = {example.id: example for example in examples()}
    assert sorted(made.ids) == sorted(by_id)
    assert len(made) == 14
    assert len(made.shards) > 2
    for i, name in enumerate(made.ids):
        sample, example = made[i], by_id[name]
        alone = target.states(example.tokens_T[None], needs=Needs(layer_ids=(0, 2, 3), last=True))
        assert sample.id == name
        assert sample.index == i
        assert sample.source == example.source == made.sources[i]
        assert made.lengths[i] == len(example.tokens_T)
        assert torch.equal(sample.tokens_T, example.tokens_T)
        assert sample.tokens_T.dtype == torch.int64
        assert torch.equal(sample.loss_mask_T, example.loss_mask_T)
        torch.testing.assert_close(sample.aux_TLD, alone.aux_BTLD[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sample.last_TD, alone.last_BTD[0], rtol=1e-4, atol=1e-5)


def test_log_sum_exp_is_where_the_next_token_is_supervised(target, made):
    for sample in (made[i] for i in range(len(made))):
        logits_TV = target.model(sample.tokens_T[None]).logits[0].double()
        expected_T = torch.zeros(len(sample.tokens_T), dtype=torch.float64)
        for t in range(len(sample.tokens_T) - 1):
            if sample.loss_mask_T[t + 1]:
                expected_T[t] = logits_TV[t].exp().sum().log()
        assert sample.lse_T.dtype == torch.float32
        assert (sample.lse_T == 0).any()
        torch.testing.assert_close(sample.lse_T.double(), expected_T, rtol=1e-5, atol=1e-5)


def test_log_sum_exp_fits_the_states_as_they_are_stored(target, tmp_path):
    cache = captured(target, tmp_path / "c", config=replace(CONFIG, codec="bf16"))
    sample = cache[0]
    assert sample.last_TD.dtype == torch.bfloat16
    t = int(sample.lse_T.nonzero()[0])
    total = (target.head.logits(sample.last_TD[t].float()) - sample.lse_T[t]).exp().sum()
    assert abs(float(total) - 1) < 1e-5


def test_layers_are_content_and_come_in_the_order_asked(made):
    everything, some = made[3], made.read([3], Needs(layer_ids=(3, 0), last=True))[0]
    assert torch.equal(some.aux_TLD, everything.aux_TLD[:, [2, 0]])
    assert made.read([3], Needs(last=True))[0].aux_TLD is None
    with pytest.raises(DataError, match=r"not \[1\].*remove that folder.*'cache.layer_ids=\[0, 1, 2, 3\]'"):
        made.read([3], Needs(layer_ids=(1, 3)))
    with pytest.raises(DataError, match=r"stores the layers \[0, 2, 3\], not \[1\]"):
        HiddenCache.open(made.folder, needs=Needs(layer_ids=(1,)))


def test_a_reader_travels_between_processes(made):
    before = made[0]
    again = pickle.loads(pickle.dumps(made))
    assert torch.equal(again[0].last_TD, before.last_TD)


def test_codecs_code_rows_one_by_one():
    rows_ND = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    for codec in CODECS.values():
        parts = codec.encode(rows_ND)
        assert set(parts) == set(codec.parts)
        assert sum(part[0].nbytes for part in parts.values()) == codec.row_bytes(5)
        cut = codec.decode({name: part[2:5] for name, part in parts.items()})
        assert torch.equal(cut, codec.decode(codec.encode(rows_ND[2:5])))
        torch.testing.assert_close(codec.decode(parts).float(), rows_ND, rtol=0.01, atol=0.01)
    with pytest.raises(ConfigError, match="cache.codec: got 'int3'; accepted: bf16"):
        find_codec("int3")


# The plan and the key


def test_the_plan_follows_from_the_set_of_examples():
    data = examples(60)
    plans = plan_shards(data, tokens_per_shard=200, batch_tokens=64)
    assert sorted(i for plan in plans for i in plan.samples) == list(range(60))
    for plan in plans:
        lengths = [len(data[i].tokens_T) for i in plan.samples]
        assert lengths == sorted(lengths, reverse=True)
        assert sum(lengths) <= 200
        assert all(len(b) * max(len(data[i].tokens_T) for i in b) <= 64 for b in plan.batches)
    assert max(len(batch) for plan in plans for batch in plan.batches) > 2
    backwards = plan_shards(data[::-1], tokens_per_shard=200, batch_tokens=64)
    assert [[data[i].id for i in p.samples] for p in plans] == [
        [data[::-1][i].id for i in p.samples] for p in backwards
    ]


def test_a_conversation_above_every_budget_is_a_batch_of_its_own():
    data = examples(5, longest=20)
    plans = plan_shards(data, tokens_per_shard=1, batch_tokens=1)
    assert [len(plan.samples) for plan in plans] == [1] * 5


def test_the_key_knows_everything_that_changes_the_states():
    data = examples()
    key = key_of(tiny_target(), data)
    assert key_of(tiny_target(), data[::-1]) == key
    assert data_hash([replace(data[0], loss_mask_T=~data[0].loss_mask_T), *data[1:]]) != key.data_hash
    assert data_hash([replace(data[0], tokens_T=data[0].tokens_T + 1), *data[1:]]) != key.data_hash
    assert data_hash(data[1:]) != key.data_hash
    changed = [key_of(tiny_target(seed=1), data), replace(key, template_hash="u"), replace(key, max_length=31)]
    changed += [replace(key, codec="bf16"), replace(key, dtype="float16"), replace(key, data_hash="d")]
    assert len({other.digest for other in [key, *changed]}) == 7


def test_the_default_folder(monkeypatch, tmp_path):
    key = key_of(tiny_target(), examples())
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path))
    assert cache_folder(CaptureConfig(name="tiny"), key) == tmp_path / "states" / f"tiny-{key.digest[:12]}"
    elsewhere = CaptureConfig(name="tiny", root=str(tmp_path / "x"))
    assert cache_folder(elsewhere, key).parent == tmp_path / "x"


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
from drafters import cache, cache_writer
from tests.test_cache import captured, tiny_target

target, root = tiny_target(), Path(sys.argv[1])
saves, replaces, real_save, real_replace = [], [], cache.save_file, os.replace
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def child(folder, point):
    def save_file(tensors, path):
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

    point_count = 3 if "cache.json" in point else 1
    cache.save_file, cache.os.replace = save_file, replace
    captured(target, folder)

def forked(folder, point):
    pid = os.fork()
    if pid == 0:
        child(folder, point)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

points = ["in a shard", "before shard-00001.safetensors", "after shard-00001.safetensors", "before cache.json",
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
    assert len(killed) == 7
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


def test_a_damaged_shard_is_found_at_its_first_read(copy):
    path = copy / "shard-00001.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    cache = HiddenCache.open(copy)
    second = cache.shards[0].num_samples
    assert cache[second - 1].index == second - 1
    with pytest.raises(DataError, match=r"shard .*shard-00001.safetensors is damaged"):
        cache[second]
    assert HiddenCache.open(copy, verify=False)[second].index == second


def test_a_shard_is_verified_once_a_process(copy, monkeypatch):
    sums = []
    real = cache_module.file_sha256
    monkeypatch.setattr(cache_module, "file_sha256", lambda path: sums.append(path) or real(path))
    for _ in range(2):
        cache = HiddenCache.open(copy)
        cache.read(range(len(cache)))
    assert len(sums) == len(cache.shards)


def test_a_cut_shard_is_found_when_opened(copy):
    os.truncate(copy / "shard-00001.safetensors", 200)
    with pytest.raises(DataError, match=r"shard-00001.safetensors is cut or grown"):
        HiddenCache.open(copy)


def test_unreadable_manifests(copy, tmp_path):
    with pytest.raises(DataError, match=r"no cache.json in .*python -m data.capture"):
        HiddenCache.open(tmp_path / "nowhere")
    manifest = json.loads((copy / "cache.json").read_text())
    manifest["key"]["schema"] = 99
    (copy / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has schema 99, this version reads 1"):
        Manifest.load(copy)
    for text in ("", "[]", "{}", json.dumps({"key": {"schema": 1}})):
        (copy / "cache.json").write_text(text)
        with pytest.raises(DataError, match=r"cache.json is damaged"):
            Manifest.load(copy)


def test_a_disk_too_small_is_refused_before_anything_is_stored(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache_writer.shutil, "disk_usage", lambda path: usage(10**9, 0, 2**26))
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
    real, saved = cache_module.save_file, []

    def save_file(tensors, path):
        saved.append(path)
        real(tensors, path)
        if len(saved) == 3:
            raise error

    monkeypatch.setattr(cache_module, "save_file", save_file)
    with pytest.raises(DataError, match="no space left on the disk of .*the same command goes on"):
        captured(target, tmp_path / "c")
    assert sum(shard is not None for shard in Manifest.load(tmp_path / "c").shards) == 2
    assert not (tmp_path / "c" / "partial").exists()
    captured(target, tmp_path / "c")
    captured(target, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_other_disk_errors(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write to .*choose another cache.root"):
        captured(target, tmp_path / "file" / "c")
    for error in (OSError(errno.EIO, "broken"), SafetensorError("something else")):
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
