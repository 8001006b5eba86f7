# The early-exit drafter in training, against one position at a time; what it takes from the target, holds and refuses.

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from drafters.checkpoint import load_drafter, save_drafter
from drafters.config import build_config
from drafters.decoding.report import Report
from drafters.errors import ConfigError, DataError
from drafters.heads.exit import AdapterConfig, ExitDrafter
from drafters.heads.final_norm import norm_gain
from drafters.target import FrozenTarget
from drafters.types import Needs
from tests.block_doubles import make_batch
from tests.evaluating import OTHER, evaluated, on
from tests.exit_doubles import EXIT, SAMPLED, draws_of, layer_skip, make_drafter, world_of
from tests.test_families import FAMILIES, family_model
from tests.tiny import tiny_target

NODE = {"_target_": "drafters.heads.exit.ExitDrafter"}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, FrozenTarget.from_model(family_model(request.param), mask_token_id=3)


def test_a_new_drafter_is_layer_skip_and_copies_the_gain(family):
    name, target = family
    gain_D = norm_gain(target)
    weight_D = target.decoder.norm.weight
    torch.testing.assert_close(gain_D, 1 + weight_D if name.startswith("gemma") else weight_D)
    assert not gain_D.is_inference()
    start = SimpleNamespace(target=target, warm=None)
    config = ExitDrafter.Config(exit_layer=EXIT, adapter=AdapterConfig(size=24))
    fresh = ExitDrafter.create(config, target.spec, start)
    assert torch.equal(fresh.gain_D, gain_D)
    plain, adapted = world_of(target, layer_skip(target)), world_of(target, fresh)
    first, second = (world.session.propose(4, draws_of(SAMPLED, 3)) for world in (plain, adapted))
    assert torch.equal(first.tokens_BS, second.tokens_BS)
    torch.testing.assert_close(first.probs_BSV, second.probs_BSV, rtol=1e-4, atol=1e-6)


def test_a_norm_that_is_no_rms_norm_is_refused():
    target = tiny_target()
    target.decoder.norm = torch.nn.LayerNorm(32)
    with pytest.raises(ConfigError, match=r"^drafter: the target's final norm, LayerNorm, is no RMSNorm"):
        norm_gain(target)
    layer_skip(target).session(target, 1)
    del target.decoder.norm
    with pytest.raises(ConfigError, match="LlamaModel has no final `norm`"):
        layer_skip(target).session(target, 1)


def naive_logs(drafter, target, batch, row, position):
    """Log-probabilities [V] after one position: the drafter's and the target's."""
    adapter, eps = drafter.adapter, target.spec.rms_norm_eps
    x_D = batch.aux_BTLD[row, position, batch.layer_ids.index(EXIT)]
    normed_D = F.rms_norm(x_D, (32,), adapter.norm.weight, eps)
    inner = F.silu(adapter.gate_proj(normed_D)) * adapter.up_proj(normed_D)
    y_D = F.rms_norm(x_D + adapter.down_proj(inner), (32,), drafter.gain_D, eps)
    return [target.head.logits(z_D).log_softmax(-1) for z_D in (y_D, batch.last_BTD[row, position])]


def naive_l1(*where):
    draft_V, truth_V = naive_logs(*where)
    return (draft_V.exp() - truth_V.exp()).abs().sum()


def naive_loss(drafter, target, batch, positions):
    """Mean over (row, position) pairs, each on its own: 0.2 ce + l1 + 0.3 kl."""
    terms = []
    for row, position in positions:
        draft_V, truth_V = naive_logs(drafter, target, batch, row, position)
        kl = (truth_V.exp() * (truth_V - draft_V)).sum()
        ce = -draft_V[batch.tokens_BT[row, position + 1]]
        terms.append(0.2 * ce + naive_l1(drafter, target, batch, row, position) + 0.3 * kl)
    return torch.stack(terms).mean()


LENGTHS = (14, 9, 11)
# All from token 3 on is supervised: position p drafts p + 1, and both have to be.
POSITIONS = [(row, p) for row, n in enumerate(LENGTHS) for p in range(3, n - 1)]


def test_training_takes_each_position_once(target):
    drafter, batch = make_drafter(target), make_batch(target, [*LENGTHS])
    found = drafter.train().loss(batch, target.head)
    assert int(found.count) == len(POSITIONS)
    wanted = naive_loss(drafter, target, batch, POSITIONS)
    torch.testing.assert_close(found.total / found.count, wanted, rtol=1e-4, atol=1e-5)
    parameters = list(drafter.parameters())
    grads = torch.autograd.grad(found.total / found.count, parameters)
    for got, want in zip(grads, torch.autograd.grad(wanted, parameters), strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_training_draws_as_many_positions_as_blocks_would_hold(target):
    drafter = make_drafter(target, num_anchors=3, block_size=5).train()
    assert int(drafter.loss(make_batch(target, [50, 60]), target.head).count) == 2 * 15


def test_validation_takes_whole_blocks_and_the_same_mean(target):
    drafter, batch = make_drafter(target).eval(), make_batch(target, [*LENGTHS])
    with torch.no_grad():
        found = drafter.loss(batch, target.head)
        blocks = [[(row, p + k) for k in range(4) if p + k + 1 < LENGTHS[row]] for row, p in POSITIONS]
        wanted = naive_loss(drafter, target, batch, [pair for block in blocks for pair in block])
        assert int(found.count) == sum(map(len, blocks))
        torch.testing.assert_close(found.total / found.count, wanted, rtol=1e-4, atol=1e-5)
        # 1 + a_1 + a_1 a_2 + ... of the blocks with all four drafts; a = 1 - TV, with true tokens.
        accepted = {pair: 1 - 0.5 * naive_l1(drafter, target, batch, *pair) for pair in POSITIONS}
        lengths = [
            1 + torch.stack([accepted[at] for at in block]).cumprod(0).sum() for block in blocks if len(block) == 4
        ]
        total, count = found.metrics["accepted_length"]
    assert int(count) == len(lengths)
    torch.testing.assert_close(total / count, torch.stack(lengths).mean(), rtol=1e-4, atol=1e-5)
    assert len(found.metrics["acceptance"][0]) == 4


@pytest.mark.parametrize("training", [True, False])
def test_padding_changes_nothing(target, training):
    drafter = make_drafter(target, num_anchors=3).train(training)
    batch = make_batch(target, [14, 9], width=20)
    padding_BT = torch.arange(20) >= batch.lengths_B[:, None]
    wild = replace(
        batch,
        aux_BTLD=batch.aux_BTLD.masked_fill(padding_BT[..., None, None], 1e3),
        last_BTD=batch.last_BTD.masked_fill(padding_BT[..., None], 1e3),
        tokens_BT=batch.tokens_BT.masked_fill(padding_BT, 77),
    )
    one, other = drafter.loss(batch, target.head), drafter.loss(wild, target.head)
    assert torch.equal(one.total, other.total)
    assert torch.equal(one.count, other.count)
    assert int(one.count) > 0


def test_batches_without_anchors_or_states(target):
    drafter, batch = make_drafter(target).train(), make_batch(target, [9], prompt=9)
    found = drafter.loss(batch, target.head)
    assert int(found.count) == 0
    found.total.backward()
    assert all(not p.grad.any() for p in drafter.parameters())
    with pytest.raises(DataError, match=r"no states of target layers \[3\]; it has \[0, 2\]"):
        make_drafter(target, exit_layer=3).loss(make_batch(target, [9]), target.head)


def test_what_it_needs_and_holds(target, tmp_path):
    plain, drafter = layer_skip(target), make_drafter(target, reduced=True)
    assert plain.needs == Needs()
    assert drafter.needs == Needs(layer_ids=(EXIT,), last=True)
    assert plain.size(target) == (0, 0)
    # A norm and three matrices; the final norm and the head are the target's.
    assert drafter.size(target) == (32 + 3 * 24 * 32, 4 * (32 + 3 * 24 * 32))
    assert not drafter.drafts_trees
    assert drafter.block_size == 4
    assert plain.state_dict() == {}
    assert ExitDrafter.trains(drafter.config)
    assert not ExitDrafter.trains(plain.config)
    with pytest.raises(NotImplementedError):
        plain.loss(make_batch(target, [9]), target.head)
    for one in (plain, drafter):
        again = load_drafter(save_drafter(one, tmp_path / "drafter", spec=target.spec), spec=target.spec)
        assert again.config == one.config
        assert again.state_dict().keys() == one.state_dict().keys()
        assert all(torch.equal(again.state_dict()[name], value) for name, value in one.state_dict().items())


def test_the_default_is_a_quarter_of_the_layers(target):
    assert layer_skip(target, None).exit_layer == 1
    assert layer_skip(tiny_target(num_hidden_layers=3), None).exit_layer == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, r"^drafter.block_size: got 0; accepted: 1 or more"),
        ({"adapter": {"size": 0}}, r"^drafter.adapter.size: got 0; accepted: 1 or more"),
        ({"adapter": {"width": 4}}, r"^drafter.adapter.width: unknown setting; accepted: size"),
        ({"adapter": None, "draft_vocab_size": 9}, r"^drafter.draft_vocab_size: got 9; accepted: null"),
        ({"exit": 1}, r"^drafter.exit: unknown setting"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config({**NODE, **settings}, key="drafter")


def test_a_layer_that_is_not_there_is_named(target):
    with pytest.raises(ConfigError, match=r"^drafter.exit_layer: layer 4 is out of range; the target has layers 0..3"):
        layer_skip(target, 4)


def test_layer_skip_is_a_baseline(world, one_thread, tmp_path):
    weights = (*OTHER, f"target.weights={world}/target", f"out={tmp_path}", "batch_size=2")
    evaluated("run=layer_skip", *on(world), *weights, "baselines.layer_skip.block_size=2")
    report = Report.load(tmp_path / "report.json")
    assert (report.name, report.drafter_parameters) == ("layer_skip", 0)
    facts = report.provenance["drafter"]
    assert facts["class"] == "drafters.heads.exit.ExitDrafter"
    assert (facts["config"]["adapter"], facts["config"]["exit_layer"]) == (None, None)
