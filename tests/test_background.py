# Writing beside the target's passes: one task in flight, errors that arrive, and a capture that makes the next shard's
# states while one is being written.

import errno
import os
import signal
import threading

import pytest

from drafters import cache_writer
from drafters.background import OneInFlight
from drafters.errors import DataError
from tests.cache_cases import Recorder, captured, content, examples
from tests.tiny import tiny_target

PATIENCE = 20  # seconds until a test fails that waits for another thread


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def raising(error):
    raise error


def check_forever(background):
    while True:
        background.check()


def test_tasks_run_in_order_and_one_at_a_time():
    ran, running = [], []

    def task(number):
        running.append(number)
        assert len(running) == 1
        ran.append((number, threading.current_thread()))
        running.remove(number)

    with OneInFlight() as background:
        for number in range(20):
            background.start(lambda number=number: task(number))
    assert [number for number, _ in ran] == list(range(20))
    assert threading.current_thread() not in {thread for _, thread in ran}


def test_an_error_comes_at_the_next_call_or_at_the_end():
    with pytest.raises(DataError, match="first"), OneInFlight() as background:
        background.start(lambda: raising(DataError("first")))
    with OneInFlight() as background:
        background.start(lambda: raising(DataError("second")))
        with pytest.raises(DataError, match="second"):
            background.start(lambda: None)
    with OneInFlight() as background:
        begun, free = threading.Event(), threading.Event()
        background.start(lambda: (begun.set(), free.wait(PATIENCE), raising(DataError("third"))))
        assert begun.wait(PATIENCE)
        background.check()  # does not wait
        free.set()
        with pytest.raises(DataError, match="third"):
            check_forever(background)


def test_leaving_with_an_error_waits_for_the_task_under_way():
    done = []

    def interrupted():
        with OneInFlight() as background:
            background.start(lambda: done.append(threading.Event().wait(0.2)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [False]


def test_the_next_shard_is_made_while_one_is_written(target, tmp_path, monkeypatch):
    whole = captured(target, tmp_path / "whole")
    assert len(whole.shards) > 2
    made, first_written, real = [], threading.Event(), cache_writer.write_shard
    real_rows = cache_writer._Job.rows
    first_batches = len(cache_writer.plan_shards(examples(), tokens_per_shard=60, batch_tokens=40)[0].batches)
    under_way, most = [], []

    def rows(job, members):
        made.append(members)
        if len(made) > first_batches:
            next_begun.set()
        return real_rows(job, members)

    def write_shard(folder, name, tensors):
        under_way.append(name)
        most.append(len(under_way))
        if not first_written.is_set():
            assert next_begun.wait(PATIENCE), "no batch of the next shard was made while this one was written"
            first_written.set()
        shard = real(folder, name, tensors)
        under_way.remove(name)
        return shard

    next_begun = threading.Event()
    monkeypatch.setattr(cache_writer._Job, "rows", rows)
    monkeypatch.setattr(cache_writer, "write_shard", write_shard)
    watcher = Recorder()
    captured(target, tmp_path / "c", watcher=watcher)
    assert set(most) == {1}
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    total = sum(whole.lengths)
    assert watcher.steps[-1][:2] == (total, total)
    assert sum(tokens for _, _, tokens in watcher.steps) == total


def test_an_error_in_writing_ends_the_capture_soon_and_the_rest_is_made_later(target, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failed, asked = threading.Event(), []
        real_rows = cache_writer._Job.rows

        def write_shard(*args):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            finally:
                failed.set()

        def rows(job, members):
            if len(asked) >= 3:
                assert failed.wait(PATIENCE)
            asked.append(members)
            return real_rows(job, members)

        patch.setattr(cache_writer, "write_shard", write_shard)
        patch.setattr(cache_writer._Job, "rows", rows)
        with pytest.raises(DataError, match="no space left on the disk"):
            captured(target, tmp_path / "c")
        assert not (tmp_path / "c" / "partial").exists()
        assert not any(name.name.startswith("shard") for name in (tmp_path / "c").iterdir())
    captured(target, tmp_path / "c")
    captured(target, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_an_interrupt_lets_the_shard_under_way_be_kept(target, tmp_path, monkeypatch):
    real, begun = cache_writer.write_shard, threading.Event()

    def write_shard(folder, name, tensors):
        if not begun.is_set():
            begun.set()
            os.kill(os.getpid(), signal.SIGINT)
        return real(folder, name, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(cache_writer, "write_shard", write_shard)
        with pytest.raises(KeyboardInterrupt):
            captured(target, tmp_path / "c")
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"shard-00000.json", "shard-00000.safetensors"} <= names
    assert "partial" not in names
    captured(target, tmp_path / "c")
    captured(target, tmp_path / "whole")
    assert content(tmp_path / "c") == content(tmp_path / "whole")
