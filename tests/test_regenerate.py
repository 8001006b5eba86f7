# The target answers prompts itself: killed anywhere, the same command ends with the same bytes.

import gzip
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.regenerate import RegenerateConfig, read_prompts, regenerate
from drafters.chat import ChatEncoder
from drafters.errors import ConfigError, DataError
from drafters.target import FrozenTarget
from drafters.types import Message
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

ROOT = Path(__file__).parent.parent
ROWS = [
    {"id": "a", "turns": ["What colour is the sky?"], "split": "train", "category": "x"},
    {"id": "b", "turns": ["Be kind.", "And grass?"], "split": "train", "category": "y"},
    {"id": "c", "turns": ["Once upon a time"], "split": "validation", "category": "x"},
    {"id": "d", "turns": ["The sky is blue, the grass is green.", "Blue", "Green!"], "split": "train", "category": "y"},
    {"id": "e", "turns": ["a tool"], "split": "train", "category": "x"},
]
CONFIG = RegenerateConfig(temperature=1.0, max_new_tokens=12, batch_size=2, seed=3)


def make_target(folder=None):
    """Stops at about every second answer: the end-of-turn row of the head is one that often wins."""
    tokenizer = tiny_tokenizer("chatml")
    model = tiny_llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"))
    with torch.no_grad():
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 16
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return FrozenTarget.from_model(model, tokenizer=tokenizer, mask_token_id=1)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """The uninterrupted result."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl.gz"
    regenerate(target, ROWS, out, CONFIG)
    return out.read_bytes()


def rows_of(content):
    return [json.loads(line) for line in gzip.decompress(content).decode().splitlines()]


def test_every_turn_is_answered_in_order(whole):
    rows = rows_of(whole)
    assert [row["id"] for row in rows] == ["a", "b", "c", "d", "e"]
    for row, asked in zip(rows, ROWS, strict=True):
        assert {k: v for k, v in row.items() if k != "messages"} == {k: v for k, v in asked.items() if k != "turns"}
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * len(asked["turns"])
        assert [m["content"] for m in row["messages"][::2]] == asked["turns"]
        assert all("finish_reason" not in m for m in row["messages"][::2])
    reasons = {m["finish_reason"] for row in rows for m in row["messages"][1::2]}
    assert reasons == {"stop", "length"}


def test_finish_reasons_say_how_an_answer_ended(target, tmp_path):
    """At temperature 0 an answer is the target's own greedy one: with its end, or cut at the limit."""
    out, greedy = tmp_path / "out.jsonl", replace(CONFIG, temperature=0.0)
    regenerate(target, ROWS, out, greedy)
    encoder = ChatEncoder(target.tokenizer, max_length=512)
    for row in map(json.loads, out.read_text().splitlines()):
        history = []
        for question, answer in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            history.append(Message(role="user", content=question["content"]))
            prompt = encoder.prompt(history)
            tokens = target.model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                max_new_tokens=greedy.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            stopped = tokens[-1] in target.spec.eos_ids
            assert answer["finish_reason"] == ("stop" if stopped else "length")
            assert answer["content"] == target.tokenizer.decode(tokens[:-1] if stopped else tokens)
            history.append(Message(role="assistant", content=answer["content"]))


class Killed(Exception):
    pass


@pytest.mark.parametrize("batches", [0, 1, 2, 4])
@pytest.mark.parametrize("torn", [b"", b'{"batch": 9, "ans'])
def test_a_kill_between_batches_or_inside_a_line_changes_nothing(target, whole, tmp_path, batches, torn):
    out, part = tmp_path / "out.jsonl.gz", tmp_path / "out.jsonl.gz.part"
    seen = []

    def die(done, total, tokens):
        seen.append((done, total, tokens > 0))
        if len(seen) == batches:
            raise Killed

    if batches:
        with pytest.raises(Killed):
            regenerate(target, ROWS, out, CONFIG, progress=die)
        assert not out.exists()
        assert len(part.read_bytes().splitlines()) == 1 + batches
    with part.open("ab") as stream:
        stream.write(torn)
    seen.clear()
    regenerate(target, ROWS, out, CONFIG, progress=lambda *now: seen.append((*now[:2], now[2] > 0)))
    assert out.read_bytes() == whole
    assert not part.exists()
    # Turn by turn: five first answers in three batches, two second ones, one third one; finished ones are not redone.
    dones = [2, 4, 5, 7, 8]
    assert seen == [(done, 8, number >= batches) for number, done in enumerate(dones)]


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path):
    """The same through the door, with SIGKILL."""
    folder, prompts, out = tmp_path / "target", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl.gz"
    target, rows, config = make_target(folder), ROWS * 4, replace(CONFIG, max_new_tokens=64, batch_size=1, seed=0)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"target.weights={folder}", "target.sha256=null", "target.dtype=float32", "target.mask_token=1"]
    settings += [
        f"prompts={prompts}",
        f"out={out}",
        "batch_size=1",
        "max_new_tokens=64",
        "temperature=1.0",
        "device=cpu",
    ]
    command, where = [sys.executable, "-m", "data.regenerate", *settings], {"cwd": ROOT, "stderr": subprocess.DEVNULL}
    part = tmp_path / "out.jsonl.gz.part"
    process = subprocess.Popen(command, **where)
    while process.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 4 <= part.read_bytes().count(b"\n") < 1 + 4 * 8
    assert not out.exists()
    assert subprocess.run(command, check=False, **where).returncode == 0
    regenerate(target, rows, tmp_path / "whole.jsonl.gz", config)
    assert out.read_bytes() == (tmp_path / "whole.jsonl.gz").read_bytes()


def test_anything_that_changes_the_answers_is_refused(target, tmp_path):
    out, part = tmp_path / "out.jsonl.gz", tmp_path / "out.jsonl.gz.part"

    def die(*progress):
        raise Killed

    with pytest.raises(Killed):
        regenerate(target, ROWS, out, CONFIG, progress=die)
    before = part.read_bytes()
    for change in ({"seed": 4}, {"temperature": 0.7}, {"top_p": 0.9}, {"max_new_tokens": 13}, {"batch_size": 3}):
        with pytest.raises(DataError, match="was begun with other prompts, settings or another target"):
            regenerate(target, ROWS, out, replace(CONFIG, **change))
    with pytest.raises(DataError, match="was begun with other prompts"):
        regenerate(target, ROWS[:-1], out, CONFIG)
    assert part.read_bytes() == before
    part.write_bytes(before.replace(b'"batch"', b'"botch"'))
    with pytest.raises(DataError, match="is damaged"):
        regenerate(target, ROWS, out, CONFIG)


def test_prompts_that_leave_no_room_are_refused(target, tmp_path):
    with pytest.raises(ConfigError, match=r"max_new_tokens: got 512, which leaves no room.*less than the target's 512"):
        regenerate(target, ROWS, tmp_path / "out.jsonl", replace(CONFIG, max_new_tokens=512))


def test_long_prompts_keep_their_end(target, tmp_path):
    out = tmp_path / "out.jsonl"
    regenerate(target, [{"id": "long", "turns": ["green " * 900]}], out, CONFIG)
    assert json.loads(out.read_text())["messages"][1]["content"]


def test_prompts_are_read_with_an_id_each(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["où?"]}\n{"id": "mine", "turns": ["x", "y"]}\n', encoding="utf-8")
    assert read_prompts(path, limit=None) == [{"id": "p-00001", "turns": ["où?"]}, {"id": "mine", "turns": ["x", "y"]}]
    assert len(read_prompts(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"turns": ["a"]}\n{torn', "line 2 is not JSON"),
        ('{"prompt": "a"}', "line 1 needs `turns`, a list of user texts"),
        ('{"turns": []}', "line 1 needs `turns`"),
        ('{"turns": ["a", ""]}', "line 1 needs `turns`"),
        ('{"turns": "a"}', "line 1 needs `turns`"),
        ("[1]", "line 1 needs `turns`"),
    ],
)
def test_bad_rows_are_named(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_prompts(path, limit=None)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no file .*gone\.jsonl; `python -m data\.samples\.prompts` writes"):
        read_prompts(tmp_path / "gone.jsonl", limit=None)
