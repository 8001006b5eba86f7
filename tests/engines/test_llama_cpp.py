# llama.cpp itself: it loads every kind of draft that is written for it, and drafts token by token what our own session
# drafts after the same text. Tiny random models in float32; it has to be named, see llama_cpp.py.

import pytest
import torch

from drafters.target import FrozenTarget
from export import to_gguf
from export.gguf_layout import kind_of
from export.to_gguf import Options
from tests.block_doubles import MARKOV, make_drafter
from tests.contract_cases import Reading, learn, tiny_world
from tests.engines.llama_cpp import VARIABLE, draft_options, random_prompt, server_path, serving, write_target
from tests.gguf_doubles import CASES, write_tokenizer
from tests.published_doubles import drafter_of_family, source_of
from tests.test_families import sharpened
from tests.tiny import tiny_llama

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(server_path() is None, reason=f"{VARIABLE} names no llama.cpp"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "rope_parameters": {"rope_theta": 5000.0}}
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32")
NUM_TOKENS = 24
F32 = Options(type="F32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    model = sharpened(tiny_llama(**SIZES))
    model.save_pretrained(folder)
    write_tokenizer(folder, 128)
    target = FrozenTarget.from_model(model, mask_token_id=3)
    write_target(folder, folder / "target.gguf", target.spec)
    return target


def drafted(source, folder, out, *, options=F32, length=4, prompt):
    """What the server drafts in each round, and its answer."""
    to_gguf.write(source, "none", out, options=options)
    (draft,) = out.glob("*.gguf")
    choice = draft_options(draft, kind_of(source.node), length=length)
    with serving(folder / "target.gguf", out / "log", *choice, *EXACT, "-lv", "5", context=512) as server:
        return server.ask(prompt.tolist(), num_tokens=NUM_TOKENS)


def own_drafts(source, target, prompt, answer, *, length=4):
    """What our session drafts where the server drafted: after the prompt and the tokens that stood before a round."""
    place, found = 0, []
    for stood, _ in answer.rounds:
        reading = Reading(source.drafter, target, [torch.cat([prompt, torch.tensor(answer.tokens[:place]).long()])])
        assert int(reading.session.anchor_B[0]) == answer.tokens[place], "the target itself differs"
        found.append(reading.propose(length).tokens_BS[0].tolist())
        place += stood + 1
    return found


def compared(source, target, folder, out, *, prompt, **how):
    """Rounds in which all drafts are the same, and all rounds that drafted in full."""
    answer = drafted(source, folder, out, prompt=prompt, **how)
    assert len(answer.tokens) == NUM_TOKENS
    own = own_drafts(source, target, prompt, answer)
    assert len(own) == len(answer.drafts) > 4
    return sum(a == b for a, b in zip(own, answer.drafts, strict=True)), len(own)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_drafts_what_our_session_drafts(case, reduced, target, folder, tmp_path):
    drafter = drafter_of_family(case.partition("-")[0], target, reduced=reduced, **CASES[case])
    source = source_of(drafter, target_folder=folder)
    same, rounds = compared(source, target, folder, tmp_path, prompt=random_prompt(17, vocab_size=128, seed=0))
    assert same == rounds


@pytest.mark.parametrize("name", ["markov", "parallel", "eagle3"])
def test_drafts_stay_the_same_when_some_stand(name, tmp_path):
    world = tiny_world()
    settings = {} if name == "eagle3" else {"window": None}
    drafter = world.drafter(name, **settings)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for step in range(60):
        learn(drafter, world.batch(drafter.needs, range(len(world.examples)), seed=step), optimizer)
    world.target.model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 128)
    write_target(tmp_path, tmp_path / "target.gguf", world.target.spec)
    source = source_of(drafter.eval(), target_folder=tmp_path)
    example = world.examples[0]
    prompt = example.tokens_T[~example.loss_mask_T]
    (tmp_path / "out").mkdir()
    answer = drafted(source, tmp_path, tmp_path / "out", prompt=prompt, length=drafter.block_size)
    own = own_drafts(source, world.target, prompt, answer, length=drafter.block_size)
    assert own == answer.drafts
    assert answer.timings["draft_n_accepted"] >= 4


def test_types_other_than_float32_load_and_draft(target, folder, tmp_path):
    drafter = make_drafter(target, sequential={**MARKOV, "rank": 32}, window=None)
    source = source_of(drafter, target_folder=folder)
    prompt = random_prompt(17, vocab_size=128, seed=1)
    for name in ("F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"):
        out = tmp_path / name
        out.mkdir()
        answer = drafted(source, folder, out, prompt=prompt, options=Options(type=name))
        assert len(answer.drafts) > 4, name


def test_a_window_is_the_trained_one_for_the_first_draft(target, folder, tmp_path):
    drafter = make_drafter(target, window=8, num_layers=1)
    source = source_of(drafter, target_folder=folder)
    prompt = random_prompt(60, vocab_size=128, seed=2)
    answer = drafted(source, folder, tmp_path, prompt=prompt)
    own = own_drafts(source, target, prompt, answer)
    assert [draft[0] for draft in own] == [draft[0] for draft in answer.drafts]
