# Prompts for measuring: what stands before the first answer, what is left out, and that what a run trained on is never
# taken for held out.

import json

import pytest

from data.prompts import held_out_prompts, source_prompts, trained_on
from data.sources import DataConfig, SourceConfig, load_conversations, load_splits
from drafters.chat import ChatEncoder
from drafters.errors import ConfigError, DataError
from tests.door_world import write_rows
from tests.tiny_chat import tiny_tokenizer

LONG = "green " * 90


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(tiny_tokenizer("chatml"), max_length=512)


def text(encoder, prompt):
    return encoder._tokenizer.decode(prompt[1])


def conversations(path, rows):
    return list(load_conversations(SourceConfig(path=str(write_rows(path, rows)))))


def asked(encoder, source, **settings):
    """Prompt texts without what the template adds, and the part that they come from."""
    given = {"split": "validation", "num_prompts": None, "room": 500, **settings}
    prompts, part = source_prompts(source, encoder, **given)
    texts = [text(encoder, prompt) for prompt in prompts]
    return sorted(one.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for one in texts), part


def test_a_prompt_is_all_up_to_the_first_user_turn(encoder, tmp_path):
    roles = [("system", "Speak."), ("user", "Sky?"), ("assistant", "Blue."), ("user", "Grass?")]
    chat = {"messages": [{"role": role, "content": content} for role, content in roles]}
    found = conversations(tmp_path / "a.jsonl", [chat])
    found += conversations(tmp_path / "b.jsonl", [{"system": "Be brief.", "turns": ["Sky?", "Grass?"]}])
    prompts = held_out_prompts(found, encoder, num_prompts=2, room=500)
    assert [text(encoder, prompt) for prompt in prompts] == [
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
        for system in ("Speak.", "Be brief.")
    ]


def test_prompts_without_room_are_left_out_with_a_warning(encoder, tmp_path):
    rows = [{"turns": ["Sky?"]}, {"turns": [LONG]}, {"turns": ["Grass?"]}]
    found = conversations(tmp_path / "a.jsonl", rows)
    fits = max(len(encoder.prompt(found[i].messages)) for i in (0, 2))
    with pytest.warns(UserWarning, match=rf"prompts: 1 of 3 left out: longer than the {fits} tokens that max_new_to"):
        held_out = held_out_prompts(found, encoder, num_prompts=3, room=fits)
    assert [len(tokens) <= fits for _, tokens in held_out] == [True, True]
    source = SourceConfig(path=str(tmp_path / "a.jsonl"))
    with pytest.warns(UserWarning, match="prompts: 1 of 3 left out: longer than"):
        assert asked(encoder, source, room=fits)[0] == ["Grass?", "Sky?"]
    for room in (3, -100):
        with pytest.raises(DataError, match=r"3 of 3 left out: longer than the \d tokens.*; lower max_new_tokens"):
            held_out_prompts(found, encoder, num_prompts=3, room=room)


def test_prompts_that_the_template_refuses_are_left_out(tmp_path):
    encoder = ChatEncoder(tiny_tokenizer("gemma"), max_length=512)
    found = conversations(tmp_path / "a.jsonl", [{"system": "Speak.", "turns": ["Sky?"]}, {"turns": ["Grass?"]}])
    with pytest.warns(UserWarning, match=r"1 of 2 left out: template refuses it \(no system role\)"):
        assert len(held_out_prompts(found, encoder, num_prompts=2, room=500)) == 1


def test_files_whose_rows_are_all_of_one_split(encoder, tmp_path):
    """Made for measuring, such a file is taken whole, whatever its rows call themselves."""
    for split in ("validation", "test", "train"):
        path = write_rows(tmp_path / f"{split}.jsonl", [{"turns": [f"Tool {i}?"], "split": split} for i in range(2)])
        told = "validation, by the rows' own split" if split == "validation" else "all rows"
        assert asked(encoder, SourceConfig(path=str(path))) == (["Tool 0?", "Tool 1?"], told)
        assert asked(encoder, SourceConfig(path=str(path), split=split)) == (["Tool 0?", "Tool 1?"], told)


def test_the_rows_own_split_is_kept(encoder, tmp_path):
    rows = [{"turns": [f"Tool {i}?"], "split": split} for i, split in enumerate(("train", "val", "test", None))]
    source = SourceConfig(path=str(write_rows(tmp_path / "a.jsonl", rows)))
    assert asked(encoder, source)[0] == ["Tool 1?", "Tool 3?"]
    assert asked(encoder, source, split="train") == (["Tool 0?", "Tool 3?"], "train, by the rows' own split")
    assert asked(encoder, source, split=None) == ([f"Tool {i}?" for i in range(4)], "all rows")
    for test in (
        SourceConfig(path=source.path, split="test"),
        SourceConfig(path=source.path, equals={"split": "test"}),
    ):
        assert asked(encoder, test) == (["Tool 2?"], "all rows")
    with pytest.raises(ConfigError, match="split: got 'dev'; accepted: train, validation, or null"):
        asked(encoder, source, split="dev")
    with pytest.raises(ConfigError, match="num_prompts: got 0"):
        asked(encoder, source, num_prompts=0)


@pytest.mark.parametrize("limit", [None, 12])
def test_held_out_stays_held_out_on_the_run_s_own_source(encoder, tmp_path, limit):
    """Rows without a split: the run drew its own, from its limit and seeds, which evaluate must not draw anew."""
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"prompt": f"Tool {i}?", "response": "Blue."} for i in range(20)])
    own, data = SourceConfig(path=str(path), limit=limit, seed=4), DataConfig(validation=0.25, seed=7)
    train, held_out = (
        {c.messages[0].content for c in part} for part in load_splits(own, validation=data.validation, seed=data.seed)
    )
    # Spelled otherwise, with other settings, and beside another file.
    other = write_rows(tmp_path / "other.jsonl", [{"turns": ["Sky?"]}])
    given = SourceConfig(path=[str(tmp_path / "x" / ".." / "chats.jsonl"), str(other)])
    (tmp_path / "x").mkdir()
    trained = trained_on(given, own=own, data=data)
    found, part = asked(encoder, given, trained=trained)
    assert held_out | {"Sky?"} <= set(found)
    assert not train & set(found)
    assert len(found) == 20 - len(train) + 1
    assert part == "validation, as the run split it"
    assert set(asked(encoder, given, split="train", trained=trained)[0]) == train
    assert len(asked(encoder, given, split=None)[0]) == 21
    # Where every row was trained on there is nothing to measure.
    (tmp_path / "x" / "part.jsonl").write_text(json.dumps({"prompt": sorted(train)[0], "response": "Blue."}) + "\n")
    with pytest.raises(DataError, match="no prompt of the run's own source belongs to validation; accepted: null"):
        asked(encoder, SourceConfig(path=str(tmp_path / "x" / "part.jsonl")), trained=trained)


def test_another_source_is_not_the_run_s_own(tmp_path):
    own, data = SourceConfig(path=str(tmp_path / "a.jsonl")), DataConfig()
    assert trained_on(SourceConfig(path=str(tmp_path / "b.jsonl")), own=own, data=data) is None
    assert trained_on(SourceConfig(hub_id="me/chats"), own=own, data=data) is None
    assert trained_on(SourceConfig(hub_id="me/chats"), own=SourceConfig(hub_id="me/other"), data=data) is None
