# How conversations become training data: the settings of that, as conf/data/*.yaml spells them, the part that is held
# out, the examples of both parts, and where the target's states of them lie.

import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafters.cache_config import CaptureConfig, cache_folder
from drafters.cache_manifest import CacheKey
from drafters.chat import ChatEncoder, EncodeReport, encode_all
from drafters.errors import ConfigError, DataError
from drafters.prefetch import AUTO, check_prefetch
from drafters.progress import over
from drafters.spec import TargetSpec
from drafters.storage import Folder
from drafters.types import Conversation, Example

__all__ = ["CACHE", "ONLINE", "DataConfig", "encode_splits", "split_conversations", "states_place"]

CACHE, ONLINE = "cache", "online"  # where states come from


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How conversations become batches: at most `max_length` tokens each, `template_kwargs` for the chat template, a
    share `validation` held out where rows have no split. A step over all ranks has `batch_size` conversations, or, with
    `max_tokens`, those of similar length that fill so many tokens, padding included. `states`: the target's are read
    from a cache, or made in the step ("online") by a target on `target_device` (None: where the drafter trains).
    `prefetch`: batches read ahead by a thread; "auto" is 2 on a GPU and 0 on a CPU."""

    max_length: int = 1024
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    validation: float = 0.05
    seed: int = 0
    batch_size: int = 2
    max_tokens: int | None = None
    prefetch: int | str = AUTO
    states: str = CACHE
    target_device: str | None = None

    def __post_init__(self) -> None:
        if self.states not in (CACHE, ONLINE):
            raise ValueError(f"states: got '{self.states}'; accepted: {CACHE}, {ONLINE}")
        if self.target_device is not None and self.states != ONLINE:
            raise ValueError(
                f"target_device: got '{self.target_device}' with states={self.states}; it is for data=online"
            )
        if self.max_length < 2:
            raise ValueError(f"max_length: got {self.max_length}; accepted: 2 or more tokens")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation: got {self.validation}; accepted: a share from 0 to below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}; accepted: 0 to 2**63 - 1")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size}; accepted: 1 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens: got {self.max_tokens}; accepted: 1 or more, or null for batch_size")
        check_prefetch(self.prefetch)
        if self.states == ONLINE and self.prefetch != AUTO:
            raise ValueError(
                f"prefetch: got {self.prefetch} with states={self.states}; accepted: {AUTO}, since the target itself "
                "makes the next batch while the drafter learns"
            )


def split_conversations(
    conversations: Iterable[Conversation], *, validation: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation): those `validation` (a share) whose hash of seed and id is smallest are held out.

    So it does not depend on the order, and a conversation mostly stays on its side when others are added.
    """
    if not 0 <= validation < 1:
        raise ConfigError(f"validation: got {validation}; accepted: a share from 0 to below 1")
    everything = list(conversations)
    count = math.ceil(validation * len(everything))
    if count and count == len(everything):
        raise DataError(
            f"source: {len(everything)} conversation(s) cannot be split into training and validation; give more, or "
            "set validation to 0"
        )
    keys = [hashlib.sha256(f"{seed}/{c.source}/{c.id}".encode()).digest() for c in everything]
    held_out = set(sorted(range(len(everything)), key=keys.__getitem__)[:count])
    train = [c for i, c in enumerate(everything) if i not in held_out]
    return train, [everything[i] for i in sorted(held_out)]


def encode_splits(
    parts: tuple[list[Conversation], list[Conversation]], encoder: ChatEncoder, *, weights_hash: str | None
) -> tuple[dict[str, list[Example]], dict[str, EncodeReport]]:
    """Examples and reports of the splits `train` and `validation`, given as conversations.

    Warns of answers that say they are not those of the target with this hash, where it is known. Raises
    DataError when a split has conversations but no supervised token.
    """
    if weights_hash is not None:
        _warn_of_foreign_answers([conversation for part in parts for conversation in part], weights_hash)
    splits: dict[str, list[Example]] = {}
    reports: dict[str, EncodeReport] = {}
    for name, conversations in zip(("train", "validation"), parts, strict=True):
        reports[name] = EncodeReport()
        shown = over(conversations, f"tokenising ({name})", unit="conversations")
        splits[name] = encode_all(shown, encoder, report=reports[name]) if conversations else []
    return splits, reports


def states_place(
    spec: TargetSpec, splits: Mapping[str, Sequence[Example]], config: CaptureConfig, *, encoder: ChatEncoder
) -> tuple[CacheKey, Folder]:
    """The key of the cache of these examples under a target of this `spec`, and its folder, which need not be there."""
    key = CacheKey.of(
        spec,
        [example for split in splits.values() for example in split],
        template_hash=encoder.template_hash,
        max_length=encoder.max_length,
        codec=config.codec,
    )
    return key, cache_folder(config, key)


def _warn_of_foreign_answers(conversations: Sequence[Conversation], weights_hash: str) -> None:
    authors = {c.answered_by for c in conversations} - {None, weights_hash}
    if authors:
        count = sum(c.answered_by in authors for c in conversations)
        warnings.warn(
            f"source: another model (weights {min(filter(None, authors)):.12}) wrote the answers of {count} of "
            f"{len(conversations)} conversations, not this target ({weights_hash:.12}); a drafter learns best from the "
            "target's own: python -m data.regenerate",
            stacklevel=3,
        )
