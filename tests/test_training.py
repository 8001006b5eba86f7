# The module: exact global normalisation on any number of ranks and accumulated batches, the guard against nan and inf,
# precision, validation metrics, and a target that stays outside.

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from drafters.errors import ConfigError, DataError
from drafters.training.budget import StepBudget
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from tests.block_doubles import make_batch, make_drafter
from tests.tiny import tiny_target
from tests.training_doubles import LIGHTNING_NOISE, ToyData, ToyHead, batch_of, sample, toy, toy_trainer

pytestmark = LIGHTNING_NOISE


def module_of(drafter=None, **settings):
    defaults = {"max_steps": 3, "warmup_steps": 0, "schedule": "constant", "precision": "float32", "lr": 0.01}
    return DistillModule(drafter or toy(noise=0.0), ToyHead(), OptimConfig(**defaults | settings))


def fit(tmp_path, module, data=None, **options):
    trainer = toy_trainer(tmp_path, callbacks=[StepBudget()], **options)
    trainer.fit(module, data or ToyData())
    return trainer


def weights_after(tmp_path, *, batch_size, clip=None, **options):
    """Weights after three steps of 8 conversations each, in whatever pieces. With a large eps, AdamW's step grows with
    the gradient, so that a wrong constant factor shows."""
    module = module_of(eps=1.0, lr=1.0)
    settings = {"limit_val_batches": 0, "gradient_clip_val": clip, **options}
    fit(tmp_path, module, ToyData(batch_size=batch_size, num_samples=16), **settings)
    return {name: p.detach().clone() for name, p in module.drafter.named_parameters()}


def assert_same(found, expected, tolerance=1e-6):
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= tolerance, name


@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulation_equals_one_batch(tmp_path, clip):
    whole = weights_after(tmp_path, batch_size=8, clip=clip)
    assert_same(weights_after(tmp_path, batch_size=2, clip=clip, accumulate_grad_batches=4), whole)


def test_a_mean_per_batch_would_not_be_the_same():
    # The conversations are uneven enough for the wrong normalisation to show.
    counts = [int(batch_of([i, i + 1], seed=0).loss_mask_BT[:, 1:].sum()) for i in range(0, 8, 2)]
    assert max(counts) > 1.3 * min(counts)


@pytest.mark.slow
def test_two_ranks_by_two_accumulated_equal_one_batch(tmp_path):
    whole = weights_after(tmp_path, batch_size=8, clip=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # process start-up belongs to torch and Lightning
        options = {"strategy": "ddp_spawn", "devices": 2, "accumulate_grad_batches": 2}
        assert_same(weights_after(tmp_path, batch_size=2, clip=0.05, **options), whole)


def test_gradient_is_that_of_the_mean_over_supervised_tokens_and_clipping_comes_after(tmp_path):
    seen = {}

    class Spy(DistillModule):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            seen["scaled"] = [p.grad.clone() for p in self.drafter.parameters()]

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            seen["stepped"] = [p.grad.clone() for p in self.drafter.parameters()]

    module = Spy(toy(noise=0.0), ToyHead(), module_of(max_steps=1).optim)
    before = copy.deepcopy(module.drafter)
    data = ToyData(num_samples=4, batch_size=4)
    fit(tmp_path, module, data, limit_val_batches=0, gradient_clip_val=1e-3)
    losses = before.loss(batch_of(range(4), seed=0), module.target_head)
    (losses.total / losses.count).backward()
    expected = [p.grad for p in before.parameters()]
    clipped = [gradient * 1e-3 / torch.nn.utils.get_total_norm(expected) for gradient in expected]
    torch.testing.assert_close(seen["scaled"], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(seen["stepped"], clipped, atol=1e-8, rtol=1e-3)


def test_every_trainable_parameter_gets_a_gradient():
    module = module_of()
    module.losses(batch_of([0, 1], seed=0)).total.backward()
    assert all(p.grad is not None for p in module.drafter.parameters() if p.requires_grad)


def test_validation_adds_up_over_batches(tmp_path):
    module = module_of(max_steps=4)
    trainer = fit(tmp_path, module)
    batches = [batch_of(pair, seed=9) for pair in ((0, 1), (2, 3))]
    with torch.no_grad():
        losses = [module.drafter.loss(batch, module.target_head) for batch in batches]
    count = sum(one.count for one in losses)
    found = trainer.callback_metrics
    torch.testing.assert_close(found["val/loss"], (sum(one.total for one in losses) / count), check_dtype=False)
    right, counts = (sum(one.metrics["acceptance"][part] for one in losses) for part in (0, 1))
    assert found["val/acceptance@1"] == pytest.approx(float(right[0] / counts[0]))
    assert found["val/accepted_length"] == pytest.approx(1 + float(right[0] / counts[0]))
    assert "val/acceptance@3" not in found  # nothing was counted there
    assert found["val/ce"] == pytest.approx(float(found["val/loss"]))


def test_training_logs_the_step_as_one_number_over_all_its_batches(tmp_path):
    module = module_of(max_steps=1)
    trainer = fit(tmp_path, module, ToyData(num_samples=8), accumulate_grad_batches=4, limit_val_batches=0)
    with torch.no_grad():
        losses = toy(noise=0.0).loss(batch_of(range(8), seed=0), module.target_head)
    assert trainer.callback_metrics["train/loss"] == pytest.approx(float(losses.total / losses.count), rel=1e-5)
    assert trainer.callback_metrics["train/positions"] == module.positions == int(losses.count)
    assert trainer.callback_metrics["train/lr"] == pytest.approx(0.01)


def poisoned(field, at, with_value=float("nan")):
    """Batches of which the one that holds conversation 5 carries a nan, or another value, in `field`."""

    def poison(batch):
        if 5 in batch.sample_ids:
            value = getattr(batch, field).clone()
            value[0, at] = with_value
            return replace(batch, **{field: value})
        return batch

    return poison


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["aux_BTLD", "last_BTD", "lse_BT"])
def test_a_nan_in_the_states_names_step_samples_and_tensor(tmp_path, field, value):
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
    step = order.index(5) // 2
    pair = order[2 * step : 2 * step + 2]
    module = module_of(max_steps=20)
    with pytest.raises(DataError) as caught:
        fit(tmp_path, module, ToyData(on_batch=poisoned(field, 0, value)))
    assert f"step {step}, samples {pair}: batch.{field} is not finite" in str(caught.value)
    assert all(p.isfinite().all() for p in module.drafter.parameters())


def test_an_alarm_calls_conversations_by_their_names(tmp_path):
    module = DistillModule(
        toy(), ToyHead(), module_of(max_steps=20).optim, sample_names=[f"chat-{i}" for i in range(16)]
    )
    with pytest.raises(DataError, match=r"samples \[.*'chat-5'.*\]: batch.aux_BTLD is not finite"):
        fit(tmp_path, module, ToyData(on_batch=poisoned("aux_BTLD", 0)), limit_val_batches=0)


def test_a_nan_gradient_names_its_parameter(tmp_path):
    module = module_of()
    module.drafter.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(ConfigError, match=r"step 0, samples .*gradient of drafter.norm.weight is not finite.*optim.lr"):
        fit(tmp_path, module)


def test_an_exploding_loss_names_its_term(tmp_path):
    module = module_of()
    with torch.no_grad():
        module.drafter.out.weight.fill_(float("inf"))
    with pytest.raises(ConfigError, match="loss term 'ce' is not finite"):
        fit(tmp_path, module)


def test_bf16_computes_in_bf16_on_float32_masters(tmp_path):
    seen = []
    module = module_of(toy().bfloat16(), precision="bf16")
    module.drafter.proj.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    fit(tmp_path, module)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in module.drafter.parameters()} == {torch.float32}
    states = [v for one in module.trainer.optimizers[0].state.values() for v in one.values()]
    assert {v.dtype for v in states} == {torch.float32}


def test_float32_takes_bf16_states(tmp_path):
    batch = batch_of([0, 1], seed=0)
    batch = replace(batch, aux_BTLD=batch.aux_BTLD.bfloat16(), last_BTD=batch.last_BTD.bfloat16())
    assert module_of().losses(batch).total.dtype == torch.float32


def test_a_validation_of_larger_batches_may_come_before_the_first_step(tmp_path):
    # The real drafter keeps scratch tensors: those that validation makes without gradients serve training too.
    target = tiny_target()
    module = DistillModule(make_drafter(target), target.head, module_of(max_steps=2).optim)
    small, large = make_batch(target, [9, 7]), make_batch(target, [30, 28, 25], seed=1)
    trainer = toy_trainer(tmp_path, callbacks=[StepBudget()], num_sanity_val_steps=1, val_check_interval=1)
    trainer.fit(module, *(DataLoader(batches, batch_size=None) for batches in ([small, small], [large])))
    assert trainer.global_step == 2


def test_the_target_is_outside_the_module_tree():
    module = module_of()
    assert all(name.startswith("drafter.") for name in module.state_dict())
    assert copy.deepcopy(module).target_head is module.target_head
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in module.drafter.parameters())


def test_a_drafter_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="ToyDrafter has no trainable parameter"):
        module_of(toy().requires_grad_(False))


def test_samples_are_ragged():
    assert len({len(sample(i)[0]) for i in range(4)}) == 3
