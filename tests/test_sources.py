# Every shape and file format becomes the same conversations; every bad input is one error that says where and what.

import gzip
import json

import datasets
import pytest

from data.sources import DataConfig, SourceConfig, load_conversations, load_splits, split_conversations
from drafters.chat import ChatEncoder, encode_all
from drafters.config import build_config, typed
from drafters.errors import ConfigError, DataError
from drafters.types import Conversation, Message
from tests.tiny_chat import tiny_tokenizer

ROWS = {
    "messages": {
        "messages": [
            {"role": "system", "content": "Speak."},
            {"role": "user", "content": "Sky?"},
            {"role": "assistant", "content": "Blue.", "finish_reason": "length"},
        ]
    },
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Speak."}]},
            {"role": "user", "content": [{"type": "text", "text": "Sk"}, {"type": "text", "text": "y?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Blue."}], "finish_reason": "length"},
        ]
    },
    "conversations": {
        "system": "Speak.",
        "conversations": [{"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}],
        "finish_reasons": ["length"],
    },
    "prompt": {"system": "Speak.", "prompt": "Sky?", "response": "Blue.", "finish_reason": "length"},
}
EXPECTED = (
    Message(role="system", content="Speak."),
    Message(role="user", content="Sky?"),
    Message(role="assistant", content="Blue.", finish_reason="length"),
)
WRITERS = {
    "a.jsonl": lambda rows, path: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
    "a.json": lambda rows, path: path.write_text(json.dumps(rows, indent=1)),
    "a.jsonl.gz": lambda rows, path: path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    ),
    "a.parquet": lambda rows, path: datasets.Dataset.from_list(rows).to_parquet(path),
    "a.arrow": lambda rows, path: write_arrow(rows, path),
}


DAMAGED = bytearray(gzip.compress(b'{"turns": ["a"]}\n' * 9, mtime=0))
DAMAGED[10] = 0xFF  # no block of gzip's begins so


def write_arrow(rows, path):
    with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def jsonl(path, rows):
    WRITERS["a.jsonl"](rows, path)
    return str(path)


def pairs(n, **columns):
    return [{"prompt": f"question {i}", "response": f"answer {i}", **columns} for i in range(n)]


def load(path, **settings):
    return list(load_conversations(SourceConfig(path=path, **settings)))


def questions(conversations):
    return [c.messages[0].content for c in conversations]


@pytest.mark.parametrize("shape", ROWS)
def test_shapes(tmp_path, shape):
    (conversation,) = load(jsonl(tmp_path / "sky.jsonl", [ROWS[shape]]))
    assert conversation == Conversation(id="sky:1", messages=EXPECTED, source="sky")


@pytest.mark.parametrize("name", WRITERS)
def test_file_formats(tmp_path, name):
    path = tmp_path / name
    WRITERS[name]([{"id": 7, **ROWS["messages"]}, {"id": 8, **ROWS["messages"]}], path)
    first, second = load(str(path))
    assert first == Conversation(id="7", messages=EXPECTED, source="a")
    assert second.id == "8"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_rows_may_differ_in_their_fields(tmp_path, name):
    rows = [{"messages": [{"role": "user", "content": "Sky?"}]}, {**ROWS["parts"], "id": "x", "note": 3}]
    WRITERS[name](rows, tmp_path / name)
    plain, full = load(str(tmp_path / name))
    assert plain.messages == EXPECTED[1:2]
    assert (plain.id, full.id) == ("a:1", "x")
    assert full.messages == EXPECTED


def test_roles_have_one_spelling(tmp_path):
    roles = ["developer", "human", "chatgpt", "function", "model"]
    rows = [{"conversations": [{"from": role, "value": "x"} for role in roles]}]
    (conversation,) = load(jsonl(tmp_path / "a.jsonl", rows))
    assert [m.role for m in conversation.messages] == ["developer", "user", "assistant", "tool", "assistant"]


def test_source_names(tmp_path):
    path = jsonl(tmp_path / "a.b.jsonl", pairs(1, category="maths", source="web"))
    assert load(path)[0].source == "a"
    assert load(path, name="mine")[0].source == "mine"
    assert load(path, columns={"source": "category"})[0].source == "maths"


def test_columns_can_be_renamed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "Sky?", "answer": "Blue."}])
    (conversation,) = load(path, columns={"prompt": "question", "response": "answer"})
    assert [m.content for m in conversation.messages] == ["Sky?", "Blue."]
    with pytest.raises(DataError, match=r"source.columns.prompt: .*a.jsonl' row 1 has no column 'q'.*answer, question"):
        load(path, columns={"prompt": "q"})


def test_limit_counts_each_file_after_the_filters(tmp_path):
    rows = [{**row, "level": i % 3} for i, row in enumerate(pairs(9))]
    files = [jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows)]
    found = load(files, limit=2, equals={"level": [1, 2]})
    assert [(c.source, c.messages[0].content[-1]) for c in found] == [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]


def test_filters_by_turns_and_length(tmp_path):
    turns = [["a"], ["a", "b"], ["a", "b", "c"], ["a" * 50]]
    path = jsonl(tmp_path / "a.jsonl", [{"turns": t} for t in turns])
    assert [c.id for c in load(path, min_turns=2, max_turns=2)] == ["a:2"]
    assert [c.id for c in load(path, max_characters=10)] == ["a:1", "a:2", "a:3"]
    with pytest.raises(DataError, match=r"no conversations in .*a.jsonl'; 4 rows: filtered"):
        load(path, min_turns=4)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_seed_shuffles_and_keeps_ids(tmp_path, streaming, monkeypatch):
    monkeypatch.setattr("data.sources.read._SHUFFLE_BUFFER", 8)
    path = jsonl(tmp_path / "a.jsonl", pairs(50))
    plain = load(path)
    shuffled = load(path, seed=1, streaming=streaming)
    assert shuffled == load(path, seed=1, streaming=streaming)
    assert shuffled != plain
    assert shuffled != load(path, seed=2, streaming=streaming)
    assert sorted(shuffled, key=lambda c: int(c.id[2:])) == plain
    assert load(path, seed=1, streaming=streaming, limit=5) == shuffled[:5]


def test_streaming_reads_no_more_than_the_limit_asks_for(tmp_path, monkeypatch):
    def rows(path):
        yield from pairs(3)
        raise AssertionError("read on after the limit")

    monkeypatch.setattr("data.sources.load.file_rows", rows)
    path = jsonl(tmp_path / "a.jsonl", pairs(1))
    assert len(load(path, streaming=True, limit=3)) == 3


def test_the_split_column_decides(tmp_path):
    rows = pairs(3, split="train") + pairs(2, split="validation") + pairs(1, split="test")
    path = jsonl(tmp_path / "a.jsonl", rows)
    train, validation = load_splits(SourceConfig(path=path), validation=0.9, seed=0)
    assert [c.id for c in train] == ["a:1", "a:2", "a:3"]
    assert [c.id for c in validation] == ["a:4", "a:5"]
    assert [c.id for c in load(path, split="validation")] == ["a:4", "a:5"]
    with pytest.raises(DataError, match="no training conversations; the `split` column holds: test"):
        load_splits(SourceConfig(path=path, split="test"), validation=0.5, seed=0)


def test_a_file_without_a_split_column_is_taken_as_the_split_asked_for(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*pairs(2), *pairs(1, split="train"), *pairs(1, split="test")])
    with pytest.warns(UserWarning, match="a.jsonl': 2 rows have no column `split` and are taken as split 'test'"):
        assert [c.id for c in load(path, split="test")] == ["a:1", "a:2", "a:4"]


def test_rows_without_a_column_to_select_by_are_left_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*pairs(2), *pairs(1, level=1)])
    with pytest.warns(UserWarning, match="left out 2 rows: no column 'level' to select by"):
        assert [c.id for c in load(path, equals={"level": 1})] == ["a:3"]
    with pytest.raises(DataError, match=r"no conversations in .*; 3 rows: no column 'lewel' to select by"):
        load(path, equals={"lewel": 1})


def test_split_by_conversation(tmp_path):
    conversations = load(jsonl(tmp_path / "a.jsonl", pairs(40)))
    train, validation = split_conversations(conversations, validation=0.1, seed=0)
    assert (len(train), len(validation)) == (36, 4)
    assert sorted(train + validation, key=conversations.index) == conversations
    shuffled, _ = split_conversations(conversations[::-1], validation=0.1, seed=0)
    assert {c.id for c in shuffled} == {c.id for c in train}
    other, _ = split_conversations(conversations, validation=0.1, seed=1)
    assert {c.id for c in other} != {c.id for c in train}
    assert split_conversations(conversations, validation=0, seed=0) == (conversations, [])
    with pytest.raises(ConfigError, match=r"validation: got 1\.0"):
        split_conversations(conversations, validation=1.0, seed=0)
    with pytest.raises(DataError, match=r"1 conversation\(s\) cannot be split"):
        split_conversations(conversations[:1], validation=0.1, seed=0)
    config = SourceConfig(path=str(tmp_path / "a.jsonl"))
    assert load_splits(config, validation=0.1, seed=0) == (train, validation)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "no conversations in .*it has no rows"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "no conversations in .*it has no rows"),
        ("a.txt", b"hello", r"unknown format of .*accepted: \.jsonl, \.json"),
        ("a.jsonl", b'{"turns": ["a"]}\n\n{"turns": ["b"}\n', "a.jsonl' line 3: malformed JSON"),
        ("a.jsonl", b'{"turns": ["a"]}\n["b"]\n', "a.jsonl' line 2: expected a JSON object, got list"),
        ("a.jsonl", b'{"turns": ["\xff"]}\n', "a.jsonl' line 1: malformed JSON"),
        ("a.json", b'[{"turns": ["a"]},\n{"turns": ["b"}]', "a.json' line 2: malformed JSON"),
        ("a.jsonl", b'{"turns": ["a"]}\n{"turns": ' + b"[" * 10**5, "a.jsonl' line 2: its JSON is nested too deep"),
        ("a.json", b"[" * 10**5, "a.json' cannot be read as json: it is nested too deep"),
        ("a.json", b'{"turns": [\n"a"]}', "a.json' line 1: malformed JSON"),
        ("a.jsonl.gz", DAMAGED, "cannot be read as json: "),
        ("a.json", b'[{"turns": ["a"]}, 3]', "a.json' element 2: expected a JSON object"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"turns": ["a"]}\n' * 9, mtime=0)[:-9],
            "cannot be read as json: Compressed file ended",
        ),
        ("a.jsonl.gz", b'{"turns": ["a"]}\n', "cannot be read as json: Not a gzipped file"),
        ("a.parquet", b"nope", "a.parquet' cannot be read as parquet"),
        ("a.arrow", b"nope", "a.arrow' cannot be read as arrow"),
        (
            "a.jsonl",
            b'{"text": "x", "n": 1}',
            "no messages in .*its columns are n, text; accepted: messages: .*ShareGPT",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "narrator", "content": "x"}]}',
            "row 1: unknown role 'narrator'; accepted:",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": 3}]}',
            "row 1: the user message should be text, got int",
        ),
        ("a.jsonl", b'{"messages": "hello"}', "row 1: `messages` should be a list, got str"),
        ("a.jsonl", b'{"messages": ["hello"]}', "row 1: a message should be an object"),
        ("a.jsonl", b'{"turns": [], "id": 1}', "no conversations in .*1 rows: no messages"),
        (
            "a.jsonl",
            b'{"prompt": "a", "response": "b", "finish_reasons": []}',
            "row 1: finish_reasons should be a list of 1",
        ),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message should be text"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / name))


def test_json_values_are_read_as_they_stand(tmp_path):
    """The type of a field is not guessed from its first values."""
    answers = ["2024-01-01", "2024-01-02T10:00:00Z", "12"]
    for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
        rows = [
            {"prompt": "When?", "response": answer, "note": note} for answer, note in zip(answers, "x2{", strict=True)
        ]
        rows[1]["note"] = {"a": [1]}
        WRITERS[name](rows, tmp_path / name)
        assert [c.messages[1].content for c in load(str(tmp_path / name))] == answers


def test_json_lines_are_read_lazily(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n\n' * 2 + b"{torn")
    assert [c.id for c in load(str(path), limit=2)] == ["a:1", "a:2"]
    with pytest.raises(DataError, match="line 5: malformed JSON"):
        load(str(path))


def test_half_characters_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"turns": ["\\ud83d"]}\n{"turns": ["\\ud83d\\ude00"]}\n')
    with pytest.warns(UserWarning, match="1 rows: text that is not Unicode"):
        assert questions(load(str(path))) == ["😀"]


def test_missing_files_are_an_error_before_anything_is_read(tmp_path):
    good = jsonl(tmp_path / "a.jsonl", pairs(1))
    with pytest.raises(DataError, match=r"no file .*nope.jsonl"):
        load_conversations(SourceConfig(path=[good, str(tmp_path / "nope.jsonl")]))
    with pytest.raises(DataError, match="is not a file"):
        load_conversations(SourceConfig(path=str(tmp_path)))


def test_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jsonl(tmp_path / "a.jsonl", pairs(2))
    assert len(load("~/a.jsonl")) == 2


def test_names_with_pattern_characters_are_files(tmp_path):
    assert len(load(jsonl(tmp_path / "a[1]*.jsonl", pairs(2)))) == 2


def test_rows_that_cannot_be_read_are_counted_in_a_warning(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    picture = {"role": "user", "content": [{"type": "image"}]}
    rows = [{"messages": [call]}, {"messages": [picture]}, {"messages": []}, ROWS["messages"]]
    with pytest.warns(
        UserWarning, match="1 rows: structured tool calls.*1 rows: content that is not text.*no messages"
    ):
        assert len(load(jsonl(tmp_path / "a.jsonl", rows))) == 1


def test_hub_data_sets(monkeypatch):
    asked = {}

    def load_dataset(path, name, **settings):
        asked.update(path=path, name=name, **settings)
        rows = datasets.Dataset.from_list(pairs(20))
        return rows.to_iterable_dataset() if settings["streaming"] else rows

    monkeypatch.setattr("data.sources.read.load_dataset", load_dataset)
    for streaming in (False, True):
        config = SourceConfig(hub_id="me/chats", subset="en", split="train_sft", streaming=streaming, seed=0, limit=3)
        found = list(load_conversations(config))
        assert asked == {**asked, "path": "me/chats", "name": "en", "split": "train_sft", "streaming": streaming}
        assert {c.source for c in found} == {"chats"}
        assert len(set(questions(found))) == 3
        assert all(c.id == f"chats:{int(c.messages[0].content.split()[1]) + 1}" for c in found)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("offline\nmore"),
        ValueError("Unknown split"),
        OSError(),
        RuntimeError("Dataset scripts are no longer supported, but found chats.py"),
    ],
)
def test_hub_errors(monkeypatch, error):
    def load_dataset(*args, **settings):
        raise error

    monkeypatch.setattr("data.sources.read.load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"source.hub_id: cannot load 'me/chats' \(subset None, split train\)"):
        load_conversations(SourceConfig(hub_id="me/chats"))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, "set one of them"),
        ({"path": "a.jsonl", "hub_id": "me/chats"}, "set one of them"),
        ({"path": 3}, r"source\.path: got 3"),
        ({"path": []}, r"source\.path: got \[\]"),
        ({"path": "a.jsonl", "limit": 0}, r"source\.limit: got 0"),
        ({"path": "a.jsonl", "limit": "ten"}, r"source\.limit: got 'ten'"),
        ({"path": "a.jsonl", "max_turns": 1, "min_turns": 2}, r"source\.max_turns: got 1"),
        (
            {"path": "a.jsonl", "template": "{prompt} Think."},
            r"source\.template: got '{prompt} Think.', which uses no f",
        ),
        ({"path": "a.jsonl", "template": "{{ prompt"}, r"source\.template: got .*; it is not Jinja: "),
        ({"path": "a.jsonl", "shuffle": True}, r"source\.shuffle: unknown setting; accepted: .*seed"),
    ],
)
def test_bad_settings(node, message):
    with pytest.raises(ConfigError, match=message):
        build_config({"_target_": "data.sources.SourceConfig", **node}, key="source")


def test_settings_from_yaml_are_typed():
    node = {"_target_": "data.sources.SourceConfig", "path": ["a.jsonl"], "equals": {"level": [1]}, "seed": 3}
    _, config = build_config(node, key="source")
    assert config == SourceConfig(path=["a.jsonl"], equals={"level": [1]}, seed=3)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70])
def test_seeds_have_a_range(seed):
    with pytest.raises(ConfigError, match=f"data.seed: got {seed}; accepted"):
        typed(DataConfig, {"seed": seed}, key="data")
    assert typed(DataConfig, {"seed": 2**63 - 1}, key="data").seed == 2**63 - 1


def test_answers_that_are_all_empty_are_refused(tmp_path):
    encoder, path = ChatEncoder(tiny_tokenizer("chatml"), max_length=500), tmp_path / "a.jsonl"
    rows = [{"prompt": "Sky?", "response": text} for text in ("", " \n")]
    with pytest.raises(DataError, match="all answers of the 2 conversations are empty, so there is nothing to learn"):
        encode_all(load(jsonl(path, rows)), encoder)
    assert len(encode_all(load(jsonl(path, [*rows, *pairs(1)])), encoder)) == 3
