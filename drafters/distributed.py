# Several processes, one result. Ranks exchange Python objects through a gloo group of their own on the CPU, also where
# they work on GPUs. Every exchange carries the sender's error or none, so that a rank that fails ends the others at
# their next exchange, whichever that is, with one message; `Alarm` ends those that wait for it elsewhere.

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count as counting
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from drafters.alarm import LAUNCHER, Alarm
from drafters.errors import CheckpointError, ConfigError, DataError, DraftersError
from drafters.stopping import INTERRUPTED

__all__ = ["Launch", "Ranks", "find_launch", "is_lost", "launch", "leave"]

T = TypeVar("T")
# Ranks wait for the slowest, which may rightly take long. One that died is noticed at once (its connection closes, and
# torchrun ends the others); this limit is for one that lives and hangs.
TIMEOUT = timedelta(hours=4)
ENVIRONMENT = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Names that SLURM gives to allocations in which a person types: outside of srun, they are no ranks.
INTERACTIVE = ("bash", "interactive")
PORTS = range(25_000, 32_000)  # below those that systems give away by themselves
SAVING = 600  # seconds that started processes have to end after a signal
_entered = counting()  # how often ranks were made of the environment, alike in all processes
KINDS = (CheckpointError, ConfigError, DataError, DraftersError)


class Ranks:
    """The processes that share a task; `Ranks()` is a process alone. All ranks call the same methods in the same order.

    Only the first rank prints, and writes what is common. Where a rank raises a DraftersError, every rank raises it in
    its next call; so does every rank when another process ends without a word or gives no answer in time.
    """

    def __init__(
        self, *, rank: int = 0, size: int = 1, local_rank: int = 0, group: Any = None, alarm: Alarm | None = None
    ) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._group, self._alarm = group, alarm
        self._agreed = self._lost = False

    @classmethod
    @contextmanager
    def from_environment(cls, *, timeout: timedelta = TIMEOUT) -> Iterator["Ranks"]:
        """The processes that torchrun or SLURM's srun started (or that torch.distributed connects already), else one
        alone. Enter it once a process: torch may hang when it connects the same processes a second time.

        `timeout` is for one exchange, the wait for the slowest rank included. Leaving waits for all ranks. A
        DraftersError that leaves is raised on the first rank; the others then exit quietly. Raises ConfigError when the
        environment is that of torchrun or srun in part only.
        """
        is_connected = dist.is_available() and dist.is_initialized()
        told = Launch(local_rank=_local_rank(os.environ)) if is_connected else find_launch(os.environ)
        if not is_connected and told.size == 1:
            yield cls()
            return
        alarm = Alarm(os.environ)
        if not is_connected:
            _connect(told, timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
        ranks = cls(
            rank=dist.get_rank(), size=dist.get_world_size(), local_rank=told.local_rank, group=group, alarm=alarm
        )
        store = dist.distributed_c10d._get_default_store()  # torch has no public way to it
        alarm.connect(PrefixStore(f"drafters/{next(_entered)}", store), rank=ranks.rank)
        try:
            with ranks._end_together():
                yield ranks
        finally:
            # A group that outlives its destruction can abort the interpreter at its end.
            ranks._group = None
            dist.destroy_process_group(group if is_connected else None)
            alarm.stop()

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
            raise self._left_alone(reason) from reason
        for _, _, failure in told:
            if failure is not None:
                self._agreed = True
                raise failure from error
        names = {name for name, _, _ in told}
        assert len(names) == 1, f"ranks do different things: {sorted(names)}"
        return [value for _, value, _ in told]

    def _left_alone(self, reason: RuntimeError) -> DraftersError:
        """What to raise where another process is gone. Raises SystemExit where that one says why, or somebody does."""
        alert = self._alarm.heard() if self._alarm is not None else None
        if alert is not None:
            assert self._alarm is not None
            if alert.message is None or not self._alarm.may_say():
                raise SystemExit(0) from None
            return DraftersError(alert.message)
        return DraftersError(
            f"rank {self.rank}: another of the {self.size} processes ended or gave no answer; its own message says "
            f"why, but of one that was killed, often for want of memory ({_first_line(reason)}); the same command goes "
            "on from what was saved"
        )

    @contextmanager
    def _end_together(self) -> Iterator[None]:
        """Tell the others of an error that leaves, or that there is none, and be told."""
        try:
            failure: DraftersError | None = None
            try:
                with ExitStack() as stack:
                    stack.push(self._sound)
                    yield
            except DraftersError as error:
                if self._agreed or self._lost:
                    raise
                failure = error
            except KeyboardInterrupt:
                if self.is_first:
                    raise
                raise SystemExit(INTERRUPTED) from None  # the first one says it
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                self._lost = True
                raise self._left_alone(error) from error
            self._exchange("end", None, failure)
        except DraftersError:
            if not self._agreed or os.environ.get("DRAFTERS_DEBUG"):
                raise
            if self.is_first and (self._alarm is None or self._alarm.may_say()):
                raise
            # With success: torchrun ends all processes once one has failed, perhaps before the first has spoken.
            raise SystemExit(0) from None

    def _sound(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Tell the alarm of an error of this process that leaves."""
        is_told = self._agreed or self._lost or (isinstance(error, RuntimeError) and is_lost(error))
        if self._alarm is None or not isinstance(error, Exception) or is_told:
            return
        if isinstance(error, DraftersError):
            self._alarm.sound(str(error))
        else:
            self._alarm.sound(None, trace="".join(traceback.format_exception(error)))


def leave() -> None:
    """End one of several processes at once, with success and everything written: in torch 2.13 the threads of a gloo
    group that was destroyed now and then abort an interpreter that ends in good order."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def launch(count: int, script: str, arguments: Sequence[str]) -> int:
    """Run `count` processes of a script on this machine, as torchrun does, and wait for them: the exit status of one
    that failed, else 0. They say what went wrong themselves; of one that a signal ended, a DraftersError does. SIGINT
    and SIGTERM are passed on to them, which then have SAVING seconds to end."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[LAUNCHER] = str(os.getpid())
    logging.disable(logging.CRITICAL)  # what torchrun says of a process that has said it
    options = ["--standalone", f"--nproc-per-node={count}", f"--shutdown-timeout={SAVING}"]
    try:
        run.main([*options, script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise DraftersError(
                f"process {rank} of {count} was ended by {failure.signal_name()} and could not say why (often for want "
                "of memory); the same command goes on from what was saved"
            ) from error
        return int(failure.exitcode) or 1
    except SignalException:
        return INTERRUPTED
    return 0


def _connect(told: "Launch", timeout: timedelta) -> None:
    if told.address is None:
        dist.init_process_group(_backend(), timeout=timeout)
        return
    host, port = told.address.rsplit(":", 1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)  # DeepSpeed reads them
    where = f"tcp://{told.address}"
    dist.init_process_group(_backend(), init_method=where, rank=told.rank, world_size=told.size, timeout=timeout)


def _backend() -> str:
    """What carries tensors: of a GPU NCCL, of the CPU gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher tells a process. `address` is where the first rank waits for the others, None where torch reads
    that from torchrun's variables by itself."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str | None = None


def find_launch(environment: Mapping[str, str]) -> Launch:
    """Torchrun's variables, or those of a step that SLURM's srun started, or one process alone. Raises ConfigError."""
    if "WORLD_SIZE" not in environment and (slurm := _slurm_launch(environment)) is not None:
        return slurm
    size = environment.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(f"WORLD_SIZE: got '{size}' in the environment; accepted: a number of processes; or unset it")
    absent = [name for name in ENVIRONMENT if name not in environment]
    if int(size) > 1 and absent:
        raise ConfigError(
            f"WORLD_SIZE: got {size} in the environment, but {', '.join(absent)} not set; start several processes with "
            "`torchrun --nproc-per-node=N` or SLURM's `srun --ntasks=N`, or unset WORLD_SIZE"
        )
    numbers = {name: environment.get(name, "0") for name in ("RANK", "LOCAL_RANK")}
    return Launch(rank=_number(numbers, "RANK"), size=int(size), local_rank=_number(numbers, "LOCAL_RANK"))


def _slurm_launch(environment: Mapping[str, str]) -> Launch | None:
    """The place of this process among the tasks of a step; None in a shell or batch script, which only have a job."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= environment.keys():
        return None
    name = "SLURM_STEP_NUM_TASKS"
    if name not in environment:
        # The job's number of tasks is that of the step too, but in a shell that SLURM opens in an allocation.
        name = "SLURM_NTASKS"
        if environment.get("SLURM_JOB_NAME") in INTERACTIVE:
            return None
    if name not in environment or (size := _number(environment, name)) < 2:
        return None
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    port = environment.get("MASTER_PORT") or str(PORTS[(7 * job + step) % len(PORTS)])
    return Launch(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        address=f"{_first_node(environment)}:{port}",
    )


def _local_rank(environment: Mapping[str, str]) -> int:
    """Of a process that somebody else connected."""
    name = next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in environment), None)
    return 0 if name is None else _number(environment, name)


def _first_node(environment: Mapping[str, str]) -> str:
    """A name or address of the machine of rank 0. The node that a step was launched from comes last: where a person
    types srun in an allocation, it is none of the step's."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    # a[03-07,12],b2 -> a03
    first = re.match(r"([^,\[\s]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,\s]*)", nodes)
    named = "".join(filter(None, first.groups())) if first else None
    found = environment.get("MASTER_ADDR") or named or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not found:
        raise ConfigError(
            "MASTER_ADDR: not set, and SLURM_STEP_NODELIST, SLURM_JOB_NODELIST and SLURM_LAUNCH_NODE_IPADDR are not "
            "either; set it to the machine of rank 0"
        )
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    if not (value := environment.get(name, "")).isdecimal():
        raise ConfigError(
            f"{name}: got '{value}' in the environment; accepted: a number; start processes with torchrun or srun"
        )
    return int(value)


def _plain(error: DraftersError) -> DraftersError:
    """The error as all ranks can read it: subclasses may need more than a message to be made."""
    return next(kind for kind in KINDS if isinstance(error, kind))(str(error))


def is_lost(error: RuntimeError) -> bool:
    """Whether this is what torch raises where another process is gone, also in collectives that are not of Ranks."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0][:200]
