# deterministic=true and seed=: what they set and restore, and what is refused.

import os
import random

import numpy as np
import pytest
import torch

from drafters.errors import ConfigError
from drafters.training.determinism import CUBLAS, reproducible
from tests.door_world import train_settings
from train import read_plan


@pytest.mark.usefixtures("no_cublas")
def test_generators_are_seeded_and_flags_hold_inside_only():
    def drawn(seed, *, deterministic):
        with reproducible(deterministic=deterministic, seed=seed):
            assert torch.are_deterministic_algorithms_enabled() == deterministic
            assert os.environ.get(CUBLAS) == (":4096:8" if deterministic else None)
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = drawn(3, deterministic=False)
    assert drawn(3, deterministic=True) == first
    assert not torch.are_deterministic_algorithms_enabled()
    with reproducible(deterministic=False, seed=4):
        other = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.usefixtures("no_cublas")
def test_an_operation_that_cannot_is_named_with_the_setting():
    refused = r"deterministic: got true, but put_ does not have .*deterministic=false"
    with pytest.raises(ConfigError, match=refused), reproducible(deterministic=True, seed=0):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(RuntimeError, match="something else"), reproducible(deterministic=True, seed=0):
        raise RuntimeError("something else")
    with reproducible(deterministic=False, seed=0):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


def test_cuda_that_cannot_be_deterministic_any_more_is_refused(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":0:0")
    with pytest.raises(ConfigError, match=f"{CUBLAS}=':0:0'.*:4096:8"), reproducible(deterministic=True, seed=0):
        pass
    monkeypatch.delenv(CUBLAS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA has started"), reproducible(deterministic=True, seed=0):
        pass


def test_settings_that_go_against_it_are_refused(world):
    with pytest.raises(ConfigError, match=r"trainer\.deterministic: got True.*deterministic=true"):
        read_plan(train_settings(world, "+trainer.deterministic=true"))
    with pytest.raises(ConfigError, match=r"trainer\.benchmark"):
        read_plan(train_settings(world, "+trainer.benchmark=true", "deterministic=true"))
    with pytest.raises(ConfigError, match="seed: got -1"):
        read_plan(train_settings(world, "seed=-1"))


def test_the_seed_of_training_is_that_of_the_data_unless_it_is_given(world):
    assert read_plan(train_settings(world, "data.seed=5")).seed == 5
    plan = read_plan(train_settings(world, "data.seed=5", "seed=0"))
    assert (plan.seed, plan.data.seed) == (0, 5)
