# The benchmarks that people use: each YAML on rows with the columns of its hub data set, in files here, since no test
# calls the hub; and on files of ready turns. What is asked is held word by word.

from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import yaml

from data.sources import SourceConfig, load_conversations
from drafters.config import build_config
from drafters.errors import DataError
from tests.door_world import settings, write_rows

SOURCES = Path(__file__).resolve().parent.parent / "conf" / "source"
STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LCB = """Solve this programming problem in Python. Answer with the program alone, in one code block.

Add {a} and b.

%s"""
READING = "Read from standard input and write to standard output."
GIVEN = "Begin with this code:\n```python\nclass Solution:\n    def add(self):\n        \n```"

# (rows with the hub's columns, what is asked of the target, turn by turn)
BENCHMARKS = {
    "gsm8k": ([{"question": "Natalia sold {48} clips?", "answer": "#### 72"}], [["Natalia sold {48} clips?" + STEPS]]),
    "math500": (
        [
            {
                "problem": "Convert $(0,3)$ to $\\frac{r}{2}$.",
                "solution": "We",
                "answer": "\\frac{3}{2}",
                "subject": "Precalculus",
                "level": 2,
                "unique_id": "test/precalculus/807.json",
            }
        ],
        [["Convert $(0,3)$ to $\\frac{r}{2}$." + STEPS]],
    ),
    "aime": (
        [{"problem_idx": 1, "problem": "Sum of bases $b>9$?", "answer": 70, "problem_type": ["Number Theory"]}],
        [["Sum of bases $b>9$?" + STEPS]],
    ),
    "humaneval": (
        [
            {
                "task_id": "HumanEval/0",
                "prompt": 'def f(x):\n    """Half {x}."""\n',
                "entry_point": "f",
                "canonical_solution": "    return x / 2",
                "test": "def check(f):",
            }
        ],
        [['Complete this Python function:\n```python\ndef f(x):\n    """Half {x}."""\n\n```']],
    ),
    "mbpp": (
        [
            {
                "source_file": "a.ipynb",
                "task_id": 2,
                "prompt": "Find the shared {elements}.",
                "code": "def f():",
                "test_imports": [],
                "test_list": ["assert f()", "assert g()"],
            }
        ],
        [["Find the shared {elements}."]],
    ),
    "livecodebench": (
        [
            {
                "question_title": "Sum",
                "question_content": "Add {a} and b.",
                "platform": "x",
                "question_id": "1_A",
                "contest_id": "1",
                "contest_date": "2025-01-04T00:00:00",
                "starter_code": code,
                "difficulty": "easy",
                "public_test_cases": "[]",
                "private_test_cases": "eJ",
                "metadata": "{}",
            }
            for code in ("", "class Solution:\n    def add(self):\n        ")
        ],
        [[LCB % READING], [LCB % GIVEN]],
    ),
    "mt_bench": (
        [{"category": "writing", "prompt": ["Compose.", "Rewrite."], "reference": [], "prompt_id": 81}],
        [["Compose.", "Rewrite."]],
    ),
    "alpaca": (
        [
            {"instruction": "Sort.", "input": given, "output": "1 2", "text": "Below is an instruction"}
            for given in ("", "2 1 {}")
        ],
        [["Sort."], ["Sort.\n\nInput:\n2 1 {}"]],
    ),
    "arena_hard": (
        [
            {
                "uid": "2edbb5f36f5b42be",
                "category": "hard_prompt",
                "subcategory": "coding",
                "language": "English",
                "prompt": "Write {me} a riddle",
            }
        ],
        [["Write {me} a riddle"]],
    ),
}


def source_of(name, *overrides):
    """The source that `python evaluate.py source=NAME ...` asks for."""
    cfg = settings("evaluate", "run=outputs/x", f"source={name}", *overrides)
    return build_config(cfg.source, key="source")[1]


def asked(config):
    return sorted([m.content for m in c.messages] for c in load_conversations(config))


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.filterwarnings("ignore:.*have no column `split`")
def test_a_local_copy_is_asked_as_peers_do(tmp_path, name, kind):
    rows, expected = BENCHMARKS[name]
    path = tmp_path / f"copy.{kind}"
    write_rows(path, rows) if kind == "jsonl" else datasets.Dataset.from_list(rows).to_parquet(path)
    config = source_of(name, "source.hub_id=null", f"source.path={path}")
    assert asked(config) == sorted(expected)
    assert {c.source for c in load_conversations(config)} == {"aime25" if name == "aime" else name}
    assert {m.role for c in load_conversations(config) for m in c.messages} == {"user"}


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.filterwarnings("ignore:.*have no column `split`", "ignore:.*source.template is not applied")
def test_files_of_turns_are_asked_as_they_stand(tmp_path, name):
    turns = [["one {x}", "two"], ["three"]]
    path = write_rows(tmp_path / "turns.jsonl", [{"turns": those} for those in turns])
    assert asked(source_of(name, "source.hub_id=null", f"source.path={path}")) == turns


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_hub_is_asked_for_the_same_rows(tmp_path, monkeypatch, name):
    rows, expected = BENCHMARKS[name]
    calls = []

    def hf_hub_download(*args, **kwargs):
        calls.append((args, kwargs))
        return str(write_rows(tmp_path / "hub.jsonl", rows))

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr("data.sources.read.hf_hub_download", hf_hub_download)
    monkeypatch.setattr("data.sources.read.load_dataset", load_dataset)
    config = source_of(name)
    assert asked(config) == sorted(expected)
    ((args, kwargs),) = calls
    assert args[0] == config.hub_id
    if config.files:
        assert args[1:] == tuple(config.files)
    else:
        assert (args[1], kwargs["split"]) == (config.subset, config.split)


def test_every_benchmark_is_tested():
    trained_on = {"hub", "jsonl", "perfectblend", "samples", "sharegpt", "ultrachat"}
    assert {path.stem for path in SOURCES.glob("*.yaml")} == trained_on | set(BENCHMARKS)


def test_the_hints_of_the_comments_work(tmp_path):
    """By category, with tests, of another year."""
    rows = BENCHMARKS["mt_bench"][0]
    path = write_rows(tmp_path / "a.jsonl", rows)
    here = ["source.hub_id=null", f"source.path={path}", "source.split=null"]
    (conversation,) = load_conversations(source_of("mt_bench", *here, "+source.columns.source=category"))
    assert (conversation.source, len(conversation.messages)) == ("writing", 2)
    write_rows(path, BENCHMARKS["math500"][0])
    (conversation,) = load_conversations(source_of("math500", *here, "+source.columns.source=subject"))
    assert conversation.source == "Precalculus"
    write_rows(path, [{"question": "Sky?", "answer": "Blue."}])
    own = [f"source.path={path}", "+source.columns={prompt: question, response: answer}"]
    assert asked(source_of("jsonl", *own)) == [["Sky?", "Blue."]]
    assert asked(source_of("jsonl", own[0], "+source.template='{{ question }} Think first.'")) == [
        ["Sky? Think first."]
    ]
    write_rows(path, BENCHMARKS["mbpp"][0])
    (line,) = [line for line in (SOURCES / "mbpp.yaml").read_text().splitlines() if line.startswith("template:")]
    config = replace(source_of("mbpp", *here), template=yaml.safe_load(line.split("with the tests:")[1]))
    assert asked(config) == [["Find the shared {elements}. Your code should pass these tests:\nassert f()\nassert g()"]]
    other = source_of("aime", "source.name=aime24", "source.hub_id=HuggingFaceH4/aime_2024")
    assert (other.name, other.hub_id, other.template) == (
        "aime24",
        "HuggingFaceH4/aime_2024",
        source_of("aime").template,
    )


def load(path, **given):
    return list(load_conversations(SourceConfig(path=str(path), **given)))


def questions(conversations):
    return [c.messages[0].content for c in conversations]


def test_templates_write_the_prompt_from_the_fields(tmp_path):
    rows = [{"question": "2+2?", "hint": hint, "level": 3} for hint in ("", "Add.", None)]
    template = "{{ question }}{% if hint %} ({{ hint }}){% endif %} {{ level }} \\boxed{}\n"
    path = write_rows(tmp_path / "a.jsonl", rows)
    texts = [f"2+2?{hint} 3 \\boxed{{}}\n" for hint in ("", " (Add.)", "")]
    assert questions(load(path, template=template)) == texts
    # With renamed columns, and beside a response.
    renamed = load(path, template="{{ prompt }} ({{ hint }})", columns={"prompt": "question", "response": "question"})
    assert [m.content for m in renamed[2].messages] == ["2+2? ()", "2+2?"]
    with pytest.raises(DataError, match=r"source.template: .*a.jsonl' row 1: 'x' is undefined; its columns: hint, lev"):
        load(path, template="{{ x }}")
    with pytest.raises(DataError, match=r"source.template: .*row 1: 'str object' has no attribute 'a'"):
        load(path, template="{{ question.a }}")


def test_rows_that_are_conversations_already_stand_as_they_are(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl",
        [{"turns": ["one", "two"]}, {"question": "three"}, {"messages": [{"role": "user", "content": "Sky?"}]}],
    )
    given = {"columns": {"prompt": "question"}, "template": "{{ prompt }}!"}
    with pytest.warns(UserWarning, match="2 rows are conversations already, so source.template is not applied"):
        found = load(path, **given)
    assert [[m.content for m in c.messages] for c in found] == [
        ["one", "two"],
        ["three!"],
        ["Sky?"],
    ]
    with pytest.raises(DataError, match=r"source.columns.source: .* row 1 has no column 'kind'"):
        load(path, columns={"source": "kind"})
    with pytest.raises(DataError, match=r"source.columns.turns: .* row 2 has no column 'prompt'"):
        load(path, columns={"turns": "prompt"})


def test_files_of_a_hub_data_set(tmp_path, monkeypatch):
    asked = []

    def hf_hub_download(repo_id, filename, **settings):
        asked.append((repo_id, filename, settings))
        return str(write_rows(tmp_path / filename, [{"prompt": "Sky?"}] * 2))

    monkeypatch.setattr("data.sources.read.hf_hub_download", hf_hub_download)
    config = SourceConfig(hub_id="me/chats", files=["a.jsonl", "b.jsonl"], revision="v1", split="test")
    found = list(load_conversations(config))
    assert asked == [("me/chats", f"{x}.jsonl", {"repo_type": "dataset", "revision": "v1"}) for x in "ab"]
    assert [(c.id, c.source) for c in found] == [(f"chats:{i}", "chats") for i in range(1, 5)]
    (tmp_path / "c.csv").write_text("x")
    monkeypatch.setattr("data.sources.read.hf_hub_download", lambda *args, **settings: str(tmp_path / "c.csv"))
    with pytest.raises(DataError, match=r"source.files: unknown format of .*c\.csv"):
        load_conversations(SourceConfig(hub_id="me/chats", files=["c.csv"]))

    def offline(*args, **settings):
        raise FileNotFoundError("offline")

    monkeypatch.setattr("data.sources.read.hf_hub_download", offline)
    with pytest.raises(DataError, match=r"cannot load 'me/chats' \(files c.csv\): offline; check"):
        load_conversations(SourceConfig(hub_id="me/chats", files=["c.csv"]))
