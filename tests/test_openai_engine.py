# Answers of a server: whatever goes wrong with it, in whatever order answers come, the same command ends with the same
# bytes, asks for nothing twice that it has, and lets no failure become a training row.

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.engines.openai_engine import request_seed
from data.regenerate import run
from drafters.errors import ConfigError, DataError
from tests.door_world import settings, write_rows
from tests.openai_doubles import NUM_TURNS, ROWS, Fault, answer_to, make_door, rows_of, serving

ROOT = Path(__file__).parent.parent
REFUSED = Fault(status=400)


@pytest.fixture
def door(stub, tmp_path):
    return make_door(stub, tmp_path)


def test_every_turn_is_answered_with_the_model_s_own_answers_before_it(door, stub):
    made = rows_of(door("+template_kwargs.enable_thinking=false", "engine.extra_body.min_p=null", "top_p=0.9"))
    assert [row["id"] for row in made] == ["a", "b", "c", "d", "e"]
    assert made[0]["split"] == "train"
    for i, (row, given) in enumerate(zip(made, ROWS, strict=True)):
        said = [{"role": "system", "content": given["system"]}] if "system" in given else []
        for turn, question in enumerate(given["turns"]):
            said.append({"role": "user", "content": question})
            body = {
                "model": "smollm2",
                "messages": said,
                "temperature": 0.7,
                "top_p": 0.9,
                "max_tokens": 9,
                "top_k": -1,
                "repetition_penalty": 1.0,
                "chat_template_kwargs": {"enable_thinking": False},
                "seed": request_seed(3, i, turn),
            }
            assert body in stub.asked
            assert row["messages"][2 * turn] == said[-1]
            answer = {"role": "assistant", "content": answer_to(body)}
            assert row["messages"][2 * turn + 1] == {**answer, "finish_reason": "stop"}
            said = [*said, answer]
    assert len(stub.asked) == NUM_TURNS
    # The same question asked twice is drawn twice.
    assert made[0]["messages"][1] != made[2]["messages"][1]


def test_seeds_are_numbers_that_any_server_takes():
    seeds = {request_seed(seed, row, turn) for seed in range(3) for row in range(30) for turn in range(3)}
    assert len(seeds) == 270
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_neither_order_nor_concurrency_changes_anything(door, stub):
    whole = door("engine.concurrency=1")
    one_by_one = stub.questions()
    stub.asked.clear()
    for pause, question in zip((0.4, 0.2, 0.1), ("Sky?", "Grass?", "Once?"), strict=True):
        stub.faults[question] = [Fault(pause=pause)]
    assert door("engine.concurrency=8", name="again.jsonl") == whole
    assert stub.questions() != one_by_one
    assert sorted(stub.questions()) == sorted(one_by_one)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(status=500), Fault(status=502)],
        [Fault(status=429, headers={"Retry-After": "0.05"})],
        [Fault(body=b'{"choices": [{"mess')],
        [Fault(missing_bytes=20)],
        [Fault(is_closed=True), Fault(is_closed=True)],
        [Fault(body=b'{"choices": []}')],
        [Fault(body=b'{"error": {"message": "overloaded"}}')],
        [Fault(body=b"<html>gateway</html>", headers={"Content-Type": "text/html"})],
        [Fault(body=b'{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}')],
        [Fault(body=b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}]}')],
        [Fault(status=202, body=b"")],
        [Fault(status=503), Fault(is_closed=True), Fault(body=b"[]"), Fault(status=500)],
    ],
    ids=[
        "5xx",
        "429",
        "torn-json",
        "torn-body",
        "closed",
        "no-choices",
        "error-as-200",
        "html",
        "type",
        "surrogate",
        "202",
        "mixed",
    ],
)
def test_what_passes_is_asked_again(door, stub, faults):
    whole = door()
    stub.asked.clear()
    stub.faults["And sea?"] = list(faults)
    assert door(name="again.jsonl") == whole
    assert stub.questions().count("And sea?") == 1 + len(faults)
    assert len(stub.asked) == NUM_TURNS + len(faults)


def test_a_time_out_is_asked_again(door, stub):
    whole = door()
    stub.faults["Tool?"] = [Fault(pause=3.0)]
    assert door("engine.timeout=1", name="again.jsonl") == whole
    assert stub.questions().count("Tool?") >= 3


def test_retry_after_is_kept(door, stub):
    times = []
    stub.faults["Tool?"] = [Fault(status=429, headers={"Retry-After": "0.6"})]
    stub_next, tool = stub.next_fault, "Tool?"

    def noted(body):
        times.append(time.monotonic()) if body["messages"][-1]["content"] == tool else None
        return stub_next(body)

    stub.next_fault = noted
    door()
    assert times[1] - times[0] >= 0.6


def test_a_server_that_does_not_count_tokens(door, stub):
    whole = door()
    stub.always = {question: Fault(has_usage=False) for question in ("Sky?", "Grass?", "Tool?")}
    assert door(name="again.jsonl") == whole


def test_finish_reasons_are_kept(door, stub):
    stub.always = {"Tool?": Fault(finish_reason="length"), "Once?": Fault(finish_reason="eos_token")}
    made = {row["id"]: [m["finish_reason"] for m in row["messages"][-1::-2]] for row in rows_of(door())}
    assert made == {"a": ["stop"], "b": ["stop"] * 3, "c": ["stop"], "d": ["stop"] * 2, "e": ["length"]}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(finish_reason="content_filter"), "finish_reason 'content_filter'"),
        (Fault(finish_reason="tool_calls", message={"content": None, "tool_calls": []}), "finish_reason 'tool_calls'"),
        (Fault(finish_reason=None), "finish_reason None"),
        (Fault(message={"content": None}), "empty answer"),
        (Fault(message={"content": " \n"}), "empty answer"),
        (Fault(message={"content": "", "reasoning_content": "Hm."}), "empty answer"),
        (REFUSED, r"HTTP 400 \(such as 'b': HTTP 400: .*the stub says 400"),
        (Fault(status=422), "HTTP 422"),
    ],
)
def test_what_is_no_answer_becomes_no_row(door, stub, fault, reason):
    stub.always["And sea?"] = fault
    with pytest.warns(UserWarning, match=rf"left out 1 of 5 prompts: 1 by {reason}"):
        made = rows_of(door("engine.max_failed=0.2"))
    assert [row["id"] for row in made] == ["a", "c", "d", "e"]
    # It does not pass, so it is asked once, and its later turn never.
    assert stub.questions().count("And sea?") == 1
    assert "Why?" not in stub.questions()


def test_what_may_pass_is_asked_once_more_at_the_end(door, stub):
    whole = door()
    stub.asked.clear()
    stub.faults["Sky?"] = [Fault(status=500)] * 4
    assert door("engine.retries=1", "engine.concurrency=1", "engine.max_failed=0.4", name="again.jsonl") == whole
    assert stub.questions()[:2] == ["Sky?"] * 2
    assert stub.questions()[-2:] == ["Sky?"] * 2


def test_too_many_failures_stop_it_and_lose_nothing(door, stub, tmp_path):
    whole = door()
    stub.asked.clear()
    stub.always = {"And sea?": Fault(status=500), "Tool?": REFUSED}
    few = ("engine.retries=1", "engine.concurrency=1")
    with pytest.raises(DataError, match=r"^engine\.max_failed: 2 of 5 .* 0\.3: 1 by HTTP 500 .*; 1 by HTTP 400 "):
        door(*few, "engine.max_failed=0.3", name="again.jsonl")
    assert not (tmp_path / "again.jsonl").exists()
    assert len((tmp_path / "again.jsonl.part").read_bytes().splitlines()) == 1 + 5
    stub.always.clear()
    stub.asked.clear()
    assert door(name="again.jsonl") == whole
    assert sorted(stub.questions()) == ["And sea?", "Tool?", "Why?"]
    assert not (tmp_path / "again.jsonl.part").exists()


def test_a_file_of_nothing_is_not_written(door, stub, tmp_path):
    for row in ROWS:
        stub.always[row["turns"][0]] = REFUSED
    with pytest.raises(DataError, match=r"^engine: not one prompt was answered: 5 by HTTP 400"):
        door("engine.max_failed=1")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_server_that_goes_away_and_comes_back(tmp_path, door, stub):
    whole = door()
    write_rows(tmp_path / "p.jsonl", ROWS)
    own = ["engine=openai", "engine.retries=1", "engine.concurrency=1", "max_new_tokens=9", "seed=3"]
    own += [f"prompts={tmp_path}/p.jsonl", f"out={tmp_path}/again.jsonl"]
    with serving() as other:
        # From the third request on nothing answers, the list of models included.
        other.faults["And sea?"] = [Fault(is_closed=True)] * 2
        other.list_faults = [Fault(), Fault(is_closed=True)]
        with pytest.raises(
            ConfigError, match=r"^engine\.base_url: .* does not answer any more .*same command goes on$"
        ):
            run(settings("regenerate", *own, f"engine.base_url={other.url}"))
    # It may have moved meanwhile.
    stub.asked.clear()
    assert door(name="again.jsonl") == whole
    assert len(stub.asked) == NUM_TURNS - 2


def test_another_job_is_refused_and_the_same_one_elsewhere_is_not(door, stub, tmp_path):
    whole = door()
    stub.always["Tool?"] = REFUSED
    with pytest.raises(DataError, match=r"^engine\.max_failed: 1 of 5"):
        door("engine.concurrency=1", name="again.jsonl")
    part = (tmp_path / "again.jsonl.part").read_bytes()
    assert part.count(b"\n") == NUM_TURNS
    stub.models += [{"id": "other"}]
    named = "engine.model=smollm2"
    changes = ["seed=4", "temperature=0.5", "top_p=0.5", "max_new_tokens=8", "limit=4", "+template_kwargs.a=1"]
    changes += ["engine.extra_body.top_k=5", "target.sha256=" + "0" * 64]
    for change in changes:
        with pytest.raises(DataError, match="was begun with other prompts, settings, another target or another model"):
            door(named, change, name="again.jsonl")
    assert (tmp_path / "again.jsonl.part").read_bytes() == part
    stub.asked.clear()
    stub.always.clear()
    with (tmp_path / "again.jsonl.part").open("ab") as stream:
        stream.write(b'{"row": 4, "tu')
    same = (
        "engine.concurrency=2",
        "engine.retries=0",
        "engine.timeout=5",
        "engine.max_failed=0.5",
        "engine.is_target=true",
    )
    assert door(named, *same, name="again.jsonl") == whole
    assert stub.questions() == ["Tool?"]


@pytest.mark.parametrize("way", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_a_stopped_process_goes_on(stub, tmp_path, way):
    rows = [{**row, "id": f"{row['id']}{k}"} for k in range(6) for row in ROWS]
    write_rows(tmp_path / "p.jsonl", rows)
    own = ["engine=openai", f"engine.base_url={stub.url}", f"prompts={tmp_path}/p.jsonl", "engine.concurrency=3"]
    command = [sys.executable, "-m", "data.regenerate", *own, f"out={tmp_path}/out.jsonl"]
    part, stub.pause = tmp_path / "out.jsonl.part", 0.1
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < 7):
        time.sleep(0.01)
    process.send_signal(way)
    said = process.communicate()[1]
    done = part.read_bytes().splitlines()[1:]
    assert 6 <= len(done) < 6 * NUM_TURNS
    assert not (tmp_path / "out.jsonl").exists()
    if way == signal.SIGINT:
        assert process.returncode == 130
        assert said.strip().endswith(".jsonl.part; the same command goes on")
        assert "Traceback" not in said
    stub.pause = 0.0
    time.sleep(0.3)  # what was in flight arrives
    stub.asked.clear()
    run(settings("regenerate", *own, f"out={tmp_path}/out.jsonl"))
    assert len(stub.asked) == 6 * NUM_TURNS - len(done)
    run(settings("regenerate", *own, f"out={tmp_path}/whole.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_reasoning_apart_is_put_before_the_answer(door, stub):
    parts = {"reasoning_content": "\nIt is blue.\n", "content": "\n\nBlue."}
    stub.always["Tool?"] = Fault(message=parts)
    stub.always["Once?"] = Fault(message={"reasoning": "Long, long", "content": None}, finish_reason="length")
    with pytest.warns(UserWarning, match="reasoning apart from answers; it is put before them in <think> tags") as seen:
        made = {row["id"]: [m["content"] for m in row["messages"]] for row in rows_of(door())}
    assert len(seen) == 1
    assert made["e"][1] == "<think>\nIt is blue.\n</think>\n\nBlue."
    assert made["d"][1] == "<think>\nLong, long"
