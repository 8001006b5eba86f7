# The cache as files: what is stored, what a reader gets back, and what a reader refuses.

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters import storage
from drafters.batches import collate
from drafters.cache import HiddenCache, Manifest, data_hash
from drafters.cache_writer import CaptureConfig, cache_folder, plan_shards
from drafters.codecs import CODECS
from drafters.errors import DataError
from drafters.states import predicts
from drafters.types import Needs
from tests.block_doubles import make_drafter
from tests.cache_cases import CONFIG, captured, examples, key_of
from tests.published_doubles import drafter_of_family
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def copy(made, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


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


@pytest.mark.parametrize("last", ["all", "supervised"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_gives_the_states_back(target, made, tmp_path, codec, last):
    cache = captured(target, tmp_path / "c", config=replace(CONFIG, codec=codec, last=last))
    bound = {"fp32": 1e-6, "bf16": 0.004, "fp8": 0.07, "int8": 0.02, "int4": 0.16}[codec]
    for i in range(len(made)):
        mine, plain = cache[i], made[i]
        assert torch.equal(mine.tokens_T, plain.tokens_T)
        kept_T = predicts(plain.loss_mask_T) if last == "supervised" else torch.ones_like(plain.loss_mask_T)
        assert not mine.last_TD[~kept_T].any()
        for a, b in (
            (mine.aux_TLD.flatten(1), plain.aux_TLD.flatten(1)),
            (mine.last_TD[kept_T], plain.last_TD[kept_T]),
        ):
            assert ((a.float() - b).norm(dim=1) <= bound * b.norm(dim=1)).all()
    size = sum(shard.num_bytes for shard in cache.shards)
    assert (size < sum(shard.num_bytes for shard in made.shards)) == ((codec, last) != ("fp32", "all"))


@pytest.mark.parametrize("family", ["markov", "eagle3"])
def test_losses_read_the_last_state_where_it_is_supervised_alone(target, made, tmp_path, family):
    if family == "markov":
        drafter = make_drafter(target, window=None)
    else:
        drafter = drafter_of_family("eagle3", target, reduced=True, layer_ids=(0, 2, 3))
    found = []
    for cache in (made, captured(target, tmp_path / "c", config=replace(CONFIG, last="supervised"))):
        samples = cache.read(range(8), drafter.needs)
        losses = drafter.loss(collate(samples, layer_ids=drafter.needs.layer_ids, seeds=range(8)), target.head)
        gradients = torch.autograd.grad(losses.total, [p for p in drafter.parameters() if p.requires_grad])
        found.append((losses.total, losses.count, *gradients))
    assert found[0][1] > 10
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found, strict=True))


def test_a_cache_without_every_last_state_is_for_drafters_that_do_not_read_it(target, tmp_path):
    cache = captured(target, tmp_path / "c", config=replace(CONFIG, last="supervised"))
    assert len(cache.read([0], Needs(layer_ids=(2,), last=True))) == 1
    with pytest.raises(DataError, match=r"reads it everywhere\. Remove .* capture it again with cache\.last=all"):
        HiddenCache.open(cache.folder, needs=Needs(last=True, last_input=True))
    with pytest.raises(DataError, match=r"cache\.last=all"):
        captured(target, tmp_path / "c")
    wide = captured(target, tmp_path / "wide")
    assert captured(target, tmp_path / "wide", config=replace(CONFIG, last="supervised")).manifest == wide.manifest


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
    assert cache_folder(CaptureConfig(name="tiny"), key).path == tmp_path / "states" / f"tiny-{key.digest[:12]}"
    elsewhere = CaptureConfig(name="tiny", root=str(tmp_path / "x"))
    assert cache_folder(elsewhere, key).path.parent == tmp_path / "x"


# What is refused


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
    real = storage.file_sha256
    monkeypatch.setattr(storage, "file_sha256", lambda path: sums.append(path) or real(path))
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
        with pytest.raises(DataError, match=r"cache.json is damaged .*remove that file alone"):
            Manifest.load(copy)
