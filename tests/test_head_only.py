# Training from a finished cache without the target's layers: the head is the whole target's, tensors are read one by
# one under whatever name they are stored, and what a capture did not prove is not trained on.

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.cache import HiddenCache
from drafters.cache_manifest import CacheKey
from drafters.cache_target import SPEC, find_spec, keep_spec
from drafters.cache_writer import CaptureConfig, capture
from drafters.errors import CheckpointError, DataError
from drafters.head_only import INDEX, SINGLE, StoredTensors, check_head, read_head
from drafters.heads.final_norm import norm_gain
from drafters.storage import LocalFolder
from drafters.target import FrozenTarget
from drafters.target_loading import WholeTensors, outline
from drafters.types import Example
from tests.test_families import FAMILIES, family_model
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

CPU = torch.device("cpu")


def saved(model, folder):
    """A folder as a hub id would give it."""
    tokenizer = tiny_tokenizer("chatml")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pair(folder, dtype="float32"):
    """The whole target of a folder, and its outline."""
    whole = FrozenTarget.load(str(folder), dtype=dtype, mask_token=3, name="t")
    given = {"dtype": dtype, "mask_token": 3, "name": "t", "weights_hash": whole.spec.weights_hash}
    return whole, FrozenTarget.outline(str(folder), **given)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_of_every_family_is_the_whole_targets(name, tmp_path):
    folder = saved(family_model(name), tmp_path)
    whole, drawn = pair(folder)
    assert not drawn.has_layers
    head = read_head(drawn, whole.spec, folder, device=CPU)
    assert not head.has_layers
    assert head.spec == whole.spec
    tokens, hidden = torch.arange(9), torch.randn(3, 32)
    assert torch.equal(head.embed(tokens), whole.embed(tokens))
    assert torch.equal(head.head.logits(hidden), whole.head.logits(hidden))
    assert torch.equal(norm_gain(head), norm_gain(whole))
    assert all(p.device.type == "meta" for p in head.decoder.layers.parameters())
    whole_tensors, tensors = whole.tensors(), head.tensors()
    assert list(tensors) == list(whole_tensors)
    for one in tensors:
        if name in ("qwen3_moe", "gpt_oss") and ".experts." in one:
            continue
        if one == "lm_head.weight" and whole.spec.tied_head:
            continue
        assert torch.equal(tensors[one], whole_tensors[one]), one
    with pytest.raises(AssertionError, match="makes no states"):
        head.step(tokens[None], head.new_cache(1))


def test_experts_that_are_stored_apart_are_refused_by_name(tmp_path):
    folder = saved(family_model("qwen3_moe"), tmp_path)
    tensors = StoredTensors(outline(folder), folder)
    with pytest.raises(CheckpointError, match=r"does not hold 'model\.layers\.3\.mlp\.experts\.\w+' as one tensor"):
        tensors["model.layers.3.mlp.experts.gate_up_proj"]


def test_ends_of_an_answer_come_from_the_generation_config(tmp_path):
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, 9]
    whole, drawn = pair(saved(model, tmp_path))
    assert drawn.spec.eos_ids == whole.spec.eos_ids == (2, 9)


@pytest.mark.parametrize("size", ["10GB", "20KB"])
def test_tensors_come_from_one_file_or_several_in_the_dtype_asked_for(tmp_path, size):
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).is_file() == (size == "20KB")
    tensors = StoredTensors(outline(tmp_path, torch.bfloat16), tmp_path)
    expected = WholeTensors(model)
    assert set(tensors) == set(expected)
    for name in expected:
        assert torch.equal(tensors[name], expected[name].bfloat16()), name


def test_other_prefixes_are_those_that_transformers_knows(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    save_file({name.removeprefix("model."): t for name, t in stored.items()}, tmp_path / SINGLE, {"format": "pt"})
    tensors = StoredTensors(outline(tmp_path), tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor), name


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    folder = saved(tiny_llama(), tmp_path)
    whole, drawn = pair(folder)
    stored = load_file(folder / SINGLE)
    kept = {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}
    save_file(kept, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"does not hold 'lm_head\.weight'"):
        read_head(drawn, whole.spec, folder, device=CPU)
    save_file({**stored, "lm_head.weight": torch.zeros(4, 4)}, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"does not fit its config\.json: .*size mismatch"):
        read_head(drawn, whole.spec, folder, device=CPU)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(stored)}))
    with pytest.raises(CheckpointError, match=r"neither .* can be read in"):
        read_head(drawn, whole.spec, folder, device=CPU)
    (folder / INDEX).unlink()
    (folder / SINGLE).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"neither .* can be read in"):
        read_head(drawn, whole.spec, folder, device=CPU)


# --- what a capture keeps


@pytest.fixture
def kept(tmp_path):
    """A whole target, its outline, the folder of a small finished cache, and its key."""
    whole, drawn = pair(saved(tiny_llama(), tmp_path / "target"))
    mask_T = torch.arange(20) > 8
    examples = [Example(id=str(i), source="test", tokens_T=torch.arange(20) + i, loss_mask_T=mask_T) for i in range(4)]
    key = CacheKey.of(whole.spec, examples, template_hash="x", max_length=64, codec="fp32")
    folder, config = LocalFolder(tmp_path / "states"), CaptureConfig(codec="fp32", tokens_per_shard=40)
    capture(whole, {"train": examples}, folder, key=key, config=config)
    return whole, drawn, folder, key


def test_a_capture_keeps_what_it_proved(kept):
    whole, drawn, folder, key = kept
    assert find_spec(folder, key, drawn.spec) == whole.spec
    # What settings decide may be another one, and does not replace what is there.
    before = folder.read(SPEC)
    keep_spec(folder, replace(whole.spec, name="other", mask_token_id=5))
    assert folder.read(SPEC) == before
    keep_spec(folder, replace(whole.spec, embed_scale=2.0))
    assert find_spec(folder, key, drawn.spec).embed_scale == 2.0


def test_why_the_target_itself_is_needed_is_said(kept, tmp_path):
    whole, drawn, folder, key = kept
    assert "no cache.json" in find_spec(LocalFolder(tmp_path / "absent"), key, drawn.spec)
    assert "says eos_ids otherwise" in find_spec(folder, key, replace(drawn.spec, eos_ids=(7,)))
    (folder.path / SPEC).write_text("{}")
    assert "is damaged" in find_spec(folder, key, drawn.spec)
    for name, wrong in [("embed_scale", "x"), ("logit_scale", None), ("embed_scale", float("nan")), ("tied_head", 1)]:
        (folder.path / SPEC).write_text(json.dumps(whole.spec.to_dict() | {name: wrong}))
        assert f"is damaged (target spec: {name} is {wrong!r}" in find_spec(folder, key, drawn.spec)
    (folder.path / SPEC).unlink()
    assert "is not there (a cache of an earlier version)" in find_spec(folder, key, drawn.spec)
    keep_spec(folder, whole.spec)
    (folder.path / "shard-00000.safetensors").unlink()
    assert "1 of 2 shards are to be captured" in find_spec(folder, key, drawn.spec)
    with pytest.raises(DataError, match="belongs to something else"):
        find_spec(folder, replace(key, max_length=65), drawn.spec)


def test_a_folder_that_cannot_be_written_is_noted(kept, caplog, monkeypatch):
    whole, _, folder, _ = kept
    (folder.path / SPEC).unlink()

    def refuse(self, name, content):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalFolder, "write", refuse)
    with caplog.at_level(logging.INFO, "drafters"):
        keep_spec(folder, whole.spec)
    assert "target_spec.json cannot be written" in caplog.text


def test_a_head_of_other_numbers_than_the_states_is_refused(kept):
    whole, drawn, folder, _ = kept
    cache = HiddenCache.open(folder)
    check_head(whole.head, cache)
    path = folder.path.parent / "target"
    wrong = read_head(drawn, replace(whole.spec, logit_scale=20.0), path, device=CPU)
    with pytest.raises(CheckpointError, match=r"its output rows and the states .* do not fit"):
        check_head(wrong.head, cache)
    assert json.loads(folder.read(SPEC))["logit_scale"] == 1.0
