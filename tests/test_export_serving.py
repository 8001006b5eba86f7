# Commands and notes for a folder: only engines that load it, the number of tokens by each engine's way of counting, and
# every place where an engine does otherwise than training did.

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from export import to_speculators
from export.card import CardFacts, card_text
from export.serving import commands, notes
from tests.contract_cases import node_of
from tests.tiny import tiny_spec

SPEC = tiny_spec()
PLACES = dict(target="org/target", folder="out")
FULL = {"draft_vocab_size": None}


def test_commands_are_those_of_engines_that_load_it():
    assert list(commands(node_of("markov"), "hf", **PLACES)) == ["vLLM", "llama.cpp"]
    assert list(commands({**node_of("markov"), **FULL}, "hf", **PLACES)) == ["vLLM", "SGLang", "llama.cpp"]
    assert list(commands({**node_of("gated"), **FULL}, "hf", **PLACES)) == ["SGLang"]
    assert list(commands(node_of("parallel"), "speculators", **PLACES)) == ["vLLM"]


@pytest.mark.parametrize(
    ("name", "method", "drafts"), [("markov", "dspark", 5), ("parallel", "dflash", 5), ("eagle3", "eagle3", 7)]
)
def test_tokens_are_counted_as_the_engine_does(name, method, drafts):
    made = commands({**node_of(name), **FULL}, "hf", **PLACES)
    settings = json.loads(shlex.split(made["vLLM"])[-1])
    assert settings == {"method": method, "model": "out", "num_speculative_tokens": drafts}
    words = shlex.split(made["SGLang"])
    assert words[words.index("--speculative-num-draft-tokens") + 1] == str(drafts + 1)
    assert words[words.index("--speculative-algorithm") + 1] == method.upper()
    assert shlex.split(made["llama.cpp"])[-3:] == ["out", "--target-model-dir", "org/target"]


@pytest.mark.parametrize(
    ("target", "served"),
    [
        ("pypi:some==0.1#some/Model.Q4_1.gguf", "TARGET"),
        ("models/target.gguf", "TARGET"),
        ("org/target@v2", "org/target"),
        ("/models/target@v2", "/models/target@v2"),
    ],
)
def test_a_target_that_engines_cannot_take_is_left_to_fill_in(target, served):
    made = commands({**node_of("markov"), **FULL}, "hf", target=target, folder="out")
    assert shlex.split(made["vLLM"])[2] == served
    assert shlex.split(made["llama.cpp"])[-1] == served


def test_the_card_names_a_base_model_of_the_hub_alone():
    spec = tiny_spec()
    node = {**node_of("markov"), "name": "markov"}
    source = SimpleNamespace(node=node, spec=spec, provenance={})
    for base_model, named in (("pypi:some==0.1#some/Model.Q4_1.gguf", None), ("org/target@v2", "org/target")):
        facts = CardFacts(
            to="hf", quant="none", base_model=base_model, commands=commands(node, "hf", target=base_model, folder="out")
        )
        text = card_text(source, facts)
        assert ModelCard(text).data.base_model == named
        assert ("TARGET is the target in the Hugging Face layout" in text) == (named is None)


def test_a_name_that_no_engine_finds_is_told():
    source = SimpleNamespace(node=node_of("markov"), spec=replace(SPEC, name="mine"))
    assert "names the target 'mine'" in " ".join(to_speculators.notes(source))
    known = to_speculators.Options(verifier="org/target")
    assert "names the target" not in " ".join(to_speculators.notes(source, options=known))


def test_notes_say_where_an_engine_does_otherwise():
    said = " ".join(notes(node_of("markov"), SPEC, "hf"))
    assert "the 64 context positions" in said
    assert "SGLang: does not load it, its Markov head is over the whole vocabulary." in said
    plain = {**node_of("markov"), **FULL, "window": None, "layer_ids": [0, 2]}
    assert notes(plain, SPEC, "hf") == []
    assert "last layer" in " ".join(notes({**plain, "layer_ids": [1, 3]}, SPEC, "hf"))
    assert "SGLANG_RAGGED_VERIFY_MODE=static" in " ".join(notes({**plain, "confidence": False}, SPEC, "hf"))
    scaled = replace(SPEC, embed_scale=8.0, logit_softcap=30.0)
    said = " ".join(notes({**node_of("parallel"), "confidence": True}, scaled, "hf"))
    for part in ("caps its logits at 30", "scales its embedding by 8", "confidence head is left out"):
        assert part in said
