# The confidence head: the probability that draft k is accepted, given that the ones before it were.

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ConfidenceHead", "confidence_loss"]


class ConfidenceHead(nn.Module):
    """logit c_k = w^T [h_k ; W_1[x_{k-1}]] + b (2607.05147). It sees tokens before k only, so that a schedule that
    reads it stays lossless. Computed in float32 or wider, as engines do."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden_ND: Tensor, embedded_NR: Tensor | None) -> Tensor:
        """Logits [...] of states after the drafter's final norm and of the previous tokens' Markov embeddings."""
        parts = [hidden_ND] if embedded_NR is None else [hidden_ND, embedded_NR]
        inputs = torch.cat([part.to(self.proj.weight.dtype) for part in parts], dim=-1)
        return F.linear(inputs, self.proj.weight, self.proj.bias).squeeze(-1)


def confidence_loss(logits_N: Tensor, accept_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted sum of binary cross-entropies against the analytic acceptance rate 1 - TV (a constant label)."""
    label_N = accept_N.detach().clamp(0.0, 1.0).to(logits_N.dtype)
    return F.binary_cross_entropy_with_logits(logits_N, label_N, weight=weights_N, reduction="sum")
