# How fast a run trains and what keeps it from being faster: tokens and supervised positions a second, the share of the
# time that waits for data, the share of the device's arithmetic that is used, memory. Numbers are those of the whole
# job: each rank's travel in the step's own reduction. Seconds are those of `module.clock`, training proper.

# mypy: disable-error-code="override"
# Lightning's hooks name LightningModule; these callbacks serve DistillModule alone.

import json
import resource
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from drafters.batches import StatesLoader
from drafters.checkpoint import write_whole
from drafters.training.flops import Peak, peak_rate, step_counter

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = ["THROUGHPUT", "Amounts", "ThroughputMeter", "peak_memory"]

THROUGHPUT = "throughput.json"
# The first steps of a session are not measured: caches are cold, and in the second one arithmetic is counted.
SKIPPED_STEPS = 2
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What was done in `seconds` of training. `waited`: seconds in which a rank waited for its next batch, summed over
    the ranks; None where the loader does not say."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    positions: int = 0
    waited: float | None = 0.0

    def __add__(self, other: "Amounts") -> "Amounts":
        waited = None if self.waited is None or other.waited is None else self.waited + other.waited
        return Amounts(
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            tokens=self.tokens + other.tokens,
            positions=self.positions + other.positions,
            waited=waited,
        )

    def rates(self, *, num_ranks: int, flops: float | None, peak: Peak | None) -> dict[str, float]:
        """Numbers a second and shares; those not known are left out. `flops`: operations for each position."""
        if not self.seconds > 0:
            return {}
        found = {
            "tokens_per_second": self.tokens / self.seconds,
            "positions_per_second": self.positions / self.seconds,
            "steps_per_second": self.steps / self.seconds,
        }
        if self.waited is not None:
            found["data_wait"] = self.waited / (self.seconds * num_ranks)
        if flops is not None and peak is not None:
            found["mfu"] = flops * found["positions_per_second"] / (peak.flops * num_ranks)
        return found


class ThroughputMeter(Callback):
    """Logs `throughput/*` every `log_every_n_steps` of the trainer, for the steps since the last time; at the end of a
    run it shows one line and writes THROUGHPUT into `folder`, for all its measured steps.

    Arithmetic is counted once, in one step, and taken as proportional to the supervised positions.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.all = Amounts()  # since the run began, over its sessions
        self.flops: float | None = None  # for each supervised position
        self.memory = 0.0  # bytes: the peak of a process, the mean over ranks
        self._peak: Peak | None = None
        self._latest = Amounts()  # since numbers were logged
        self._tokens: Tensor | None = None  # of this rank in the step under way
        self._step = self._done = 0  # of the run; of this session
        self._counter: FlopCounterMode | None = None
        self._since = (0.0, 0.0, 0)  # seconds, seconds waited, positions: at the last step's end

    def on_train_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        bf16 = pl_module.optim.precision == "bf16"
        self._peak = peak_rate(pl_module.device, torch.bfloat16 if bf16 else torch.float32)
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self._step, self._done, self._tokens = trainer.global_step, 0, None
        self._latest = Amounts()
        self._since = (pl_module.clock.seconds, _waited(trainer) or 0.0, pl_module.positions)

    def on_train_batch_start(self, trainer: Trainer, pl_module: "DistillModule", batch: Any, batch_idx: int) -> None:
        tokens = batch.lengths_B.sum()
        self._tokens = tokens if self._tokens is None else self._tokens + tokens
        if self.flops is None and self._done == SKIPPED_STEPS - 1 and self._counter is None:
            self._counter = step_counter()
            self._counter.__enter__()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: "DistillModule", optimizer: torch.optim.Optimizer
    ) -> None:
        # Runs before the module's own hook, which sums these over the ranks.
        assert self._tokens is not None
        waited = _waited(trainer)
        tallies: dict[str, Tensor | float] = {"tokens": self._tokens}
        if waited is not None:
            tallies["waited"] = waited - self._since[1]
        if _is_logged(trainer, trainer.global_step + 1, pl_module):
            tallies["memory"] = peak_memory(pl_module.device)
        if self._counter is not None:
            tallies["flops"] = float(self._stop_counting())
        pl_module.tallies = tallies

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # in the middle of an accumulation
            return
        self._step, self._tokens = trainer.global_step, None
        self._done += 1
        total = {name: float(value) for name, value in pl_module.tallies.items()}
        before, self._since = self._since, (pl_module.clock.seconds, _waited(trainer) or 0.0, pl_module.positions)
        positions = self._since[2] - before[2]
        if "flops" in total:
            self.flops = total["flops"] / max(positions, 1)
        if self._done > SKIPPED_STEPS:
            done = Amounts(
                steps=1,
                seconds=self._since[0] - before[0],
                tokens=round(total["tokens"]),
                positions=positions,
                waited=total.get("waited"),
            )
            self.all, self._latest = self.all + done, self._latest + done
        if "memory" in total:
            self.memory = max(self.memory, total["memory"] / trainer.world_size)
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if not trainer.is_global_zero or not self.all.seconds > 0:
            return
        facts = self.facts(trainer.world_size)
        write_whole(self.folder / THROUGHPUT, lambda temp: temp.write_text(json.dumps(facts, indent=1) + "\n"))
        self.console.print(one_line(facts), markup=False, highlight=False)

    def on_exception(self, trainer: Trainer, pl_module: "DistillModule", exception: BaseException) -> None:
        if self._counter is not None:
            self._stop_counting()

    def facts(self, num_ranks: int) -> dict[str, Any]:
        """What THROUGHPUT holds: rates, what they were measured on, and what the utilisation is a share of."""
        peak = self._peak
        return {
            **self.all.rates(num_ranks=num_ranks, flops=self.flops, peak=peak),
            "memory_gib": self.memory / GIB,
            "measured": asdict(self.all),
            "flops_per_position": self.flops,
            "peak_flops_per_second": None if peak is None else peak.flops,
            "peak_origin": None if peak is None else peak.origin,
            "ranks": num_ranks,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"all": asdict(self.all), "flops": self.flops, "memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = {field.name for field in fields(Amounts)}
        self.all = Amounts(**{name: value for name, value in state_dict["all"].items() if name in known})
        self.flops, self.memory = state_dict["flops"], state_dict["memory"]

    def _log(self, trainer: Trainer, module: "DistillModule") -> None:
        rates = self._latest.rates(num_ranks=trainer.world_size, flops=self.flops, peak=self._peak)
        self._latest = Amounts()
        values = {f"throughput/{name}": value for name, value in (rates | {"memory_gib": self.memory / GIB}).items()}
        module.log_dict({name: torch.tensor(value) for name, value in values.items()})

    def _stop_counting(self) -> int:
        assert self._counter is not None
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        return counter.get_total_flops()


def peak_memory(device: torch.device) -> float:
    """Bytes: the most that torch held on a GPU since training began, else the most that this process ever held."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def one_line(facts: dict[str, Any]) -> str:
    """What a person wants to know of THROUGHPUT."""
    parts = [f"{facts['tokens_per_second']:,.0f} tokens/s", f"{facts['positions_per_second']:,.0f} positions/s"]
    if "data_wait" in facts:
        parts.append(f"data wait {facts['data_wait']:.1%}")
    if "mfu" in facts:
        parts.append(f"MFU {facts['mfu']:.1%} of {facts['peak_flops_per_second'] / 1e12:,.2f} TFLOP/s")
    parts.append(f"peak memory {facts['memory_gib']:.2f} GiB")
    return "throughput: " + ", ".join(parts)


def _waited(trainer: Trainer) -> float | None:
    loader = trainer.train_dataloader
    return loader.seconds if isinstance(loader, StatesLoader) else None


def _is_logged(trainer: Trainer, step: int, module: "DistillModule") -> bool:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # a connector sets it
    return step == module.total_steps or (every > 0 and step % every == 0)
