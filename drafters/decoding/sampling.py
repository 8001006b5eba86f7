# From logits to tokens: the one place that applies repetition penalty, temperature, top-k, top-p and min-p, and that
# draws. Target and drafter both come through here, since rejection sampling is lossless only for the two distributions
# as they were drawn from. Every row has random numbers of its own, so that it draws the same in any batch.

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from drafters.errors import ConfigError
from drafters.types import Sampling

__all__ = [
    "Draws",
    "RowStreams",
    "Uniforms",
    "check_sampling",
    "draw",
    "effective_sampling",
    "penalised",
    "probs",
    "sample",
]


LEAST_TEMPERATURE = 1e-3  # logits divided by much less leave the range of float32


def check_sampling(sampling: Sampling, *, key: str = "sampling") -> None:
    """Raises ConfigError, naming `key`, for a setting outside its range."""
    prefix = f"{key}." if key else ""
    if not (sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature < math.inf):
        raise ConfigError(
            f"{prefix}temperature: got {sampling.temperature}; accepted: 0 (greedy) or {LEAST_TEMPERATURE} and more"
        )
    if sampling.top_k < 0:
        raise ConfigError(f"{prefix}top_k: got {sampling.top_k}; accepted: 0 (off) or a positive integer")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"{prefix}top_p: got {sampling.top_p}; accepted: above 0, up to 1 (off)")
    if not 0 <= sampling.min_p <= 1:
        raise ConfigError(f"{prefix}min_p: got {sampling.min_p}; accepted: 0 (off) to 1")
    if not (math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0):
        raise ConfigError(
            f"{prefix}repetition_penalty: got {sampling.repetition_penalty}; accepted: 1 (off) or a positive number"
        )


def effective_sampling(generation_config: Any, asked: Mapping[str, float | None]) -> Sampling:
    """The settings that act. `asked` gives each field of Sampling a value or None: what the target's
    `generation_config` says; of top-k, top-p and min-p only where the temperature is None as well, else they are off.
    What it does not say is off (transformers itself would take top-k 50); without `do_sample` it is greedy. Warns of
    settings that greedy decoding ignores. Raises ConfigError for a setting outside its range.
    """
    off = Sampling(temperature=1.0)
    stated = {f.name: getattr(generation_config, f.name, None) for f in fields(Sampling)}
    if not generation_config.do_sample:
        stated["temperature"] = 0.0
    follows = asked["temperature"] is None
    values: dict[str, Any] = {}
    for name, value in asked.items():
        if value is None and (follows or name == "repetition_penalty"):
            value = stated[name]
        values[name] = getattr(off, name) if value is None else value
    check_sampling(Sampling(**values), key="")
    if values["temperature"] == 0:
        for name in ("top_k", "top_p", "min_p"):
            if asked[name] not in (None, getattr(off, name)):
                warnings.warn(f"{name}={asked[name]} is ignored: temperature 0 is greedy decoding", stacklevel=2)
            values[name] = getattr(off, name)
    return Sampling(**{**values, "top_k": int(values["top_k"])})


def probs(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that `sampling` makes of (penalised) logits; float32, any leading shape, last axis sums to one.

    Order: temperature, top-k, top-p, min-p. Temperature 0 gives the one-hot argmax. Top-k keeps ties of the k-th logit;
    top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`, at least one; min-p keeps tokens
    of at least `min_p` times the best one's probability.
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
    if sampling.min_p > 0:
        least = sampling.min_p * result.amax(-1, keepdim=True)
        result = result.masked_fill(result < least, 0.0)
        result = result / result.sum(-1, keepdim=True)
    return result


def penalised(logits_NV: Tensor, seen_NV: Tensor | None, sampling: Sampling) -> Tensor:
    """Logits with the repetition penalty (Keskar 1909.05858): those of `seen_NV` (bool) are divided by it where they
    are positive and multiplied by it where they are not. `seen_NV` None: as they are."""
    if seen_NV is None:
        return logits_NV
    penalty = sampling.repetition_penalty
    return torch.where(seen_NV, torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty), logits_NV)


def draw(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One token id [N] per row of non-negative weights [N, V], which need not sum to one.

    Inverts the cumulative sum at `uniforms_N`, numbers in [0, 1). A token of weight zero is drawn only if all are zero.
    """
    cdf_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    # The product may round up to the total, beyond which only tokens of weight zero stand.
    point_N1 = torch.minimum(uniforms_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    return torch.searchsorted(cdf_NV, point_N1, right=True).squeeze(1).clamp_(max=probs_NV.shape[-1] - 1)


def sample(logits_NV: Tensor, sampling: Sampling, uniforms_N: Tensor | None = None) -> Tensor:
    """One token id [N] per row of (penalised) logits. Temperature 0 takes the argmax and builds no distribution."""
    if sampling.temperature == 0 or uniforms_N is None:
        return logits_NV.argmax(-1)
    return draw(probs(logits_NV, sampling), uniforms_N)


class Uniforms(NamedTuple):
    """The random numbers of one round, float64 in [0, 1): one a draft to draw it, one a draft to accept it, and one for
    the token that the target adds."""

    draft_BS: Tensor
    accept_BS: Tensor
    last_B: Tensor


class RowStreams:
    """Random numbers for every row of a batch, made of its own seed and the count of calls it has seen: a row gets the
    same ones whoever shares its batch."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._rows = [[seed, 0] for seed in seeds]
        self._device = device
        self._generator = Generator()

    def numbers(self, count: int) -> Tensor:
        """[B, count], float64 in [0, 1): with the 24 bits of float32, tokens below 6e-8 could never be drawn."""
        drawn = []
        for row in self._rows:
            digest = hashlib.blake2b(f"{row[0]}/{row[1]}".encode(), digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(digest) >> 1)
            drawn.append(torch.rand(count, generator=self._generator, dtype=torch.float64))
            row[1] += 1
        return torch.stack(drawn).to(self._device)

    def round(self, slots: int) -> Uniforms:
        """The numbers of a round of up to `slots` drafts."""
        numbers_BN = self.numbers(2 * slots + 1)
        return Uniforms(numbers_BN[:, :slots], numbers_BN[:, slots:-1], numbers_BN[:, -1])

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows."""
        self._rows = [self._rows[row] for row in rows]

    def join(self, other: "RowStreams") -> None:
        """Take in other rows, behind one's own."""
        self._rows += other._rows


class Draws:
    """Draws the drafts of one round for a session. `uniforms_BS` has a number for every row and slot, None at
    temperature 0; `seen_BV` (bool) says which tokens a row's text holds, None without a repetition penalty."""

    def __init__(self, sampling: Sampling, uniforms_BS: Tensor | None = None, seen_BV: Tensor | None = None) -> None:
        self.sampling, self.uniforms_BS = sampling, uniforms_BS
        self.seen_BV = None if seen_BV is None else seen_BV.clone()
        self._slot = 0

    def draft(self, logits_BV: Tensor, support_V: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The tokens [B] of the next slot, and the distribution over `support_V` that they were drawn from (None at
        temperature 0). Call it once a slot, in order: a drafted token counts as seen by the slots after it."""
        rows_B = torch.arange(len(logits_BV), device=logits_BV.device)
        if self.seen_BV is not None:
            seen_BV = self.seen_BV if support_V is None else self.seen_BV[:, support_V]
            logits_BV = penalised(logits_BV, seen_BV, self.sampling)
        dist_BV = None
        if self.uniforms_BS is None:
            token_B = logits_BV.argmax(-1)
        else:
            dist_BV = probs(logits_BV, self.sampling)
            token_B = draw(dist_BV, self.uniforms_BS[:, self._slot])
        if support_V is not None:
            token_B = support_V[token_B]
        if self.seen_BV is not None:
            self.seen_BV[rows_B, token_B] = True
        self._slot += 1
        return token_B, dist_BV
