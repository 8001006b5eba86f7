# Two artefacts: `checkpoints/last.ckpt` for resuming only, `drafter/` for everything else. Both are replaced whole, so
# that a killed run finds the last good one. A signal is answered at the end of a step, never inside one: half an
# optimizer step cannot be resumed from.

# mypy: disable-error-code="override"
# Lightning's hooks name LightningModule; these callbacks serve DistillModule alone.

import logging
import math
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn

from drafters.checkpoint import WHOLE, replace_path, save_drafter, write_error
from drafters.errors import ConfigError
from drafters.files import save_tensors
from drafters.stopping import ASKED, leave_terminal
from drafters.training.strategies import together, whole_drafter

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = [
    "PROBED",
    "WARNING",
    "LastCheckpoint",
    "SaveDrafter",
    "TrainingInterrupted",
    "averaged_weights",
    "validation_follows",
]

logger = logging.getLogger(__name__)

PROBED = "probe/accepted_length"  # the monitor that is real decoding
WARNING = signal.SIGUSR2  # what submitit asks SLURM to send before a time limit or a preemption


class TrainingInterrupted(Exception):
    """A signal ended the run after everything was saved; the same command goes on from `checkpoint`. `number` is the
    signal, None where another process heard it."""

    def __init__(self, step: int, checkpoint: Path, number: int | None = None) -> None:
        super().__init__(f"stopped after step {step}; saved {checkpoint}; the same command resumes")
        self.step, self.checkpoint, self.number = step, checkpoint, number


@contextmanager
def averaged_weights(trainer: Trainer, module: "DistillModule") -> Iterator[None]:
    """Inside, `module` holds the averaged weights, if the run averages; afterwards its own again, bit for bit."""
    averagers = [callback for callback in _callbacks(trainer) if isinstance(callback, WeightAveraging)]
    for callback in averagers:
        callback.on_validation_epoch_start(trainer, module)
    try:
        yield
    finally:
        for callback in averagers:
            callback.on_validation_epoch_end(trainer, module)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it


def validation_follows(trainer: Trainer) -> bool:
    """Whether a validation comes right after this batch; asked at its end, when StepBudget has said whether it is the
    last one. Lightning has no public way to ask."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


class LastCheckpoint(Checkpoint):
    """Keeps `folder/last.ckpt`: every `every_n_steps` optimizer steps, every `every_minutes`, at the end, and at a
    signal of ASKED, after which it raises TrainingInterrupted. A second Ctrl-C stops at once, without saving. Where a
    launcher has a handler for WARNING (submitit's puts the job back into the queue), that signal is answered alike.

    A step with a validation is saved after it, never before: Lightning counts what a checkpoint holds as done, so a run
    that is killed in a validation would never repeat it, and in the last one never end.

    Lightning runs Checkpoint callbacks last, so the state of all others is the step's own.
    """

    def __init__(self, folder: Path | str, *, every_n_steps: int = 500, every_minutes: float = 5.0) -> None:
        self.path = Path(folder) / "last.ckpt"
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self._step = 0
        self._is_due = False
        self._saved_at = time.monotonic()
        self._handlers: dict[int, Any] = {}
        self._heard: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._step, self._saved_at = trainer.global_step, time.monotonic()
        for wishes in (pl_module.requests, pl_module.agreed):
            wishes.update(dict.fromkeys(wishes, False))
        if threading.current_thread() is threading.main_thread():
            # Those that are ignored stay so, as that of a closed terminal under nohup.
            asked = [one for one in ASKED if signal.getsignal(one) != signal.SIG_IGN]
            answered = (*asked, *([WARNING] if callable(signal.getsignal(WARNING)) else []))
            self._handlers = {number: signal.getsignal(number) for number in answered}
            for number in self._handlers:
                signal.signal(number, lambda number, frame: self._on_signal(number, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: "DistillModule", batch: Any, batch_idx: int) -> None:
        if pl_module.agreed["stop"]:
            raise TrainingInterrupted(trainer.global_step, self.path, self._heard)
        # Only the first rank's clock counts; the others learn of it in the step's own reduction.
        if trainer.is_global_zero and time.monotonic() - self._saved_at > self.every_minutes * 60:
            pl_module.requests["save"] = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        has_stepped, self._step = step != self._step, step  # else it is in the middle of an accumulation
        is_wished = pl_module.agreed["stop"] or pl_module.agreed["save"]
        is_time = step % self.every_n_steps == 0 or step == pl_module.total_steps
        self._is_due = has_stepped and (is_wished or is_time)
        if self._is_due and not validation_follows(trainer):
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._is_due:
            self.save(trainer, pl_module)

    def save(self, trainer: Trainer, module: "DistillModule") -> None:
        """Writes the checkpoint now; called on all ranks. Raises CheckpointError when the disk does not take it."""
        temp = self.path.with_name(self.path.name + ".tmp")
        with module.clock.paused():
            module.requests["save"] = False
            with together(trainer), self._cleaning(temp):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with together(trainer), self._cleaning(temp):
                try:
                    trainer.save_checkpoint(temp, weights_only=False)
                except OSError:
                    trainer.strategy.barrier()  # where save_checkpoint ends on the ranks that do not write
                    raise
            is_in_parts = isinstance(trainer.strategy, DeepSpeedStrategy)  # of which none is the drafter
            drafter = whole_drafter(trainer, module) if is_in_parts else None
            with together(trainer), self._cleaning(temp):
                if drafter is not None and trainer.is_global_zero:
                    tensors = drafter.state_dict(prefix="drafter.")
                    save_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, temp / WHOLE)
                if trainer.is_global_zero:
                    replace_path(temp, self.path)
        self._saved_at = time.monotonic()

    @contextmanager
    def _cleaning(self, temp: Path) -> Iterator[None]:
        """Removes what a full disk left of a checkpoint. Raises CheckpointError."""
        try:
            yield
        except OSError as error:
            if temp.is_dir():
                shutil.rmtree(temp, ignore_errors=True)
            else:
                temp.unlink(missing_ok=True)
            raise write_error(self.path, error) from error

    def on_train_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._restore_handlers()
        # No step comes any more that would hear of a signal in the last one or in its validation.
        if trainer.strategy.reduce_boolean_decision(pl_module.requests["stop"], all=False):
            raise TrainingInterrupted(trainer.global_step, self.path, self._heard)

    def on_exception(self, trainer: Trainer, pl_module: "DistillModule", exception: BaseException) -> None:
        self._restore_handlers()

    def _on_signal(self, number: int, module: "DistillModule") -> None:
        module.requests["stop"], self._heard = True, number
        if number == signal.SIGHUP:
            leave_terminal()
        signal.signal(number, self._handlers[number])
        logger.warning("%s: stopping after this step; once more to stop at once", signal.Signals(number).name)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class SaveDrafter(Callback):
    """Writes `folder` (config.json, model.safetensors) whenever a validation beats the best `monitor` so far (higher is
    better), with averaged weights if the run averages. With the monitor PROBED, whoever probes calls `offer` instead.
    Where none gives a number, and where a finished run has lost its folder, it holds the last weights."""

    def __init__(
        self,
        folder: Path | str,
        *,
        monitor: str = "val/accepted_length",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.monitor, self.provenance = Path(folder), monitor, dict(provenance or {})
        self.best: float | None = None
        self.best_step: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if self.monitor != PROBED:
            metrics = trainer.callback_metrics
            self.offer(trainer, pl_module, {name: float(v) for name, v in metrics.items() if name.startswith("val/")})
        self._save_without_best(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not validation_follows(trainer):
            self._save_without_best(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if trainer.global_step == pl_module.total_steps and not self._is_there():
            best = "" if self.best_step is None else f"; the best ones were those of step {self.best_step}"
            warnings.warn(f"{self.folder} was lost: it is written again with the last weights{best}", stacklevel=2)
            self._save(trainer, pl_module, {})

    def offer(self, trainer: Trainer, module: "DistillModule", metrics: Mapping[str, float]) -> None:
        """Save the weights if `metrics[monitor]` beats the best so far; called on all ranks with the same numbers.
        Raises ConfigError when the monitor is not among the metrics."""
        if self.monitor not in metrics:
            raise ConfigError(
                f"callbacks.monitor: no metric '{self.monitor}'; accepted: {', '.join(sorted({*metrics, PROBED}))}"
            )
        value = metrics[self.monitor]
        is_lost = self.best is not None and not self._is_there()
        if math.isfinite(value) and (self.best is None or is_lost or value > self.best):
            self.best, self.best_step = value, trainer.global_step
            self._save(trainer, module, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = state_dict.get("monitor", self.monitor)
        if before == self.monitor:
            self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        else:
            logger.info("callbacks.monitor was %s, now %s: the best weights are chosen anew", before, self.monitor)

    def _is_there(self) -> bool:
        return self.folder.exists() or self.folder.with_name(f"{self.folder.name}.old").exists()

    def _save_without_best(self, trainer: Trainer, module: "DistillModule") -> None:
        # Before the checkpoint of the last step is written: what goes on from that one trains and saves no more.
        if self.best is None and trainer.global_step == module.total_steps:
            measuring = "probe" if self.monitor == PROBED else "validation"
            warnings.warn(
                f"no {measuring} gave a finite {self.monitor}: the drafter holds the last weights, not the best ones",
                stacklevel=2,
            )
            self._save(trainer, module, {})

    def _save(self, trainer: Trainer, module: "DistillModule", metrics: Mapping[str, float]) -> None:
        facts = {
            **self.provenance,
            "step": trainer.global_step,
            "positions": module.positions,
            "monitor": self.monitor,
            "probe" if self.monitor == PROBED else "validation": dict(metrics),
        }
        with module.clock.paused(), averaged_weights(trainer, module):
            drafter = whole_drafter(trainer, module)
            with together(trainer):
                if drafter is not None and trainer.is_global_zero:
                    save_drafter(drafter, self.folder, spec=module.target_head.spec, provenance=facts)
