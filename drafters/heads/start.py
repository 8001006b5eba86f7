# What a new drafter may begin from: the target's weights, the training text, and a few of its states. Everything is
# made only when a drafter asks for it.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.batches import StateSource, collate
from drafters.errors import ConfigError
from drafters.types import Batch, Example, Needs

if TYPE_CHECKING:
    from drafters.heads.base import Drafter
    from drafters.target import FrozenTarget

__all__ = ["Start", "check_block_size"]

SAMPLE_SIZE = 8  # conversations that scales are measured on


@dataclass(frozen=True, kw_only=True)
class Start:
    """`examples` are the training conversations, `states` where their states lie, at `indices`; `warm` is a drafter
    whose draft vocabulary the new one has to share."""

    target: "FrozenTarget"
    examples: Sequence[Example]
    states: StateSource
    indices: Sequence[int]
    warm: "Drafter | None" = None

    def supervised_tokens(self) -> list[Tensor]:
        """The tokens [n] of each conversation that a drafter will have to draft."""
        return [example.tokens_T[example.loss_mask_T] for example in self.examples]

    def supervised_pairs(self) -> Tensor:
        """Pairs [P, 2] of a token and the supervised token after it."""
        pairs = []
        for example in self.examples:
            both = torch.stack([example.tokens_T[:-1], example.tokens_T[1:]], dim=1)
            pairs.append(both[example.loss_mask_T[1:]])
        return torch.cat(pairs)

    def sample(self, needs: Needs) -> Batch:
        """A batch of a few training conversations, the same at every call, on the CPU."""
        few = list(self.indices[:: max(1, len(self.indices) // SAMPLE_SIZE)][:SAMPLE_SIZE])
        return collate(self.states.read(few, needs), layer_ids=needs.layer_ids, seeds=range(len(few))).to("cpu")

    def target_tensors(self) -> Mapping[str, Tensor]:
        """The target's weights by name."""
        return self.target.tensors()


def check_block_size(examples: Sequence[Example], block_size: int) -> None:
    """Raises ConfigError when no answer is long enough for a block of `block_size` drafts after an anchor."""
    longest = max((_longest_run(example.loss_mask_T) for example in examples), default=0)
    if block_size >= longest:
        raise ConfigError(
            f"drafter.block_size: got {block_size}, but the longest of {len(examples)} training answers has "
            f"{longest} supervised tokens in a row, and a block needs one more than its size; accepted: 1 to "
            f"{max(1, longest - 1)}, or give conversations with longer answers"
        )


def _longest_run(mask_T: Tensor) -> int:
    """The most supervised tokens in a row."""
    counts_T = (~mask_T).cumsum(0)[mask_T]
    return int(counts_T.bincount().max()) if len(counts_T) else 0
