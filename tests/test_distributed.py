# Several processes as one: the exchanges of two real ranks, and how a failure of one ends both.

import subprocess
import sys

import pytest
import torch

from drafters.distributed import Launch, Ranks, find_launch
from drafters.errors import ConfigError, DataError
from tests.processes import ROOT, as_ranks, slurm_world, torch_world, torchrun

OPENING = """
import os, sys, time, warnings
from datetime import timedelta
warnings.simplefilter("error")
from drafters.chat import EncodeError
from drafters.decoding.journal import Journal, UnitKey, UnitResult
from drafters.decoding.records import Generation, RunTimings
from drafters.distributed import Ranks
from drafters.door import door
from drafters.errors import ConfigError, DataError
say = lambda *words: sys.stdout.write(" ".join(map(str, words)) + "\\n")
"""
KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
RANKS = "with door(), Ranks.from_environment() as ranks:\n"


def start(body, world=torch_world):
    """What two processes say that run `body` as ranks."""
    return as_ranks(OPENING + body, world)


def test_alone_everything_is_ones_own(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.from_environment() as ranks:
        assert (ranks.rank, ranks.size, ranks.local_rank, ranks.is_first) == (0, 1, 0, True)
        assert ranks.gather([1, 2]) == ranks.mine([1, 2]) == [1, 2]
        assert ranks.share("value") == "value"
        ranks.barrier()
        ranks.agree(None)
        with pytest.raises(DataError, match="mine"):
            ranks.agree(DataError("mine"))
    with pytest.raises(DataError, match="leaves"), Ranks.from_environment():
        raise DataError("leaves")


def test_shares_are_disjoint_and_complete():
    items = list(range(11))
    parts = [Ranks(rank=rank, size=3).mine(items) for rank in range(3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    second = Ranks(rank=5, size=8, local_rank=1)
    assert second.device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert second.device(None) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert second.device(None) == "cuda:1"
    assert Ranks().device(None) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="rank 5 is process 1 of its machine and sees 1 GPUs"):
        second.device(None)


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ConfigError, match=r"WORLD_SIZE: got 2 .* RANK, LOCAL_RANK, .*torchrun"),
        Ranks.from_environment(),
    ):
        pass


STEP = dict(SLURM_JOB_ID="123456", SLURM_STEP_ID="2", SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NTASKS="8")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n7", "n7"),
        ("n[03-07,12],m1", "n03"),
        ("gpu-a[12]", "gpu-a12"),
        ("alpha,beta", "alpha"),
        ("r[1-2]-ib", "r1-ib"),
        ("10.0.0.5", "10.0.0.5"),
    ],
)
def test_tasks_of_srun_are_ranks(nodes, first):
    port = 25_000 + (7 * 123456 + 2) % 7_000
    found = find_launch({**STEP, "SLURM_JOB_NODELIST": nodes, "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"})
    assert found == Launch(rank=3, size=8, local_rank=1, address=f"{first}:{port}")


def test_where_the_first_task_of_srun_waits():
    def address(**more):
        return find_launch({**STEP, **more}).address.split(":")

    assert address(SLURM_LAUNCH_NODE_IPADDR="10.9.9.9")[0] == "10.9.9.9"
    assert address(SLURM_JOB_NODELIST="a[1-9]", SLURM_STEP_NODELIST="a4")[0] == "a4"
    assert address(MASTER_ADDR="here", MASTER_PORT="77", SLURM_JOB_NODELIST="a[1-9]") == ["here", "77"]
    assert address(MASTER_ADDR="x") != address(MASTER_ADDR="x", SLURM_STEP_ID="3")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: not set, .*SLURM_JOB_NODELIST"):
        find_launch(STEP)
    with pytest.raises(ConfigError, match=r"SLURM_LOCALID: got 'a' .*accepted: a number"):
        find_launch({**STEP, "MASTER_ADDR": "x", "SLURM_LOCALID": "a"})


def test_a_shell_or_script_of_slurm_is_one_process():
    alone = Launch()
    for absent in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        assert find_launch({name: value for name, value in STEP.items() if name != absent}) == alone
    for more in ({"SLURM_NTASKS": "1"}, {"SLURM_JOB_NAME": "interactive"}, {"SLURM_STEP_NUM_TASKS": "1"}):
        assert find_launch({**STEP, **more}) == alone
    # srun in an interactive allocation does start ranks.
    step = {**STEP, "SLURM_JOB_NAME": "interactive", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "x"}
    assert find_launch(step).size == 2
    # Torchrun, one a node, started by srun.
    torch_variables = dict(WORLD_SIZE="16", RANK="9", LOCAL_RANK="1", MASTER_ADDR="x", MASTER_PORT="1")
    assert find_launch({**STEP, **torch_variables}) == Launch(rank=9, size=16, local_rank=1)


def test_two_tasks_of_srun_exchange():
    body = """
    say(ranks.gather([(ranks.rank, ranks.size, ranks.local_rank)]))
"""
    same = "[(0, 2, 0), (1, 2, 1)]\n"
    assert start(RANKS + body, slurm_world) == [(0, same, ""), (0, same, "")]


def test_two_ranks_exchange_and_write_one_journal(tmp_path):
    body = f"""
    from pathlib import Path
    for resume in (False, True):
        with Journal(Path({str(tmp_path)!r}), "f", resume=resume, ranks=ranks) as journal:
            say(len(journal))
            if not resume:
                journal.add(UnitKey("speed", "a", 0, (ranks.rank,)), UnitResult([Generation(ranks.rank)], RunTimings()))
            ranks.barrier()
    say(ranks.rank, ranks.size, ranks.local_rank, ranks.is_first)
    say(ranks.gather([(number, ranks.rank) for number in ranks.mine(range(5))]))
    say(ranks.share("first" if ranks.is_first else "second"))
    say(ranks.gather([] if ranks.is_first else [None]))
    ranks.agree(None)
"""
    first, second = start(RANKS + body)
    same = ["[(0, 0), (2, 0), (4, 0), (1, 1), (3, 1)]", "first", "[None]"]
    assert first == (0, "\n".join(["0", "2", "0 2 0 True", *same, ""]), "")
    assert second == (0, "\n".join(["0", "2", "1 2 1 False", *same, ""]), "")


@pytest.mark.parametrize("meanwhile", ["ranks.gather([1])", "pass"])
def test_an_error_of_one_rank_ends_all_with_its_message_once(meanwhile):
    body = f"""
    if ranks.is_first:
        {meanwhile}
    else:
        raise EncodeError("prompt 7: refused", reason="refused")
"""
    assert start(RANKS + body) == [(1, "", "error: prompt 7: refused\n"), (0, "", "")]


def test_an_error_that_is_handed_in_is_caught_alike_on_all():
    body = """
    try:
        ranks.agree(None if ranks.is_first else ConfigError("length: got 9"))
    except ConfigError as error:
        say("caught", error)
        raise
"""
    caught = "caught length: got 9\n"
    assert start(RANKS + body) == [(1, caught, "error: length: got 9\n"), (0, caught, "")]


def test_a_disk_that_fails_one_rank_in_a_training_ends_all():
    body = """
    from types import SimpleNamespace
    from drafters.errors import CheckpointError
    from drafters.training.strategies import together
    trainer = SimpleNamespace(world_size=2)
    for failing in (None, 1):
        with together(trainer):
            if ranks.rank == failing:
                raise CheckpointError("last.ckpt: no space left")
        say("saved")
"""
    opening = "warnings.simplefilter('ignore')\n" + RANKS
    (code, out, err), other = start(opening + body)
    assert (code, out, err.splitlines()[-1]) == (1, "saved\n", "error: last.ckpt: no space left")
    assert other[:2] == (0, "saved\n")


def test_of_a_process_that_is_killed_the_one_that_started_it_tells(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    body = OPENING + f"from drafters.distributed import launch\nwith door():\n    launch(2, {str(script)!r}, [])"
    start = [sys.executable, "-c", body]
    done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: process 1 of 2 was ended by SIGKILL and could not say why")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("waiting", ["ranks.barrier()", "torch.distributed.all_reduce(torch.zeros(1))"])
def test_a_rank_that_dies_is_noticed_at_once(waiting):
    body = f"""
    import torch
    if ranks.is_first:
        {waiting}
    else:
        os._exit(9)
"""
    first, second = start(RANKS + body)
    assert second[0] == 9
    assert first[0] == 1
    assert first[2].startswith("error: rank 0: another of the 2 processes ended or gave no answer")
    assert first[2].count("\n") == 1


def test_a_rank_that_hangs_is_given_up_in_time():
    body = """
import torch.distributed as dist
dist.init_process_group("gloo")
with door(), Ranks.from_environment(timeout=timedelta(seconds=1)) as ranks:
    if ranks.is_first:
        ranks.barrier()
    else:
        time.sleep(3)
        os._exit(0)
"""
    first, _ = start(body)
    assert first[0] == 1
    assert "gave no answer" in first[2]


def test_ranks_that_do_different_things_are_a_bug():
    body = """
    ranks.gather([]) if ranks.is_first else ranks.barrier()
"""
    for code, _, stderr in start(RANKS + body):
        assert code == 1
        assert "AssertionError: ranks do different things: ['barrier', 'gather']" in stderr


def test_torchrun_starts_them_and_a_group_of_others_is_used(tmp_path):
    body = """
import torch.distributed as dist
dist.init_process_group("gloo")
with Ranks.from_environment() as ranks:
    say(ranks.gather([ranks.rank]))
dist.barrier()
dist.destroy_process_group()
"""
    script = tmp_path / "script.py"
    script.write_text(OPENING + body)
    done = torchrun(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0, 1]") == 2
