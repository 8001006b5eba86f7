# EAGLE-3's unrolled steps (2503.01840), by hand: uniform attention over embeddings, and an MLP that adds nothing.

import pytest
import torch

from drafters.heads.anchors import sample_anchors
from drafters.heads.eagle3 import Eagle3Drafter
from drafters.losses import LossWeights
from tests.by_hand import HAND, LM_HEAD, close, hand_batch, hand_head

# Root mean square 1, so that a norm changes nothing.
EMBEDDING = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]
TOKENS = [2, 0, 1, 2, 0]
FUSED = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [9.0, 9.0], [9.0, 9.0]]


@pytest.fixture
def drafter():
    loss = LossWeights(ce=1.0, l1=0.0, kl=0.0, gamma=4.481420)
    drafter = Eagle3Drafter(Eagle3Drafter.Config(layer_ids=(0,), block_size=2, loss=loss), HAND)
    layer = drafter.midlayer
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        drafter.fc.weight.copy_(torch.eye(2))
        layer.self_attn.v_proj.weight[:, :2] = torch.eye(2)  # the half that reads embeddings
        layer.self_attn.o_proj.weight.copy_(torch.eye(2))
        drafter.lm_head.weight.copy_(LM_HEAD)
    return drafter


def batch_of(supervised):
    aux = [[row] for row in FUSED]
    return hand_batch(TOKENS, [[0.0, 0.0]] * 5, supervised=supervised, aux=aux, layer_ids=(0,))


def test_states(drafter):
    # Anchor at 2, so row 1. Rows 0 and 1 read tokens 1 and 2, of ids 0 and 1: values (1, 1) and (1, -1).
    # Step 0: g_1 + mean of both = (0, 2) + (1, 0) = (1, 2); by its root mean square 1.581139: (0.632456, 1.264911).
    # Step 1 reads token 3, of id 2: value (-1, 1). It sees rows 0 and 1 of step 0, and itself:
    #   (1, 2) + (1/3, 1/3) = (4/3, 7/3); by 1.900292: (0.701647, 1.227882).
    batch = batch_of([False, False, True, True, False])
    anchors = sample_anchors(batch, num_anchors=9, block_size=2)
    assert anchors.positions_A.tolist() == [2]
    states = drafter.states(batch, anchors, hand_head(EMBEDDING), torch.float32)
    close(states, [[[0.632456, 1.264911], [0.701647, 1.227882]]])


def test_labels_and_weights(drafter):
    # Anchor 2: step 0 has the label of position 3, which is 2: ln(1.882227 + 3.542778 + 1) - 0 = 1.860198;
    #   step 1 that of position 4, which is 0: ln(2.017072 + 3.413990 + 1) - 0.701647 = 1.159506.
    # Anchor 3, row 2: (3, 0) + (1/3, 1/3) = (10/3, 1/3); by 2.368778: (1.407195, 0.140720); the label of position 4, 0:
    #   ln(4.084483 + 1.151102 + 1) - 1.407195 = 0.423077. Nothing comes after it.
    # 1.860198 + 0.8 * 1.159506 + 0.423077 = 3.210880
    found = drafter.loss(batch_of([False, False, True, True, True]), hand_head(EMBEDDING))
    close(found.total, 3.210880)
    assert found.count == 3
