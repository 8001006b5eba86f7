# What every door (script that a person runs) shares: errors as one line, the device, a progress bar.

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drafters.errors import ConfigError, DraftersError

__all__ = ["door", "pick_device", "progress_bar"]


@contextmanager
def door() -> Iterator[None]:
    """Turns a DraftersError into one line on stderr and exit code 1; Ctrl-C into exit code 130.

    `DRAFTERS_DEBUG=1` shows the traceback instead.
    """
    try:
        yield
    except DraftersError as error:
        if os.environ.get("DRAFTERS_DEBUG"):
            raise
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: finished work is kept; the same command goes on from there\n")
        raise SystemExit(130) from None


def pick_device(name: str | None) -> str:
    """The device to run on: `name`, or a GPU if there is one, else the CPU. Raises ConfigError for one that is absent."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: got '{name}': {reason}; accepted: null, cpu, cuda, cuda:N") from error
    return name


@contextmanager
def progress_bar(what: str, *, unit: str) -> Iterator[Callable[[int, int, int], None]]:
    """A rich bar. The function it yields takes (done, total, amount): `amount` feeds the rate shown in `unit`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TextColumn("left"))
    with Progress(TextColumn("{task.description}"), *columns, TimeRemainingColumn(elapsed_when_finished=True), console=console) as bar:
        task = bar.add_task(what, total=None, rate="")
        amounts = 0.0

        def advance(done: int, total: int, amount: int) -> None:
            nonlocal amounts
            amounts += amount
            elapsed = bar.tasks[task].elapsed or 0.0
            rate = f"{amounts / elapsed:,.0f} {unit}" if elapsed else ""
            bar.update(task, completed=done, total=total, rate=rate, refresh=not console.is_terminal)

        yield advance
