# data=online against a cache: the same samples in the same order, the same states up to the composition of a pass, the
# same losses; the door trains with it and leaves nothing on the disk.

import json

import pytest
import torch

import train
from data.sources import DataConfig
from drafters.batches import BatchConfig, StatesLoader
from drafters.errors import DataError
from drafters.online import OnlineStates
from drafters.types import Needs
from tests.cache_cases import CONFIG, examples
from tests.door_world import train_settings
from tests.published_doubles import drafter_of_family
from tests.tiny import tiny_target

pytestmark = pytest.mark.usefixtures("one_thread")
NEEDS = Needs(layer_ids=(0, 3), last=True)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def online(target):
    data = examples()
    return OnlineStates(target, {"train": data[:10], "validation": data[10:]}, CONFIG)


def close(mine, other):
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_samples_are_those_of_a_cache(made, online):
    assert (online.ids, online.lengths, len(online)) == (made.ids, made.lengths, len(made))
    assert online.data_hash == made.data_hash
    for name in ("train", "validation"):
        assert online.split(name) == made.split(name)
    for mine, other in zip(online.read([5, 0, 9], NEEDS), made.read([5, 0, 9], NEEDS), strict=True):
        assert (mine.index, mine.id, mine.source) == (other.index, other.id, other.source)
        assert torch.equal(mine.tokens_T, other.tokens_T)
        assert torch.equal(mine.loss_mask_T, other.loss_mask_T)
        for name in ("aux_TLD", "last_TD", "lse_T"):
            close(vars(mine)[name], vars(other)[name])
        assert torch.equal(mine.lse_T == 0, other.lse_T == 0)
    assert online.read([1], Needs(last=True))[0].aux_TLD is None


def test_batches_and_losses_are_those_of_a_cache(target, made, online):
    drafter = drafter_of_family("eagle3", target, reduced=True, layer_ids=(0, 2, 3))
    loaders = [
        StatesLoader(states, states.split("train"), BatchConfig(batch_size=3), needs=drafter.needs, finished=lambda: 1)
        for states in (online, made)
    ]
    pairs = list(zip(*loaders, strict=True))
    assert len(pairs) == 2
    for mine, other in pairs:
        assert (mine.seeds, mine.sample_ids) == (other.seeds, other.sample_ids)
        first, second = (drafter.loss(batch, target.head) for batch in (mine, other))
        assert first.count == second.count > 0
        close(first.total, second.total)
        first.total.backward()  # states made by inference can be learned from


def test_a_split_that_is_not_there(online, target):
    with pytest.raises(DataError, match="no split 'test'; there are train, validation"):
        online.split("test")
    with pytest.raises(DataError, match="no conversation to train on"):
        OnlineStates(target, {"train": [], "validation": []}, CONFIG)


def test_settings():
    with pytest.raises(ValueError, match="states: got 'disk'; accepted: cache, online"):
        DataConfig(states="disk")
    with pytest.raises(ValueError, match=r"target_device: got 'cuda:1' with states=cache; it is for data=online"):
        DataConfig(target_device="cuda:1")


def test_the_door_trains_without_a_cache(world, first, tmp_path):
    own = ["name=online", f"outputs={tmp_path}", "data=online", f"cache.root={tmp_path}/states"]
    train.train(train_settings(world, *own, "data.validation=0.2"))
    assert not (tmp_path / "states").exists()
    steps = []
    for run in (first, tmp_path / "online"):
        header, *rows = (run / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
        column = header.split(",").index("train/loss")
        steps.append([float(row.split(",")[column]) for row in rows if row.split(",")[column]])
    assert len(steps[0]) > 3
    assert steps[1] == pytest.approx(steps[0], rel=0.01)  # products in bfloat16
    facts = [json.loads((run / "report.json").read_text()) for run in (first, tmp_path / "online")]
    hashes = [one["provenance"]["drafter"]["data_hash"] for one in facts]
    assert hashes[0] == hashes[1]
