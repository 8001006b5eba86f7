# vLLM itself: it loads every kind of folder that is written for it, quantized and not, and drafts as our own loop does:
# on the same prompts the same text, in the same number of rounds. Tiny models; it has to be named, see vllm.py.

import pytest
import torch

from drafters.decoding.loop import DecodeConfig, decode
from drafters.target import FrozenTarget
from export import to_hf, to_speculators
from export.serving import METHODS
from tests.contract_cases import GREEDY, World, learn, texts_of
from tests.engines.vllm import VARIABLE, vllm, vllm_python
from tests.published_doubles import drafter_of_family, source_of
from tests.test_families import sharpened
from tests.tiny import tiny_llama

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(vllm_python() is None, reason=f"{VARIABLE} names no python with vLLM"),
]

# Heads of a size that its kernels for processors have.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 6,
}
FORMATS = {"hf": to_hf, "speculators": to_speculators}
QUANTS = ("none", "int8", "int4", "fp8")
FAMILIES = ("parallel", "markov", "eagle3")
NUM_TOKENS, LENGTH = 40, 3


def written(source, to: str, quant: str, out, *, target, dtype: str):
    """A folder of that export, for a draft of the target in the folder `target`."""
    made = FORMATS[to]
    verifier = {"verifier": str(target)} if to == "speculators" else {}
    out.mkdir(parents=True)
    made.write(source, quant, out, options=made.Options(dtype=dtype, **verifier))
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, whose folder comes with it, and texts of its own."""
    folder = tmp_path_factory.mktemp("target")
    model = sharpened(tiny_llama(**SIZES))
    model.save_pretrained(folder)
    target = FrozenTarget.from_model(model, mask_token_id=3)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 128, (length,), generator=generator) for length in (9, 3, 6, 12, 4, 7)]
    examples = texts_of(target, prompts, sampling=GREEDY, num_tokens=NUM_TOKENS)
    return World(target, examples, draft_vocab=100), folder


@pytest.fixture(scope="module")
def drafts(world):
    """Drafters that have learnt the texts."""
    made = {}
    for name in ("parallel", "eagle3"):
        drafter = world[0].drafter(name, **({} if name == "eagle3" else {"window": None}))
        optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
        for step in range(60):
            batch = world[0].batch(drafter.needs, range(len(world[0].examples)), seed=step)
            learn(drafter, batch, optimizer, world=world[0])
        made[name] = drafter.eval()
    return made


def test_every_folder_loads(world, tmp_path):
    target, target_folder = world
    wanted, methods = {}, {}
    for family in FAMILIES:
        for reduced in (False, True):
            source = source_of(drafter_of_family(family, target.target, reduced=reduced), target_folder=target_folder)
            for to in FORMATS:
                for quant in QUANTS:
                    out = tmp_path / f"{to}-{family}-{'reduced' if reduced else 'full'}-{quant}"
                    written(source, to, quant, out, target=target_folder, dtype="bf16")
                    methods[str(out)], wanted[str(out)] = METHODS[family], (source, quant)
    found = vllm(tmp_path, "load", target=str(target_folder), drafts=methods, dtype="bfloat16", length=LENGTH)
    assert found.keys() == wanted.keys()
    assert not {folder: facts["error"] for folder, facts in found.items() if "error" in facts}
    for folder, facts in found.items():
        source, quant = wanted[folder]
        # It counts states from the embedding on.
        assert list(facts["layers"]) == [layer + 1 for layer in source.node["layer_ids"]], folder
        assert (facts["scheme"] == "UnquantizedLinearMethod") == (quant == "none"), folder


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["eagle3", "parallel"])
def test_it_drafts_what_our_loop_drafts(name, to, world, drafts, tmp_path):
    found = served(world, drafts[name], to, "none", tmp_path, dtype="float32")
    config = DecodeConfig(max_new_tokens=NUM_TOKENS, stop_ids=(), length=LENGTH)
    own = decode(world[0].target, drafts[name], prompts_of(world[0]), config)
    for theirs, mine in zip(found, own, strict=True):
        assert theirs["tokens"] == mine.tokens
        # A near tie between two drafts of a block may fall to either side.
        assert abs(theirs["rounds"] - len(mine.rounds)) <= (name == "parallel")
        # Of the last round, which the limit cuts, it counts all drafts that stood.
        assert -1 <= theirs["accepted"] - sum(r.accepted for r in mine.rounds) <= LENGTH
    assert sum(one["accepted"] for one in found) > sum(one["rounds"] for one in found) / 4


def test_a_quantized_draft_changes_no_text(world, drafts, tmp_path):
    """In bfloat16: its products of integers take no other."""
    found = {
        quant: served(world, drafts["eagle3"], "hf", quant, tmp_path / quant, dtype="bfloat16")
        for quant in ("none", "int8", "int4")
    }
    rounds = {quant: sum(one["rounds"] for one in answers) for quant, answers in found.items()}
    for quant in ("int8", "int4"):
        assert [one["tokens"] for one in found[quant]] == [one["tokens"] for one in found["none"]], quant
        assert rounds[quant] < 1.25 * rounds["none"], quant


def served(world, drafter, to, quant, folder, *, dtype):
    """vLLM's answers with an export of the drafter."""
    target, target_folder = world
    family = "eagle3" if type(drafter).__name__ == "Eagle3Drafter" else "parallel"
    source = source_of(drafter, target_folder=target_folder)
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    return vllm(
        folder,
        "serve",
        target=str(target_folder),
        draft=str(written(source, to, quant, folder / "draft", target=target_folder, dtype=short)),
        method=METHODS[family],
        dtype=dtype,
        length=LENGTH,
        tokens=NUM_TOKENS,
        context=256,
        ignore_stops=True,
        stops=[],
        prompts=[prompt.tolist() for prompt in prompts_of(target)],
    )


def prompts_of(world):
    return [example.tokens_T[~example.loss_mask_T] for example in world.examples]
