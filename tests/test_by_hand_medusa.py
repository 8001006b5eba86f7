# Medusa (2401.10774): z_k = W_k^out (h + SiLU(W_k h + b_k)), by hand.

import math

import torch

from drafters.heads.medusa import MedusaDrafter
from drafters.losses import LossWeights
from tests.by_hand import HAND, close, hand_batch, hand_head


def drafter_of(**settings):
    config = MedusaDrafter.Config(block_size=2, loss=LossWeights(ce=1.0, l1=0.0, kl=0.0, gamma=4.481420), **settings)
    drafter = MedusaDrafter(config, HAND)
    with torch.no_grad():
        # Head 1: W = identity, b = 0. Head 2: W = 0, b = (0, ln 3).
        drafter.heads[0].blocks[0].linear.weight.copy_(torch.eye(2))
        drafter.heads[1].blocks[0].linear.bias.copy_(torch.tensor([0.0, math.log(3)]))
    return drafter


def test_states():
    # h = (ln 3, 0), SiLU(x) = x sigmoid(x), sigmoid(ln 3) = 3/4.
    # Head 1: (ln 3 + 3/4 ln 3, 0) = (1.922572, 0). Head 2: (ln 3, 3/4 ln 3) = (1.098612, 0.823959).
    states = drafter_of().states(torch.tensor([[math.log(3), 0.0]]))
    close(states, [[[1.922572, 0.0], [1.098612, 0.823959]]])


def test_labels_and_weights():
    """The state before the anchor is read; head 1 predicts the token after it, head 2 the one after that."""
    # Tokens 2 2 0 1 with 1 to 3 supervised: anchors at 1 (labels 0 and 1) and 2 (label 1; nothing after it).
    # Both projections pass the state on: logits are (state_1, state_2, 0).
    # Anchor 1 reads state 0 = (ln 3, 0): head 1 gives (1.922572, 0, 0), label 0:
    #   ln(e^1.922572 + 2) - 1.922572 = ln(8.838507) - 1.922572 = 0.256543
    #   head 2 gives (1.098612, 0.823959, 0), label 1: ln(3 + 2.279507 + 1) - 0.823959 = 1.013347
    # Anchor 2 reads state 1 = (0, 0): head 1 gives (0, 0, 0), label 1: ln 3 = 1.098612
    # Head 2 weighs 0.8: 0.256543 + 0.8 * 1.013347 + 1.098612 = 2.165833
    drafter = drafter_of(own_projection=False)
    last = [[math.log(3), 0.0], [0.0, 0.0], [5.0, 5.0], [5.0, 5.0]]
    batch = hand_batch([2, 2, 0, 1], last, supervised=[False, True, True, True])
    found = drafter.loss(batch, hand_head())
    close(found.total, 2.165833)
    close(found.count, 3.0)
    own = drafter_of()
    with torch.no_grad():
        for projection in own.projections:
            projection.copy_(hand_head().lm_head_VD)
    close(own.loss(batch, hand_head()).total, 2.165833)
