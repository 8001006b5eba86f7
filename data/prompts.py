# Prompts for measuring, from the user turns of a source: the first turn of each, in the target's own chat template.

from collections.abc import Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

from data.sources import SourceConfig, load_splits, prompts
from drafters.errors import ConfigError, DataError
from drafters.types import Conversation, Message

if TYPE_CHECKING:
    from drafters.chat import ChatEncoder
    from drafters.decoding.measure import Prompt

__all__ = ["held_out_prompts", "source_prompts"]


def held_out_prompts(
    conversations: Sequence[Conversation], encoder: "ChatEncoder", *, num_prompts: int
) -> list["Prompt"]:
    """Prompts of `num_prompts` evenly spaced held-out conversations. Raises DataError when there are none."""
    if not conversations:
        raise DataError(
            "data.validation: no conversation is held out, but the best weights are chosen on such; give a share above "
            "0, or rows whose `split` is validation"
        )
    found = prompts(conversations)
    chosen = [found[i * len(found) // num_prompts] for i in range(min(num_prompts, len(found)))]
    return _encoded(chosen, encoder)


def source_prompts(
    source: SourceConfig, encoder: "ChatEncoder", *, split: str | None, num_prompts: int | None
) -> list["Prompt"]:
    """The first `num_prompts` (None = all) of each source, of the rows of `split` where rows have one, else of all.

    Raises ConfigError for an unknown split, DataError when there are none.
    """
    train, validation = load_splits(source, validation=0.0, seed=0)
    parts = {None: train + validation, "train": train, "validation": validation or train}
    if split not in parts:
        raise ConfigError(f"split: got '{split}'; accepted: train, validation, or null for all")
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(f"num_prompts: got {num_prompts}; accepted: 1 or more, or null for all")
    found = sorted(prompts(parts[split]), key=lambda pair: pair[0])
    by_source = groupby(found, key=lambda pair: pair[0])
    return _encoded([pair for _, pairs in by_source for pair in islice(pairs, num_prompts)], encoder)


def _encoded(found: Sequence[tuple[str, tuple[str, ...]]], encoder: "ChatEncoder") -> list["Prompt"]:
    return [(name, encoder.prompt([Message(role="user", content=turns[0])])) for name, turns in found]
