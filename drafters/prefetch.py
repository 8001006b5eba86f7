# Batches made ahead, by one thread, while a step runs: read, decoded, and on a GPU copied to it from pinned memory on
# a stream of their own. They are the same batches in the same order; one that nobody asked for is dropped.

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.types import Batch

__all__ = ["AUTO", "CudaTransfer", "Prefetch", "Transfer", "check_prefetch", "prefetch_depth", "settle"]

AUTO = "auto"
DEPTH = 2  # what "auto" is on a GPU

Step = tuple[int, int]


class Transfer(Protocol):
    """Takes batches from the thread that makes them to the one that trains."""

    def begin(self, batch: Batch) -> Any:
        """Called by the thread that makes batches."""

    def end(self, begun: Any) -> Batch:
        """What `begin` returned, as a batch for the thread that asks for it."""


class HostTransfer:
    """Batches stay where they are."""

    def begin(self, batch: Batch) -> Batch:
        return batch

    def end(self, begun: Batch) -> Batch:
        return begun


class CudaTransfer:
    """Copies to a GPU from pinned memory, beside the stream that trains."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        # Pinning belongs to the current device, which a new thread has yet to be told: the stream does.
        with torch.cuda.stream(self.stream):
            return batch.pinned().to(self.device), self.stream.record_event()

    def end(self, begun: tuple[Batch, torch.cuda.Event]) -> Batch:
        return settle(*begun, device=self.device)


def settle(batch: Batch, made: torch.cuda.Event, *, device: torch.device) -> Batch:
    """Have the stream that trains wait until a batch is made, and tell the allocator that both streams use it."""
    current = torch.cuda.current_stream(device)
    current.wait_event(made)
    for tensor in vars(batch).values():
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(current)
    return batch


class Prefetch:
    """Stands where `map` does: `make` runs in a thread, up to `depth` batches ahead of the one handed out.

    What `make` raises is raised where its batch is asked for. Closing the iterator drops what is waiting and lets the
    batch under way end by itself; nothing waits for that, so an interrupt is never held up by a slow disk.
    """

    def __init__(self, depth: int, transfer: Transfer | None = None) -> None:
        self.depth, self.transfer = depth, transfer or HostTransfer()

    def __call__(self, make: Callable[[Step], Batch], steps: Iterable[Step]) -> Iterator[Batch]:
        pool = ThreadPool(1)
        waiting: deque[AsyncResult[Any]] = deque()
        try:
            for step in steps:
                waiting.append(pool.apply_async(self._make, (make, step)))
                if len(waiting) > self.depth:
                    yield self.transfer.end(waiting.popleft().get())
            while waiting:
                yield self.transfer.end(waiting.popleft().get())
        finally:
            pool.terminate()

    def _make(self, make: Callable[[Step], Batch], step: Step) -> Any:
        return self.transfer.begin(make(step))


def prefetch_depth(setting: int | str, device: torch.device) -> int:
    """Batches to make ahead for training on `device`, of `data.prefetch`.

    On a CPU "auto" is 0: a mapped read takes a hundredth of a step, and a thread that runs torch operators brings a
    second OpenMP pool that takes cores from the first (measured: a third of the training speed on two cores).
    """
    if isinstance(setting, str):
        return DEPTH if device.type == "cuda" else 0
    return setting


def check_prefetch(setting: int | str) -> None:
    """Raises ValueError for what `data.prefetch` cannot be."""
    if setting != AUTO and (isinstance(setting, str | bool) or setting < 0):
        raise ValueError(f"prefetch: got {setting!r}; accepted: {AUTO}, or the batches to make ahead, 0 or more")
