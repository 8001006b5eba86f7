# From what a head made of each anchor to its `Losses`: the same rows, weights, labels and metrics for every family.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.heads.anchors import Anchors
from drafters.heads.block_metrics import block_metrics
from drafters.heads.calibration_metrics import histogram
from drafters.heads.confidence import confidence_loss
from drafters.losses import DistillInput, LossWeights, distill, position_weights
from drafters.types import Batch, Losses
from drafters.vocab import DraftVocab
from drafters.vocab_products import Workspace

if TYPE_CHECKING:
    from torch import nn

    from drafters.target import TargetHead

__all__ = ["Blocks", "Distillation", "no_anchors"]


@dataclass(kw_only=True)
class Blocks:
    """What a head made of A anchors: G states each after its final norm, in the dtype of products.

    Draft logits are the target's output projection of `hidden_AGD`, plus `bias_AGR` times `bias_weight_VR`. With `own`
    output projections [V', D] they are those of the states instead: one for all slots, or one for each.
    `weights_G` are the slots' weights in the loss, None = exp(-(k - 1) / gamma). `confidence_AG` are logits of a
    confidence head.
    """

    hidden_AGD: Tensor
    bias_AGR: Tensor | None = None
    bias_weight_VR: Tensor | None = None
    own: Sequence[Tensor] = ()
    weights_G: Tensor | None = None
    confidence_AG: Tensor | None = None


def no_anchors(module: "nn.Module", device: torch.device) -> Losses:
    """The loss of a batch without an anchor: zero, and zero gradients for every parameter."""
    nothing = torch.stack([p.sum() * 0.0 for p in module.parameters()]).sum()
    return Losses(total=nothing, count=torch.zeros((), device=device))


class Distillation:
    """The loss of a drafter's blocks with its `weights` over its `vocab`; keeps scratch memory between calls."""

    def __init__(self, weights: LossWeights, vocab: DraftVocab | None) -> None:
        self.weights, self.vocab = weights, vocab
        self._workspace = Workspace()

    def __call__(
        self, batch: Batch, anchors: Anchors, blocks: Blocks, head: "TargetHead", *, want_metrics: bool
    ) -> Losses:
        """Loss of the supervised slots, as sums; `want_metrics` fills those that need the target's whole vocabulary."""
        weights, counted_AG = self.weights.at(batch.progress), anchors.counted_AG
        num_slots = counted_AG.shape[1]
        weights_G = position_weights(num_slots, weights.gamma) if blocks.weights_G is None else blocks.weights_G
        weights_AG = weights_G.to(counted_AG.device).expand(counted_AG.shape)
        accept_AG = agree_AG = None
        total: Tensor | float = 0.0
        terms: dict[str, Tensor] = {}
        for slots in [slice(k, k + 1) for k in range(num_slots)] if len(blocks.own) > 1 else [slice(0, num_slots)]:
            kept = _Kept(anchors, blocks, weights_AG, slots)
            found = distill(
                kept.inputs(batch, self.vocab),
                head,
                weights,
                want_accept=blocks.confidence_AG is not None,
                want_metrics=want_metrics,
                workspace=self._workspace,
            )
            total = total + found.total
            terms = {name: terms.get(name, 0.0) + term for name, term in found.terms.items()}
            accept_AG, agree_AG = kept.put(found.accept_N, accept_AG), kept.put(found.agree_N, agree_AG)
        accept_N, agree_N = (None if found_AG is None else found_AG[counted_AG] for found_AG in (accept_AG, agree_AG))
        confidence_N = None
        if blocks.confidence_AG is not None and accept_N is not None:
            logits_N = blocks.confidence_AG[counted_AG]
            term = confidence_loss(logits_N, accept_N, weights_AG[counted_AG])
            total, terms["confidence"] = total + weights.confidence * term, term.detach()
            confidence_N = logits_N.detach().sigmoid()
        metrics = block_metrics(anchors, accept_N=accept_N, agree_N=agree_N, confidence_N=confidence_N)
        if want_metrics and confidence_N is not None and accept_N is not None:
            slot_N = counted_AG.nonzero()[:, 1]
            metrics |= histogram(confidence_N, accept_N, slot_N=slot_N, num_slots=num_slots)
        return Losses(total=torch.as_tensor(total), count=counted_AG.sum().float(), terms=terms, metrics=metrics)


class _Kept:
    """The supervised rows of some slots, by anchor."""

    def __init__(self, anchors: Anchors, blocks: Blocks, weights_AG: Tensor, slots: slice) -> None:
        self.anchors, self.blocks, self.slots, self.weights_AG = anchors, blocks, slots, weights_AG
        self.rows_N = anchors.counted_AG[:, slots].flatten().nonzero().squeeze(1)

    def pick(self, values_AGX: Tensor) -> Tensor:
        return values_AGX[:, self.slots].flatten(0, 1).index_select(0, self.rows_N)

    def inputs(self, batch: Batch, vocab: DraftVocab | None) -> DistillInput:
        blocks, hidden_ND = self.blocks, self.pick(self.blocks.hidden_AGD)
        bias_NR = None if blocks.bias_AGR is None else self.pick(blocks.bias_AGR).to(hidden_ND.dtype)
        bias_weight_VR = blocks.bias_weight_VR
        if blocks.own:
            bias_weight_VR = blocks.own[self.slots.start if len(blocks.own) > 1 else 0]
        return DistillInput(
            hidden_ND=None if blocks.own else hidden_ND,
            target_MD=batch.last_BTD.flatten(0, 1),
            target_rows_N=self.pick(self.anchors.states_AG),
            labels_N=self.pick(self.anchors.labels_AG),
            weights_N=self.pick(self.weights_AG),
            lse_M=batch.lse_BT.flatten(),
            bias_NR=hidden_ND if blocks.own else bias_NR,
            bias_weight_VR=bias_weight_VR,
            vocab=vocab,
        )

    def put(self, found_N: Tensor | None, into_AG: Tensor | None) -> Tensor | None:
        """Results of these rows in their places beside those of other slots."""
        if found_N is None:
            return None
        if into_AG is None:
            into_AG = found_N.new_zeros(self.anchors.counted_AG.shape)
        part = into_AG[:, self.slots].flatten().clone()
        part[self.rows_N] = found_N
        into_AG[:, self.slots] = part.view(-1, self.slots.stop - self.slots.start)
        return into_AG
