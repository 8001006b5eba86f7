# Dialogues for measuring, from the conversations of a source: its user turns in the target's own chat template. Answers
# that a conversation holds are not used, since the target gives its own.

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from data.sources import DataConfig, SourceConfig, load_part, load_splits
from drafters.chat import ChatEncoder, EncodeError
from drafters.decoding.dialogue import Dialogue
from drafters.errors import ConfigError, DataError
from drafters.types import Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptConfig", "Trained", "held_out_prompts", "prompt_encoder", "source_prompts", "trained_on"]

Trained = frozenset[tuple[Message, ...]]


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Which prompts are measured.

    `split` ("train", "validation", None = all) counts where rows have one, and where it is known what was trained on.
    `num_prompts` takes the first so many conversations of each source, None all; `turns` the first so many user turns
    of each, None all. `system` replaces the system prompt, or gives one; "" takes it away.
    """

    split: str | None = None
    num_prompts: int | None = None
    turns: int | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("num_prompts", self.num_prompts), ("turns", self.turns)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: got {value}; accepted: 1 or more, or null for all")


@dataclass(frozen=True)
class _Asked:
    """What is asked in a conversation: all up to and with the first user turn, and the later user turns."""

    source: str
    head: tuple[Message, ...]
    later: tuple[Message, ...]


def prompt_encoder(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    template_kwargs: dict[str, Any],
    thinking: bool | None = None,
) -> ChatEncoder:
    """The encoder of prompts. `thinking` sets `enable_thinking` beside `template_kwargs`; None leaves it to them.

    Raises ConfigError when `thinking` is given and the chat template renders the same with and without.
    """
    if thinking is None:
        return ChatEncoder(tokenizer, max_length=max_length, template_kwargs=template_kwargs)
    on, off = (
        ChatEncoder(tokenizer, max_length=max_length, template_kwargs={**template_kwargs, "enable_thinking": value})
        for value in (True, False)
    )
    probe = [Message(role="user", content="Hello")]
    if on.prompt(probe).tolist() == off.prompt(probe).tolist():
        raise ConfigError(
            f"thinking: got {thinking}, but the target's chat template ignores `enable_thinking`; accepted: null, "
            "or where it has a setting of another name, that one in data.template_kwargs"
        )
    return on if thinking else off


def held_out_prompts(
    conversations: Sequence[Conversation], encoder: ChatEncoder, *, num_prompts: int, room: int
) -> list[Dialogue]:
    """The first turns of `num_prompts` evenly spaced held-out conversations, without those of more than `room` tokens.

    Raises DataError when there are none.
    """
    if not conversations:
        raise DataError(
            "data.validation: no conversation is held out, but the best weights are chosen on such; give a share above "
            "0, or rows whose `split` is validation"
        )
    found = _asked(conversations, PromptConfig(turns=1))
    chosen = [found[i * len(found) // num_prompts] for i in range(min(num_prompts, len(found)))]
    return _dialogues(chosen, encoder, room=room)


def trained_on(source: SourceConfig, *, own: SourceConfig, data: DataConfig) -> Trained | None:
    """The conversations that a run with the source `own` trained on, when `source` shares a file or the hub data set
    with it; else None."""
    shared = {path.resolve() for path in source.paths} & {path.resolve() for path in own.paths}
    if not shared and (source.hub_id is None or source.hub_id != own.hub_id):
        return None
    train, _ = load_splits(own, validation=data.validation, seed=data.seed)
    return frozenset(conversation.messages for conversation in train)


def source_prompts(
    source: SourceConfig, encoder: ChatEncoder, config: PromptConfig, *, room: int, trained: Trained | None = None
) -> tuple[list[Dialogue], str]:
    """The dialogues of a source that `config` asks for, without those whose first prompt has more than `room` tokens,
    and in words which part of the rows they come from.

    Where `trained` tells, the split "validation" is what was not trained on. Raises ConfigError for an unknown split,
    DataError when there are no prompts.
    """
    split = config.split
    conversations, told = load_part(source, split)
    used = f"{split}, by the rows' own split" if told else "all rows"
    if trained is not None and split is not None:
        conversations = [c for c in conversations if (c.messages in trained) == (split == "train")]
        used = f"{split}, as the run split it"
        if not conversations:
            raise DataError(f"split: no prompt of the run's own source belongs to {split}; accepted: null for all rows")
    found = sorted(_asked(conversations, config), key=lambda asked: asked.source)
    by_source = groupby(found, key=lambda asked: asked.source)
    chosen = [asked for _, those in by_source for asked in islice(those, config.num_prompts)]
    return _dialogues(chosen, encoder, room=room), used


def _asked(conversations: Iterable[Conversation], config: PromptConfig) -> list[_Asked]:
    """What is asked in each conversation that has a user turn, up to a message of a role that is no part of a dialogue
    (a tool's)."""
    found = []
    for conversation in conversations:
        roles = [message.role for message in conversation.messages]
        if "user" not in roles:
            continue
        first = roles.index("user") + 1
        end = next((i for i in range(first, len(roles)) if roles[i] not in ("user", "assistant")), len(roles))
        later = tuple(message for message in conversation.messages[first:end] if message.role == "user")
        head = conversation.messages[:first]
        if config.system is not None:
            given = (Message(role="system", content=config.system),) if config.system else ()
            head = (*given, *(message for message in head if message.role not in ("system", "developer")))
        found.append(_Asked(conversation.source, head, later[: None if config.turns is None else config.turns - 1]))
    if not found:
        raise DataError("source: no user message in any conversation, so nothing to answer; choose another source=")
    return found


def _dialogues(found: Sequence[_Asked], encoder: ChatEncoder, *, room: int) -> list[Dialogue]:
    """Warns of prompts that are left out. Raises DataError when all are."""
    made: list[Dialogue] = []
    left_out: Counter[str] = Counter()
    for asked in found:
        encode = partial(_prompt, asked, encoder)
        try:
            tokens_T = encode([])
        except EncodeError as error:
            left_out[error.reason] += 1
            continue
        if len(tokens_T) > room:
            left_out[f"longer than the {max(room, 0)} tokens that max_new_tokens leaves of the target's positions"] += 1
            continue
        texts = [[message.role, message.content] for message in (*asked.head, *asked.later)]
        key = json.dumps([asked.source, texts, encoder.template_kwargs, encoder.template_hash], default=str)
        made.append(Dialogue(source=asked.source, key=key, num_turns=1 + len(asked.later), encode=encode))
    counts = "; ".join(f"{count} of {len(found)} left out: {reason}" for reason, count in left_out.items())
    if not made:
        raise DataError(f"prompts: {counts}; lower max_new_tokens, or give other prompts")
    if counts:
        warnings.warn(f"prompts: {counts}", stacklevel=3)
    return made


def _prompt(asked: _Asked, encoder: ChatEncoder, answers: Sequence[Sequence[int]]) -> Tensor:
    """Token ids [T] of the turn after `answers`."""
    messages = list(asked.head)
    for answer, question in zip(answers, asked.later, strict=False):
        messages += [Message(role="assistant", content=encoder.answer(answer)), question]
    assert len(messages) == len(asked.head) + 2 * len(answers), "more answers than questions"
    return encoder.prompt(messages)
