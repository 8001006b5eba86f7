# Sequential heads, position weights and losses of the block family (DFlash 2602.06036, DSpark 2607.05147), by hand.

import math

import torch

from drafters.heads.anchors import Anchors
from drafters.heads.distillation import Blocks, Distillation
from drafters.heads.sequential import GatedHead, MarkovHead, RNNHead, teacher_forced
from drafters.losses import LossWeights, position_weights
from tests.by_hand import HAND, close, hand_batch, hand_head

# W_1 of tokens 0, 1, 2 is 1, 2, 3; W_2 of tokens 0, 1, 2 is 1, 0, -1.
W1, W2 = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [0.0], [-1.0]])


def head_of(cls):
    head = cls(cls.Config(rank=1), HAND, 3)
    with torch.no_grad():
        head.markov_w1.weight.copy_(W1)
        head.markov_w2.weight.copy_(W2)
    return head


def bias(head, previous, hidden):
    """B_k [G, V] after the previous tokens, with the backbone's states."""
    embedded_AGR = head.markov_w1(torch.tensor([previous]))
    return (teacher_forced(head, embedded_AGR, torch.tensor([hidden])) @ head.markov_w2.weight.T)[0]


def test_markov():
    # After token 2: 3 * (1, 0, -1). After token 0: 1 * (1, 0, -1).
    close(bias(head_of(MarkovHead), [2, 0], [[9.0, 9.0]] * 2), [[3.0, 0.0, -3.0], [1.0, 0.0, -1.0]])


def test_gated():
    head = head_of(GatedHead)
    with torch.no_grad():
        head.gate_proj.weight.copy_(torch.tensor([[1.0, 0.0, 1.0]]))  # of [h_1, h_2, W_1]
        head.gate_proj.bias.fill_(0.5)
    # After token 2: h_1 + W_1 + b = (ln 3 - 3.5) + 3 + 0.5 = ln 3, sigmoid 3 / 4, factor 9 / 4.
    # After token 0: h_1 + W_1 + b = -1.5 + 1 + 0.5 = 0, sigmoid 1 / 2, factor 1 / 2.
    hidden = [[math.log(3) - 3.5, 7.0], [-1.5, 7.0]]
    close(bias(head, [2, 0], hidden), [[2.25, 0.0, -2.25], [0.5, 0.0, -0.5]])


def test_rnn():
    head = head_of(RNNHead)
    half = 0.5 * math.log(3)
    with torch.no_grad():
        # Rows are W_g, W_c, W_o, columns [s, W_1, h_1, h_2].
        head.joint_proj.weight.copy_(torch.tensor([[0, 0, 0, 1.0], [0, half, 0, 0], [1.0, 0, 1.0, 0]]))
        head.joint_proj.bias.zero_()
    # Step 1, token 0, h = (0.3, 0): g = sigmoid(0) = 1/2; tanh(ln(3) / 2) = (3 - 1) / (3 + 1) = 1/2;
    #   s = 1/2 * 0 + 1/2 * 1/2 = 1/4; the factor is tanh(s_0 + h_1) = tanh(0.3) = 0.291313.
    # Step 2, token 1, h = (0.1, ln 3): the factor is tanh(s_1 + h_1) = tanh(0.35) = 0.336376;
    #   g = 3/4; tanh(ln 3) = (9 - 1) / (9 + 1) = 0.8; s = 3/4 * 1/4 + 1/4 * 0.8 = 0.3875.
    # Step 3, token 0, h = (0, 0): the factor is tanh(0.3875) = 0.369215.
    factors = [0.291313, 0.336376, 0.369215]
    hidden = [[0.3, 0.0], [0.1, math.log(3)], [0.0, 0.0]]
    close(bias(head, [0, 1, 0], hidden), [[f, 0.0, -f] for f in factors])


def test_position_weights():
    # exp(-(k - 1) / 4): 1, e^-0.25, e^-0.5.
    close(position_weights(3, 4.0), [1.0, 0.778801, 0.606531])
    # 0.8^(k - 1), as Medusa and EAGLE-3 write it, is gamma = -1 / ln 0.8 = 4.481420.
    close(position_weights(3, 4.481420), [1.0, 0.8, 0.64])


def one_block(counted):
    """An anchor at position 0 with two slots, whose labels are token 1 at positions 1 and 2."""
    return Anchors(
        rows_A=torch.tensor([0]),
        positions_A=torch.tensor([0]),
        tokens_AG=torch.tensor([[0, 1]]),
        labels_AG=torch.tensor([[1, 1]]),
        counted_AG=torch.tensor([counted]),
        states_AG=torch.tensor([[0, 1]]),
    )


def dspark(counted):
    # Draft logits (ln 2, 0, 0): p_d = (2, 1, 1) / 4. Target logits (0, ln 2, 0): p_t = (1, 2, 1) / 4. Label 1.
    ln2 = math.log(2)
    batch = hand_batch([0, 1, 1], [[0.0, ln2]] * 3, supervised=[True] * 3)
    blocks = Blocks(hidden_AGD=torch.tensor([[[ln2, 0.0]] * 2]), confidence_AG=torch.zeros(1, 2))
    weights = LossWeights(ce=0.1, l1=0.9, kl=0.0, confidence=1.0, gamma=4.0)
    return Distillation(weights, None)(batch, one_block(counted), blocks, hand_head(), want_metrics=True)


def test_the_loss_of_dspark():
    # CE = ln 4 = 1.386294. |p_d - p_t|_1 = 1/4 + 1/4 + 0 = 0.5, so c* = 1 - 0.25 = 0.75.
    # With c = sigmoid(0) = 1/2, BCE = ln 2 = 0.693147.
    # A slot: 0.1 * 1.386294 + 0.9 * 0.5 + 0.693147 = 1.281777; the second weighs e^-0.25 = 0.778801.
    found = dspark([True, True])
    close(found.total, 1.281777 * 1.778801)
    close(found.terms["l1"], 0.5 * 1.778801)
    close(found.count, 2.0)
    close(dspark([True, False]).total, 1.281777)


def test_accepted_length():
    # 0.75 at both slots: 1 + 0.75 + 0.75^2 = 2.3125; no argmax agrees: 1.
    found = dspark([True, True])
    close(found.metrics["accepted_length"][0], 2.3125)
    close(found.metrics["accepted_length_greedy"][0], 1.0)
    close(found.metrics["acceptance"][0] / found.metrics["acceptance"][1], [0.75, 0.75])
