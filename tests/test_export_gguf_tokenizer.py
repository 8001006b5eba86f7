# The tokenizer of a GGUF draft: made from tokenizer.json, or copied from the target's own GGUF as it is.

from dataclasses import replace

import pytest

from drafters.errors import CheckpointError, ConfigError
from export import to_gguf
from export.gguf_tokenizer import tokenizer_fields
from tests.gguf_doubles import write_tokenizer
from tests.published_doubles import drafter_of_family, saved_target, source_of

SPACE = {"type": "Split", "pattern": {"Regex": r"\p{L}+"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    target = saved_target(folder)
    write_tokenizer(folder, target.spec.vocab_size)
    return target


def test_a_tokenizer_from_json_has_a_token_for_every_id(target, folder):
    found = {field.key: field.value for field in tokenizer_fields(folder, target.spec)}
    tokens = found["tokenizer.ggml.tokens"]
    assert len(tokens) == len(found["tokenizer.ggml.token_type"]) == target.spec.vocab_size
    assert tokens[:4] == ["<s0>", "<s1>", "<s2>", "t3"]
    assert tokens[-1] == "[PAD127]"
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 4, 1]
    assert found["tokenizer.ggml.token_type"][-1] == 5
    assert found["tokenizer.ggml.merges"] == ["t 3", "t 4"]
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("parsed", "name"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], "smollm"),
        ([SPACE, {"type": "ByteLevel", "use_regex": False}], "default"),
    ],
)
def test_pre_tokenizers_have_names(parsed, name, target, tmp_path):
    if isinstance(parsed, list):
        parsed = {"type": "Sequence", "pretokenizers": parsed}
    write_tokenizer(tmp_path, 128, pre_tokenizer=parsed)
    found = {field.key: field.value for field in tokenizer_fields(tmp_path, target.spec)}
    assert found["tokenizer.ggml.pre"] == name


def test_a_tokenizer_is_copied_from_the_targets_own_gguf(target, folder, tmp_path):
    source = source_of(drafter_of_family("eagle3", target, reduced=True), target_folder=folder)
    to_gguf.write(source, "none", tmp_path)
    other = tmp_path / "eagle3-eagle3.gguf"
    copied = tokenizer_fields(None, target.spec, target_gguf=other)
    assert sorted(copied, key=lambda f: f.key) == sorted(tokenizer_fields(folder, target.spec), key=lambda f: f.key)
    spec = replace(target.spec, mask_token_id=7)
    assert tokenizer_fields(None, spec, target_gguf=other)[-1].value == 7
    with pytest.raises(CheckpointError, match="has 128 tokens, the drafter's target 130"):
        tokenizer_fields(None, replace(target.spec, vocab_size=130), target_gguf=other)
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        tokenizer_fields(None, target.spec, target_gguf=folder / "tokenizer.json")


def test_tokenizers_of_another_kind_need_the_targets_gguf(target, tmp_path):
    for model in ({"type": "Unigram", "vocab": []}, {"type": "BPE", "byte_fallback": True, "vocab": {}, "merges": []}):
        write_tokenizer(tmp_path, 128, model=model)
        with pytest.raises(ConfigError, match="give the target's own GGUF file"):
            tokenizer_fields(tmp_path, target.spec)
    write_tokenizer(tmp_path, 140)
    with pytest.raises(CheckpointError, match="the drafter's target 128 tokens"):
        tokenizer_fields(tmp_path, target.spec)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"is no tokenizer\.json"):
        tokenizer_fields(tmp_path, target.spec)
