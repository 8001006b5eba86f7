# The shapes that rows come in, turned into conversations. A shape is recognised by its columns.

import re
from collections.abc import Mapping
from typing import Any

from data.sources.read import Row
from drafters.errors import DataError
from drafters.types import Conversation, Message

__all__ = ["SkipRow", "find_shape", "is_ready", "rename", "to_conversation"]

# In this order: a row with several of them is read by the first.
_SHAPES = {
    "messages": "messages: [{role, content}, ...]",
    "conversations": "conversations: [{from, value}, ...] (ShareGPT)",
    "turns": "turns: [user text, ...] (prompts without answers)",
    "prompt": "prompt and response: text",
}
# Half a character, as JSON can write it ("\ud83d") and no tokenizer can read it.
_SURROGATE = re.compile("[\ud800-\udfff]")
# Columns that hold a whole conversation, and those that hold a part of one.
_READY = ("messages", "conversations", "turns")
_PARTS = (*_SHAPES, "response", "system")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


class SkipRow(Exception):
    """A well-formed row that cannot become a conversation here; the text is the reason that is counted."""


def is_ready(row: Row) -> bool:
    """Whether a row is a conversation as it stands."""
    return any(row.get(column) is not None for column in _READY)


def rename(row: Row, columns: Mapping[str, str], *, where: str) -> Row:
    """The row with `columns` ({expected: column's name}) renamed. Raises DataError on a column that is not there, but
    for the parts of a conversation where the row is one already."""
    found = {}
    for expected, column in columns.items():
        if column in row:
            found[expected] = row[column]
        elif not (expected in _PARTS and is_ready(row)):
            raise DataError(f"source.columns.{expected}: {where} has no column '{column}'; its columns: {_names(row)}")
    return {**row, **found}


def find_shape(row: Row, *, where: str, key: str = "source") -> str:
    """The column that holds the conversation. Raises DataError that lists the columns found and the shapes accepted;
    `key` is the setting that names the file."""
    for shape in _SHAPES:
        if shape in row:
            return shape
    shapes = "; or ".join(_SHAPES.values())
    hint = ". Map other names: '+source.columns={prompt: question, response: answer}'" if key == "source" else ""
    raise DataError(f"{key}: no messages in {where}: its columns are {_names(row)}; accepted: {shapes}{hint}")


def to_conversation(row: Row, *, shape: str, number: int, source: str, where: str) -> Conversation:
    """The conversation of a row. Raises SkipRow, and DataError for an unknown role or a value of the wrong type."""
    if shape == "prompt":
        messages = [_message("user", row["prompt"], where=where)]
        if row.get("response") is not None:
            messages.append(_message("assistant", row["response"], where=where))
    elif shape == "turns":
        messages = [_message("user", text, where=where) for text in _list(row, shape, where=where)]
    else:
        messages = [_from_mapping(item, where=where) for item in _list(row, shape, where=where)]
    if row.get("system") and not any(message.role == "system" for message in messages):
        messages.insert(0, _message("system", row["system"], where=where))
    messages = _with_finish_reasons(messages, row, where=where)
    name = row["id"] if row.get("id") is not None else f"{source}:{number}"
    answered_by = str(row["answered_by"]) if row.get("answered_by") else None
    return Conversation(id=str(name), messages=tuple(messages), source=source, answered_by=answered_by)


def _list(row: Row, column: str, *, where: str) -> list[Any]:
    value = row[column]
    if not value:
        raise SkipRow("no messages")
    if not isinstance(value, list):
        raise DataError(f"{where}: `{column}` should be a list, got {type(value).__name__}")
    return value


def _from_mapping(item: Any, *, where: str) -> Message:
    """A message from {role, content} or {from, value}, with an optional finish_reason."""
    if not isinstance(item, Mapping):
        raise DataError(f"{where}: a message should be an object with role and content, got {type(item).__name__}")
    if item.get("tool_calls"):
        raise SkipRow("structured tool calls (only text can be read)")
    role = item.get("role") or item.get("from")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if str(role) not in _ROLES:
        raise DataError(f"{where}: unknown role {role!r}; accepted: {', '.join(_ROLES)}")
    return _message(_ROLES[str(role)], content, where=where, finish_reason=item.get("finish_reason"))


def _message(role: str, content: Any, *, where: str, finish_reason: str | None = None) -> Message:
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        if any(part.get("type") != "text" for part in content):
            raise SkipRow("content that is not text")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise DataError(f"{where}: the {role} message should be text, got {type(content).__name__}")
    if _SURROGATE.search(content):
        raise SkipRow("text that is not Unicode")
    return Message(role=role, content=content, finish_reason=finish_reason)


def _with_finish_reasons(messages: list[Message], row: Row, *, where: str) -> list[Message]:
    """`finish_reasons` has one entry per answer; `finish_reason` is the last answer's."""
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    reasons = dict(zip(answers[-1:], [row.get("finish_reason")], strict=False))
    if row.get("finish_reasons") is not None:
        given = row["finish_reasons"]
        if not isinstance(given, list) or len(given) != len(answers):
            raise DataError(f"{where}: finish_reasons should be a list of {len(answers)}, one for each answer")
        reasons = dict(zip(answers, row["finish_reasons"], strict=True))
    return [
        Message(role=m.role, content=m.content, finish_reason=reasons.get(i) or m.finish_reason)
        for i, m in enumerate(messages)
    ]


def _names(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "none"
