# Draft logits of a session: the output projection of the target, restricted to the draft vocabulary once per session,
# or the drafter's own copy of it.

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.target import TargetHead

__all__ = ["DraftOutput"]


class DraftOutput:
    """Rows of the target's `lm_head` over `vocab` (None = all), or `own` ones, which bring the logit scale along.
    `support_V` are their ids, as proposals want them."""

    def __init__(self, head: "TargetHead", vocab: DraftVocab | None, own: Tensor | None = None) -> None:
        self.support_V = None if vocab is None else vocab.ids_V
        self.weight_VD = head.rows(self.support_V) if own is None else own
        self.scale = head.spec.logit_scale if own is None else 1.0
        self.cap = head.spec.logit_softcap

    def __call__(self, hidden_XD: Tensor) -> Tensor:
        """Float32 logits [..., V'] of states after the drafter's final norm."""
        # As rows: a slice of three dimensions would go through a batched product, at twice the time.
        rows_MD = hidden_XD.flatten(0, -2)
        logits = (rows_MD @ self.weight_VD.T).float().unflatten(0, hidden_XD.shape[:-1])
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
