# Conversations become tokens here, with the tokenizer's own chat template and a mask of the supervised ones. No marker
# of any model family is searched for: the template is rendered on prefixes of the conversation, and what it adds after
# the generation prompt is the answer. Where a template rewrites earlier turns (it strips old reasoning), those turns
# are not supervised, because the target never wrote them as they now stand.

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor

from drafters.errors import ConfigError, DataError
from drafters.types import Conversation, Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatEncoder", "EncodeError", "EncodeReport", "encode_all"]

# Some templates print today's date. A fixed one keeps token ids, and so caches, the same from day to day.
_TODAY = date(2025, 1, 1)
_DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class EncodeError(DataError):
    """A conversation that cannot be trained on; `reason` is the short form that reports count."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(kw_only=True)
class EncodeReport:
    """What became of a set of conversations. `num_skipped_turns` counts answers that the template rewrites."""

    num_conversations: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0
    num_skipped_turns: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def add(self, example: Example, *, skipped_turns: int) -> None:
        """Count a conversation that was encoded."""
        self.num_conversations += 1
        self.num_examples += 1
        self.num_tokens += len(example.tokens_T)
        self.num_supervised += int(example.loss_mask_T.sum())
        self.num_truncated += example.truncated
        self.num_skipped_turns += skipped_turns

    def drop(self, reason: str) -> None:
        """Count a conversation that was not."""
        self.num_conversations += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def summary(self) -> str:
        """One line for people."""
        share = 100 * self.num_supervised / max(1, self.num_tokens)
        parts = [
            f"{self.num_examples:,} of {self.num_conversations:,} conversations",
            f"{self.num_tokens:,} tokens, {self.num_supervised:,} supervised ({share:.0f} %)",
            f"{self.num_truncated:,} truncated",
        ]
        if self.num_skipped_turns:
            parts.append(f"{self.num_skipped_turns:,} earlier answers not supervised (the template rewrites them)")
        parts += [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        return "; ".join(parts)


class ChatEncoder:
    """Encodes conversations of at most `max_length` tokens (the rest is cut off and marked as truncated).

    `template_hash` is the sha256 of the chat template, and of `template_kwargs` (such as `enable_thinking`) if any.
    Raises ConfigError when the tokenizer has no chat template or gives no character offsets.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, max_length: int, template_kwargs: dict[str, Any] | None = None
    ) -> None:
        if max_length < 2:
            raise ConfigError(f"max_length: got {max_length}; accepted: 2 or more tokens")
        if not tokenizer.is_fast:
            raise ConfigError(
                f"tokenizer: {type(tokenizer).__name__} gives no character offsets; use one with a tokenizer.json"
            )
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                "tokenizer: it has no (default) chat template; use an instruction-tuned target, or add a "
                "chat_template.jinja to its folder"
            ) from error
        self.max_length = max_length
        self._tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._template = _DATE_CALL.sub(lambda call: repr(_TODAY.strftime(call[2])), template)
        self._special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids |= set(tokenizer.all_special_ids)
        self._special_ids -= {tokenizer.unk_token_id}
        settings = json.dumps(self.template_kwargs, sort_keys=True, default=str) if self.template_kwargs else ""
        self.template_hash = hashlib.sha256((template + settings).encode()).hexdigest()

    def encode(self, conversation: Conversation) -> Example:
        """Tokens and mask of a conversation up to its last answer.

        Supervised are the tokens that the target writes after the generation prompt, its end-of-turn token included;
        an answer cut at its length limit (`finish_reason` "length") has no end-of-turn of the target's, so there the
        token is masked. Raises EncodeError, which is a DataError, when no token is supervised.
        """
        return self._encode(conversation)[0]

    def prompt(self, messages: Sequence[Message]) -> Tensor:
        """Token ids [T] (int64) of `messages` with the generation prompt appended."""
        text = self._render(messages, add_generation_prompt=True, where="prompt")
        return torch.tensor(self._ids(text)[0])

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of an answer that the target wrote, without its end-of-turn and other special tokens."""
        return str(self._tokenizer.decode([token for token in tokens if token not in self._special_ids]))

    def _encode(self, conversation: Conversation) -> tuple[Example, int]:
        """The example, and how many answers could not be supervised because the template rewrites them."""
        where = f"conversation '{conversation.id}' of source '{conversation.source}'"
        messages = conversation.messages
        answers = [i for i, message in enumerate(messages) if message.role == "assistant" and i > 0]
        if not answers:
            raise EncodeError(
                f"{where}: it has no assistant message after its prompt, so nothing to train on; roles found: "
                f"{', '.join(message.role for message in messages) or 'none'}. Let the target answer its prompts first",
                reason="no assistant message",
            )
        text = self._render(messages[: answers[-1] + 1], where=where)
        found = {i: self._answer_span(messages, i, text=text, where=where) for i in answers}
        spans = {i: span for i, span in found.items() if span is not None}
        ids, offsets = self._tokenize(text, starts=[start for start, _ in spans.values()])
        mask_T = torch.zeros(len(ids), dtype=torch.bool)
        for i, span in spans.items():
            mask_T[self._written_by_target(ids, offsets, span=span, text=text, message=messages[i])] = True
        if not mask_T.any():
            raise EncodeError(
                f"{where}: the chat template rewrites its answers (the rendered prompt is not a prefix of the rendered "
                "conversation), so no token can be supervised; check template_kwargs, and that answers are complete",
                reason="template rewrites every answer",
            )
        example = Example(
            id=conversation.id,
            source=conversation.source,
            tokens_T=torch.tensor(ids[: self.max_length]),
            loss_mask_T=mask_T[: self.max_length].clone(),
            truncated=len(ids) > self.max_length,
        )
        if not example.loss_mask_T.any():
            raise EncodeError(
                f"{where}: no supervised token among the first {self.max_length} of {len(ids)}; raise max_length",
                reason=f"no answer within {self.max_length} tokens",
            )
        return example, len(answers) - len(spans)

    def _answer_span(self, messages: Sequence[Message], i: int, *, text: str, where: str) -> tuple[int, int] | None:
        """Characters of `text` that message i adds to its prompt; None when the template rewrites them later."""
        prompt = self._render(messages[:i], add_generation_prompt=True, where=where)
        answered = self._render(messages[: i + 1], where=where)
        if text.startswith(answered) and answered.startswith(prompt):
            return len(prompt), len(answered)
        return None

    def _tokenize(self, text: str, *, starts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text` and their character offsets, with answers that begin at `starts`.

        In decoding a prompt is tokenised without its answer, so no token crosses the line between them. Where the
        whole text gives other tokens up to that line, it is tokenised in pieces; if that changes the text (tokenizers
        that add a space before the first word), it is not, and a crossing token is not supervised.
        """
        ids, offsets = self._ids(text)
        cuts = []
        for start in starts:
            prompt_ids, _ = self._ids(text[:start])
            if ids[: len(prompt_ids)] != prompt_ids:
                cuts.append(start)
        if not cuts:
            return ids, offsets
        pieces_ids: list[int] = []
        pieces_offsets: list[tuple[int, int]] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            piece_ids, piece_offsets = self._ids(text[start:end])
            pieces_ids += piece_ids
            pieces_offsets += [(a + start, b + start) for a, b in piece_offsets]
        same_text = self._tokenizer.decode(pieces_ids) == self._tokenizer.decode(ids)
        return (pieces_ids, pieces_offsets) if same_text else (ids, offsets)

    def _ids(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _written_by_target(
        self, ids: list[int], offsets: list[tuple[int, int]], *, span: tuple[int, int], text: str, message: Message
    ) -> list[int]:
        """Positions of the tokens in a span that the target itself wrote: up to its last special token (the
        end-of-turn) after the message's text; where the template has none, all but the white space at the end."""
        start, end = span
        # A token across the start holds characters of the prompt, so the target cannot have written it.
        inside = [t for t, (a, b) in enumerate(offsets) if start <= a < end and b > start]
        content_end = start + _end_of(message.content.strip(), text[start:end])
        closing = [t for t in inside if ids[t] in self._special_ids and offsets[t][0] >= content_end]
        if closing:
            last = closing[-1] - (message.finish_reason == "length")
            return [t for t in inside if t <= last]
        visible_end = start + len(text[start:end].rstrip())
        return [t for t in inside if offsets[t][0] < visible_end]

    def _render(self, messages: Sequence[Message], *, where: str, add_generation_prompt: bool = False) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                plain,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except TemplateError as error:
            raise EncodeError(
                f"{where}: the tokenizer's chat template refuses it: {error}; roles: "
                f"{', '.join(message.role for message in messages)}",
                reason=f"template refuses it ({error})",
            ) from error
        return str(rendered)


def encode_all(
    conversations: Iterable[Conversation], encoder: ChatEncoder, *, report: EncodeReport | None = None
) -> list[Example]:
    """Examples of all conversations that have a supervised token; `report` counts the others by reason.

    Raises DataError when not one has, and when all their answers are empty.
    """
    report = EncodeReport() if report is None else report
    any_text = False
    examples: list[Example] = []
    first_error: EncodeError | None = None
    for conversation in conversations:
        try:
            example, skipped = encoder._encode(conversation)
        except EncodeError as error:
            first_error = first_error or error
            report.drop(error.reason)
            continue
        examples.append(example)
        any_text = any_text or any(m.role == "assistant" and m.content.strip() for m in conversation.messages)
        report.add(example, skipped_turns=skipped)
    if not examples:
        detail = f"first: {first_error}" if first_error else "there are no conversations"
        raise DataError(f"no supervised token in {report.num_conversations} conversations; {detail}") from first_error
    if not any_text:
        raise DataError(
            f"all answers of the {len(examples)} conversations are empty, so there is nothing to learn; let the target "
            "answer their prompts: python -m data.regenerate"
        )
    return examples


def _end_of(part: str, text: str) -> int:
    """Where the first `part` in `text` ends; 0 when it is not there, as in templates that reword their messages."""
    found = text.find(part)
    return 0 if found < 0 else found + len(part)
