# Prompts for measuring, from the conversations of a source: what stands before the first answer, in the target's own
# chat template. Later turns are not measured.

import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

from data.sources import DataConfig, SourceConfig, load_part, load_splits, prompts
from drafters.chat import ChatEncoder, EncodeError
from drafters.errors import ConfigError, DataError
from drafters.types import Conversation, Message

if TYPE_CHECKING:
    from drafters.decoding.measure import Prompt

__all__ = ["Trained", "held_out_prompts", "source_prompts", "trained_on"]

Trained = frozenset[tuple[Message, ...]]


def held_out_prompts(
    conversations: Sequence[Conversation], encoder: ChatEncoder, *, num_prompts: int, room: int
) -> list["Prompt"]:
    """Prompts of `num_prompts` evenly spaced held-out conversations, without those of more than `room` tokens.

    Raises DataError when there are none.
    """
    if not conversations:
        raise DataError(
            "data.validation: no conversation is held out, but the best weights are chosen on such; give a share above "
            "0, or rows whose `split` is validation"
        )
    found = prompts(conversations)
    chosen = [found[i * len(found) // num_prompts] for i in range(min(num_prompts, len(found)))]
    return _encoded(chosen, encoder, room=room)


def trained_on(source: SourceConfig, *, own: SourceConfig, data: DataConfig) -> Trained | None:
    """The conversations that a run with the source `own` trained on, when `source` shares a file or the hub data set
    with it; else None."""
    shared = {path.resolve() for path in source.paths} & {path.resolve() for path in own.paths}
    if not shared and (source.hub_id is None or source.hub_id != own.hub_id):
        return None
    train, _ = load_splits(own, validation=data.validation, seed=data.seed)
    return frozenset(conversation.messages for conversation in train)


def source_prompts(
    source: SourceConfig,
    encoder: ChatEncoder,
    *,
    split: str | None,
    num_prompts: int | None,
    room: int,
    trained: Trained | None = None,
) -> tuple[list["Prompt"], str]:
    """The first `num_prompts` (None = all) of each source without those of more than `room` tokens, and in words which
    part of the rows they come from.

    `split` ("train", "validation", None = all) counts where rows have one, and where `trained` tells the two apart:
    "validation" is then what was not trained on. Raises ConfigError for an unknown split, DataError when there are no
    prompts.
    """
    conversations, told = load_part(source, split)
    used = f"{split}, by the rows' own split" if told else "all rows"
    if trained is not None and split is not None:
        conversations = [c for c in conversations if (c.messages in trained) == (split == "train")]
        used = f"{split}, as the run split it"
        if not conversations:
            raise DataError(f"split: no prompt of the run's own source belongs to {split}; accepted: null for all rows")
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(f"num_prompts: got {num_prompts}; accepted: 1 or more, or null for all")
    found = sorted(prompts(conversations), key=lambda pair: pair[0])
    by_source = groupby(found, key=lambda pair: pair[0])
    chosen = [pair for _, pairs in by_source for pair in islice(pairs, num_prompts)]
    return _encoded(chosen, encoder, room=room), used


def _encoded(found: Sequence[tuple[str, tuple[Message, ...]]], encoder: ChatEncoder, *, room: int) -> list["Prompt"]:
    """Warns of prompts that are left out. Raises DataError when all are."""
    made: list[Prompt] = []
    left_out: Counter[str] = Counter()
    for name, messages in found:
        try:
            tokens = encoder.prompt(messages)
        except EncodeError as error:
            left_out[error.reason] += 1
            continue
        if len(tokens) > room:
            left_out[f"longer than the {max(room, 0)} tokens that max_new_tokens leaves of the target's positions"] += 1
            continue
        made.append((name, tokens))
    counts = "; ".join(f"{count} of {len(found)} left out: {reason}" for reason, count in left_out.items())
    if not made:
        raise DataError(f"prompts: {counts}; lower max_new_tokens, or give other prompts")
    if counts:
        warnings.warn(f"prompts: {counts}", stacklevel=3)
    return made
