# What ends processes of one task that would wait in vain. A wait for others cannot be interrupted from Python, so a
# thread in each process looks twice a second whether another one has failed, and whether the one that started it is
# still there; it ends its process where that has not ended by itself in GRACE seconds.

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn

from torch._C._distributed_c10d import Store

__all__ = ["LAUNCHER", "Alarm", "Alert"]

INTERVAL = 0.5  # seconds between two looks
GRACE = 10.0  # seconds that a process has to end in good order, once another one has failed
LAUNCHER = "DRAFTERS_LAUNCHER"  # environment: the process that starts others, for those
FAILED, SAID = "failed", "said"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A failure of process `rank`. `message`: what all say of it, once; None where that process says it itself."""

    rank: int
    message: str | None = None


class Alarm:
    """Of one process: starts before processes are connected, knows the others from `connect` on, and ends by `stop`.

    A `store` is shared by all. The first failure that is told there is the one of all.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._parent = _parent(environment)
        self._rank = 0
        self._store: Store | None = None
        self._trace = ""
        self._heard: Alert | None = None  # kept: the store may end with the process that has it
        self._was_said = False
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="alarm", daemon=True).start()

    def connect(self, store: Store, *, rank: int) -> None:
        """`store` serves this alarm alone."""
        self._rank, self._store = rank, store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it

    def stop(self) -> None:
        self._stopped.set()

    def sound(self, message: str | None, *, trace: str = "") -> None:
        """Tell all of a failure of this process. `trace`: what is printed, where it cannot end, of one without a
        message."""
        self._trace = trace
        text = json.dumps(asdict(Alert(rank=self._rank, message=message)))
        self._first(FAILED, text)

    def heard(self) -> Alert | None:
        """The first failure that was told; None too where nobody can be asked."""
        self._asks()
        return self._heard

    def may_say(self) -> bool:
        """Whether this process is the first that wants to say what was heard. Where nobody can tell, it is where the
        failure is its own."""
        if self._was_said:
            return False
        own = str(self._rank)
        is_own = self._heard is None or self._heard.rank == self._rank
        return self._first(SAID, own, if_lost=own if is_own else "") == own

    def _first(self, key: str, text: str, *, if_lost: str = "") -> str:
        """What the first one wrote at `key`."""
        if self._store is None:
            return text
        try:
            return bytes(self._store.compare_set(key, "", text)).decode()
        except RuntimeError:
            return if_lost

    def _look(self) -> None:
        """Ask the store. Raises RuntimeError where it is gone."""
        store = self._store
        if store is None:
            return
        if self._heard is None and store.check([FAILED]):
            self._heard = Alert(**json.loads(store.get(FAILED)))
        if self._heard is not None and not self._was_said:
            self._was_said = store.check([SAID])

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL):
            if self._parent is not None and os.getppid() != self._parent:
                _end("the process that started this one is gone; the same command goes on from what was saved", 1)
            if not self._asks() and self._heard is None:
                self._wait(GRACE)
                what = "another process ended or gave no answer; its own message says why, but of one that was killed"
                _end(f"rank {self._rank}: {what}", 1)
            if self._heard is not None:
                self._wait(GRACE)
                self._end_of(self._heard)

    def _asks(self) -> bool:
        """Whether there is somebody to ask, after asking."""
        try:
            self._look()
        except RuntimeError:  # whoever connects all is gone
            return False
        return True

    def _wait(self, seconds: float) -> None:
        """Until this process has ended, which then takes this thread with it, or time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._stopped.wait(INTERVAL):
                sys.exit()
            self._asks()

    def _end_of(self, alert: Alert) -> None:
        """End this process, which waits for a failed one or cannot end after its own failure."""
        if alert.message is None:
            _end(self._trace or None, int(alert.rank == self._rank), prefix="")
        if self._rank != 0 and not self._was_said:
            self._wait(GRACE / 2)  # the first one speaks; should it be stopped, another does
        if self.may_say():
            _end(alert.message, 1)
        _end(None, 0)


def _end(text: str | None, status: int, *, prefix: str = "error: ") -> NoReturn:
    if text is not None:
        sys.stderr.write(f"{prefix}{text.rstrip()}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(3 * INTERVAL)  # the others may ask a store that this process has, and see that it has spoken
    os._exit(status)


def _parent(environment: Mapping[str, str]) -> int | None:
    """The process that has to outlive this one: a launcher of this package, or torchrun."""
    if LAUNCHER in environment:
        return int(environment[LAUNCHER])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None
