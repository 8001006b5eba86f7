# What every door (script that a person runs) shares: errors as one line, the device, the target, a progress bar, the
# measurement with its tables.

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.errors import ConfigError, DraftersError

if TYPE_CHECKING:
    from drafters.decoding.measure import MeasureConfig, Prompt
    from drafters.decoding.report import Report
    from drafters.heads.base import Drafter
    from drafters.target import FrozenTarget

__all__ = ["door", "load_target", "measure_and_write", "pick_device", "progress_bar", "say"]

TARGET_KEYS = ("name", "weights", "sha256", "dtype", "mask_token", "layer_ids")


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
    """`name`, or a GPU if there is one, else the CPU. Raises ConfigError for a device that is absent."""
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
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
    )
    with Progress(
        TextColumn("{task.description}"), *columns, TimeRemainingColumn(elapsed_when_finished=True), console=console
    ) as bar:
        task = bar.add_task(what, total=None, rate="")
        amounts = 0.0

        def advance(done: int, total: int, amount: int) -> None:
            nonlocal amounts
            amounts += amount
            elapsed = bar.tasks[task].elapsed or 0.0
            rate = f"{amounts / elapsed:,.0f} {unit}" if elapsed else ""
            bar.update(task, completed=done, total=total, rate=rate, refresh=not console.is_terminal)

        yield advance


def say(text: Any) -> None:
    """Print text or any rich renderable on stdout."""
    from rich.console import Console

    Console().print(text, highlight=False)


def load_target(node: Mapping[str, Any], *, device: str | None) -> "FrozenTarget":
    """The target that a node of conf/target describes, checked. Raises ConfigError for an unknown setting."""
    from drafters.target import FrozenTarget

    for name in node:
        if name not in TARGET_KEYS:
            raise ConfigError(f"target.{name}: unknown setting; accepted: {', '.join(TARGET_KEYS)}")
    chosen = {name: node[name] for name in ("weights", "sha256", "dtype", "mask_token") if name in node}
    return FrozenTarget.load(**chosen, device=pick_device(device))


def measure_and_write(
    target: "FrozenTarget",
    drafter: "Drafter",
    prompts: Sequence["Prompt"],
    config: "MeasureConfig",
    *,
    out: Path,
    provenance: Mapping[str, Any] | None = None,
) -> "Report":
    """Measure with a progress bar, write report.json, report.md and the picture into `out`, print the tables."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from drafters.decoding.measure import measure
    from drafters.decoding.report import render

    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    facts = {"command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), **(provenance or {})}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int, accepted_length: float) -> None:
            task = tasks.setdefault(phase, None)
            if task is None:
                task = tasks[phase] = bar.add_task(f"measuring {phase}", total=total, note="")
            text = "" if accepted_length != accepted_length else f"accepted length {accepted_length:.2f}"
            bar.update(task, completed=done, total=total, note=text)

        report = measure(target, drafter, prompts, config, provenance=facts, progress=progress)
    report.save(out)
    say(render(report))
    say(f"Written: {out / 'report.md'}")
    return report
