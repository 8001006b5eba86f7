# What is measured: conversations whose answers the target gives itself, turn by turn. Later prompts are made when the
# answers before them are there, by whoever knows the chat template; here they are a function.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Dialogue"]


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A conversation to be answered turn by turn.

    `encode(answers)` gives the prompt [T] (int64) of turn number `len(answers)`, of `num_turns`, from the token ids of
    the answers before; it raises EncodeError when the chat template refuses. `key` tells dialogues of the same content
    (source, text, system prompt, template and its settings) from others.
    """

    source: str
    key: str
    num_turns: int
    encode: Callable[[Sequence[Sequence[int]]], Tensor]
