# Draft layers whose dense ends are computed again in the backward pass, or compiled: the same losses and gradients.

import pytest
import torch

from drafters.computing import Computing, computed_as
from drafters.errors import ConfigError
from drafters.training.plan import how_computed
from tests.contract_cases import tiny_world

FAMILIES = ("markov", "eagle3", "mtp")


def learned(name, dense):
    """Loss and gradients of a batch, and the bytes that were kept for the backward pass."""
    world, kept = tiny_world(), {}
    drafter = world.drafter(name).float()
    weights = {p.data_ptr() for p in drafter.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    batch = world.batch(drafter.needs, [0, 1, 2])
    with computed_as(dense), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = drafter.loss(batch, world.target.head).total
    return [loss, *torch.autograd.grad(loss, [p for p in drafter.parameters() if p.requires_grad])], sum(kept.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_computing_again_changes_nothing_and_keeps_less(name):
    (plain, kept), (again, kept_again) = learned(name, Computing()), learned(name, Computing(recompute=True))
    assert all(map(torch.equal, plain, again))
    assert kept_again < kept


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_layers_learn_the_same(name, recompute):
    (plain, _), (compiled, _) = learned(name, Computing()), learned(name, Computing(compile=True, recompute=recompute))
    for mine, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_settings():
    assert how_computed({}) == Computing()
    assert how_computed({"compile": True, "activation_checkpointing": True}) == Computing(
        compile=True, compile_loss=True, recompute=True
    )
    with pytest.raises(ConfigError, match=r"trainer\.compile: got 'max'; accepted: true, false"):
        how_computed({"compile": "max"})


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/no/such/compiler",))
    with pytest.raises(ConfigError, match=r"trainer\.compile: got True, but torch finds no C\+\+ compiler"):
        how_computed({"compile": True})
