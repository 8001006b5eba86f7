# The target answers prompts itself: killed anywhere, the same command ends with the same bytes.

import fcntl
import gzip
import hashlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch

from data.engines.answers import RegenerateConfig, claim
from data.engines.local import regenerate, resume_key
from data.regenerate import read_prompts, run
from data.sources import SourceConfig, load_conversations
from drafters.chat import ChatEncoder
from drafters.decoding import loop
from drafters.decoding.loop import DecodeConfig, decode
from drafters.errors import ConfigError, DataError
from drafters.target import FrozenTarget
from drafters.types import Message
from tests.door_world import settings
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


def make_target(folder=None, template="chatml"):
    """Stops at about every second answer: the end-of-turn row of the head is one that often wins."""
    tokenizer = tiny_tokenizer(template)
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


def test_every_turn_is_answered_in_order(target, whole):
    rows = rows_of(whole)
    assert [row["id"] for row in rows] == ["a", "b", "c", "d", "e"]
    for row, asked in zip(rows, ROWS, strict=True):
        assert row.pop("answered_by") == target.spec.weights_hash
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
    rows, config = ROWS * 4, replace(CONFIG, max_new_tokens=64, batch_size=1, seed=0)
    make_target(folder)
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
    target = FrozenTarget.load(str(folder), dtype="float32", mask_token=1)
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
        with pytest.raises(DataError, match="was begun with other prompts, settings, another target or another model"):
            regenerate(target, ROWS, out, replace(CONFIG, **change))
    with pytest.raises(DataError, match="was begun with other prompts"):
        regenerate(target, ROWS[:-1], out, CONFIG)
    assert part.read_bytes() == before
    part.write_bytes(before.replace(b'"batch"', b'"botch"'))
    with pytest.raises(DataError, match="is damaged"):
        regenerate(target, ROWS, out, CONFIG)


def test_template_settings_change_the_prompts_and_the_key(tmp_path, monkeypatch):
    target = make_target(template="qwen3")
    keys = {
        resume_key(target, ROWS, replace(CONFIG, template_kwargs=kwargs))
        for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True})
    }
    assert len(keys) == 3
    # Without any the key is the one of before there were any, so that older unfinished files go on.
    settings = {name: value for name, value in vars(CONFIG).items() if name != "template_kwargs"}
    what = [ROWS, settings, target.spec.weights_hash, target.spec.template_hash]
    assert resume_key(target, ROWS, CONFIG) == hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    asked = []
    monkeypatch.setattr(loop, "decode", lambda target, drafter, prompts, config: asked.append(prompts) or [])
    for kwargs in ({}, {"enable_thinking": False}):
        with pytest.raises(ValueError, match="shorter"):
            regenerate(target, ROWS[:1], tmp_path / f"{len(asked)}.jsonl", replace(CONFIG, template_kwargs=kwargs))
    texts = [target.tokenizer.decode(prompts[0]) for prompts in asked]
    assert texts[1] == texts[0] + "<think>\n\n</think>\n\n"


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
        ('{"turns": ["a"]}\n{torn', r"^prompts: .*p\.jsonl' line 2: malformed JSON"),
        ('{"turns": ' + "[" * 10**5, r"^prompts: .*p\.jsonl' line 1: its JSON is nested too deep"),
        ('{"text": "a"}', r"prompts: no messages in .*p\.jsonl line 1: its columns are text; accepted: (?!.*source)"),
        ('{"turns": []}', "1 rows: no messages"),
        ('{"turns": ["a", ""]}', "1 rows: no user message, or an empty one"),
        ('{"turns": "a"}', "line 1: `turns` should be a list"),
        ("[1]", "element 1: expected a JSON object, got int"),
        ('{"turns": ["a"]}\n[1]', "line 2: expected a JSON object, got list"),
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


def test_lines_end_only_where_json_lines_do(tmp_path):
    """Unicode's own line ends may stand in a text; blank lines say nothing."""
    path, text = tmp_path / "p.jsonl", "one\u2028two\u2029three\x85four"
    path.write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + '\n\n{"turns": ["five"]}\n\n', encoding="utf-8")
    assert [row["turns"] for row in read_prompts(path, limit=None)] == [[text], ["five"]]
    assert [row["id"] for row in read_prompts(path, limit=None)] == ["p-00001", "p-00003"]


def test_prompts_come_from_any_source_file(target, tmp_path):
    messages = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Red.", "finish_reason": "stop"}]
    shapes = [
        {"id": "m", "note": 3, "messages": [{"role": "system", "content": "Speak."}, *messages]},
        {"id": "s", "note": 3, "system": "Speak.", "conversations": [{"from": "human", "value": "Sky?"}]},
        {"id": "p", "note": 3, "system": "Speak.", "prompt": "Sky?", "response": "Red.", "finish_reason": "stop"},
        {"id": "t", "note": 3, "system": "Speak.", "turns": ["Sky?"]},
    ]
    for row in shapes:
        expected = {"id": row["id"], "note": 3, "system": "Speak.", "turns": ["Sky?"]}
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
        (tmp_path / "a.json").write_text(json.dumps([row]))
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
        for name in ("a.jsonl.gz", "a.json", "a.parquet"):
            assert read_prompts(tmp_path / name, limit=None) == [expected], name
    tool = {"messages": [*messages, {"role": "tool", "content": "x"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(tool) + "\n" + json.dumps(shapes[0]) + "\n")
    with pytest.warns(UserWarning, match=r"a\.jsonl: left out 1 rows: roles other than system, user and assistant"):
        (asked,) = read_prompts(tmp_path / "a.jsonl", limit=None)
    out, greedy = tmp_path / "out.jsonl", replace(CONFIG, temperature=0.0)
    regenerate(target, [asked], out, greedy)
    (conversation,) = load_conversations(SourceConfig(path=str(out)))
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant"]
    prompt = ChatEncoder(target.tokenizer, max_length=512).prompt(conversation.messages[:2])
    (answer,) = decode(target, None, [prompt], DecodeConfig(max_new_tokens=greedy.max_new_tokens))
    kept = [token for token in answer.tokens if token not in target.spec.eos_ids]
    assert conversation.messages[2].content == target.tokenizer.decode(kept)


@pytest.fixture
def door(tmp_path):
    """The settings of the door on a small target, and the place of its result."""
    make_target(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text('{"turns": ["Sky?"]}\n{"turns": ["Grass?"]}\n')
    own = [f"target.weights={tmp_path}/target", "target.sha256=null", "target.dtype=float32", "target.mask_token=1"]
    own += [f"prompts={tmp_path}/p.jsonl", f"out={tmp_path}/out.jsonl", "max_new_tokens=8", "device=cpu"]
    return lambda *more: run(settings("regenerate", *own, *more))


def test_values_are_read_as_they_stand(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["2024-01-01"], "note": "2024-01-01"}\n{"turns": ["x"], "note": {"a": [1, "b"]}}\n')
    assert [(row["turns"], row["note"]) for row in read_prompts(path, limit=None)] == [
        (["2024-01-01"], "2024-01-01"),
        (["x"], {"a": [1, "b"]}),
    ]


def test_a_second_process_on_one_file_is_refused(door, tmp_path, monkeypatch):
    def load(*args, **settings):
        raise AssertionError("the target was loaded")

    with monkeypatch.context() as patched:
        patched.setattr("drafters.door.load_target", load)
        with claim(tmp_path / "out.jsonl"):
            command = [sys.executable, "-m", "data.regenerate", f"out={tmp_path}/out.jsonl"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 1
            assert done.stderr.startswith(f"error: out: another process is writing {tmp_path}/out.jsonl; wait for it")
            assert done.stderr.count("\n") == 1
            with pytest.raises(DataError, match="another process is writing"):
                door()
            # Another file of the same folder is free.
            with claim(tmp_path / "other.jsonl"):
                pass
    assert not list(tmp_path.glob("*.part"))
    door()
    assert (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_was_finished_meanwhile_is_not_claimed(tmp_path, monkeypatch):
    """The other process ends between our opening of its unfinished file and our lock on it."""
    out, real = tmp_path / "out.jsonl", fcntl.flock

    def flock(stream, flags):
        (tmp_path / "out.jsonl.part").unlink()
        real(stream, flags)

    monkeypatch.setattr("data.engines.answers.fcntl.flock", flock)
    with pytest.raises(DataError, match="another process is writing"), claim(out):
        pass


@pytest.mark.parametrize(
    ("place", "message"),
    [("p.jsonl/out.jsonl", "^out: cannot write .*; choose"), ("folder.jsonl", "^out: .* is a folder")],
)
def test_places_that_cannot_be_written_are_named_before_the_target_is_loaded(
    door, tmp_path, monkeypatch, place, message
):
    (tmp_path / "folder.jsonl").mkdir()
    monkeypatch.setattr("drafters.door.load_target", lambda *args, **settings: pytest.fail("the target was loaded"))
    with pytest.raises(DataError, match=message):
        door(f"out={tmp_path}/{place}", "overwrite=true")


def test_top_p_is_said_to_be_ignored_at_temperature_0(door):
    with pytest.warns(UserWarning, match=r"top_p: 0\.9 is ignored at temperature 0"):
        door("temperature=0", "top_p=0.9", "limit=1")


def test_a_finished_file_is_not_replaced_unasked(door, tmp_path):
    door("limit=1")
    before = (tmp_path / "out.jsonl").read_bytes()
    assert before.count(b"\n") == 1
    with pytest.raises(DataError, match=r"out\.jsonl is finished; remove it, choose another out=, or overwrite=true"):
        door()
    assert (tmp_path / "out.jsonl").read_bytes() == before
    door("overwrite=true")
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limit=abc", r"^limit: got 'abc'.*Integer"),
        ("limit=0", r"^limit: got 0; accepted: 1 or more"),
        ("batch_size=abc", r"^batch_size: got 'abc'.*Integer"),
        ("max_new_tokens=0", r"^max_new_tokens: got 0; accepted: 1 or more"),
        ("overwrite=perhaps", r"^overwrite: got 'perhaps'"),
        ("prompts=[a.jsonl]", r"^prompts: got "),
        ("out=null", r"^out: got None"),
        ("out=chats.parquet", r"^out: got 'chats\.parquet'; accepted: a name that ends with \.jsonl"),
        ("+target.weight=x", r"^target\.weight: unknown setting; accepted: name, weights"),
        ("template_kwargs=3", r"^template_kwargs: got 3"),
    ],
)
def test_wrong_settings_are_named(door, override, message):
    with pytest.raises(ConfigError, match=message):
        door(override)
