# EAGLE-3 (2503.01840) worked by hand: two unrolled steps after one anchor, their attention, labels and losses.

from dataclasses import replace
from math import log, pi, sqrt

import pytest
import torch

from drafters.decoding.sampling import Draws
from drafters.heads.anchors import sample_anchors
from drafters.heads.eagle3 import Eagle3Drafter
from drafters.heads.eagle3_session import Eagle3Session
from drafters.losses import LossWeights
from drafters.target import TargetHead
from drafters.types import Batch, Sampling
from tests.tiny import tiny_spec

# Hidden size 2, one head, three tokens. Rotary frequency pi / 2: each position turns (x, y) into (-y, x) once more.
# Tokens 0, 0, 1, 2, 1 with embeddings E_0 = (1, 1), E_1 = (1, -1), E_2 = (-1, 1); the anchor is token 1 at position 2,
# so the row is i = 1. Norms divide by the root mean square: vectors (+-a, +-a) become (+-1, +-1).
#
# Fused states g = low + 2 mid + 3 high: g_0 = (3, 0) + 2 (-1, -1) + 3 (0, 1) = (1, 1), normed (1, 1);
#                                        g_1 = (1, -1) + 2 (0, 1) + 3 (-1, -1) = (-2, -2), normed (-1, -1).
# Queries are ln 3 / sqrt 2 times the embedding, keys the normed state, values 2 embedding + normed state. With the
# scale 1 / sqrt 2, a product q . k of 2 scores ln 3, so it weighs 3 times one of 0.
# The MLP of a normed (a, b) is silu(a ln 3) * (4 / ln 3) b * (1, -1): with silu(ln 3) = 3/4 ln 3 and
# silu(-ln 3) = -1/4 ln 3 that is 3 b (1, -1) for a = 1, and -b (1, -1) for a = -1.
#
# Row 0 reads E_0 (the token after it): key (1, 1), value 2 (1, 1) + (1, 1) = (3, 3).
# Step 0 reads E_1 at position 1: query (1, -1) turned once = (1, 1); key (-1, -1) turned once = (1, -1), value
#   2 (1, -1) + (-1, -1) = (1, -3). Products 2 and 0, weights 3/4 and 1/4: attention (2.5, 1.5). Plus g_1: (0.5, -0.5),
#   normed (1, -1), MLP (-3, 3): output (-2.5, 2.5).
# Step 1 reads E_2 and that output, normed (-1, 1), at position 2: query (-1, 1) turned twice = (1, -1), key the same,
#   value 2 (-1, 1) + (-1, 1) = (-3, 3). Products with row 0: 0, step 0: 2, itself: 2; weights 1/7, 3/7, 3/7: attention
#   ((3 + 3 - 9) / 7, (3 - 9 + 9) / 7) = (-3/7, 3/7). Plus the output of step 0: (-41/14, 41/14), normed (-1, 1), MLP
#   (-1, 1): output (-55/14, 55/14).
# Both are (-1, 1) after the final norm. The drafter's projection rows ln 2 times (1, 0), (0, 1), (1, 1) give logits
# ln 2 (-1, 1, 0): probabilities 1/7, 4/7, 2/7.
# The target's rows are ln 2 times (1, 0), (0, 1), (0, 0). Its state at position 2, (1, 0), gives 1/2, 1/4, 1/4 for the
# token at 3; its state at position 3, (0, 1), gives 1/4, 1/2, 1/4 for the token at 4.
SIZES = dict(hidden_size=2, vocab_size=3, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=1, num_layers=3)
OTHER = [9.0, 5.0]  # what nothing may read


def world(**weights):
    """The drafter, the target's head and a batch whose one drawn anchor is at position 2."""
    spec = replace(tiny_spec(), **SIZES, rms_norm_eps=0.0, rope_inv_freq=(pi / 2,), eos_ids=(), mask_token_id=0)
    loss = LossWeights(**{"l1": 0.0, "kl": 0.0, "gamma": -1 / log(0.8), **weights})  # step weights 1 and 0.8
    config = Eagle3Drafter.Config(layer_ids=(0, 1, 2), block_size=2, num_anchors=1, loss=loss)
    drafter = Eagle3Drafter(config, spec)
    one, none = torch.eye(2), torch.zeros(2, 2)
    values = {
        "fc": torch.cat([one, 2 * one, 3 * one], 1),
        "midlayer.self_attn.q_proj": log(3) / sqrt(2) * torch.cat([one, none], 1),
        "midlayer.self_attn.k_proj": torch.cat([none, one], 1),
        "midlayer.self_attn.v_proj": torch.cat([2 * one, one], 1),
        "midlayer.self_attn.o_proj": one,
        "midlayer.mlp.gate_proj": torch.tensor([[log(3), 0.0]]),
        "midlayer.mlp.up_proj": torch.tensor([[0.0, 4 / log(3)]]),
        "midlayer.mlp.down_proj": torch.tensor([[1.0], [-1.0]]),
        "lm_head": log(2) * torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    }
    gains = {name: torch.ones(2) for name, _ in drafter.named_parameters() if "norm" in name}
    drafter.load_state_dict({f"{name}.weight": value for name, value in values.items()} | gains)
    embedding = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
    rows = log(2) * torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    head = TargetHead(spec, embedding_VD=embedding, lm_head_VD=rows)
    aux_TLD = torch.tensor([[[3, 0], [-1, -1], [0, 1]], [[1, -1], [0, 1], [-1, -1]], *[[OTHER] * 3] * 3]).float()
    last_BTD = torch.tensor([[OTHER, OTHER, [1.0, 0.0], [0.0, 1.0], OTHER]])
    batch = Batch(
        tokens_BT=torch.tensor([[0, 0, 1, 2, 1]]),
        lengths_B=torch.tensor([5]),
        loss_mask_BT=torch.tensor([[False, False, True, True, True]]),
        aux_BTLD=aux_TLD[None],
        last_BTD=last_BTD,
        lse_BT=head.logits(last_BTD).logsumexp(-1),
        layer_ids=(0, 1, 2),
        seeds=(0,),
    )

    def drawn(seed):
        return sample_anchors(replace(batch, seeds=(seed,)), num_anchors=1, block_size=2).positions_A.tolist()

    return drafter, head, replace(batch, seeds=(next(seed for seed in range(50) if drawn(seed) == [2]),))


def test_outputs_of_two_steps():
    drafter, head, batch = world(ce=1.0)
    seen = []
    drafter.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    anchors = sample_anchors(batch, num_anchors=1, block_size=2)
    states_AGD = drafter.states(batch, anchors, head, torch.float32)
    torch.testing.assert_close(seen[0], torch.tensor([[[-2.5, 2.5], [-55 / 14, 55 / 14]]]))
    torch.testing.assert_close(states_AGD, torch.tensor([[[-1.0, 1.0], [-1.0, 1.0]]]))


# Labels are tokens 2 and 1, of probability 2/7 and 4/7.
CE = log(7 / 2) + 0.8 * log(7 / 4)
# 1/2 ln(7/2) + 1/4 ln(7/16) + 1/4 ln(7/8) = ln 7 - (1/2 + 1 + 3/4) ln 2, and
# 1/4 ln(7/4) + 1/2 ln(7/8) + 1/4 ln(7/8) = ln 7 - (1/2 + 3/2 + 3/4) ln 2.
KL = log(7) - 2.25 * log(2) + 0.8 * (log(7) - 2.75 * log(2))
# Total variations |1/2 - 1/7| + |1/4 - 4/7| + |1/4 - 2/7| = (10 + 9 + 1) / 28, then (3 + 2 + 1) / 28.
L1 = 20 / 28 + 0.8 * 6 / 28


@pytest.mark.parametrize(("weights", "want"), [({"ce": 1.0}, CE), ({"kl": 1.0}, KL), ({"l1": 1.0}, L1)])
def test_loss_takes_the_label_and_the_target_of_each_step(weights, want):
    drafter, head, batch = world(**weights)
    losses = drafter.loss(batch, head)
    assert losses.count == 2
    torch.testing.assert_close(float(losses.total.detach()), want, rtol=1e-5, atol=0.0)


def test_a_session_drafts_from_the_same_row():
    """The target has run on tokens 0 and 1; token 2 is the anchor. Probabilities 1/7, 4/7, 2/7: token 1."""
    drafter, head, batch = world(ce=1.0)
    session = Eagle3Session(drafter, head, 1)
    session.extend(batch.tokens_BT[:, :2], torch.tensor([2]), batch.tokens_BT[:, 2], batch.aux_BTLD[:, :2], None)
    proposal = session.propose(1, Draws(Sampling()))
    assert proposal.tokens_BS.tolist() == [[1]]
    torch.testing.assert_close(proposal.likeliest_BS, torch.tensor([[4 / 7]]))
