# A drafter learns its target's own words: conversations say who answered them, and others' answers are warned of.

import gzip
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data.engines.answers import RegenerateConfig
from data.engines.local import regenerate
from data.sources import SourceConfig, load_conversations
from drafters.cache import data_hash
from drafters.chat import ChatEncoder
from drafters.splits import encode_splits
from tests.door_world import write_rows
from tests.test_regenerate import make_target

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def encoder(target):
    return ChatEncoder(target.tokenizer, max_length=512)


def load(path):
    return list(load_conversations(SourceConfig(path=str(path))))


def rows(*authors):
    made = [{"id": str(i), "prompt": f"Tool {i}?", "response": "Blue."} for i in range(len(authors))]
    return [{**row, **({"answered_by": name} if name else {})} for row, name in zip(made, authors, strict=True)]


def test_answers_of_another_model_are_warned_of(encoder, tmp_path):
    found = load(write_rows(tmp_path / "chats.jsonl", rows("a" * 64, None, "b" * 64, "c" * 64)))
    message = r"another model \(weights aaaaaaaaaaaa\) wrote the answers of 2 of 4 .*not this target \(bbbbbbbbbbbb\).*"
    with pytest.warns(UserWarning, match=message + "python -m data.regenerate"):
        encode_splits((found[:2], found[2:]), encoder, weights_hash="b" * 64)


def test_unknown_authors_are_not_and_caches_do_not_depend_on_them(encoder, tmp_path):
    hashes = set()
    for author in (None, "b" * 64):
        found = load(write_rows(tmp_path / "chats.jsonl", rows(author, author)))
        assert {c.answered_by for c in found} == {author}
        splits, _ = encode_splits((found, []), encoder, weights_hash="b" * 64)
        hashes.add(data_hash(splits["train"]))
    assert len(hashes) == 1


def test_regenerated_answers_say_whose_they_are(target, encoder, tmp_path):
    asked = [{"id": "a", "turns": ["Sky?"], "split": "train", "answered_by": "somebody"}]
    regenerate(target, asked, tmp_path / "out.jsonl", RegenerateConfig(max_new_tokens=8))
    made = load(tmp_path / "out.jsonl")
    assert [c.answered_by for c in made] == [target.spec.weights_hash]
    encode_splits((made, []), encoder, weights_hash=target.spec.weights_hash)


def test_the_bundled_answers_are_the_default_target_s():
    text = gzip.decompress((ROOT / "data" / "samples" / "conversations.jsonl.gz").read_bytes()).decode()
    expected = OmegaConf.load(ROOT / "conf" / "target" / "smollm2.yaml").sha256
    assert {json.loads(line)["answered_by"] for line in text.split("\n") if line} == {expected}
