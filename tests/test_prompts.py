# Dialogues for measuring: what each turn asks, what is left out, and that what a run trained on is never taken for held
# out.

import json

import pytest

from data.prompts import PromptConfig, held_out_prompts, prompt_encoder, source_prompts, trained_on
from data.sources import DataConfig, SourceConfig, load_conversations, load_splits
from drafters.chat import ChatEncoder, EncodeError
from drafters.errors import ConfigError, DataError
from drafters.types import Message
from tests.door_world import write_rows
from tests.tiny_chat import tiny_tokenizer

LONG = "green " * 90


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(tiny_tokenizer("chatml"), max_length=512)


def text(encoder, dialogue, *answers):
    """The prompt of the turn after `answers`, as text."""
    return encoder._tokenizer.decode(dialogue.encode([encoder._tokenizer.encode(answer) for answer in answers]))


def turn(role, content):
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def conversations(path, rows):
    return list(load_conversations(SourceConfig(path=str(write_rows(path, rows)))))


def asked(encoder, source, **settings):
    """Prompt texts without what the template adds, and the part that they come from."""
    given = {"room": settings.pop("room", 500), "trained": settings.pop("trained", None)}
    prompts, part = source_prompts(source, encoder, PromptConfig(**{"split": "validation", **settings}), **given)
    texts = [text(encoder, prompt) for prompt in prompts]
    return sorted(one.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for one in texts), part


def dialogues(encoder, path, rows, **settings):
    found, _ = source_prompts(
        SourceConfig(path=str(write_rows(path, rows))), encoder, PromptConfig(**settings), room=500
    )
    return found


def test_held_out_prompts_are_all_up_to_the_first_user_turn(encoder, tmp_path):
    roles = [("system", "Speak."), ("user", "Sky?"), ("assistant", "Blue."), ("user", "Grass?")]
    chat = {"messages": [{"role": role, "content": content} for role, content in roles]}
    found = conversations(tmp_path / "a.jsonl", [chat])
    found += conversations(tmp_path / "b.jsonl", [{"system": "Be brief.", "turns": ["Sky?", "Grass?"]}])
    prompts = held_out_prompts(found, encoder, num_prompts=2, room=500)
    assert [(prompt.source, prompt.num_turns) for prompt in prompts] == [("a", 1), ("b", 1)]
    assert [text(encoder, prompt) for prompt in prompts] == [
        turn("system", system) + turn("user", "Sky?") + "<|im_start|>assistant\n" for system in ("Speak.", "Be brief.")
    ]


def test_later_turns_hold_the_answers_of_the_target(encoder, tmp_path):
    """Whatever a conversation answered itself; the end-of-turn comes from the template alone."""
    roles = [("system", "Speak."), ("user", "Sky?"), ("assistant", "Blue."), ("user", "Grass?"), ("assistant", "x")]
    chat = {"messages": [{"role": role, "content": content} for role, content in [*roles, ("user", "Tool?")]]}
    for row in (chat, {"system": "Speak.", "turns": ["Sky?", "Grass?", "Tool?"]}):
        (dialogue,) = dialogues(encoder, tmp_path / "a.jsonl", [row])
        assert dialogue.num_turns == 3
        said = turn("system", "Speak.") + turn("user", "Sky?")
        assert text(encoder, dialogue) == said + "<|im_start|>assistant\n"
        for answers in (["Red."], ["Red.<|im_end|>"], ["<|im_start|>Red.</s>"]):
            expected = said + turn("assistant", "Red.") + turn("user", "Grass?") + "<|im_start|>assistant\n"
            assert text(encoder, dialogue, *answers) == expected
        said += turn("assistant", "Red.") + turn("user", "Grass?") + turn("assistant", "") + turn("user", "Tool?")
        assert text(encoder, dialogue, "Red.<|im_end|>", "<|im_end|>") == said + "<|im_start|>assistant\n"
        with pytest.raises(AssertionError, match="more answers than questions"):
            text(encoder, dialogue, "a", "b", "c")


@pytest.mark.parametrize(("turns", "expected"), [(None, 3), (1, 1), (2, 2), (9, 3)])
def test_turns_are_limited(encoder, tmp_path, turns, expected):
    (dialogue,) = dialogues(encoder, tmp_path / "a.jsonl", [{"turns": ["a", "b", "c"]}], turns=turns)
    assert dialogue.num_turns == expected
    with pytest.raises(ConfigError, match="turns: got 0; accepted: 1 or more, or null"):
        PromptConfig(turns=0)


def test_a_dialogue_ends_before_a_tool_speaks(encoder, tmp_path):
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant", "user"]
    (dialogue,) = dialogues(encoder, tmp_path / "a.jsonl", [{"messages": [{"role": r, "content": "x"} for r in roles]}])
    assert dialogue.num_turns == 2


def test_the_first_prompts_of_every_source_are_taken(encoder, tmp_path):
    paths = [
        write_rows(tmp_path / "mt-bench.jsonl", [{"turns": ["Sky?"]}, {"turns": ["Grass?"]}]),
        write_rows(tmp_path / "gsm8k.jsonl", [{"messages": [{"role": "assistant", "content": "x"}]}, {"turns": ["a"]}]),
    ]
    source = SourceConfig(path=[str(path) for path in paths])
    found, _ = source_prompts(source, encoder, PromptConfig(num_prompts=1), room=500)
    assert [(d.source, json.loads(d.key)[1]) for d in found] == [
        ("gsm8k", [["user", "a"]]),
        ("mt-bench", [["user", "Sky?"]]),
    ]
    write_rows(paths[1], [{"messages": [{"role": "assistant", "content": "x"}]}])
    with pytest.raises(DataError, match="no user message in any conversation"):
        source_prompts(SourceConfig(path=str(paths[1]), min_turns=0), encoder, PromptConfig(), room=500)


def test_the_system_prompt_can_be_another(encoder, tmp_path):
    rows = [{"system": "Speak.", "turns": ["Sky?"]}, {"turns": ["Sky?"]}]
    asked = [text(encoder, d) for d in dialogues(encoder, tmp_path / "a.jsonl", rows, system="Hush.")]
    assert asked == [turn("system", "Hush.") + turn("user", "Sky?") + "<|im_start|>assistant\n"] * 2
    # Without any, what the template puts there.
    asked = [text(encoder, d) for d in dialogues(encoder, tmp_path / "a.jsonl", rows, system="")]
    assert asked == [turn("system", "Be kind.") + turn("user", "Sky?") + "<|im_start|>assistant\n"] * 2
    developer = [{"messages": [{"role": role, "content": role} for role in ("developer", "user")]}]
    (one,) = dialogues(encoder, tmp_path / "a.jsonl", developer, system="Hush.")
    assert "developer" not in text(encoder, one)


def test_thinking_is_set_where_the_template_heeds_it():
    tokenizer = tiny_tokenizer("qwen3")
    chat, empty = [Message(role="user", content="Sky?")], "<think>\n\n</think>\n\n"
    for thinking, kwargs, ends in (
        (None, {}, False),
        (None, {"enable_thinking": False}, True),
        (False, {}, True),
        (True, {"enable_thinking": False}, False),
    ):
        encoder = prompt_encoder(tokenizer, max_length=500, template_kwargs=kwargs, thinking=thinking)
        assert tokenizer.decode(encoder.prompt(chat)).endswith(empty) == ends
    for thinking in (True, False):
        with pytest.raises(ConfigError, match=f"^thinking: got {thinking}, but the target's chat template ignores"):
            prompt_encoder(tiny_tokenizer("chatml"), max_length=500, template_kwargs={}, thinking=thinking)


def test_keys_tell_dialogues_apart_by_what_is_asked(encoder, tmp_path):
    def key(row, *, encoder=encoder, name="a", **settings):
        (dialogue,) = dialogues(encoder, tmp_path / f"{name}.jsonl", [row], **settings)
        return dialogue.key

    row = {"turns": ["Sky?", "Grass?"]}
    thinking = ChatEncoder(encoder._tokenizer, max_length=512, template_kwargs={"enable_thinking": True})
    others = [
        key({"turns": ["Sky?", "Tool?"]}),
        key({"turns": ["Sky?", "Grass?"], "system": "Speak."}),
        key(row, turns=1),
        key(row, name="b"),
        key(row, encoder=thinking),
        key(row, encoder=ChatEncoder(tiny_tokenizer("llama3"), max_length=512)),
    ]
    assert len({key(row), *others}) == 1 + len(others)
    answered = [("user", "Sky?"), ("assistant", "Blue."), ("user", "Grass?")]
    chat = {"id": 3, "messages": [{"role": role, "content": content} for role, content in answered]}
    assert key(row) == key(chat)
    assert json.loads(key(row))[:2] == ["a", [["user", "Sky?"], ["user", "Grass?"]]]


def test_later_turns_that_the_template_refuses_are_an_error(tmp_path):
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template += "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}"
    (dialogue,) = dialogues(ChatEncoder(tokenizer, max_length=512), tmp_path / "a.jsonl", [{"turns": ["a", "b"]}])
    assert len(dialogue.encode([]))
    with pytest.raises(EncodeError, match="too long"):
        dialogue.encode([[5]])


def test_prompts_without_room_are_left_out_with_a_warning(encoder, tmp_path):
    rows = [{"turns": ["Sky?"]}, {"turns": [LONG]}, {"turns": ["Grass?"]}]
    found = conversations(tmp_path / "a.jsonl", rows)
    fits = max(len(encoder.prompt(found[i].messages)) for i in (0, 2))
    with pytest.warns(UserWarning, match=rf"prompts: 1 of 3 left out: longer than the {fits} tokens that max_new_to"):
        held_out = held_out_prompts(found, encoder, num_prompts=3, room=fits)
    assert [len(dialogue.encode([])) <= fits for dialogue in held_out] == [True, True]
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
