# The journal of a measurement: what comes back equals what went in, a kill costs one unit, and nothing of another
# measurement or damaged is taken over.

import errno
import json
import math
import os

import pytest

from drafters.decoding import journal as module
from drafters.decoding.journal import Journal, UnitKey, UnitResult
from drafters.decoding.records import Generation, Round, RoundCost, RunTimings
from drafters.distributed import Ranks
from drafters.errors import CheckpointError, DataError

KEY = UnitKey("speed", "markov", 0, (3, 4))


def unit(number=0):
    rounds = [
        Round(4, 2, 3, True, 17),
        Round(7, 3, 2, False, 20, slots=(0, 2, 5), confidences=(0.5, 0.25), likeliest=(0.75, 0.5)),
    ]
    rows = [Generation(number, [5, 6, 49_151], rounds, "stop"), Generation(number + 1, [7], [], "length")]
    costs = [RoundCost(2, 4, 0.1, 1 / 3, 5e-324), RoundCost(1, 0, 1e-17, math.pi, 0.0)]
    return UnitResult(rows, RunTimings(prefill_s=0.1 + 0.2, rounds=costs))


class Alone(Ranks):
    """One of several ranks, where the others are not there."""

    def barrier(self):
        pass


def key(number):
    return KEY._replace(prompts=(number,))


def begun(folder, count=3, fingerprint="f"):
    """A journal of `count` units; its lines."""
    with Journal(folder, fingerprint, resume=False) as journal:
        for number in range(count):
            journal.add(key(number), unit(number))
    return (folder / "progress.jsonl").read_bytes().splitlines(keepends=True)


def test_units_come_back_exactly(tmp_path):
    with Journal(tmp_path / "new", "f", resume=True) as journal:
        assert journal.get(KEY) is None
        journal.add(KEY, unit())
        assert journal.get(KEY) == unit()
    with Journal(tmp_path / "new", "f", resume=True) as journal:
        assert len(journal) == 1
        back = journal.get(UnitKey("speed", "markov", 0, (3, 4)))
        assert back == unit()
        assert isinstance(back.rows[0].rounds[1], Round)
        assert isinstance(back.rows[0].rounds[1].slots, tuple)
        assert isinstance(back.timings.rounds[0], RoundCost)
        assert journal.get(KEY._replace(turn=1)) is None


def test_what_is_given_is_not_shared(tmp_path):
    with Journal(tmp_path, "f", resume=False) as journal:
        result = unit()
        journal.add(KEY, result)
        result.rows[0].tokens.append(1)
        journal.get(KEY).rows.clear()
        assert journal.get(KEY) == unit()


def test_notes(tmp_path):
    with Journal(tmp_path, "f", resume=False) as journal:
        assert journal.get_note("costs") is None
        journal.note("costs", {"1": [0.1, 1 / 3]})
        journal.note("costs", {"1": (0.2, 1 / 3), "name": "größer"})
    with Journal(tmp_path, "f", resume=True) as journal:
        assert journal.get_note("costs") == {"1": [0.2, 1 / 3], "name": "größer"}
        assert len(journal) == 0


def test_not_a_number_is_a_bug(tmp_path):
    with Journal(tmp_path, "f", resume=False) as journal, pytest.raises(ValueError, match="JSON"):
        journal.note("costs", float("nan"))


def test_every_line_is_on_the_disk_at_once(tmp_path, monkeypatch):
    synced = []
    journal = Journal(tmp_path, "f", resume=False)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    journal.add(KEY, unit())
    assert synced == [(tmp_path / "progress.jsonl").stat().st_size]
    journal.close()


def test_without_resume_what_was_there_is_removed(tmp_path):
    begun(tmp_path)
    (tmp_path / "progress.rank7.jsonl").write_text("of another measurement\n")
    with Journal(tmp_path, "other", resume=False) as journal:
        assert len(journal) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["progress.jsonl"]


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_line_cut_by_a_kill_is_dropped_and_done_again(tmp_path, kept):
    lines = begun(tmp_path)
    path = tmp_path / "progress.jsonl"
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    for _ in range(2):
        with Journal(tmp_path, "f", resume=True) as journal:
            assert [journal.get(key(n)) == unit(n) for n in range(3)] == [True, True, False]
    with Journal(tmp_path, "f", resume=True) as journal:
        journal.add(key(2), unit(2))
    assert path.read_bytes() == b"".join(lines)


def test_a_last_line_of_garbage_is_dropped(tmp_path):
    lines = begun(tmp_path)
    (tmp_path / "progress.jsonl").write_bytes(b"".join(lines[:-1]) + b"\0" * len(lines[-1]) + b"\n")
    with Journal(tmp_path, "f", resume=True) as journal:
        assert len(journal) == 2


@pytest.mark.parametrize("kept", [0, 10])
def test_a_cut_header_is_a_new_journal(tmp_path, kept):
    lines = begun(tmp_path)
    (tmp_path / "progress.jsonl").write_bytes(lines[0][:kept])
    with Journal(tmp_path, "other", resume=True) as journal:
        assert len(journal) == 0
    with Journal(tmp_path, "other", resume=True):
        pass


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_line_is_named(tmp_path, number):
    lines = begun(tmp_path)
    # One digit of it is another: still JSON, and still a number.
    at = max(i for i, byte in enumerate(lines[number - 1]) if chr(byte).isdigit())
    damaged = bytearray(lines[number - 1])
    damaged[at] ^= 1
    json.loads(damaged)
    lines[number - 1] = bytes(damaged)
    (tmp_path / "progress.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=rf"resume: line {number} of .*progress\.jsonl is damaged; remove the file"):
        Journal(tmp_path, "f", resume=True)
    assert (tmp_path / "progress.jsonl").read_bytes() == b"".join(lines)


def test_another_measurement_is_refused(tmp_path, monkeypatch):
    lines = begun(tmp_path)
    with pytest.raises(DataError, match=r"with other settings, prompts or weights.*resume=false removes it"):
        Journal(tmp_path, "other", resume=True)
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    with pytest.raises(DataError, match="of another version"):
        Journal(tmp_path, "f", resume=True)
    assert (tmp_path / "progress.jsonl").read_bytes() == b"".join(lines)


def test_a_measurement_goes_on_with_another_number_of_ranks(tmp_path):
    for rank in range(3):
        with Journal(tmp_path, "f", resume=True, ranks=Alone(rank=rank, size=3)) as journal:
            journal.add(key(rank), unit(rank))
            journal.note("rank", rank)
    assert len(list(tmp_path.glob("progress*.jsonl"))) == 3
    for rank, size in [(0, 1), (1, 2)]:
        with Journal(tmp_path, "f", resume=True, ranks=Alone(rank=rank, size=size)) as journal:
            assert [journal.get(key(n)) for n in range(3)] == [unit(n) for n in range(3)]
            assert journal.get_note("rank") == 0
            journal.add(key(10 + rank), unit())
    with Journal(tmp_path, "f", resume=True) as journal:
        assert len(journal) == 5
        journal.remove()
    assert not list(tmp_path.iterdir())


def test_a_rank_without_resume_does_not_remove_what_the_first_has_begun(tmp_path):
    with Journal(tmp_path, "f", resume=False, ranks=Alone(rank=0, size=2)) as journal:
        journal.add(key(0), unit())
    with Journal(tmp_path, "f", resume=False, ranks=Alone(rank=1, size=2)) as journal:
        journal.remove()
    assert (tmp_path / "progress.jsonl").is_file()


def test_a_foreign_rank_is_refused(tmp_path):
    begun(tmp_path)
    begun(tmp_path / "other", fingerprint="other")
    (tmp_path / "other" / "progress.jsonl").rename(tmp_path / "progress.rank1.jsonl")
    with pytest.raises(DataError, match=r"progress\.rank1\.jsonl holds a measurement"):
        Journal(tmp_path, "f", resume=True)


def test_a_full_disk_is_one_line_and_the_rest_goes_on(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal(tmp_path, "f", resume=False)
    journal.add(key(0), unit())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="no space left on the disk"):
            journal.add(key(1), unit())
    journal.close()
    with Journal(tmp_path, "f", resume=True) as journal:
        assert journal.get(key(0)) == unit()


def test_a_disk_that_takes_less_than_a_line_gets_the_rest(tmp_path):
    class Slow:
        def __init__(self, stream):
            self.stream = stream

        def write(self, data):
            return self.stream.write(data[:7])

        def fileno(self):
            return self.stream.fileno()

        def close(self):
            self.stream.close()

    with Journal(tmp_path, "f", resume=False) as journal:
        journal._stream = Slow(journal._stream)
        journal.add(KEY, unit())
    with Journal(tmp_path, "f", resume=True) as journal:
        assert journal.get(KEY) == unit()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Journal(tmp_path / "file", "f", resume=False)


def test_a_folder_is_measured_into_by_one_at_a_time(tmp_path):
    first = Journal(tmp_path / "out", "same", resume=False)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r"out: another process measures into .*choose another out="):
            Journal(tmp_path / "out", "same", resume=resume)
    first.close()
    Journal(tmp_path / "out", "same", resume=True).close()
