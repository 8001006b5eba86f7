# What does not fit the target is refused before anything is captured, whichever family it is of.

import pytest

import train
from drafters.config import build_config
from drafters.errors import ConfigError
from drafters.target import FrozenTarget
from drafters.training.fit import check_fits
from tests.contract_cases import NAMES, node_of, tiny_world
from tests.door_world import settings as composed
from tests.door_world import train_overrides
from tests.test_families import family_model


def fits(target, name, **changes):
    return check_fits(*build_config({**tiny_world().shrunk(node_of(name)), **changes}, key="drafter"), target)


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_tells_its_block_size(name):
    assert fits(tiny_world().target, name).block_size == tiny_world().shrunk(node_of(name))["block_size"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("markov", {"layer_ids": [3, 9]}, "drafter.layer_ids: layer 9 is out of range"),
        ("eagle3", {"layer_ids": [3, 1]}, "drafter.layer_ids: got .3, 1.; the ids must be"),
        ("exit", {"exit_layer": 99}, "drafter.exit_layer: layer 99 is out of range"),
        (
            "mtp",
            {"draft_vocab_size": 1000},
            "drafter.draft_vocab_size: got 1000; accepted: 1 to 127, or null for all 128 of the target",
        ),
        ("mtp", {"block": "target", "target_config": {"a": 1}}, "drafter.target_config: it is not this target's"),
    ],
)
def test_what_does_not_fit_is_named(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        fits(tiny_world().target, name, **changes)


def test_an_output_projection_of_its_own_does_not_fit_a_softcap():
    target = FrozenTarget.from_model(family_model("gemma2"), mask_token_id=3)
    with pytest.raises(ConfigError, match=r"drafter\.own_projection: got true for a target that caps its logits"):
        fits(target, "medusa")


def test_what_a_drafter_reads_is_captured_with_the_rest(world, monkeypatch):
    """And an older cache without it is refused before training."""
    captured = []

    def capture_states(target, splits, config, **how):
        captured.append(config.layer_ids)
        raise ConfigError("seen")

    monkeypatch.setattr("data.capture.capture_states", capture_states)
    with pytest.raises(ConfigError, match="seen"):
        train.train(composed("train", *train_overrides(world), "drafter.layer_ids=[1,2]", "name=reads-more"))
    assert captured == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["drafter.layer_ids=[0,9]"], "drafter.layer_ids: layer 9 is out of range"),
        (["drafter.block_size=500"], "drafter.block_size: got 500, but the longest of"),
        (
            ["drafter.sequential._target_=drafters.heads.ngram.NgramDrafter", "~drafter.sequential.rank"],
            "no sequential",
        ),
        (["drafter=eagle3", "target.layer_ids=[0,1]"], r"drafter.layer_ids.1.: Interpolation key .* not found; give"),
        (["warm_start=''"], "warm_start: got ''; accepted: text, or null"),
    ],
)
def test_nothing_is_captured_for_it(world, monkeypatch, settings, message):
    monkeypatch.setattr("data.capture.capture_states", lambda *args, **kwargs: pytest.fail("it was captured"))
    # Settings of the world that markov alone has.
    common = [one for one in train_overrides(world) if "sequential" not in one or "drafter=eagle3" not in settings]
    with pytest.raises(ConfigError, match=message):
        train.train(composed("train", *common, *settings, "name=unfit"))
