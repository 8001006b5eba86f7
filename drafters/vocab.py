# The draft vocabulary: a subset of the target's tokens on which a drafter's logits live. It is counted once, stored
# with the drafter (`vocab.d2t`), and never rebuilt. Draft ids ascend with target ids.

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from drafters.errors import ConfigError
from drafters.progress import over

__all__ = ["DraftVocab", "check_vocab_size", "count_vocab", "coverage"]


class DraftVocab(nn.Module):
    """The target ids of the draft ids 0..V'-1, ascending; `num_full` is the target's vocabulary size. A module without
    parameters, so that the ids are stored, moved and loaded with the drafter that holds it (as `d2t`).

    Raises ConfigError when the ids are not ascending, distinct and inside the target's vocabulary.
    """

    d2t: Tensor
    id_to_draft_V: Tensor

    def __init__(self, ids_V: Tensor, *, num_full: int) -> None:
        super().__init__()
        ids, self.num_full = ids_V.to(torch.int64), num_full
        if ids.dim() != 1 or len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()):
            raise ConfigError(
                f"draft vocabulary: got ids of shape {list(ids.shape)}; accepted: ascending, distinct ids"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= num_full:
            span = f"{int(ids[0])}..{int(ids[-1])}"
            raise ConfigError(f"draft vocabulary: ids {span} leave the target's vocabulary 0..{num_full - 1}")
        self.register_buffer("d2t", ids)
        self.register_buffer("id_to_draft_V", _inverse(ids, num_full), persistent=False)
        self.register_load_state_dict_post_hook(_look_up_loaded)

    @property
    def size(self) -> int:
        """Number of draft tokens, V'."""
        return len(self.d2t)

    @property
    def ids_V(self) -> Tensor:
        """int64 [V']: absolute target ids (engines that want offsets subtract arange)."""
        return self.d2t

    @property
    def t2d(self) -> Tensor:
        """bool [V]: whether a target id has a draft id."""
        return self.id_to_draft_V >= 0

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, -1 where there is none."""
        return self.id_to_draft_V[tokens]


def _inverse(ids_V: Tensor, num_full: int) -> Tensor:
    """int64 [V]: the draft id of each target id, -1 where there is none."""
    inverse_V = torch.full((num_full,), -1, dtype=torch.int64, device=ids_V.device)
    inverse_V[ids_V] = torch.arange(len(ids_V), device=ids_V.device)
    return inverse_V


def _look_up_loaded(vocab: DraftVocab, _: Any) -> None:
    # Loading writes into the tensor in place; another tensor tells who gathered rows by the old ids.
    vocab.d2t = vocab.d2t.clone()
    vocab.id_to_draft_V = _inverse(vocab.d2t, vocab.num_full)


def check_vocab_size(size: int, vocab_size: int, *, always: Iterable[int] = ()) -> list[int]:
    """The ids that have to be in, ascending. Raises ConfigError when `size` does not hold them, or is not less than
    all: engines take a map of all tokens for none."""
    forced = sorted({int(i) for i in always})
    if not max(1, len(forced)) <= size < vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size: got {size}; accepted: {max(1, len(forced))} to {vocab_size - 1}, or null for "
            f"all {vocab_size} of the target"
        )
    return forced


def count_vocab(tokens: Iterable[Tensor], *, size: int, vocab_size: int, always: Iterable[int] = ()) -> DraftVocab:
    """The `size` most frequent ids in `tokens` (int64 tensors of any shape); `always` (end-of-turn ids) are in
    whatever their count; ties and unseen ids go by id. Raises ConfigError when `size` does not fit.
    """
    forced = check_vocab_size(size, vocab_size, always=always)
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for part in over(tokens, "counting the draft vocabulary", unit="conversations"):
        counts_V += torch.bincount(part.flatten().cpu(), minlength=vocab_size)
    counts_V[forced] = torch.iinfo(torch.int64).max
    ids_V = counts_V.sort(descending=True, stable=True).indices[:size].sort().values
    return DraftVocab(ids_V, num_full=vocab_size)


def coverage(tokens: Iterable[Tensor], vocab: DraftVocab) -> float:
    """Share of `tokens` that the draft vocabulary holds; 0.0 when there are none."""
    held = total = 0
    inside_V = vocab.t2d.cpu()
    for part in tokens:
        held += int(inside_V[part.flatten().cpu()].sum())
        total += part.numel()
    return held / total if total else 0.0
