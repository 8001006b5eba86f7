# A target of two hidden sizes and three tokens, whose numbers can be worked out on paper.

from dataclasses import replace

import torch

from drafters.target import TargetHead
from drafters.types import Batch
from tests.training_doubles import SPEC

HAND = replace(
    SPEC,
    hidden_size=2,
    vocab_size=3,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    rope_inv_freq=(1.0,),
    rms_norm_eps=1e-12,
    eos_ids=(2,),
)
# Token 0 is drawn by the first entry of a state, token 1 by the second, token 2 by none.
LM_HEAD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])


def hand_head(embedding=LM_HEAD):
    return TargetHead(HAND, embedding_VD=torch.as_tensor(embedding), lm_head_VD=LM_HEAD)


def hand_batch(tokens, last, *, supervised, aux=None, layer_ids=()):
    """One conversation: token ids, the target's last states [T, 2], which tokens are supervised; aux [T, L, 2]."""
    last_BTD = torch.tensor([last])
    return Batch(
        tokens_BT=torch.tensor([tokens]),
        lengths_B=torch.tensor([len(tokens)]),
        loss_mask_BT=torch.tensor([supervised]),
        aux_BTLD=None if aux is None else torch.tensor([aux]),
        last_BTD=last_BTD,
        lse_BT=(last_BTD @ LM_HEAD.T).logsumexp(-1),
        layer_ids=layer_ids,
        seeds=(0,),
    )


def close(value, expected):
    torch.testing.assert_close(torch.as_tensor(value).detach(), torch.tensor(expected), rtol=1e-4, atol=1e-5)
