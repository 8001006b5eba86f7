# A rank that fails while another waits in a collective that is not of Ranks: its own error is printed once, and both
# end in seconds. Processes whose parent is gone end too.

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import PIPES, ROOT, as_ranks, environment

OPENING = """
import os, sys, time, warnings
import torch, torch.distributed as dist
from drafters import alarm
from drafters.distributed import Ranks
from drafters.door import door
from drafters.errors import DataError
alarm.INTERVAL, alarm.GRACE = 0.2, 1.0
with door(), Ranks.from_environment() as ranks:
"""
# Waits forever where the other one does not come.
WAIT = "dist.all_reduce(torch.zeros(9))"


def by_ranks(first, second):
    """What two processes say of which the first does one thing in the task and the second another."""
    return as_ranks(f"{OPENING}    if ranks.is_first:\n        {first}\n    else:\n        {second}\n")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_said_once_while_the_other_waits(failing):
    tasks = [WAIT, WAIT]
    tasks[failing] = "raise DataError('shard 3: damaged')"
    first, second = by_ranks(*tasks)
    assert first == (1, "", "error: shard 3: damaged\n")
    assert second == (0, "", "")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_bug_is_said_by_its_own_process(failing):
    tasks = [WAIT, WAIT]
    tasks[failing] = "raise RuntimeError('out of memory')"
    found = by_ranks(*tasks)
    assert found[failing][0] == 1
    assert found[failing][2].count("RuntimeError: out of memory") == 1
    assert found[1 - failing] == (0, "", "")


def test_both_may_fail():
    first, second = by_ranks("raise DataError('mine')", "raise ValueError('yours')")
    assert second[0] == 1
    assert second[2].count("ValueError: yours") == 1
    assert (first[0], first[2].count("\n")) in ((1, 1), (0, 0))


def test_where_the_first_one_is_stopped_another_speaks():
    stop = "os.kill(os.getpid(), 19)"
    failing = "dist.barrier(); time.sleep(0.5); raise DataError('shard 3: damaged')"
    body = f"{OPENING}    if ranks.is_first:\n        dist.barrier(); {stop}\n    else:\n        {failing}\n"
    # The store lives in another process than the stopped one, as torchrun's does.
    store = "import sys, time, torch.distributed as d\ns = d.TCPStore('127.0.0.1', 0, is_master=True)\n"
    store += "sys.stdout.write(f'{s.port}\\n'); sys.stdout.flush(); time.sleep(60)"
    host = subprocess.Popen([sys.executable, "-c", store], **PIPES)
    port = host.stdout.readline().strip()
    common = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    common["TORCHELASTIC_RESTART_COUNT"] = "0"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", body], env=environment(RANK=str(i), LOCAL_RANK=str(i), **common), cwd=ROOT, **PIPES
        )
        for i in range(2)
    ]
    try:
        out, err = running[1].communicate(timeout=60)
    finally:
        for process in (*running, host):
            process.kill()
            process.communicate()
    assert (running[1].returncode, out, err) == (1, "", "error: shard 3: damaged\n")


@pytest.mark.parametrize("kind", ["drafters", "torchrun"])
def test_processes_whose_parent_was_killed_end(tmp_path, kind):
    script = tmp_path / "script.py"
    waiting = f"    open(f'{tmp_path}/pid{{ranks.rank}}', 'w').write(f'{{os.getpid()}}\\n')\n    time.sleep(600)\n"
    script.write_text(OPENING + waiting)
    launch = f"from drafters.distributed import launch\nlaunch(2, {str(script)!r}, [])"
    own = [sys.executable, "-c", launch]
    line = own if kind == "drafters" else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", script]
    parent = subprocess.Popen(line, env=environment(), cwd=ROOT, **PIPES)
    paths = [tmp_path / f"pid{rank}" for rank in range(2)]
    wait_for(lambda: all(path.is_file() and path.read_text().endswith("\n") for path in paths))
    pids = [int(path.read_text()) for path in paths]
    try:
        parent.kill()
        _, said = parent.communicate(timeout=60)  # until the last one that can write there has ended
        wait_for(lambda: not any(is_alive(pid) for pid in pids))
        assert "the process that started this one is gone" in said
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def wait_for(condition, *, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


def is_alive(pid):
    """A child that nobody waits for is not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")
