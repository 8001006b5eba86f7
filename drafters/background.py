# Work beside the main one: a single thread, a single task in flight. For what waits on disks and checksums, which leave
# the interpreter and the processor's vector units to others.

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["OneInFlight"]


class OneInFlight:
    """Runs tasks one after the other in a thread. At most one waits or runs: `start` waits for the one before.

    Its error is raised, as it was, by the next call of any method, or at the end. Leaving the context waits for the
    task under way, also after an error or an interrupt.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._task: Future[Any] | None = None

    def __enter__(self) -> "OneInFlight":
        # An interrupt while a thread is being started would leave one that `shutdown` does not know.
        self._pool.submit(int).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                self._settle()
        finally:
            self._pool.shutdown()

    def start(self, task: Callable[[], Any]) -> None:
        """Run a task once the one before has ended."""
        self._settle()
        self._task = self._pool.submit(task)

    def check(self) -> None:
        """Raises the error of the task in flight, where it has ended with one; does not wait."""
        if self._task is not None and self._task.done():
            self._settle()

    def _settle(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.result()
