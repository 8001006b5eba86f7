# Sequential heads against their formulas as the paper writes them (2607.05147), one slot at a time: values, gradients,
# what a bias may depend on, and the loss of a drafter that has them.

import pytest
import torch

from drafters.config import build_config
from drafters.errors import ConfigError
from drafters.heads.anchors import sample_anchors
from drafters.heads.sequential import teacher_forced
from drafters.losses import LossWeights
from tests.block_doubles import GATED, MARKOV, RNN, make_batch, make_drafter
from tests.tiny import tiny_target

ANCHORS, SLOTS, RANK, DRAFTED = 4, 5, 6, 17
SHIPPED = [MARKOV, GATED, RNN]
IDS = ["markov", "gated", "rnn"]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def head_of(node, spec, *, shaken=True):
    cls, config = build_config(node, key="drafter.sequential")
    torch.manual_seed(0)
    head = cls(config, spec, DRAFTED).double()
    if shaken:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(std=0.5)
    return head


def given(spec):
    """Previous tokens [A, G], and the backbone's states [A, G, D]."""
    generator = torch.Generator().manual_seed(1)
    tokens_AG = torch.randint(0, spec.vocab_size, (ANCHORS, SLOTS), generator=generator)
    hidden_AGD = torch.randn(ANCHORS, SLOTS, spec.hidden_size, generator=generator, dtype=torch.float64)
    return tokens_AG, hidden_AGD.requires_grad_()


def biases(head, tokens_AG, hidden_AGD):
    return teacher_forced(head, head.markov_w1(tokens_AG), hidden_AGD) @ head.markov_w2.weight.T


def naive_biases(node, head, tokens_AG, hidden_AGD):
    """B_k of each anchor and slot, from the formulas of the paper with matrices of their own."""
    weights, name = dict(head.named_parameters()), node["_target_"].rsplit(".", 1)[1]
    rows = []
    for tokens_G, hidden_GD in zip(tokens_AG, hidden_AGD, strict=True):
        state_R, row = hidden_AGD.new_zeros(RANK), []
        for token, h_D in zip(tokens_G, hidden_GD, strict=True):
            e_R = weights["markov_w1.weight"][token]
            factor_R = e_R
            if name == "GatedHead":
                inputs = torch.cat([h_D, e_R])
                gate_R = 1 / (1 + torch.exp(-(weights["gate_proj.weight"] @ inputs + weights["gate_proj.bias"])))
                factor_R = gate_R * e_R
            elif name == "RNNHead":
                z = torch.cat([state_R, e_R, h_D])
                w_g, w_c, w_o = weights["joint_proj.weight"].split(RANK)
                b_g, b_c, b_o = weights["joint_proj.bias"].split(RANK)
                gate_R = 1 / (1 + torch.exp(-(w_g @ z + b_g)))
                factor_R = torch.tanh(w_o @ z + b_o)
                state_R = gate_R * state_R + (1 - gate_R) * torch.tanh(w_c @ z + b_c)
            row.append(weights["markov_w2.weight"] @ factor_R)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("node", SHIPPED, ids=IDS)
def test_a_head_is_its_formula(target, node):
    """In value, and in the gradients of every weight and of the backbone's states."""
    head = head_of(node, target.spec)
    tokens_AG, hidden_AGD = given(target.spec)
    found, naive = biases(head, tokens_AG, hidden_AGD), naive_biases(node, head, tokens_AG, hidden_AGD)
    torch.testing.assert_close(found, naive)
    probe = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = [*head.parameters(), *([] if node is MARKOV else [hidden_AGD])]
    gradients = [torch.autograd.grad((x * probe).sum(), leaves) for x in (found, naive)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
        assert other.abs().max() > 0


@pytest.mark.parametrize("node", SHIPPED, ids=IDS)
def test_no_bias_at_the_start_and_yet_a_gradient(target, node):
    head = head_of(node, target.spec, shaken=False)
    tokens_AG, hidden_AGD = given(target.spec)
    found = biases(head, tokens_AG, hidden_AGD)
    assert not found.any()
    (gradient,) = torch.autograd.grad(found.sum(), head.markov_w2.weight)
    assert gradient.abs().max() > 0.1


def test_the_gate_starts_half_open(target):
    head = head_of(GATED, target.spec, shaken=False)
    tokens_AG, hidden_AGD = given(target.spec)
    embedded_AGR = head.markov_w1(tokens_AG)
    torch.testing.assert_close(
        teacher_forced(head, embedded_AGR, 0.0 * hidden_AGD), 0.5 * embedded_AGR, rtol=0.05, atol=0.0
    )


# Whether the bias of a slot sees the token before it alone (or all before it), and the backbone's states.
SEES = [(MARKOV, "last", "none"), (GATED, "last", "own"), (RNN, "all", "all")]


@pytest.mark.parametrize(("node", "tokens", "states"), SEES, ids=IDS)
def test_what_a_bias_depends_on(target, node, tokens, states):
    """x_{k-1} and h_k stand at index k - 1: nothing after them reaches the bias of draft k."""
    head = head_of(node, target.spec)
    tokens_AG, hidden_AGD = given(target.spec)
    before = biases(head, tokens_AG, hidden_AGD)
    for at in range(SLOTS):
        other_AG, other_AGD = tokens_AG.clone(), hidden_AGD.detach().clone()
        other_AG[:, at] = (other_AG[:, at] + 5) % target.spec.vocab_size
        other_AGD[:, at] += 1.0
        seen = {"none": [], "own": [at], "last": [at], "all": list(range(at, SLOTS))}
        for after, kind in ((biases(head, other_AG, hidden_AGD), tokens), (biases(head, tokens_AG, other_AGD), states)):
            changed_G = (after - before).abs().amax((0, 2)) > 1e-12
            assert changed_G.nonzero().flatten().tolist() == seen[kind]


@pytest.mark.parametrize("node", SHIPPED, ids=IDS)
def test_rows_can_be_reordered_between_steps(target, node):
    """As a tree does: a branch goes on from its parent's state."""
    head = head_of(node, target.spec)
    tokens_AG, hidden_AGD = given(target.spec)
    parents_A = torch.tensor([2, 2, 0, 1])
    embedded_AGR = head.markov_w1(tokens_AG)
    state, _ = head.step(head.start(ANCHORS), embedded_AGR[:, 0], hidden_AGD[:, 0])
    state = None if state is None else state[parents_A]
    _, factor_AR = head.step(state, embedded_AGR[:, 1], hidden_AGD[:, 1])
    path_AGR = torch.stack([embedded_AGR[parents_A, 0], embedded_AGR[:, 1]], 1)
    whole = teacher_forced(head, path_AGR, torch.stack([hidden_AGD[parents_A, 0], hidden_AGD[:, 1]], 1))
    torch.testing.assert_close(factor_AR, whole[:, 1])


@pytest.mark.parametrize("node", SHIPPED, ids=IDS)
def test_states_in_bfloat16_give_factors_in_float32(target, node):
    head = head_of(node, target.spec).float()
    tokens_AG, hidden_AGD = given(target.spec)
    hidden_AGD = hidden_AGD.detach().bfloat16()
    rough, exact = (teacher_forced(head, head.markov_w1(tokens_AG), x) for x in (hidden_AGD, hidden_AGD.float()))
    assert rough.dtype == torch.float32
    assert torch.equal(rough, exact)


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("node", SHIPPED, ids=IDS)
def test_the_loss_of_a_drafter_with_the_head(target, node, from_anchor):
    """Cross-entropy over the whole vocabulary, with naive biases after the true tokens; value and every gradient."""
    weights = LossWeights(ce=1.0, l1=0.0, kl=0.0, gamma=2.0, chunk=7)
    settings = {"sequential": node, "loss": weights, "confidence": False, "sample_from_anchor": from_anchor}
    drafter, batch = make_drafter(target, reduced=False, **settings), make_batch(target, [13, 9])
    found = drafter.loss(batch, target.head)
    anchors = sample_anchors(batch, num_anchors=drafter.config.num_anchors, block_size=drafter.block_size)
    hidden_AGD = drafter.states(batch, anchors, target.head, torch.float32)
    bias = naive_biases(node, drafter.markov_head, anchors.tokens_AG, hidden_AGD)
    logs = (target.head.logits(hidden_AGD) + bias).double().log_softmax(-1)
    decay_G = torch.exp(-torch.arange(drafter.block_size) / 2.0)
    ce_AG = -logs.gather(-1, anchors.labels_AG[..., None])[..., 0] * decay_G
    naive = ce_AG[anchors.counted_AG].sum()
    torch.testing.assert_close(found.total.double(), naive, rtol=1e-5, atol=1e-4)
    names, leaves = zip(*drafter.named_parameters(), strict=True)
    for name, one, other in zip(
        names, torch.autograd.grad(found.total, leaves), torch.autograd.grad(naive, leaves), strict=True
    ):
        scale = float(other.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=1e-3 * scale, msg=name)


@pytest.mark.parametrize("node", SHIPPED, ids=IDS)
def test_a_rank_that_is_none_is_refused(node):
    with pytest.raises(ConfigError, match=r"drafter.sequential.rank: got 0; accepted: 1 or more"):
        build_config({**node, "rank": 0}, key="drafter.sequential")
