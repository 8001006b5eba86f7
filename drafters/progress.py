# How far long work is, on stderr: a bar with a rate and the time left on a terminal, elsewhere plain lines that a log
# can hold. Nothing is shown until a door says so; inside of work that is shown already, more is not.

import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

__all__ = ["Work", "is_terminal", "over", "phase_bars", "progress_bar", "show", "tqdm_lines"]

T = TypeVar("T")
SHARE = 0.1  # of the work that is worth a line
SECONDS, FIFTIETH = 30.0, 0.02  # and the time that is: later a fiftieth of all that has passed
PATIENCE = 2.0  # seconds that side work may take without a word
# Called with (phase, done, total, accepted length or NaN).
Phases = Callable[[str, int, int, float], None]

_is_shown = False
_open: list["Work"] = []


def show(is_shown: bool) -> None:
    """Whether work that begins from now on is shown by this process."""
    global _is_shown
    _is_shown = is_shown


def is_terminal() -> bool:
    """Whether stderr is a terminal on which a line can be drawn anew; that of a CI job is none."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return sys.stderr.isatty() and not is_dumb and not is_ci


@dataclass(frozen=True, kw_only=True)
class State:
    """What is to be shown. `seconds`: since the work began; `left_s`: until it ends, None where that is not known."""

    what: str
    done: float
    total: float | None
    unit: str
    rate: str
    note: str
    seconds: float
    left_s: float | None


class Display(Protocol):
    """Where a work is shown."""

    def show(self, state: State) -> None: ...

    def close(self) -> None: ...


class Work:
    """One piece of work by name, counted in `unit`: enter it, then call it with what is done. What is done within
    `patience` seconds is never shown. `begun_at`: what was done earlier, which counts for the share, not for the
    rate. `started`: the time.monotonic() of its beginning, where that was before."""

    def __init__(
        self, what: str, *, unit: str, patience: float = 0.0, begun_at: float = 0.0, started: float | None = None
    ) -> None:
        self.what, self.unit, self.patience, self.begun_at = what, unit, patience, begun_at
        self._display: Display | None = None
        self._started = time.monotonic() if started is None else started

    def __enter__(self) -> Self:
        if _is_shown and not _open:
            self._display = Bar() if is_terminal() else Lines()
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        if self._display is not None:
            with suppress(OSError):  # a terminal that was closed meanwhile
                self._display.close()

    def __call__(
        self, done: float, total: float | None, *, rate: str | None = None, note: str = "", what: str | None = None
    ) -> None:
        """`rate` and `what` replace those of the work itself."""
        seconds = time.monotonic() - self._started
        if self._display is None or seconds < self.patience:
            return
        pace = (done - self.begun_at) / seconds if seconds > 0 else 0.0
        state = State(
            what=what or self.what,
            done=done,
            total=total,
            unit=self.unit,
            rate=_rate(done - self.begun_at, seconds, self.unit) if rate is None else rate,
            note=note,
            seconds=seconds,
            left_s=(total - done) / pace if total is not None and pace > 0 else None,
        )
        self._display.show(state)


class Lines:
    """Plain lines, few of them: one for each SHARE of the work, or SECONDS where that takes longer, and the last."""

    def __init__(self) -> None:
        self._shown: State | None = None

    def show(self, state: State) -> None:
        if self._is_due(state):
            self._shown = state
            sys.stderr.write(line_of(state) + "\n")
            sys.stderr.flush()

    def close(self) -> None: ...

    def _is_due(self, state: State) -> bool:
        last = self._shown
        if last is None or (state.total is not None and state.done >= state.total > last.done):
            return True
        grown = 0.0 if not state.total else (state.done - last.done) / state.total
        passed = state.seconds - last.seconds
        # A share of what is done in no time is worth no line.
        return (grown >= SHARE and passed >= 1) or passed >= max(SECONDS, FIFTIETH * state.seconds)


class Bar:
    """A bar on a terminal, which prints what others write meanwhile above itself."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        names = ("count", "rate", "times", "note")
        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in names]
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), *texts, console=Console(stderr=True)
        )
        self._task: Any = None

    def show(self, state: State) -> None:
        if self._task is None:
            self._task = self._bars.add_task(state.what, total=state.total, **_fields(state))
            self._bars.start()
        self._bars.update(self._task, description=state.what, completed=state.done, total=state.total, **_fields(state))

    def close(self) -> None:
        self._bars.stop()


def line_of(state: State) -> str:
    """The state in one plain line."""
    share = f"{math.floor(100 * state.done / state.total)} % " if state.total else ""
    count = f"({_count(state)})" if share else _count(state)
    fields = _fields(state)
    rest = [fields[name] for name in ("rate", "times", "note") if fields[name]]
    return ", ".join([f"{state.what}: {share}{count}", *rest])


def _fields(state: State) -> dict[str, Any]:
    times = f"{_clock(state.seconds)} passed"
    if state.left_s is not None and state.left_s > 0:
        times += f", about {_clock(state.left_s)} left"
    return {"count": _count(state), "rate": state.rate, "times": times, "note": state.note}


def _count(state: State) -> str:
    done = f"{state.done:,.0f}" if state.total is None else f"{state.done:,.0f} of {state.total:,.0f}"
    return f"{done} {state.unit}".rstrip()


def _rate(amount: float, seconds: float, unit: str) -> str:
    """Empty where too little time has passed to tell."""
    return f"{_number(amount / seconds)} {unit}/s".replace(" /", "/") if amount > 0 and seconds >= 0.1 else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def over(items: Iterable[T], what: str, *, unit: str, total: int | None = None) -> Iterator[T]:
    """The items, with side work shown that is done with each; `total`: how many, where they do not tell themselves."""
    count = len(items) if isinstance(items, Sequence) else total
    with Work(what, unit=unit, patience=PATIENCE) as work:
        for number, item in enumerate(items, start=1):
            yield item
            work(number, count)


def tqdm_lines(what: str) -> Any:
    """A class of tqdm bars for libraries that download: those of bytes write plain lines."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    display = Lines()

    class TqdmLines(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": not _is_shown})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            told = self.format_dict
            if told["unit"] == "B" and told["n"] > 0:
                done, total, seconds = told["n"] / 1e6, (told["total"] or 0) / 1e6, told["elapsed"]
                pace = done / seconds if seconds > 0 else 0.0
                left_s = (total - done) / pace if total > done and pace > 0 else None
                rate = f"{_number(pace)} MB/s"
                display.show(
                    State(
                        what=what,
                        done=done,
                        total=total or None,
                        unit="MB",
                        rate=rate,
                        note="",
                        seconds=seconds,
                        left_s=left_s,
                    )
                )
            return True

    return TqdmLines


@contextmanager
def progress_bar(what: str, *, unit: str, rate: str | None = None) -> Iterator[Callable[[int, int, int], None]]:
    """The function that it yields takes (done, total, amount), both in `unit`; `amount` feeds the rate, which is shown
    in `rate` (None: `unit`) a second."""
    amounts, started = 0, time.monotonic()
    with Work(what, unit=unit) as work:

        def advance(done: int, total: int, amount: int) -> None:
            nonlocal amounts
            amounts += amount
            seconds = time.monotonic() - started
            work(done, total, rate=_rate(amounts, seconds, rate or unit))

        yield advance


@contextmanager
def phase_bars(is_shown: bool, *, verb: str = "measuring", unit: str = "") -> Iterator[Phases]:
    """Of work in phases, each shown by itself, with the running accepted length."""
    work: Work | None = None
    started = time.monotonic()

    def progress(phase: str, done: int, total: int, accepted_length: float) -> None:
        nonlocal work, started
        what = f"{verb} {phase}"
        if work is None or work.what != what:
            if work is not None:
                work.__exit__()
            work = Work(what, unit=unit, started=started).__enter__()
        started = time.monotonic()  # of a phase that may follow
        work(done, total, note="" if math.isnan(accepted_length) else f"accepted length {accepted_length:.2f}")

    try:
        yield progress if is_shown else lambda *_: None
    finally:
        if work is not None:
            work.__exit__()
