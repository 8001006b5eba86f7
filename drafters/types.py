# The nouns that travel between rooms. Shape letters on tensor names: B batch, T time, L aux layers, D hidden,
# V vocabulary, A anchors, G block size, N heads, H head dim, R rank, S drafted slots. Nothing here computes.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "SIGNALS",
    "Batch",
    "Conversation",
    "Example",
    "Losses",
    "Message",
    "Needs",
    "Proposal",
    "Sampling",
    "States",
    "StepOutput",
]

# What tells how likely a draft is to stand: what the drafter's own head says, or its likeliest token's probability.
SIGNALS = ("confidence", "likeliest")


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn. `finish_reason` says how a generated answer ended: "stop", "length" (cut), or None (unknown)."""

    role: str
    content: str
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order; `id` is stable across runs, `source` names the data source for breakdowns,
    `answered_by` is the weights hash of the target that wrote the answers (None: not known)."""

    id: str
    messages: tuple[Message, ...]
    source: str = ""
    answered_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Example:
    """A tokenised conversation. `loss_mask_T[t]` is True when token t itself is supervised (assistant text,
    end-of-turn included), so a prediction made at t-1 for token t counts where `loss_mask_T[t]`."""

    id: str
    source: str
    tokens_T: Tensor  # int64
    loss_mask_T: Tensor  # bool
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Target states that a drafter reads. Layer k means the output of decoder layer k, 0-based
    (= HF `hidden_states[k + 1]`); `last` is the state after the final norm, which losses read where a prediction is
    supervised; `last_input`: the drafter itself reads it, at every position."""

    layer_ids: tuple[int, ...] = ()
    last: bool = False
    last_input: bool = False


@dataclass(frozen=True, kw_only=True)
class States:
    """`aux_BTLD` holds the layers in the order of `Needs.layer_ids`; None where not asked for."""

    aux_BTLD: Tensor | None = None
    last_BTD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one cached target pass returns: logits of every input slot, and the states asked for."""

    logits_BSV: Tensor
    aux_BSLD: Tensor | None = None
    last_BSD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded conversations with their target states; offline and online training produce the same.

    `lse_BT[b, t]` is the target's log-sum-exp over the full vocabulary of the logits made from `last_BTD[b, t]`
    (the prediction of token t+1), in float32, defined where `loss_mask_BT[b, t+1]`. `seeds`, one a conversation, are
    the only source of randomness a loss may use (anchors, noise): a conversation's part of the sums is the same in
    every batch, so that neither resuming nor the number of processes changes anything. `progress` is the share of the
    training that is done, for weights that follow a schedule; 1 in validation.
    """

    tokens_BT: Tensor  # int64, padded with 0
    lengths_B: Tensor  # int64
    loss_mask_BT: Tensor  # bool, False on padding
    aux_BTLD: Tensor | None
    last_BTD: Tensor
    lse_BT: Tensor  # float32
    layer_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sample_ids: tuple[int, ...] = ()
    progress: float = 1.0

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The same batch in memory that the current GPU reads by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {k: change(v) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Batch(**changed)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Sums over this batch, not means: the trainer divides by the global count across ranks and accumulation.

    `total` carries the gradient. `terms` are detached sums of each loss term. `metrics` maps a name to a detached
    (sum, count) pair that may be added up over batches and ranks; a vector pair is one entry per draft position.
    """

    total: Tensor
    count: Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, the same for target and drafter. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0
    and `repetition_penalty` 1 are off. Applied in the order of transformers: repetition penalty (on logits of tokens
    that the text holds already), temperature, top-k, top-p, min-p (a share of the best token's probability)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a drafter proposes after each row's anchor.

    `parents_S` is None for a chain, else the index of each slot's parent (-1 = the anchor), the same in every row;
    parents come before their children, siblings in the order in which they were drawn. `lengths_B` counts the valid
    slots of each row. `probs_BSV` holds, for each slot, the distribution that it was drawn from, over `support_V`
    (token ids, or None = the whole vocabulary); for a later sibling that is the one before its earlier siblings were
    taken out. None where proposals are points: at temperature 0, and from drafters that do not draw. `confidence_BS`
    is the probability that slot k survives given that the slots before it did, as the drafter says; `likeliest_BS` the
    largest probability of the slot's distribution. Both may depend on tokens before k only.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    parents_S: tuple[int, ...] | None = None
    probs_BSV: Tensor | None = None
    support_V: Tensor | None = None
    confidence_BS: Tensor | None = None
    likeliest_BS: Tensor | None = None

    def signal(self, name: str) -> Tensor:
        """What it says of its drafts, [B, S], by one of SIGNALS: "likeliest", or "confidence", which is the likeliest
        where the drafter says nothing else; 1, the largest probability of a point, where it has neither."""
        said = self.confidence_BS if name == "confidence" and self.confidence_BS is not None else self.likeliest_BS
        return torch.ones(self.tokens_BS.shape, device=self.tokens_BS.device) if said is None else said

    def cut(self, lengths_B: Tensor) -> "Proposal":
        """The same chain with `lengths_B` valid slots a row, and no more slots than the longest row has."""
        width = int(lengths_B.max()) if len(lengths_B) else 0
        if width == self.tokens_BS.shape[1]:
            return replace(self, lengths_B=lengths_B)
        return replace(
            self,
            tokens_BS=self.tokens_BS[:, :width],
            lengths_B=lengths_B,
            probs_BSV=None if self.probs_BSV is None else self.probs_BSV[:, :width],
            confidence_BS=None if self.confidence_BS is None else self.confidence_BS[:, :width],
            likeliest_BS=None if self.likeliest_BS is None else self.likeliest_BS[:, :width],
        )
