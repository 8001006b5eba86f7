# Where the time of a training step goes, operator by operator: torch.profiler over a few steps of a run, written as a
# Chrome trace and as a table. It watches; the weights are those of a run without it.

# mypy: disable-error-code="override"
# Lightning's hooks name LightningModule; these callbacks serve DistillModule alone.

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from drafters.checkpoint import write_whole
from drafters.errors import ConfigError
from drafters.training.optim import MEASURED_STEPS, SKIPPED_STEPS, OptimConfig

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = ["PROFILE", "ProfilerConfig", "StepProfiler", "build_profiler"]

PROFILE = "profile"  # the folder in a run's


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Which optimizer steps of a session are recorded: after `skip_steps`, and after `warmup_steps` that run with the
    profiler on. The rest as in torch.profiler.profile; `top` operators stand in the table."""

    skip_steps: int = 50
    warmup_steps: int = 2
    steps: int = 3
    top: int = 30
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    def __post_init__(self) -> None:
        for name, least in (("skip_steps", 0), ("warmup_steps", 1), ("steps", 1), ("top", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: got {value}; accepted: {least} or more")

    @property
    def last_step(self) -> int:
        """The last recorded step of a session, counted from 1."""
        return self.skip_steps + self.warmup_steps + self.steps


def build_profiler(
    config: ProfilerConfig | None, run: Path, *, optim: OptimConfig, console: Console
) -> list["StepProfiler"]:
    """The callback that `config` asks for, or none. Raises ConfigError when its steps would count for a time budget."""
    if config is None:
        return []
    least = SKIPPED_STEPS + MEASURED_STEPS
    if optim.minutes is not None and config.skip_steps < least:
        raise ConfigError(
            f"profiler.skip_steps: got {config.skip_steps}; with optim.minutes at least {least}, since the speed of "
            "the steps before says how long the run is; or give optim.max_steps and optim.minutes=null"
        )
    return [StepProfiler(run / PROFILE, config, console)]


class StepProfiler(Callback):
    """Writes `trace-rankN.json.gz` (for chrome://tracing or ui.perfetto.dev) and `operators-rankN.txt` into `folder`;
    those of a resumed session take the place of earlier ones. Raises CheckpointError when they cannot be written."""

    def __init__(self, folder: Path, config: ProfilerConfig, console: Console) -> None:
        self.folder, self.config, self.console = folder, config, console
        self._profiler: torch.profiler.profile | None = None
        self._begun = self._step = 0
        self._is_done = False

    def on_train_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._begun = self._step = trainer.global_step
        self._is_done = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: "DistillModule", batch: Any, batch_idx: int) -> None:
        is_time = trainer.global_step - self._begun == self.config.skip_steps
        if is_time and self._profiler is None and not self._is_done:
            self._profiler = self._start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        has_stepped, self._step = trainer.global_step != self._step, trainer.global_step
        if self._profiler is None or not has_stepped:
            return
        with pl_module.clock.paused():
            self._profiler.step()
            if self._step - self._begun == self.config.last_step:
                self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        done = trainer.global_step - self._begun
        if self._profiler is not None:
            self._stop()
        if done < self.config.last_step:
            warnings.warn(
                f"profiler: {done} steps were trained, but the ones to record end with step {self.config.last_step}; "
                "lower profiler.skip_steps, or train longer",
                stacklevel=2,
            )

    def on_exception(self, trainer: Trainer, pl_module: "DistillModule", exception: BaseException) -> None:
        self._is_done = True  # nothing more is written
        self._stop()

    def _start(self, trainer: Trainer, module: "DistillModule") -> torch.profiler.profile:
        kinds = torch.profiler.ProfilerActivity
        on_gpu = module.device.type == "cuda"
        config, rank = self.config, trainer.global_rank
        profiler = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=config.warmup_steps, active=config.steps, repeat=1),
            on_trace_ready=lambda done: self._write(
                done, rank, sort_by=f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
            ),
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            acc_events=True,
        )
        profiler.start()
        return profiler

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: torch.profiler.profile, rank: int, *, sort_by: str) -> None:
        if self._is_done:
            return
        self._is_done = True

        def trace(temp: Path) -> None:
            # torch compresses what is called .gz.
            packed = temp.with_name(temp.name + ".gz")
            profiler.export_chrome_trace(str(packed))
            packed.replace(temp)

        table = profiler.key_averages(group_by_input_shape=self.config.record_shapes)
        first = self._begun + self.config.skip_steps + self.config.warmup_steps + 1
        text = f"steps {first} to {self._step}, rank {rank}\n" + table.table(sort_by=sort_by, row_limit=self.config.top)
        trace_path = write_whole(self.folder / f"trace-rank{rank}.json.gz", trace)
        write_whole(self.folder / f"operators-rank{rank}.txt", lambda temp: temp.write_text(text + "\n"))
        if rank == 0:
            self.console.print(f"profile: {trace_path} and operators-rank0.txt", markup=False, highlight=False)
