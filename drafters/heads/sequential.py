# Sequential heads: a bias on the draft logits from the tokens already drafted in the block. A head gives the low-rank
# factor of the bias; its last matrix W_2 is multiplied in the loss, together with the vocabulary rows. A new head is
# one class here (or anywhere: the drafter's config names it by `_target_`).

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.spec import TargetSpec

__all__ = ["GatedHead", "MarkovHead", "RNNHead", "RankConfig", "SequentialHead", "teacher_forced"]


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """`rank` of the bias, and width of a head's state; 256 is published for targets of 4B parameters and more."""

    rank: int = 64

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: got {self.rank}; accepted: 1 or more (for no head, sequential: null)")


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

    Config = RankConfig

    def __init__(self, config: RankConfig, spec: TargetSpec, num_draft: int) -> None:
        super().__init__()
        self.config = config
        self.markov_w1, self.markov_w2 = _factors(config.rank, spec, num_draft)

    def start(self, num_rows: int) -> None:
        """No state."""

    def step(self, state: Tensor | None, embedded_NR: Tensor, hidden_ND: Tensor) -> tuple[None, Tensor]:
        """The embedding is the factor."""
        return None, embedded_NR


class GatedHead(SequentialHead):
    """B_k = (W_1[x_{k-1}] * sigmoid(W [h_k; W_1[x_{k-1}]] + b)) W_2 (2607.05147): the backbone says how much of the
    previous token's bias applies. W_2 starts at zero, the gate half open."""

    Config = RankConfig

    def __init__(self, config: RankConfig, spec: TargetSpec, num_draft: int) -> None:
        super().__init__()
        self.config = config
        self.markov_w1, self.markov_w2 = _factors(config.rank, spec, num_draft)
        self.gate_proj = nn.Linear(spec.hidden_size + config.rank, config.rank)
        nn.init.normal_(self.gate_proj.weight, std=0.02)
        nn.init.zeros_(self.gate_proj.bias)

    def start(self, num_rows: int) -> None:
        """No state."""

    def step(self, state: Tensor | None, embedded_NR: Tensor, hidden_ND: Tensor) -> tuple[None, Tensor]:
        """The gated embedding; the gate is computed in float32 or wider."""
        inputs = torch.cat([hidden_ND.to(embedded_NR.dtype), embedded_NR], dim=-1)
        return None, embedded_NR * torch.sigmoid(self.gate_proj(inputs))


class RNNHead(SequentialHead):
    """B_k = W_2^T tanh(W_o z_k) (2607.05147), with z_k = [s_{k-1}; W_1[x_{k-1}]; h_k], a gate g = sigmoid(W_g z_k), the
    state s_k = g * s_{k-1} + (1 - g) * tanh(W_c z_k), and s_0 = 0: a bias from all tokens drafted so far. W_g, W_c, W_o
    are one joint projection; W_2 starts at zero."""

    Config = RankConfig

    def __init__(self, config: RankConfig, spec: TargetSpec, num_draft: int) -> None:
        super().__init__()
        self.config = config
        self.markov_w1, self.markov_w2 = _factors(config.rank, spec, num_draft)
        self.joint_proj = nn.Linear(2 * config.rank + spec.hidden_size, 3 * config.rank)
        nn.init.normal_(self.joint_proj.weight, std=0.02)
        nn.init.zeros_(self.joint_proj.bias)

    def start(self, num_rows: int) -> Tensor:
        """Zeros [N, R]."""
        return self.markov_w1.weight.new_zeros(num_rows, self.config.rank)

    def step(self, state: Tensor | None, embedded_NR: Tensor, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The state after this token, and the factor; in float32 or wider."""
        assert state is not None
        inputs = torch.cat([state, embedded_NR, hidden_ND.to(state.dtype)], dim=-1)
        gate, candidate, output = self.joint_proj(inputs).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)


def _factors(rank: int, spec: TargetSpec, num_draft: int) -> tuple[nn.Embedding, nn.Linear]:
    """W_1, random, and W_2, zero."""
    first, second = nn.Embedding(spec.vocab_size, rank), nn.Linear(rank, num_draft, bias=False)
    nn.init.normal_(first.weight)
    nn.init.zeros_(second.weight)
    return first, second
