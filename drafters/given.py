# Conversations that a program hands over, instead of a data source: checked here, and kept in the run's folder, so that
# the run can be measured later as one of train.py is.

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafters.checkpoint import write_whole
from drafters.errors import DataError
from drafters.types import Conversation, Message

__all__ = ["ROLES", "Given", "Messages", "to_conversations", "to_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
Messages = Sequence[Message | Mapping[str, Any]]
ACCEPTED = "a drafters.Conversation, {'messages': [...]}, or a list of messages {'role': ..., 'content': text}"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a plan calls conversations that were handed over, in place of the settings of a source."""

    digest: str

    @classmethod
    def of(cls, conversations: Iterable[Conversation]) -> "Given":
        """`digest` changes with any of them, and with their order."""
        digest = hashlib.sha256()
        for conversation in conversations:
            digest.update(_row(conversation).encode())
        return cls(digest=digest.hexdigest())

    def path(self, run: Path) -> Path:
        """Where the folder of a run keeps them."""
        return run / f"conversations-{self.digest[:12]}.jsonl"

    def source(self, run: Path) -> dict[str, Any]:
        """The settings of a source (conf/source) that reads them from there."""
        columns = {"source": "source"}
        return {"_target_": "data.sources.SourceConfig", "path": str(self.path(run)), "columns": columns}

    def keep(self, conversations: Iterable[Conversation], run: Path) -> None:
        """Write them there, unless they are. Raises CheckpointError."""
        path = self.path(run)
        if not path.is_file():
            text = "".join(f"{_row(conversation)}\n" for conversation in conversations)
            write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


def to_conversations(given: Iterable[Any]) -> list[Conversation]:
    """Conversations of whatever a caller has: see ACCEPTED. Raises DataError that names the first wrong one."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise DataError(f"conversations: got {type(given).__name__}; accepted: a list, each of {ACCEPTED}")
    found = [_conversation(one, number) for number, one in enumerate(given)]
    if not found:
        raise DataError("conversations: there are none; give those to train on")
    return found


def to_messages(given: Any, *, where: str) -> tuple[Message, ...]:
    """The messages of one conversation; a text is a user's message. Raises DataError that starts with `where`."""
    if isinstance(given, str):
        given = [Message(role="user", content=given)]
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise DataError(f"{where}: got {type(given).__name__}; accepted: a list of messages with role and content")
    found = tuple(_message(one, f"{where}, message {number}") for number, one in enumerate(given))
    if not found:
        raise DataError(f"{where}: it has no messages; give at least one")
    return found


def _conversation(given: Any, number: int) -> Conversation:
    where = f"conversation {number}"
    if isinstance(given, Conversation):
        to_messages(given.messages, where=where)
        return given
    if isinstance(given, str):
        raise DataError(f"{where}: got a text; accepted: {ACCEPTED}")
    facts: dict[str, Any] = {}
    if isinstance(given, Mapping):
        facts = {name: value for name, value in given.items() if name in ("id", "source", "answered_by") and value}
        if "messages" not in given:
            raise DataError(f"{where}: got the keys {', '.join(map(str, given)) or 'none'}; accepted: {ACCEPTED}")
        given = given["messages"]
    messages = to_messages(given, where=where)
    texts = {"id": f"given:{number}", "source": "given"} | {name: str(value) for name, value in facts.items()}
    return Conversation(messages=messages, **texts)


def _message(given: Any, where: str) -> Message:
    plain = asdict(given) if isinstance(given, Message) else given
    if not isinstance(plain, Mapping):
        raise DataError(f"{where}: got {type(given).__name__}; accepted: {{'role': ..., 'content': text}}")
    role, content, reason = (plain.get(name) for name in ("role", "content", "finish_reason"))
    if role not in ROLES:
        raise DataError(f"{where}: role: got {role!r}; accepted: {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where}: content: got {type(content).__name__}; accepted: text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: content: not Unicode text ({error.reason}); mend or leave out the message"
        ) from error
    return Message(role=str(role), content=content, finish_reason=None if reason is None else str(reason))


def _row(conversation: Conversation) -> str:
    """As the readers of data/sources take it."""
    messages = [
        {name: value for name, value in asdict(message).items() if value is not None}
        for message in conversation.messages
    ]
    facts = {"id": conversation.id, "source": conversation.source, "answered_by": conversation.answered_by}
    return json.dumps({**facts, "messages": messages}, ensure_ascii=False)
