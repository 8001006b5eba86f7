# From logits to tokens: the one place that applies temperature, top-k and top-p and that draws. Target and drafter
# both come through here, since rejection sampling is lossless only for the two distributions as they were drawn from.

import math

import torch
from torch import Generator, Tensor

from drafters.errors import ConfigError
from drafters.types import Sampling

__all__ = ["check_sampling", "draw", "probs", "sample", "uniform"]


def check_sampling(sampling: Sampling, *, key: str = "sampling") -> None:
    """Raises ConfigError, naming `key`, for a setting outside its range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ConfigError(f"{key}.temperature: got {sampling.temperature}; accepted: 0 (greedy) or a positive number")
    if sampling.top_k < 0:
        raise ConfigError(f"{key}.top_k: got {sampling.top_k}; accepted: 0 (off) or a positive integer")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"{key}.top_p: got {sampling.top_p}; accepted: above 0, up to 1 (off)")


def probs(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that `sampling` makes of logits; float32, any leading shape, last axis sums to one.

    Order: temperature, top-k, top-p. Temperature 0 gives the one-hot argmax. Top-k keeps ties of the k-th logit;
    top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`, at least one.
    """
    if sampling.temperature == 0:
        best = logits_NV.argmax(-1, keepdim=True)
        return torch.zeros(logits_NV.shape, device=logits_NV.device).scatter_(-1, best, 1.0)
    scaled = logits_NV.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    result = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1:
        ordered, ids = result.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(mass_before >= sampling.top_p, 0.0)
        result = torch.zeros_like(result).scatter_(-1, ids, ordered / ordered.sum(-1, keepdim=True))
    return result


def uniform(shape: tuple[int, ...], generator: Generator | None, device: torch.device) -> Tensor:
    """Float64 uniforms in [0, 1): with 24 bits, tokens below 6e-8 could never be drawn."""
    return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)


def draw(probs_NV: Tensor, generator: Generator | None = None) -> Tensor:
    """One token id [N] per row of non-negative weights [N, V], which need not sum to one.

    Inverts the cumulative sum with one uniform a row. A token of weight zero is never drawn.
    """
    cdf_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    u_N1 = uniform((probs_NV.shape[0], 1), generator, probs_NV.device)
    return torch.searchsorted(cdf_NV, u_N1 * cdf_NV[:, -1:], right=True).squeeze(1).clamp_(max=probs_NV.shape[-1] - 1)


def sample(logits_NV: Tensor, sampling: Sampling, generator: Generator | None = None) -> Tensor:
    """One token id [N] per row of logits. Temperature 0 takes the argmax and builds no distribution."""
    if sampling.temperature == 0:
        return logits_NV.argmax(-1)
    return draw(probs(logits_NV, sampling), generator)
