# Multi-token prediction (DeepSeek-V3, section 2.2): h'^k_i = M_k [norm(Emb(t_{i+k})) ; norm(h^{k-1}_i)], by hand, with
# blocks that add nothing.

import math

import pytest
import torch

from drafters.heads.anchors import sample_anchors
from drafters.heads.mtp import MtpDrafter
from drafters.losses import LossWeights
from tests.by_hand import HAND, close, hand_batch, hand_head

EMBEDDING = [[3.0, 4.0], [1.0, 1.0], [2.0, 0.0]]
TOKENS, LAST = [2, 0, 1, 2], [[1.0, -1.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]]
SUPERVISED = [False, True, True, True]


def drafter_of(**settings):
    config = MtpDrafter.Config(block_size=2, loss=LossWeights(ce=1.0, l1=0.0, kl=0.0, gamma=4.481420), **settings)
    drafter = MtpDrafter(config, HAND)
    with torch.no_grad():
        for depth in drafter.modules_in_order:
            # M takes the first entry of the first half, and the second entry of the second half.
            depth.input_proj.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]]))
            depth.block.self_attn.o_proj.weight.zero_()
            depth.block.mlp.down_proj.weight.zero_()
    return drafter


def states(drafter):
    """Of the anchor at position 1, after the final norm."""
    batch = hand_batch(TOKENS, LAST, supervised=[False, True, True, False])
    anchors = sample_anchors(batch, num_anchors=9, block_size=2)
    assert anchors.positions_A.tolist() == [1]
    return drafter.states(batch, anchors, hand_head(EMBEDDING), torch.float32)[0]


@pytest.mark.parametrize("feedback", ["before_norm", "after_norm"])
def test_embedding_first(feedback):
    # Index 0, h^0 = (1, -1), whose norm is itself. Depth 1 reads token 1, which is 0: (3, 4) / sqrt(12.5) =
    #   (0.848528, 1.131371), so h'^1 = (0.848528, -1). Its final norm divides by sqrt((0.72 + 1) / 2) = 0.927362:
    #   (0.914991, -1.078328).
    # Depth 2 reads token 2, which is 1: (1, 1), and the norm of h^1, which is the same before and after a norm:
    #   h'^2 = (1, -1.078328); divided by sqrt((1 + 1.162791) / 2) = 1.039901: (0.961630, -1.036953).
    close(states(drafter_of(feedback=feedback)), [[0.914991, -1.078328], [0.961630, -1.036953]])


def test_hidden_first():
    # Depth 1: M takes the state's 1 and the embedding's 1.131371, divided by sqrt((1 + 1.28) / 2) = 1.067708:
    #   (0.936586, 1.059626).
    # Depth 2: the state's 0.936586 and the embedding's 1, divided by sqrt((0.877193 + 1) / 2) = 0.968812:
    #   (0.966737, 1.032192).
    close(states(drafter_of(order="hidden_first")), [[0.936586, 1.059626], [0.966737, 1.032192]])


def test_labels_and_weights():
    # Anchor 1, as above: depth 1 has logits (0.914991, -1.078328, 0) and the label of position 2, which is 1:
    #   ln(2.496752 + 0.340164 + 1) + 1.078328 = 1.344663 + 1.078328 = 2.422997
    #   depth 2 has logits (0.961630, -1.036953, 0) and the label of position 3, which is 2:
    #   ln(2.615956 + 0.354533 + 1) - 0 = 1.378889
    # Anchor 2 reads index 1, whose state (9, 9) has the norm (1, 1), and token 2, whose id is 1: h' = (1, 1), and that
    #   again after the final norm; label 2: ln(e + e + 1) = 1.861995
    # 2.422997 + 0.8 * 1.378889 + 1.861995 = 5.388103
    batch = hand_batch(TOKENS, LAST, supervised=SUPERVISED)
    found = drafter_of().loss(batch, hand_head(EMBEDDING))
    close(found.total, 5.388103)
    assert found.count == 3
    assert math.isclose(
        float(drafter_of(share_depths=True).loss(batch, hand_head(EMBEDDING)).total.detach()), 5.388103, rel_tol=1e-4
    )
