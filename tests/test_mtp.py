# MTP modules with our own block: a naive twin in value and gradient, every option, what is refused, how it starts.

from dataclasses import replace

import pytest
import torch

from drafters.errors import ConfigError
from drafters.heads.anchors import sample_anchors, with_a_row
from drafters.heads.mtp import MtpDrafter
from drafters.losses import LossWeights
from tests.block_doubles import make_batch
from tests.contract_cases import tiny_world
from tests.mtp_doubles import make_mtp, naive_depths, norm
from tests.tiny import tiny_target

OPTIONS = [
    {},
    {"share_depths": True},
    {"order": "hidden_first"},
    {"feedback": "after_norm"},
    {"share_depths": True, "order": "hidden_first", "feedback": "after_norm", "reduced": False},
    {"block_size": 1},
]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trained(drafter, target, batch):
    anchors = with_a_row(sample_anchors(batch, num_anchors=1000, block_size=drafter.block_size))
    return anchors, drafter.states(batch, anchors, target.head, torch.float32)


@pytest.mark.parametrize("options", OPTIONS)
def test_states_and_gradients_equal_the_naive_twin(target, options):
    drafter, batch = make_mtp(target, **options), make_batch(target, [20, 9, 14])
    anchors, states_AGD = trained(drafter, target, batch)
    naive = torch.full_like(states_AGD, torch.nan)
    for row, length in enumerate(batch.lengths_B.tolist()):
        outputs = naive_depths(drafter, target, batch.tokens_BT[row, :length], batch.last_BTD[row, :length])
        for a in (anchors.rows_A == row).nonzero().flatten().tolist():
            for k, output_TD in enumerate(outputs):
                index = int(anchors.positions_A[a]) - 1
                if index < len(output_TD):
                    naive[a, k] = norm(output_TD[index], drafter.depth(k).final_layernorm)
    known = ~naive.isnan().any(-1)
    assert bool((known | ~anchors.counted_AG).all())
    torch.testing.assert_close(states_AGD[known], naive[known], rtol=1e-4, atol=1e-4)
    probe = torch.randn(int(known.sum()), states_AGD.shape[-1], generator=torch.Generator().manual_seed(0))
    parameters = dict(drafter.named_parameters())
    got = torch.autograd.grad((states_AGD[known] * probe).sum(), list(parameters.values()))
    want = torch.autograd.grad((naive[known] * probe).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()), msg=name)
        assert other.abs().max() > 0, name


def test_shared_depths_are_one_module(target):
    own, shared = make_mtp(target), make_mtp(target, share_depths=True)
    assert sum(p.numel() for p in own.parameters()) == 3 * sum(p.numel() for p in shared.parameters())
    assert shared.depth(0) is shared.depth(2)


def test_depth_weights_take_the_place_of_the_decay(target):
    batch = make_batch(target, [20])
    terms = []
    for weights in ([1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 2.0, 0.0], None):
        drafter = make_mtp(target, depth_weights=weights, loss=LossWeights(kl=0.0, gamma=None))
        terms.append(float(drafter.loss(batch, target.head).total.detach()))
    assert terms[0] + terms[1] == pytest.approx(terms[2])
    assert terms[3] > terms[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "hidden"}, "order: got 'hidden'; accepted: embedding_first, hidden_first"),
        ({"feedback": "norm"}, "feedback: got 'norm'; accepted: before_norm, after_norm"),
        ({"block": "llama"}, "block: got 'llama'; accepted: qwen3, target"),
        ({"block_size": 0}, "block_size: got 0; accepted: 1 or more"),
        ({"depth_weights": (1.0,)}, r"depth_weights: got \[1.0\]; accepted: one of 0 or more for each of 3 depths"),
        ({"depth_weights": (1.0, -1.0, 0.0)}, "depth_weights: got"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MtpDrafter.Config(**settings)


def test_the_target_s_block_needs_the_target(target):
    with pytest.raises(ConfigError, match=r"drafter\.block: 'target' needs the target's config"):
        MtpDrafter(MtpDrafter.Config(block="target"), target.spec)


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
def test_it_starts_as_the_target_s_last_layer(order):
    """With nothing of the embedding a depth is the last layer on the normed state, and the target's final norm."""
    world = tiny_world()
    drafter = world.drafter("mtp", order=order)
    hidden = world.target.spec.hidden_size
    half = slice(hidden, None) if order == "embedding_first" else slice(0, hidden)
    tensors = world.target.model.state_dict()
    for depth in drafter.modules_in_order:
        assert torch.equal(depth.input_proj.weight[:, half], torch.eye(hidden))
        assert torch.equal(depth.block.mlp.up_proj.weight, tensors["model.layers.5.mlp.up_proj.weight"])
        assert torch.equal(depth.final_layernorm.weight, tensors["model.norm.weight"])


def test_a_random_start_is_random():
    drafter = tiny_world().drafter("mtp", init="random")
    assert all(float(depth.input_proj.weight.detach().std()) < 0.03 for depth in drafter.modules_in_order)


def test_no_later_token_changes_an_earlier_draft(target):
    """Tokens from some place on are others: drafts that read only what stands before stay."""
    drafter, batch = make_mtp(target), make_batch(target, [18])
    anchors, before = trained(drafter, target, batch)
    for start in range(2, 18):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[:, start:] = (tokens_BT[:, start:] + 7) % target.spec.vocab_size
        _, after = trained(drafter, target, replace(batch, tokens_BT=tokens_BT))
        changed_AG = (after - before).abs().amax(-1) > 1e-6
        reads_AG = anchors.positions_A[:, None] + torch.arange(drafter.block_size) >= start
        assert torch.equal(changed_AG & anchors.counted_AG, reads_AG & anchors.counted_AG), start
