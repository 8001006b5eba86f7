# What a server is asked to be: its address, its model and its key; whose answers they are; settings that are wrong; and
# what docs/regenerate.md says of all that.

import re
import shlex

import pytest

from data.engines.openai_engine import OpenAIEngine
from data.sources import SourceConfig, load_conversations
from drafters.config import to_plain
from drafters.errors import ConfigError, DataError
from tests.door_world import ROOT, settings
from tests.openai_doubles import NUM_TURNS, Fault, make_door, rows_of


@pytest.fixture
def door(stub, tmp_path):
    return make_door(stub, tmp_path)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_it_at_once_and_is_not_shown(door, stub, monkeypatch, status):
    monkeypatch.setenv("SERVER_KEY", "sk-secret")
    echo = Fault(status=status, body=b'{"error": {"message": "wrong key: sk-secret"}}')
    stub.list_faults = [echo]
    with pytest.raises(ConfigError, match=r"^engine\.api_key_env: http.* refuses the key of .*: HTTP 40[13]$") as seen:
        door("engine.api_key_env=SERVER_KEY")
    assert "secret" not in str(seen.value)
    stub.faults["Sky?"] = [echo]
    with pytest.raises(ConfigError, match=r"^engine\.api_key_env: http.* refuses a request without a key"):
        door("engine.concurrency=1")
    assert len(stub.asked) == 1


def test_a_key_is_sent_and_not_kept(door, stub, monkeypatch, tmp_path):
    monkeypatch.setenv("SERVER_KEY", " sk-secret\n")
    stub.always["Tool?"] = Fault(status=400, body=b'{"error": {"message": "no sk-secret here"}}')
    with pytest.raises(DataError, match=r"no \*\*\* here"):
        door("engine.api_key_env=SERVER_KEY", "engine.concurrency=1")
    assert stub.keys == {"Bearer sk-secret"}
    assert b"secret" not in (tmp_path / "out.jsonl.part").read_bytes()
    stub.always.clear()
    # Another key goes on.
    assert b"secret" not in door("engine.api_key_env=null")
    assert len(stub.asked) == NUM_TURNS + 1


def test_a_server_that_is_absent(door, stub):
    stub.url = "http://127.0.0.1:9/v1"
    with pytest.raises(ConfigError, match=r"^engine\.base_url: no answer from http://127\.0\.0\.1:9/v1 \(.+\); start"):
        door()


def test_the_model_is_the_only_one_or_named(door, stub):
    stub.models = [{"id": "smollm2"}, {"id": "other"}]
    with pytest.raises(ConfigError, match=r"^engine\.model: null, but .* has 2 models; choose: other, smollm2$"):
        door()
    with pytest.raises(ConfigError, match=r"^engine\.model: .* has no 'third'; it has: other, smollm2$"):
        door("engine.model=third")
    with pytest.warns(UserWarning, match="answered_by is not recorded"):
        door("engine.model=other")
    assert {body["model"] for body in stub.asked} == {"other"}
    stub.models = []
    with pytest.raises(ConfigError, match=r"has 0 models; choose: none$"):
        door(name="more.jsonl")
    # Some servers keep no list.
    stub.models = None
    with pytest.raises(ConfigError, match=r"^engine\.base_url: .* has no list of models"):
        door(name="more.jsonl")
    door("engine.model=smollm2", name="more.jsonl")
    stub.faults["Sky?"] = [Fault(status=404)]
    with pytest.raises(ConfigError, match=r"^engine\.base_url: .* says HTTP 404: .*the stub says 404.*engine\.model$"):
        door("engine.model=smollm2", name="third.jsonl")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(body=b"<html></html>", headers={"Content-Type": "text/html"}), "does not answer as OpenAI's API does"),
        (Fault(body=b'{"data": [3]}'), "does not answer as OpenAI's API does"),
        (Fault(status=418), "says HTTP 418"),
    ],
)
def test_what_is_no_such_server_is_named(door, stub, fault, message):
    stub.list_faults = [fault]
    with pytest.raises(ConfigError, match=rf"^engine\.base_url: .* {message}"):
        door()


def test_a_server_that_still_loads_is_waited_for(door, stub):
    stub.list_faults = [Fault(status=503, headers={"Retry-After": "0.05"})] * 2
    door()
    assert stub.num_lists == 3


def test_who_answered_is_recorded_as_far_as_it_is_known(door, stub, tmp_path):
    expected = settings("regenerate").target.sha256
    unnamed = r"answered_by is not recorded: the server calls its model 'x', which .*; say engine\.is_target=true"
    cases = [
        ("smollm2", None, [], expected, None),
        ("x", "/models/SmolLM2-135M-Instruct.Q4_1.gguf", [], expected, None),
        ("x", None, [], None, unnamed),
        ("x", None, ["engine.is_target=true"], expected, None),
        ("smollm2", None, ["engine.is_target=false"], None, None),
        (
            "org/name",
            None,
            ["target=qwen3_8b", "target.weights=org/name"],
            None,
            "org/name are not all on this machine",
        ),
    ]
    for number, (name, root, more, author, warning) in enumerate(cases):
        stub.models = [{"id": name, **({"root": root} if root else {})}]
        out = f"{number}.jsonl"
        if warning is None:
            made = rows_of(door(*more, name=out))
        else:
            with pytest.warns(UserWarning, match=warning):
                made = rows_of(door(*more, name=out))
        assert {row["answered_by"] for row in made} == {author}, number
        assert {c.answered_by for c in load_conversations(SourceConfig(path=str(tmp_path / out)))} == {author}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.base_url=localhost:8000/v1", r"^engine.base_url: got 'localhost:8000/v1'; accepted: an address such"),
        ("engine.base_url=http://a:99999/v1", r"^engine.base_url: got"),
        ("engine.base_url=http://me:word@a/v1", r"^engine.base_url: it holds a name or password, which (?!.*word@)"),
        ("engine.base_url=http://a/v1/chat/completions", r"^engine.base_url: .*end it before the name of a call"),
        ("engine.concurrency=0", r"^engine.concurrency: got 0; accepted: 1 to 1000"),
        ("engine.timeout=0", r"^engine.timeout: got 0"),
        ("engine.retries=-1", r"^engine.retries: got -1"),
        ("engine.max_failed=2", r"^engine.max_failed: got 2"),
        ("+engine.extra_body.seed=2", r"^engine: extra_body\.seed: not accepted here"),
        ("+engine.speed=2", r"^engine\.speed: unknown setting; accepted: base_url"),
        ("engine.timeout=abc", r"^engine\.timeout: got 'abc'"),
        ("temperature=-1", r"^temperature: got -1"),
        ("top_p=0", r"^top_p: got 0"),
        ("engine.api_key_env=NO_SUCH_KEY", r"^engine\.api_key_env: the environment has no value for 'NO_SUCH_KEY'"),
    ],
)
def test_wrong_settings_are_named(door, override, message):
    with pytest.raises(ConfigError, match=message):
        door(override)


def test_a_key_with_strange_signs_is_named_and_not_shown(door, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sk-\u00e9")
    with pytest.raises(ConfigError, match=r"the value of 'SERVER_KEY' has signs that no key has; set it anew$"):
        door("engine.api_key_env=SERVER_KEY")


def test_ignored_settings_are_said_to_be(door):
    with pytest.warns(UserWarning, match=r"batch_size: 4 is ignored with engine=openai; set engine\.concurrency"):
        door("batch_size=4")
    with pytest.warns(UserWarning, match="device: cpu is ignored with engine=openai"):
        door("device=cpu", name="more.jsonl")


def test_an_absent_client_is_named(door, monkeypatch):
    monkeypatch.setattr("data.engines.openai_engine.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"package openai is not installed; pip install -e '\.\[openai\]'"):
        door()


def test_the_page_says_what_is():
    page = (ROOT / "docs" / "regenerate.md").read_text()
    commands = re.findall(r"^python -m data\.regenerate (.*)$", page, flags=re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert settings("regenerate", *shlex.split(command, comments=True)).out
    own = to_plain(settings("regenerate", "engine=openai")["engine"])
    rows = dict(re.findall(r"^\| `engine\.(\w+)` \| (.*?) \|", page, flags=re.MULTILINE))
    assert set(rows) == set(OpenAIEngine.__dataclass_fields__)
    for name, said in rows.items():
        if name != "extra_body":
            assert said.strip("`") == {None: "null"}.get(own[name], str(own[name])), name
