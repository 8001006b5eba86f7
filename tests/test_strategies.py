# The same training by one process and by two (gloo, on the CPU): data parallel, sharded by FSDP2 and by DeepSpeed. The
# losses are equal in float32, also where a rank has nothing to draft; any number of ranks goes on from a run.

import importlib.util
import json
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from safetensors.torch import load_file

from drafters.distributed import Ranks
from drafters.errors import CheckpointError, ConfigError
from drafters.training.strategies import ZeroStrategy, check_kind, check_strategy, num_processes, placement
from tests.processes import torchrun
from tests.strategy_worker import CASES, SHARDED, STEPS, ZERO, Case, silent_world, train
from tests.training_doubles import LIGHTNING_NOISE

pytestmark = [pytest.mark.usefixtures("one_thread"), *LIGHTNING_NOISE]
HAS_ZERO = importlib.util.find_spec("deepspeed") is not None
BUDGETED = "of a token budget"
PLAIN = [name for name in CASES if not name.startswith("zero") and name != BUDGETED]
ZEROS = [name for name in CASES if name.startswith("zero")]


def by_two(folder, names):
    """Train the cases `names` by two processes: what each saw."""
    done = torchrun("-m", "tests.strategy_worker", folder, *names, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: json.loads((folder / name / "seen.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def alone(folder, one_thread):
    """One process, all steps in one go; and one that stops after two."""
    train(silent_world(), Case(stop=2), folder / "begun alone", Ranks())
    return train(silent_world(), Case(), folder / "alone", Ranks())


@pytest.fixture(scope="module")
def plain(folder, alone):
    return by_two(folder, [*PLAIN, BUDGETED])


@pytest.fixture(scope="module")
def zeros(folder, alone):
    return by_two(folder, ZEROS)


def check(folder, alone, name, seen):
    """Losses are those of one process, and so is the drafter that was saved."""
    first = CASES[name].resumes is not None and 2
    expected = alone.losses[int(first) : CASES[name].stop]
    assert seen["losses"] == pytest.approx(expected, rel=0, abs=1e-6)
    if CASES[name].stop == STEPS:
        mine, other = (load_file(folder / one / "drafter" / "model.safetensors") for one in (name, "alone"))
        assert mine.keys() == other.keys()
        for key, tensor in mine.items():
            torch.testing.assert_close(tensor, other[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_two_processes_train_as_one(folder, alone, plain, name):
    assert len(alone.losses) == len(set(alone.losses)) == STEPS
    check(folder, alone, name, plain[name])


def test_two_processes_share_the_steps_of_a_token_budget(folder, plain):
    alone = train(silent_world(), CASES[BUDGETED], folder / "alone of a token budget", Ranks())
    assert len(set(alone.losses)) == STEPS
    assert plain[BUDGETED]["losses"] == pytest.approx(alone.losses, rel=0, abs=1e-6)


def test_a_rank_without_anchors_takes_part(plain, alone):
    counts = torch.tensor(plain["accumulated"]["counts"])[:, 1::2]  # of a step's two batches, by rank
    assert ((counts == 0).any(0) & (counts > 0).any(0)).any()
    assert counts.sum(0).tolist() == alone.counts


def test_fsdp_shares_the_weights_out(plain):
    assert plain["fsdp"]["kinds"] == ["DTensor"]
    assert plain["ddp"]["kinds"] == ["Tensor"]


@pytest.mark.parametrize("begun", ["fsdp begun", "begun alone"])
def test_one_process_goes_on_from_any_run(folder, alone, plain, begun):
    found = train(silent_world(), Case(resumes=begun), folder / f"after {begun}", Ranks())
    assert found.losses == pytest.approx(alone.losses[2:], rel=0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_ZERO, reason="needs the extra 'deepspeed'")
@pytest.mark.parametrize("name", ZEROS)
def test_deepspeed_trains_as_one(folder, alone, zeros, name):
    check(folder, alone, name, zeros[name])


def test_what_a_strategy_cannot_do_is_refused(tmp_path):
    def refused(match, settings, checkpoint=None, *, averages=False, size=2):
        with pytest.raises(ConfigError, match=match):
            check_strategy(settings, checkpoint, averages=averages, size=size)

    refused("optim.ema_decay", {"strategy": SHARDED}, averages=True)
    refused("accumulate_grad_batches: got 2", {"strategy": ZERO, "accumulate_grad_batches": 2})
    (tmp_path / "one.ckpt").touch()
    refused("was written by another strategy", {"strategy": ZERO}, tmp_path / "one.ckpt")
    parts = tmp_path / "parts.ckpt" / "checkpoint"
    parts.mkdir(parents=True)
    refused("was written by DeepSpeed", {"strategy": SHARDED}, parts.parent)
    (parts.parent / "latest").write_text("checkpoint")
    for rank in range(3):
        torch.save({}, parts / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    refused("is of 3 processes, these are 2; start 3", {"strategy": ZERO}, parts.parent)
    check_strategy({"strategy": ZERO}, parts.parent, averages=False, size=3)


def test_a_part_that_is_missing_or_damaged_is_one_error(tmp_path, monkeypatch):
    parts = tmp_path / "last.ckpt" / "checkpoint"
    parts.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"resume: .*last\.ckpt is damaged: the part of process 0 is missing"):
        check_strategy({"strategy": ZERO}, parts.parent, averages=False, size=2)
    for rank in (0, 2):
        (parts / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"the part of process 1 is missing; remove it to start anew"):
        check_strategy({"strategy": ZERO}, parts.parent, averages=False, size=2)

    def load(reason):
        monkeypatch.setattr(DeepSpeedStrategy, "load_checkpoint", Mock(side_effect=reason))
        ZeroStrategy.load_checkpoint(object.__new__(ZeroStrategy), parts.parent)

    for reason in (EOFError("Ran out of input"), RuntimeError("PytorchStreamReader failed"), AssertionError()):
        with pytest.raises(CheckpointError, match=r"^resume: .*last\.ckpt is damaged: (Ran|Pytorch|AssertionError)"):
            load(reason)
    with pytest.raises(RuntimeError, match="closed by peer"):
        load(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))


def test_strategies_are_ours_or_lightnings_own_data_parallel():
    for fine in ({}, {"strategy": "ddp"}, {"strategy": SHARDED}, {"strategy": ZERO}):
        check_kind(fine)
    for wrong in ("deepspeed_stage_2", "ddp_spawn", None, 3, ["ddp"]):
        with pytest.raises(ConfigError, match=r"trainer\.strategy: got .*; accepted: auto, ddp"):
            check_kind({"strategy": wrong})
    with pytest.raises(ConfigError, match=r"_target_: got 'torch\.nn\.Linear'; accepted: a subclass of .*Strategy"):
        check_kind({"strategy": {"_target_": "torch.nn.Linear"}})
    with pytest.raises(ValueError, match="stage: got 7; accepted: 2, 3"):
        ZeroStrategy(stage=7)


def test_the_number_of_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert num_processes({"devices": 3}, Ranks()) == 3
    assert num_processes({"devices": "auto"}, Ranks()) == 4
    assert num_processes({}, Ranks(rank=1, size=8)) == 8
    assert num_processes({"devices": "auto"}, Ranks(rank=1, size=8)) == 8
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert num_processes({"devices": "srun"}, Ranks()) == 1
    zero = {"strategy": {"_target_": "drafters.training.strategies.ZeroStrategy"}}
    with pytest.raises(ConfigError, match=r"trainer\.strategy: DeepSpeed needs GPUs, and this is cpu"):
        placement(zero, Ranks(), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"trainer\.devices: got 2, but 1 were started"):
        placement({"devices": 2}, Ranks(), torch.device("cpu"))
