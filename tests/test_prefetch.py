# Reading ahead: the same batches in order, at most `depth` ahead, errors and interrupts in the thread that trains, and
# the hand-over to a device by a stand-in. The copy itself is checked on a GPU: tests/gpu/check_gpu.py.

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from data.sources import DataConfig
from drafters.batches import BatchConfig
from drafters.errors import DataError
from drafters.prefetch import Prefetch, prefetch_depth

STEPS = [(0, step) for step in range(7)]


class Maker:
    """Makes a step's batch of its number; remembers what it was asked for, and where."""

    def __init__(self, fail_at=None):
        self.made, self.threads, self.fail_at = [], set(), fail_at
        self.lock = threading.Condition()

    def __call__(self, step):
        if step == self.fail_at:
            raise DataError("cache: shard 3 is damaged")
        with self.lock:
            self.made.append(step)
            self.threads.add(threading.current_thread())
            self.lock.notify_all()
        return f"batch {step}"

    def wait_for(self, count):
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.made) >= count, timeout=10)


class Stub:
    """Stands for a device: says in which thread each end of the hand-over ran."""

    def __init__(self):
        self.begun, self.ended = [], []

    def begin(self, batch):
        self.begun.append(threading.current_thread())
        return "moved", batch

    def end(self, begun):
        moved, batch = begun
        assert moved == "moved"
        self.ended.append(threading.current_thread())
        return batch


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_batches_are_those_of_map(depth):
    make = Maker()
    assert list(Prefetch(depth)(make, STEPS)) == list(map(Maker(), STEPS))
    assert make.made == STEPS
    assert len(make.threads) == 1
    assert threading.current_thread() not in make.threads
    assert list(Prefetch(depth)(Maker(), [])) == []


def test_no_more_than_its_depth_is_made_ahead():
    make = Maker()
    batches = Prefetch(2)(make, STEPS)
    for handed_out in range(1, 4):
        next(batches)
        make.wait_for(handed_out + 2)
        time.sleep(0.02)
        assert make.made == STEPS[: handed_out + 2]
    batches.close()


def test_a_batch_is_handed_over_from_the_thread_to_the_one_that_trains():
    transfer = Stub()
    assert list(Prefetch(2, transfer)(Maker(), STEPS)) == [f"batch {step}" for step in STEPS]
    assert {threading.current_thread()} == set(transfer.ended)
    assert threading.current_thread() not in transfer.begun


def test_an_error_is_raised_where_its_batch_is_asked_for():
    batches = Prefetch(2)(Maker(fail_at=STEPS[3]), STEPS)
    assert [next(batches) for _ in range(3)] == [f"batch {step}" for step in STEPS[:3]]
    with pytest.raises(DataError, match="shard 3 is damaged"):
        next(batches)


@pytest.mark.parametrize("ending", ["end", "close", "error"])
def test_the_thread_ends_with_the_iterator(ending):
    make = Maker(fail_at=STEPS[3] if ending == "error" else None)
    batches = Prefetch(2)(make, STEPS)
    next(batches)
    if ending == "close":
        batches.close()
    elif ending == "end":
        list(batches)
    else:
        with pytest.raises(DataError):
            list(batches)
    (thread,) = make.threads
    thread.join(timeout=10)
    assert not thread.is_alive()


SLOW = """
import sys, time
from drafters.prefetch import Prefetch
def slow(step):
    if step:
        print("reading", flush=True)
        time.sleep(600)
    return step
for batch in Prefetch(2)(slow, range(5)):
    pass
"""


def test_an_interrupt_does_not_wait_for_a_slow_read():
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"reading\n"
            os.kill(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    assert err.rstrip().endswith(b"KeyboardInterrupt")


def test_auto_reads_ahead_on_a_gpu_alone():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert [prefetch_depth("auto", device) for device in (cpu, gpu)] == [0, 2]
    assert [prefetch_depth(3, device) for device in (cpu, gpu)] == [3, 3]
    assert prefetch_depth(0, gpu) == 0


@pytest.mark.parametrize("wrong", ["two", -1, True])
def test_a_wrong_setting_is_refused(wrong):
    for config in (BatchConfig, DataConfig):
        with pytest.raises(ValueError, match=rf"prefetch: got {wrong!r}; accepted: auto, or the batches"):
            config(prefetch=wrong)
    with pytest.raises(ValueError, match="prefetch: got 2 with states=online; accepted: auto"):
        DataConfig(prefetch=2, states="online")
