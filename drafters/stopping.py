# Signals that ask a process to end. The first one raises KeyboardInterrupt, so that what is open is closed and what is
# half done is taken away; a second one ends at once.

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "asked_to_end", "keeping", "leave_terminal", "run_stoppable", "stoppable"]

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # exit status of a process that a signal has stopped
SHOW_CURSOR = b"\x1b[?25h\n"  # progress bars hide it
# What tells that this process is one of several. Whoever started those ends them by signals, also where one has failed
# and has said so; no more is to be said then.
SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def asked_to_end(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """The signals that are answered here: those whose handlers are the system's own. One that is ignored (nohup) or
    that a launcher answers is left alone."""
    is_alone = all(environment.get(name, "1") == "1" for name in SIZES)
    wanted = ASKED if is_alone else ASKED[:1]
    return tuple(one for one in wanted if signal.getsignal(one) in (signal.SIG_DFL, signal.default_int_handler))


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, signals that ask to end raise KeyboardInterrupt, the second one ends the process with INTERRUPTED."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in asked_to_end()}
    has_terminal = os.isatty(2) if before else False

    def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
        if has_terminal:
            with suppress(OSError):
                os.write(2, SHOW_CURSOR)
        os._exit(INTERRUPTED)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for one in before:
            signal.signal(one, end_at_once)
        if number == signal.SIGHUP:
            leave_terminal()
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def keeping(what: str) -> Iterator[None]:
    """Lets a KeyboardInterrupt say what is kept and how to go on, where none within has said it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if stop.args:
            raise
        raise KeyboardInterrupt(what) from stop


def run_stoppable(work: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, whose task the first signal that is answered cancels, in good order, before KeyboardInterrupt is
    raised. One that is raised in the middle of a loop would leave tasks that nobody hears of."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers: dict[int, Any] = {one: signal.getsignal(one) for one in ASKED} if is_main else {}
    answered = {number: handler for number, handler in handlers.items() if callable(handler)}

    async def watched() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(heard: int) -> None:
            if heard == signal.SIGHUP:
                leave_terminal()
            for number, handler in answered.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
            task.cancel()

        for number in answered:
            loop.add_signal_handler(number, stop, number)
        await work

    try:
        asyncio.run(watched())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in answered.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Point the standard streams that are terminals to nowhere: on one that was closed, every word would be an
    error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)
