# How far work is: plain and few lines where nobody's terminal is, a bar with a rate and the time left where one is.

import io
import os
import sys

import pytest

from drafters import progress
from drafters.progress import Work, over, phase_bars, progress_bar, tqdm_lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves, as clock[0]; work is shown."""
    now = [1000.0]
    monkeypatch.setattr("drafters.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("drafters.progress._is_shown", True)
    return now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(clock, *, steps, seconds, **options):
    with Work("training", unit="steps", **options) as work:
        for step in range(1, steps + 1):
            clock[0] += seconds
            work(step, steps, note="loss 1.5")


def test_a_line_says_share_count_rate_and_what_is_left(clock, capsys):
    run(clock, steps=8, seconds=60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "training: 25 % (2 of 8 steps), 0.0167 steps/s, 2:00 passed, about 6:00 left, loss 1.5"
    assert lines[-1] == "training: 100 % (8 of 8 steps), 0.0167 steps/s, 8:00 passed, loss 1.5"
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("steps", "seconds", "most"),
    [(100_000, 0.0001, 12), (1000, 1, 40), (10_000, 8.64, 250), (30, 0.001, 2)],
    ids=["ten seconds", "a quarter of an hour", "a day", "at once"],
)
def test_lines_are_few_and_the_last_is_there(clock, capsys, steps, seconds, most):
    run(clock, steps=steps, seconds=seconds)
    text = capsys.readouterr().err
    lines = text.splitlines()
    assert 2 <= len(lines) <= most
    assert f"100 % ({steps:,} of {steps:,} steps)" in lines[-1]
    assert all(line.isprintable() for line in lines)
    # And no long silence.
    assert seconds * steps / len(lines) < 600


def test_what_was_done_before_counts_for_the_share_alone(clock, capsys):
    with Work("training", unit="steps", begun_at=50) as work:
        clock[0] += 10
        work(60, 100)
    assert capsys.readouterr().err == ("training: 60 % (60 of 100 steps), 1 steps/s, 0:10 passed, about 0:40 left\n")


def test_side_work_that_is_quick_is_silent_and_slow_one_is_not(clock, capsys):
    def slowly(items, seconds):
        for item in items:
            clock[0] += seconds
            yield item

    assert list(over(slowly(range(5), 0.1), "tokenising", unit="conversations")) == list(range(5))
    assert capsys.readouterr().err == ""
    assert list(over(slowly(range(5), 10), "tokenising", unit="conversations", total=5)) == list(range(5))
    err = capsys.readouterr().err
    assert err.startswith("tokenising: 20 % (1 of 5 conversations), 0.1 conversations/s")
    assert err.count("\n") == 5


def test_work_inside_of_work_and_of_a_library_is_silent(clock, capsys, monkeypatch):
    with Work("training", unit="steps"), Work("loading", unit="tensors") as inner:
        clock[0] += 5
        inner(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("drafters.progress._is_shown", False)
    run(clock, steps=3, seconds=40)
    assert capsys.readouterr().err == ""


def test_phases_are_told_apart_and_amounts_feed_the_rate(clock, capsys):
    with phase_bars(True) as phases:
        for phase in ("acceptance", "costs"):
            for done in (1, 2):
                clock[0] += 20
                phases(phase, done, 2, 2.5 if phase == "acceptance" else float("nan"))
    err = capsys.readouterr().err.splitlines()
    assert err[1] == "measuring acceptance: 100 % (2 of 2), 0.05/s, 0:40 passed, accepted length 2.50"
    assert err[2] == "measuring costs: 50 % (1 of 2), 0.05/s, 0:20 passed, about 0:20 left"
    with progress_bar("answering", unit="answers", rate="tokens") as advance:
        clock[0] += 2
        advance(1, 4, 500)
    assert "answering: 25 % (1 of 4 answers), 250 tokens/s" in capsys.readouterr().err


def test_downloads_of_the_hub_are_lines_of_bytes(monkeypatch, capsys):
    monkeypatch.setattr("drafters.progress._is_shown", True)
    from huggingface_hub.utils.tqdm import _create_progress_bar

    bar = _create_progress_bar(
        cls=tqdm_lines("downloading org/name"), log_level=0, name="x", desc="", total=0, initial=0, unit="B"
    )
    bar.total = 4_000_000
    bar.update(1_000_000)
    bar.refresh()
    bar.close()
    err = capsys.readouterr().err
    assert err.startswith("downloading org/name: 25 % (1 of 4 MB)")
    assert err.count("\n") == 1
    assert "\r" not in err


@pytest.mark.parametrize(
    ("variables", "is_drawn"),
    [({}, True), ({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False), ({"CI": "true"}, False)],
    ids=["terminal", "no colour", "dumb", "CI"],
)
def test_a_bar_is_drawn_on_a_terminal_that_can(clock, monkeypatch, variables, is_drawn):
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(clock, steps=4, seconds=60)
    text = terminal.getvalue()
    assert ("\x1b[" in text) == is_drawn
    assert "4 of 4 steps" in text
    assert "4:00 passed" in text
    if is_drawn:
        assert text.rstrip().endswith("\x1b[?25h")  # the cursor is there again
    if "NO_COLOR" in variables:
        assert "\x1b[3" not in text


def test_no_colour_is_forced_into_a_pipe(clock, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(clock, steps=4, seconds=60)
    assert "\x1b" not in capsys.readouterr().err


def test_a_terminal_that_was_closed_ends_no_work(clock, monkeypatch):
    class Gone:
        def show(self, state): ...

        def close(self):
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr(progress, "Lines", Gone)
    run(clock, steps=1, seconds=1)
    assert progress._open == []
