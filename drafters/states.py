# What is computed of a batch of conversations, wherever it goes then: into a cache, or straight into a training step.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.types import Example, Needs
from drafters.vocab_products import logits_in_parts

if TYPE_CHECKING:
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["PackedStates", "log_sum_exp", "predicts", "target_states"]


@dataclass(frozen=True, kw_only=True)
class PackedStates:
    """States without padding: the N tokens of a batch, samples one after the other, and one tensor a layer."""

    aux_LND: tuple[Tensor, ...]
    last_ND: Tensor


def predicts(loss_mask_T: Tensor) -> Tensor:
    """Positions [T] (bool) whose prediction, of the token after them, is supervised."""
    return torch.cat([loss_mask_T[1:], loss_mask_T.new_zeros(1)])


@torch.inference_mode()
def target_states(target: "FrozenTarget", examples: Sequence[Example], *, layer_ids: tuple[int, ...]) -> PackedStates:
    """States of one right-padded pass over `examples`, with the padding taken out."""
    tokens_BT = pad_sequence([example.tokens_T for example in examples], batch_first=True)
    lengths_B = torch.tensor([len(example.tokens_T) for example in examples])
    states = target.states(tokens_BT, needs=Needs(layer_ids=layer_ids, last=True), lengths_B=lengths_B)
    valid_BT = (torch.arange(tokens_BT.shape[1]) < lengths_B[:, None]).to(target.device)
    assert states.last_BTD is not None
    aux_LND = () if states.aux_BTLD is None else tuple(aux_BTD[valid_BT] for aux_BTD in states.aux_BTLD.unbind(2))
    return PackedStates(aux_LND=aux_LND, last_ND=states.last_BTD[valid_BT])


@torch.inference_mode()
def log_sum_exp(head: "TargetHead", hidden_ND: Tensor) -> Tensor:
    """Log-sum-exp [N] (float32) over the vocabulary of the logits of states after the final norm."""
    found = [logits.logsumexp(-1) for logits in logits_in_parts(head, hidden_ND, dtype=head.lm_head_VD.dtype)]
    return torch.cat(found).float() if found else hidden_ND.new_empty(0, dtype=torch.float32)
