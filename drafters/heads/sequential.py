# Sequential heads: a bias on the draft logits from the tokens already drafted in the block. A head gives the low-rank
# factor of the bias; its last matrix W_2 is multiplied in the loss, together with the vocabulary rows. A new head is
# one class here (or anywhere: the drafter's config names it by `_target_`).

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.spec import TargetSpec

__all__ = ["MarkovHead", "SequentialHead", "teacher_forced"]


class SequentialHead(nn.Module, ABC):
    """Built as `Cls(config, spec, num_draft)`, with V' = `num_draft`. Parameters common to all kinds, by the names
    that engines know: `markov_w1` [V, R], an embedding of the previous token, and `markov_w2` [V', R]."""

    markov_w1: nn.Embedding
    markov_w2: nn.Linear

    @abstractmethod
    def start(self, num_rows: int) -> Tensor | None:
        """The state before the first draft; None for a head without one."""

    @abstractmethod
    def step(self, state: Tensor | None, embedded_NR: Tensor, hidden_ND: Tensor) -> tuple[Tensor | None, Tensor]:
        """New state and bias factor [N, R], from W_1[x_{k-1}] (float32) and the backbone's state at slot k (in the
        dtype of products)."""


def teacher_forced(head: SequentialHead, embedded_AGR: Tensor, hidden_AGD: Tensor) -> Tensor:
    """Bias factors [A, G, R] with the true previous tokens, left to right."""
    state = head.start(len(embedded_AGR))
    if state is None:
        return head.step(None, embedded_AGR, hidden_AGD)[1]
    factors = []
    for embedded, hidden in zip(embedded_AGR.unbind(1), hidden_AGD.unbind(1), strict=True):
        state, factor = head.step(state, embedded, hidden)
        factors.append(factor)
    return torch.stack(factors, dim=1)


class MarkovHead(SequentialHead):
    """B_k = W_1[x_{k-1}] W_2 (2607.05147): what tends to follow the previous token. W_2 starts at zero."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`rank` of the bias; 256 is published for targets of 4B parameters and more."""

        rank: int = 64

        def __post_init__(self) -> None:
            if self.rank < 1:
                raise ValueError(f"rank: got {self.rank}; accepted: 1 or more (for no head, sequential: null)")

    def __init__(self, config: Config, spec: TargetSpec, num_draft: int) -> None:
        super().__init__()
        self.config = config
        self.markov_w1 = nn.Embedding(spec.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, num_draft, bias=False)
        nn.init.normal_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)

    def start(self, num_rows: int) -> None:
        """No state."""

    def step(self, state: Tensor | None, embedded_NR: Tensor, hidden_ND: Tensor) -> tuple[None, Tensor]:
        """The embedding is the factor."""
        return None, embedded_NR
