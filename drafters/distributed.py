# Several processes, one result. Ranks exchange Python objects through a gloo group on the CPU, also where they work on
# GPUs. Every exchange carries the sender's error or none, so that a rank that fails ends the others at their next
# exchange, whichever that is, with one message, instead of leaving them to wait for it.

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from drafters.errors import CheckpointError, ConfigError, DataError, DraftersError

__all__ = ["Ranks", "is_launched", "launch", "leave"]

T = TypeVar("T")
# Ranks wait for the slowest, which may rightly take long. One that died is noticed at once (its connection closes, and
# torchrun ends the others); this limit is for one that lives and hangs.
TIMEOUT = timedelta(hours=4)
ENVIRONMENT = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SAVING = 600
INTERRUPTED = 130  # exit status of a process that a signal has stopped
KINDS = (CheckpointError, ConfigError, DataError, DraftersError)


class Ranks:
    """The processes that share a task; `Ranks()` is a process alone. All ranks call the same methods in the same order.

    Only the first rank prints, and writes what is common. Where a rank raises a DraftersError, every rank raises it in
    its next call; so does every rank when another process ends without a word or gives no answer in time.
    """

    def __init__(self, *, rank: int = 0, size: int = 1, local_rank: int = 0, group: Any = None) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._group = group
        self._agreed = self._lost = False

    @classmethod
    @contextmanager
    def from_environment(cls, *, timeout: timedelta = TIMEOUT) -> Iterator["Ranks"]:
        """The processes that torchrun started (or that torch.distributed connects already), else one alone. Enter it
        once a process: torch may hang when it connects the same processes a second time.

        `timeout` is for one exchange, the wait for the slowest rank included. Leaving waits for all ranks. A
        DraftersError that leaves is raised on the first rank; the others then exit quietly. Raises ConfigError when the
        environment is that of torchrun in part only.
        """
        is_connected = dist.is_available() and dist.is_initialized()
        if not is_connected and _world_size() == 1:
            yield cls()
            return
        group = None
        if is_connected:
            group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            _check_environment()
            dist.init_process_group(_backend(), timeout=timeout)
        ranks = cls(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            group=group,
        )
        try:
            with ranks._end_together():
                yield ranks
        finally:
            # A group that outlives its destruction can abort the interpreter at its end.
            ranks._group = None
            dist.destroy_process_group(group)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def device(self, asked: str | None) -> str | None:
        """`asked`, or, of several processes on a machine with GPUs, the one of this rank."""
        if asked is None and self.size > 1 and torch.cuda.is_available():
            count = torch.cuda.device_count()
            if self.local_rank >= count:
                raise ConfigError(
                    f"rank {self.rank} is process {self.local_rank} of its machine and sees {count} GPUs; start one "
                    "process a GPU, and let each see all of its machine"
                )
            torch.cuda.set_device(self.local_rank)
            return f"cuda:{self.local_rank}"
        return asked

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Within it the first rank goes before the others, who then find what it has fetched or written."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share: number i belongs to rank i % size."""
        return list(items[self.rank :: self.size])

    def gather(self, items: Sequence[T]) -> list[T]:
        """Everybody's items, in the order of ranks, on every rank."""
        return [item for part in self._exchange("gather", list(items)) for item in part]

    def share(self, value: T) -> T:
        """The first rank's value, on every rank."""
        shared: T = self._exchange("share", value if self.is_first else None)[0]
        return shared

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._exchange("barrier", None)

    def agree(self, error: DraftersError | None) -> None:
        """Raise the first error, in the order of ranks, on every rank; go on when none has one.

        Not needed for an error that is raised: leaving `from_environment` does the same.
        """
        self._exchange("agree", None, error)

    def _exchange(self, name: str, value: Any, error: DraftersError | None = None) -> list[Any]:
        """Everybody's value. `name` shows ranks that do not do the same, which is a bug."""
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        told: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(told, (name, value, error and _plain(error)), group=self._group)
        except RuntimeError as reason:
            self._lost = True
            raise DraftersError(
                f"rank {self.rank}: another of the {self.size} processes ended or gave no answer; its own message "
                f"says why ({_first_line(reason)})"
            ) from reason
        for _, _, failure in told:
            if failure is not None:
                self._agreed = True
                raise failure from error
        names = {name for name, _, _ in told}
        assert len(names) == 1, f"ranks do different things: {sorted(names)}"
        return [value for _, value, _ in told]

    @contextmanager
    def _end_together(self) -> Iterator[None]:
        """Tell the others of an error that leaves, or that there is none, and be told."""
        try:
            failure: DraftersError | None = None
            try:
                yield
            except DraftersError as error:
                if self._agreed or self._lost:
                    raise
                failure = error
            except KeyboardInterrupt:
                if self.is_first:
                    raise
                raise SystemExit(INTERRUPTED) from None  # the first one says it
            self._exchange("end", None, failure)
        except DraftersError:
            if self._agreed and not self.is_first and not os.environ.get("DRAFTERS_DEBUG"):
                # With success: torchrun ends all processes once one has failed, perhaps before the first has spoken.
                raise SystemExit(0) from None
            raise


def leave() -> None:
    """End one of several processes at once, with success and everything written: in torch 2.13 the threads of a gloo
    group that was destroyed now and then abort an interpreter that ends in good order."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_launched() -> bool:
    """Whether this process is one of several that were started together."""
    return _world_size() > 1


def launch(count: int, script: str, arguments: Sequence[str]) -> int:
    """Run `count` processes of a script on this machine, as torchrun does, and wait for them: the exit status of one
    that failed, else 0. They say what went wrong themselves. SIGINT and SIGTERM are passed on to them, which then have
    SAVING seconds to end."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)  # what torchrun says of a process that has said it
    options = ["--standalone", f"--nproc-per-node={count}", f"--shutdown-timeout={SAVING}"]
    try:
        run.main([*options, script, *arguments])
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode) or 1
    except SignalException:
        return INTERRUPTED
    return 0


def _backend() -> str:
    """What carries tensors: of a GPU NCCL, of the CPU gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"WORLD_SIZE: got '{value}' in the environment; accepted: a number of processes; or unset it")
    return int(value)


def _check_environment() -> None:
    absent = [name for name in ENVIRONMENT if name not in os.environ]
    if absent:
        raise ConfigError(
            f"WORLD_SIZE: got {os.environ['WORLD_SIZE']} in the environment, but {', '.join(absent)} not set; start "
            "several processes with `torchrun --nproc-per-node=N`, or unset WORLD_SIZE"
        )


def _plain(error: DraftersError) -> DraftersError:
    """The error as all ranks can read it: subclasses may need more than a message to be made."""
    return next(kind for kind in KINDS if isinstance(error, kind))(str(error))


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0][:200]
