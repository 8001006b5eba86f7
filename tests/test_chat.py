# The loss mask is what training stands on: for templates in the manner of many families, the supervised text is
# compared with hand-written text, and the tokens before it with the prompt that decoding would give the target.

import hashlib
from itertools import groupby

import pytest
import torch

from drafters.chat import ChatEncoder, EncodeError, EncodeReport, encode_all
from drafters.errors import ConfigError, DataError
from drafters.types import Conversation, Message
from tests.tiny_chat import TEMPLATES, tiny_tokenizer

SUPERVISED = {
    "chatml": ["Blue.<|im_end|>", "Green!<|im_end|>"],
    "generation": ["Blue.<|im_end|>", "Green!<|im_end|>"],
    "llama3": ["Blue.<|eot_id|>", "Green!<|eot_id|>"],
    "gemma": ["Blue.<end_of_turn>", "Green!<end_of_turn>"],
    "qwen3": ["<think>\n\n</think>\n\nGreen!<|im_end|>"],
    "mistral": [" Blue.</s>", " Green!</s>"],
    "harmony": ["<|channel|>final<|message|>Blue.<|end|>", "<|channel|>final<|message|>Green!<|end|>"],
    "plain": ["Blue.", "Green!"],
}


def chat(*contents, cut=(), system=None, name="c1"):
    """User and assistant in turn; answers whose index is in `cut` ended at their length limit."""
    messages = [Message(role="system", content=system)] if system else []
    for i, content in enumerate(contents):
        reason = ("length" if i in cut else "stop") if i % 2 else None
        messages.append(Message(role="assistant" if i % 2 else "user", content=content, finish_reason=reason))
    return Conversation(id=name, source="tests", messages=tuple(messages))


TWO_TURNS = chat("What colour is the sky?", "Blue.", "And grass?", "Green!")


def supervised(example, tokenizer):
    """Text of each supervised run."""
    pairs = zip(example.tokens_T.tolist(), example.loss_mask_T.tolist(), strict=True)
    runs = [[token for token, _ in run] for mask, run in groupby(pairs, key=lambda pair: pair[1]) if mask]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.mark.parametrize("template", TEMPLATES)
def test_only_what_the_target_wrote_is_supervised(template):
    tokenizer = tiny_tokenizer(template)
    example = ChatEncoder(tokenizer, max_length=500).encode(TWO_TURNS)
    assert supervised(example, tokenizer) == SUPERVISED[template]
    assert example.tokens_T.dtype == torch.int64
    assert example.loss_mask_T.dtype == torch.bool
    assert (example.id, example.source, example.truncated) == ("c1", "tests", False)


@pytest.mark.parametrize("template", ["gemma", "llama3", "mistral", "plain"])
def test_tokenizers_that_mark_spaces(template):
    tokenizer = tiny_tokenizer(template, kind="spaces")
    example = ChatEncoder(tokenizer, max_length=500).encode(TWO_TURNS)
    texts = [text.strip() for text in supervised(example, tokenizer)]
    assert texts == [text.strip() for text in SUPERVISED[template]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_before_an_answer_are_the_prompt_of_decoding(template):
    encoder = ChatEncoder(tiny_tokenizer(template), max_length=500)
    for conversation in (TWO_TURNS, chat("Sky?", "Blue.")):
        example = encoder.encode(conversation)
        first = 3 if template == "qwen3" and conversation is TWO_TURNS else 1
        prompt_T = encoder.prompt(conversation.messages[:first])
        assert prompt_T.dtype == torch.int64
        assert torch.equal(example.tokens_T[: len(prompt_T)], prompt_T)
        assert int(example.loss_mask_T.nonzero()[0]) == len(prompt_T)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_cut_answer_has_no_end_of_turn(template):
    tokenizer = tiny_tokenizer(template)
    conversation = chat("What colour?", "Blue.", "And grass?", "Green!", cut=(1, 3))
    example = ChatEncoder(tokenizer, max_length=500).encode(conversation)
    ends = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|end|>")
    expected = []
    for text in SUPERVISED[template]:
        for end in ends:
            text = text.removesuffix(end)
        expected.append(text)
    assert supervised(example, tokenizer) == expected


def test_reasoning_that_the_template_strips_later_is_not_supervised():
    tokenizer = tiny_tokenizer("qwen3")
    conversation = chat("Sky?", "<think>\nHm.\n</think>\n\nBlue.", "Grass?", "<think>\nOh.\n</think>\n\nGreen!")
    encoder = ChatEncoder(tokenizer, max_length=500)
    assert supervised(encoder.encode(conversation), tokenizer) == ["<think>\nOh.\n</think>\n\nGreen!<|im_end|>"]
    report = EncodeReport()
    encode_all([conversation], encoder, report=report)
    assert report.num_skipped_turns == 1
    assert "1 earlier answers not supervised" in report.summary()


def test_template_settings_reach_prompt_and_mask():
    tokenizer = tiny_tokenizer("qwen3")
    encoder = ChatEncoder(tokenizer, max_length=500, template_kwargs={"enable_thinking": False})
    assert supervised(encoder.encode(TWO_TURNS), tokenizer) == ["Green!<|im_end|>"]
    assert tokenizer.decode(encoder.prompt(TWO_TURNS.messages[:1])).endswith("</think>\n\n")


def test_a_template_that_rewrites_every_answer_is_refused():
    tokenizer = tiny_tokenizer("qwen3")
    tokenizer.chat_template = "{% for m in messages %}{{ '...' if loop.last }}{{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(EncodeError, match="'c1' of source 'tests': the chat template rewrites"):
        ChatEncoder(tokenizer, max_length=500).encode(TWO_TURNS)


def test_end_of_turn_that_swallows_white_space_is_supervised():
    tokenizer = tiny_tokenizer("chatml", rstrip=("<|im_end|>",))
    example = ChatEncoder(tokenizer, max_length=500).encode(TWO_TURNS)
    assert [text.rstrip("\n") for text in supervised(example, tokenizer)] == SUPERVISED["chatml"]


def test_no_token_crosses_from_prompt_to_answer():
    tokenizer = tiny_tokenizer("chatml")
    encoder = ChatEncoder(tokenizer, max_length=500)
    conversation = chat("Sky?", "\n\nBlue.", "Grass?", "\n\nGreen!")
    prompt_T = encoder.prompt(conversation.messages[:1])
    together = tokenizer(tokenizer.decode(prompt_T) + "\n\nBlue.")["input_ids"]
    assert together[len(prompt_T) - 1] != prompt_T[-1]  # one text, tokenised whole, would change the prompt
    example = encoder.encode(conversation)
    assert supervised(example, tokenizer) == ["\n\nBlue.<|im_end|>", "\n\nGreen!<|im_end|>"]
    assert torch.equal(example.tokens_T[: len(prompt_T)], prompt_T)
    whole = tokenizer.apply_chat_template([vars(m) for m in conversation.messages], tokenize=False)
    assert tokenizer.decode(example.tokens_T) == whole


def test_a_crossing_token_that_cannot_be_split_is_not_supervised():
    tokenizer = tiny_tokenizer("plain", kind="spaces")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    tokenizer.add_tokens([":Blue"])  # from the prompt into the answer; tokenised alone, "Blue" would get a space
    example = ChatEncoder(tokenizer, max_length=500).encode(chat("Sky?", "Blue sky."))
    crossing = tokenizer.convert_tokens_to_ids(":Blue")
    assert (example.tokens_T == crossing).sum() == 1
    assert not example.loss_mask_T[example.tokens_T == crossing].any()
    assert supervised(example, tokenizer)[0].strip() == "sky."


def test_characters_of_several_tokens_are_supervised_whole():
    tokenizer = tiny_tokenizer("chatml")
    example = ChatEncoder(tokenizer, max_length=500).encode(chat("Ünï?", "Blåå 🌊."))
    assert supervised(example, tokenizer) == ["Blåå 🌊.<|im_end|>"]


@pytest.mark.parametrize("answer", ["", "  ", "end", "im_end", "Say <|im_end|> twice"])
def test_answers_that_look_like_their_surroundings(answer):
    tokenizer = tiny_tokenizer("chatml")
    example = ChatEncoder(tokenizer, max_length=500).encode(chat("Sky?", answer))
    assert supervised(example, tokenizer) == [answer + "<|im_end|>"]


def test_special_tokens_before_the_text_do_not_end_the_turn():
    tokenizer = tiny_tokenizer("harmony")
    tokenizer.chat_template = TEMPLATES["harmony"].replace("<|end|>", "")  # so that no token ends a turn
    example = ChatEncoder(tokenizer, max_length=500).encode(TWO_TURNS)
    assert supervised(example, tokenizer) == [text.removesuffix("<|end|>") for text in SUPERVISED["harmony"]]


def test_system_and_tool_messages_pass_through():
    tokenizer = tiny_tokenizer("chatml")
    conversation = chat("Sky?", "Blue.", system="Speak.")
    tool = (Message(role="tool", content="42"), Message(role="assistant", content="Green!"))
    conversation = Conversation(id="c", source="s", messages=conversation.messages + tool)
    example = ChatEncoder(tokenizer, max_length=500).encode(conversation)
    text = tokenizer.decode(example.tokens_T)
    assert "<|im_start|>system\nSpeak.<|im_end|>" in text
    assert "<|im_start|>tool\n42<|im_end|>" in text
    assert supervised(example, tokenizer) == SUPERVISED["chatml"]


def test_messages_after_the_last_answer_are_left_out():
    tokenizer = tiny_tokenizer("chatml")
    encoder = ChatEncoder(tokenizer, max_length=500)
    longer = encoder.encode(chat("What colour is the sky?", "Blue.", "And grass?", "Green!", "Thanks"))
    assert torch.equal(longer.tokens_T, encoder.encode(TWO_TURNS).tokens_T)


def test_a_greeting_before_any_prompt_is_not_supervised():
    tokenizer = tiny_tokenizer("chatml")
    greeting = (Message(role="assistant", content="Hello"),)
    conversation = Conversation(id="c", source="s", messages=greeting + TWO_TURNS.messages)
    assert supervised(ChatEncoder(tokenizer, max_length=500).encode(conversation), tokenizer) == SUPERVISED["chatml"]


def test_no_assistant_message_is_an_error_that_names_the_conversation():
    encoder = ChatEncoder(tiny_tokenizer("chatml"), max_length=500)
    with pytest.raises(DataError, match="conversation 'c1' of source 'tests': it has no assistant message"):
        encoder.encode(chat("Sky?"))


def test_a_template_that_refuses_a_role_is_an_error():
    encoder = ChatEncoder(tiny_tokenizer("gemma"), max_length=500)
    with pytest.raises(DataError, match=r"'c1' of source 'tests'.*refuses it: no system role"):
        encoder.encode(chat("Sky?", "Blue.", system="Speak."))


def test_truncation_is_marked_and_counted():
    encoder = ChatEncoder(tiny_tokenizer("chatml"), max_length=500)
    full = encoder.encode(TWO_TURNS)
    first_answer = int(full.loss_mask_T.nonzero()[0])
    report = EncodeReport()
    short = ChatEncoder(tiny_tokenizer("chatml"), max_length=first_answer + 1)
    (example,) = encode_all([TWO_TURNS], short, report=report)
    assert example.truncated
    assert torch.equal(example.tokens_T, full.tokens_T[: first_answer + 1])
    assert example.loss_mask_T.nonzero().tolist() == [[first_answer]]
    assert (report.num_truncated, report.num_supervised, report.num_tokens) == (1, 1, first_answer + 1)
    with pytest.raises(EncodeError, match=f"no supervised token among the first {first_answer} of"):
        ChatEncoder(tiny_tokenizer("chatml"), max_length=first_answer).encode(TWO_TURNS)


def test_encode_all_keeps_the_good_and_counts_the_rest():
    encoder = ChatEncoder(tiny_tokenizer("chatml"), max_length=60)
    report = EncodeReport()
    conversations = [
        TWO_TURNS,
        chat("Sky?", name="c2"),
        chat("sky " * 100, "Blue.", name="c3"),
        chat("Sky?", name="c4"),
    ]
    examples = encode_all(iter(conversations), encoder, report=report)
    assert [example.id for example in examples] == ["c1"]
    assert (report.num_conversations, report.num_examples) == (4, 1)
    assert report.dropped == {"no assistant message": 2, "no answer within 60 tokens": 1}
    assert "1 of 4 conversations" in report.summary()
    assert "2 dropped: no assistant message" in report.summary()


@pytest.mark.parametrize(("conversations", "message"), [([chat("Sky?")], "no assistant message"), ([], "there are no")])
def test_a_set_without_a_supervised_token_is_an_error(conversations, message):
    with pytest.raises(DataError, match=f"no supervised token in {len(conversations)} conversations; .*{message}"):
        encode_all(conversations, ChatEncoder(tiny_tokenizer("chatml"), max_length=500))


def test_template_hash_tells_templates_and_settings_apart():
    tokenizer = tiny_tokenizer("qwen3")
    plain = ChatEncoder(tokenizer, max_length=500).template_hash
    assert plain == hashlib.sha256(TEMPLATES["qwen3"].encode()).hexdigest()
    off = ChatEncoder(tokenizer, max_length=500, template_kwargs={"enable_thinking": False}).template_hash
    on = ChatEncoder(tokenizer, max_length=500, template_kwargs={"enable_thinking": True}).template_hash
    assert len({plain, off, on}) == 3


def test_templates_that_print_the_date_do_not_change_from_day_to_day():
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') + '\n' }}" + TEMPLATES["chatml"]
    prompt = ChatEncoder(tokenizer, max_length=500).prompt(TWO_TURNS.messages[:1])
    assert tokenizer.decode(prompt).startswith("2025-01-01\n")


def test_tokenizers_that_cannot_serve_are_refused():
    with pytest.raises(ConfigError, match=r"no \(default\) chat template"):
        ChatEncoder(tiny_tokenizer(None), max_length=500)
    with pytest.raises(ConfigError, match="max_length: got 1"):
        ChatEncoder(tiny_tokenizer("chatml"), max_length=1)
