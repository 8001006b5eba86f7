# The reduced draft vocabulary of a trained head: counted when it is new, read back from its tensors afterwards, never
# counted twice. Every head holds it as `vocab` (None = the target's whole vocabulary): it is stored as `vocab.d2t`.

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.spec import TargetSpec
from drafters.vocab import DraftVocab, count_vocab, coverage

if TYPE_CHECKING:
    from drafters.heads.base import Drafter
    from drafters.heads.start import Start

__all__ = ["STORED", "check_vocab", "new_vocab", "stored_vocab", "vocab_of"]

STORED = "vocab.d2t"  # its name among a drafter's tensors

logger = logging.getLogger(__name__)


def new_vocab(size: int | None, spec: TargetSpec, start: "Start") -> DraftVocab | None:
    """That of the drafter that training starts from, else the `size` most frequent tokens of the training text; None
    (the whole vocabulary) for no size. Raises ConfigError when the one to start from has another size."""
    if start.warm is not None:
        return vocab_of(start.warm, size, spec)
    if size is None:
        return None
    tokens = start.supervised_tokens()
    vocab = count_vocab(tokens, size=size, vocab_size=spec.vocab_size, always=spec.eos_ids)
    logger.info("draft vocabulary: %d tokens hold %.1f %% of the training text", size, 100 * coverage(tokens, vocab))
    return vocab


def vocab_of(drafter: "Drafter", size: int | None, spec: TargetSpec) -> DraftVocab | None:
    """The draft vocabulary of another drafter, for one of this `size`. Raises ConfigError when it has another size."""
    ids_V = drafter.state_dict().get(STORED)
    known = None if ids_V is None else len(ids_V)
    if size != known:
        raise ConfigError(
            f"drafter.draft_vocab_size: got {size}, but the drafter of warm_start has {known}, and its vocabulary "
            f"comes with it; accepted: drafter.draft_vocab_size={'null' if known is None else known}"
        )
    return None if ids_V is None else DraftVocab(ids_V, num_full=spec.vocab_size)


def stored_vocab(size: int | None, spec: TargetSpec, tensors: Mapping[str, Tensor]) -> DraftVocab | None:
    """The draft vocabulary among stored `tensors`. Raises CheckpointError where that is not what `size` says."""
    if (size is None) != (STORED not in tensors):
        raise CheckpointError(
            f"{STORED}: {'present' if STORED in tensors else 'missing'}, but draft_vocab_size is {size}; "
            "the folder is damaged, or its config was edited"
        )
    return None if size is None else DraftVocab(tensors[STORED], num_full=spec.vocab_size)


def check_vocab(size: int | None, spec: TargetSpec, vocab: DraftVocab | None) -> None:
    """Raises ConfigError unless `vocab` has the `size` of the config, and ids of this target."""
    given = None if vocab is None else vocab.size
    if given != size:
        raise ConfigError(
            f"drafter.draft_vocab_size: got {size} with a draft vocabulary of {given}; "
            "they must agree (count_vocab makes one from the training tokens)"
        )
    if vocab is not None and vocab.num_full != spec.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size: the draft vocabulary was counted for {vocab.num_full} target tokens, "
            f"this target has {spec.vocab_size}"
        )
