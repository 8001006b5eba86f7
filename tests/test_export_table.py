# The table of what engines load: every cell has a verdict, refusals name what is accepted instead, and the README's
# rendering says what the data says.

from pathlib import Path

import pytest

from drafters.errors import ConfigError
from export import table
from export.families import FAMILIES, family_of, vocabulary_of
from tests.contract_cases import NAMES, SHOWN, node_of

CELLS = [(to, family, vocabulary) for to in table.FORMATS for family in FAMILIES for vocabulary in table.VOCABULARIES]


@pytest.mark.parametrize(("to", "family", "vocabulary"), CELLS)
def test_every_engine_has_a_verdict_and_every_refusal_a_reason(to, family, vocabulary):
    found = table.verdicts(to, family, vocabulary)
    assert tuple(found) == table.ENGINES[to]
    assert all(one.loads or one.says for one in found.values())
    loads = [engine for engine, one in found.items() if one.loads]
    assert (table.refusal(to, family, vocabulary) is None) == bool(loads)


def test_every_family_that_has_weights_of_its_own_goes_somewhere():
    for family in set(FAMILIES) - {"draft_model", "ngram"}:
        for vocabulary in table.VOCABULARIES:
            assert "to=packed" in table.alternatives(family, vocabulary)
    assert table.alternatives("ngram", "full") == "none"


def test_what_single_cells_say():
    assert [e for e, one in table.verdicts("hf", "markov", "full").items() if one.loads] == [
        "vLLM",
        "SGLang",
        "llama.cpp",
    ]
    assert [e for e, one in table.verdicts("hf", "markov", "reduced").items() if one.loads] == ["vLLM", "llama.cpp"]
    assert [e for e, one in table.verdicts("hf", "rnn", "full").items() if one.loads] == ["SGLang"]
    assert table.verdicts("hf", "medusa", "full")["vLLM"].says == "up to 0.32"


def test_a_refusal_names_reasons_formats_and_the_setting_that_helps():
    with pytest.raises(ConfigError) as caught:
        table.check("hf", "gated", "reduced")
    said = str(caught.value)
    for part in (
        "gated with a reduced vocabulary",
        "vLLM, llama.cpp: it knows",
        "SGLang: its Markov",
        "to=packed",
        "=null",
    ):
        assert part in said
    table.check("hf", "gated", "full")
    with pytest.raises(ConfigError, match="accepted for it: none"):
        table.check("gguf", "draft_model", "full")


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_has_a_family(name):
    node = node_of(name)
    family = family_of(node)
    assert family == ("own" if name == SHOWN else "exit" if name == "layer_skip" else name)
    assert vocabulary_of(node) == ("reduced" if node.get("draft_vocab_size") else "full")


def test_heads_of_a_users_own_are_of_no_family():
    node = {**node_of("markov"), "sequential": {"_target_": "mine.Head"}}
    assert family_of(node) == "own"


def test_the_rendering_has_a_row_for_each_family_and_all_reasons():
    lines = table.render().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} == set(FAMILIES)
    assert all(row.count("|") == 3 + len(table.FORMATS) for row in rows)
    (row,) = [row for row in rows if row.startswith("| `markov` | reduced")]
    assert "vLLM, ~~SGLang~~ (" in row
    notes = {line.partition(". ")[0]: line.partition(". ")[2] for line in lines if line[:1].isdigit()}
    number = row.partition("~~SGLang~~ (")[2].partition(")")[0]
    assert notes[number] == "Its Markov head is over the whole vocabulary."
    used = {part.partition(")")[0] for line in rows for part in line.split("(")[1:]}
    assert used == notes.keys()


def test_the_documentation_shows_the_table():
    page = (Path(__file__).resolve().parent.parent / "docs" / "export.md").read_text()
    assert table.render() in page
