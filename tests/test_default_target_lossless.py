# The default target in float32: greedy tokens with a drafter, in batches of one and of several, are those of plain
# decoding and of transformers, and the target that drafts for itself has everything accepted.

from pathlib import Path

import pytest
import torch
import yaml

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.tree import static_tree
from drafters.door import load_target
from drafters.heads.block import BlockDrafter
from drafters.heads.draft_model import DraftModel
from drafters.heads.ngram import NgramDrafter
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter

pytestmark = pytest.mark.slow

TEXTS = [
    "Write a haiku about the sea.",
    "List the first ten even numbers.",
    "What is the capital of France, and what is it known for?",
    "Translate to French: good morning, my friends.",
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue? Explain it to a child, in short sentences, and end with a question for the child to answer.",
]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def target():
    path = Path(__file__).parents[1] / "conf/target/smollm2.yaml"
    return load_target({**yaml.safe_load(path.read_text()), "dtype": "float32"}, device="cpu")


@pytest.fixture(scope="module")
def prompts(target):
    def encode(text):
        chat = [{"role": "user", "content": text}]
        rendered = target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return torch.tensor(target.tokenizer.encode(rendered, add_special_tokens=False))

    return [encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def truth(target, prompts):
    """What transformers generates, up to the end of the answer."""
    rows = []
    for prompt in prompts:
        out = target.model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=NUM_TOKENS, do_sample=False,
            eos_token_id=list(target.spec.eos_ids), pad_token_id=0, repetition_penalty=1.0,
        )  # fmt: skip
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def drafter_of(kind, target):
    spec = target.spec
    if kind == "none":
        return None
    if kind == "itself":
        return DraftModel(DraftModel.Config(block_size=5), spec)
    if kind == "ngram":
        return NgramDrafter(NgramDrafter.Config(), spec)
    if kind == "itself tree":
        return CopyDrafter(target, block_size=2)
    torch.manual_seed(0)
    return BlockDrafter(BlockDrafter.Config(block_size=4, layer_ids=(7, 20)), spec)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", ["none", "itself", "ngram", "block", "block tree", "itself tree"])
def test_greedy_tokens_are_those_of_transformers(target, prompts, truth, kind, batch_size):
    tree = {"block tree": static_tree([3, 2, 1]), "itself tree": static_tree([2, 2])}.get(kind)
    config = DecodeConfig(max_new_tokens=NUM_TOKENS, tree=tree, batch_size=batch_size)
    rows = decode(target, drafter_of(kind, target), prompts, config)
    assert [row.tokens for row in rows] == truth
    accepted = [r.accepted for row in rows for r in row.rounds if r.full]
    if kind == "itself":
        assert set(accepted) == {5}
    elif kind == "itself tree":
        assert set(accepted) == {2}
    elif kind == "ngram":
        assert max(accepted) > 3


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_target_accepts_all_of_its_own_samples(target, prompts, batch_size):
    config = DecodeConfig(max_new_tokens=NUM_TOKENS, sampling=Sampling(temperature=1.0), batch_size=batch_size)
    rows = decode(target, drafter_of("itself", target), prompts, config)
    assert {r.accepted for row in rows for r in row.rounds if r.full} == {5}
