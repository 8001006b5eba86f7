# evaluate.py beside what test_doors.py tests of it: whose prompts it takes, where it writes, what it says when settings
# are wrong; and that a prompt without room does not end a run.

import json
import shutil
from pathlib import Path

import pytest
import torch

import evaluate
import train
from data.sources import SourceConfig, load_conversations, load_splits
from drafters.chat import ChatEncoder
from drafters.decoding.measure import MeasureConfig
from drafters.decoding.probe import acceptance_probe
from drafters.decoding.report import Report
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter, sharp_target
from tests.door_world import ANSWER, make_world, settings, train_settings, write_rows
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a target, conversations and prompts."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def first(world):
    """The folder of a finished run."""
    train.train(train_settings(world))
    return world / "outputs" / "first"


@pytest.fixture
def measured(first, monkeypatch):
    """Runs evaluate.py up to the measurement; gives what would be measured and written."""

    def call(*overrides):
        seen = []
        monkeypatch.setattr(
            "drafters.door.measure_and_write",
            lambda target, drafter, prompts, config, **rest: seen.append(
                {"prompts": prompts, "config": config, **rest}
            ),
        )
        evaluate.evaluate(settings("evaluate", f"run={first}", "device=cpu", "max_new_tokens=12", *overrides))
        return seen[0]

    return call


def test_the_run_s_own_source_is_split_as_the_run_split_it(world, measured):
    """Its rows have no split: taken whole they would measure what was trained on."""
    source = ("source=jsonl", f"source.path={world}/chats.jsonl")
    own = SourceConfig(path=str(world / "chats.jsonl"))
    _, held_out = load_splits(own, validation=0.2, seed=0)
    found = measured(*source)
    assert len(held_out) == 4
    assert found["provenance"]["prompts"] == {
        "source": [f"{world}/chats.jsonl"],
        "split": "validation, as the run split it",
        "num_prompts": 4,
    }
    encoder = ChatEncoder(tiny_tokenizer("chatml"), max_length=512)
    expected = [encoder.prompt(conversation.messages[:1]).tolist() for conversation in held_out]
    assert sorted(tokens.tolist() for _, tokens in found["prompts"]) == sorted(expected)
    assert len(measured(*source, "split=null")["prompts"]) == len(list(load_conversations(own))) == 20


def test_other_sources_are_taken_whole(world, measured):
    facts = measured("source=jsonl", f"source.path={world}/maths.jsonl")["provenance"]["prompts"]
    assert facts == {"source": [f"{world}/maths.jsonl"], "split": "all rows", "num_prompts": 2}


def test_other_settings_get_another_folder(world, first, measured, tmp_path):
    same = write_rows(tmp_path / "maths.jsonl", [{"turns": ["Another?"]}])
    plain = ("source=jsonl", f"source.path={world}/maths.jsonl")
    changes = ("temperature=1.0", "length=2", "batch_size=2", "seed=1", "top_k=5", "num_prompts=1", "max_new_tokens=13")
    outs = [measured(*plain, *change)["out"] for change in ((), *((one,) for one in changes))]
    outs.append(measured("source=jsonl", f"source.path={same}")["out"])
    assert len(set(outs)) == len(outs) == 9
    assert all(out.parent == first / "evaluate" and out.name.startswith("maths-") for out in outs)
    assert ["-t1-" in out.name for out in outs] == [False, True] + [False] * 7
    assert "-length2-" in outs[2].name
    assert "-batch2-" in outs[3].name
    assert measured(*plain)["out"] == outs[0]
    assert measured(*plain, f"out={tmp_path}/own")["out"] == tmp_path / "own"
    assert measured(*plain, "out='~/own'")["out"] == Path.home() / "own"


def test_folder_names_are_safe_and_short():
    prompts = [(name, torch.tensor([1])) for name in ("../web/chats", "Ünïcode name", *(f"s{i}" for i in range(40)))]
    config = MeasureConfig(sampling=Sampling(temperature=0.7), length=12, batch_size=128)
    name = evaluate.folder_name(prompts, config, "hash")
    assert len(name) <= 60
    assert name.startswith("web_chats-Ünïcode_name-s0")
    assert "/" not in name
    assert "-t0.7-length12-batch128-" in name
    assert evaluate.folder_name([("..", torch.tensor([1]))], config, "hash").startswith("-t0.7")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["num_prompts=abc"], ConfigError, r"^num_prompts: got 'abc'.*Integer"),
        (["num_speed_prompts=abc"], ConfigError, r"^num_speed_prompts: got 'abc'.*Integer"),
        (["allow_other_target=maybe"], ConfigError, r"^allow_other_target: got 'maybe'"),
        (["max_new_tokens=512"], DataError, r"2 of 2 left out: longer than the 0 tokens that max_new_tokens leaves"),
        (["out={world}/maths.jsonl/x"], CheckpointError, r"maths\.jsonl/x: cannot be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_settings_are_named(world, first, overrides, error, message, monkeypatch):
    monkeypatch.setattr("drafters.decoding.measure.measure", None)  # nothing is measured before
    own = [f"run={first}", "device=cpu", "source=jsonl", f"source.path={world}/maths.jsonl"]
    with pytest.raises(error, match=message):
        evaluate.evaluate(settings("evaluate", *own, *(one.format(world=world) for one in overrides)))


def test_a_run_must_be_named():
    with pytest.raises(ConfigError, match=r"^run: missing"):
        evaluate.evaluate(settings("evaluate"))


def test_no_is_no(world, first, tmp_path):
    """`allow_other_target=no` is text in YAML's eyes here, and a text is true."""
    shutil.copytree(world / "target", tmp_path / "tuned")
    tiny_llama(seed=1, vocab_size=len(tiny_tokenizer("chatml"))).save_pretrained(tmp_path / "tuned")
    own = (f"run={first}", "device=cpu", "source=jsonl", f"source.path={world}/maths.jsonl", "allow_other_target=no")
    other = ("target=smollm2", f"target.weights={tmp_path}/tuned", "target.sha256=null", "target.mask_token=0")
    with pytest.raises(CheckpointError, match="allow_other_target=true"):
        evaluate.evaluate(settings("evaluate", *own, *other, "target.dtype=float32"))


def test_tables_are_on_the_screen_when_they_cannot_be_saved(world, first, tmp_path, monkeypatch, capsys):
    def no_space(report, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Report, "save", no_space)
    own = (f"run={first}", "device=cpu", "source=jsonl", f"source.path={world}/maths.jsonl", "max_new_tokens=12")
    with pytest.raises(CheckpointError, match="out: cannot be written: no space left"):
        evaluate.evaluate(settings("evaluate", *own, f"out={tmp_path}/out"))
    assert "accepted length (bonus included)" in capsys.readouterr().out


def test_a_held_out_prompt_without_room_does_not_end_a_run(world, tmp_path):
    rows = [{"prompt": f"Tool {i}?", "response": ANSWER, "split": "train"} for i in range(9)]
    rows += [{"prompt": text, "response": ANSWER, "split": "validation"} for text in ("Sky?", "k" * 490)]
    chats = write_rows(tmp_path / "chats.jsonl", rows)
    own = (f"outputs={tmp_path}", f"source.path={chats}", "data.max_length=64", f"cache.root={tmp_path}/states")
    with pytest.warns(UserWarning, match="prompts: 1 of 2 left out: longer than the 500 tokens"):
        train.train(train_settings(world, *own))
    assert json.loads((tmp_path / "first" / "report.json").read_text())["prompts"] == 1


def test_the_probe_makes_fewer_tokens_where_a_prompt_leaves_no_more():
    target = sharp_target(vocab_size=64, scale=30)
    prompt = torch.arange(3, 63).repeat(9)[: target.spec.max_position - 20]
    found = acceptance_probe(target, [prompt, prompt[:40]])(CopyDrafter(target, block_size=3))
    assert found["accepted_length"] >= 1
