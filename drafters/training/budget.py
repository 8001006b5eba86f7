# How long a run lasts. A Stopwatch counts seconds of training proper; StepBudget turns minutes into steps once, from
# measured speed, so that the learning-rate schedule knows its end and a resumed run ends where it would have.

# mypy: disable-error-code="override"
# Lightning's hooks name LightningModule; these callbacks serve DistillModule alone.

import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer

from drafters.runs import Run, read_steps, write_steps
from drafters.training.optim import MEASURED_STEPS, SKIPPED_STEPS
from drafters.training.strategies import together

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = ["StepBudget", "Stopwatch"]

logger = logging.getLogger(__name__)


class Stopwatch:
    """Counts seconds between `start` and `stop`; both may be repeated."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds counted so far, the running stretch included."""
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def reset(self, seconds: float) -> None:
        """Stops, and goes on from `seconds`."""
        self._seconds, self._since = seconds, None

    def start(self) -> None:
        """Counts from now on."""
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stops counting."""
        self.reset(self.seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count inside; afterwards it runs or stands as it did before."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()


class StepBudget(Callback):
    """Ends the run at `module.total_steps`, after a last validation; finds that number when a time budget is given.

    The speed is the median of MEASURED_STEPS steps after SKIPPED_STEPS, measured once; the total lies in the
    checkpoint, and in the folder of `run`. A number that lies there already is taken: that of the run which this one
    repeats. It is looked for when the speed would be known, since what comes before must not know the end either.
    """

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self._ends: list[float] = []  # of the steps so far, in seconds of training
        self._last_step = 0

    def setup(self, trainer: Trainer, pl_module: "DistillModule", stage: str) -> None:
        if stage == "fit":
            _limit(trainer, pl_module.total_steps)

    def on_train_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._ends, self._last_step = [], trainer.global_step
        total, warmup = pl_module.total_steps, pl_module.optim.warmup_steps
        _limit(trainer, total)
        if total is not None and warmup >= total:
            warnings.warn(
                f"optim.warmup_steps: {warmup} warm-up steps in a run of {total}; the learning rate never reaches lr",
                stacklevel=2,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.total_steps is None:
            self._measure(trainer, pl_module)
        if pl_module.total_steps is not None and trainer.global_step >= pl_module.total_steps:
            trainer.should_stop = True  # makes Lightning validate once more before it leaves

    def _measure(self, trainer: Trainer, module: "DistillModule") -> None:
        if trainer.global_step == self._last_step:  # in the middle of an accumulation
            return
        self._last_step = trainer.global_step
        self._ends.append(module.clock.seconds)
        if len(self._ends) < SKIPPED_STEPS + MEASURED_STEPS:
            return
        minutes = module.optim.minutes
        assert minutes is not None
        # The median: the first reads of a cache's shards, which check their sums, are over before long.
        seconds_per_step = statistics.median(b - a for a, b in pairwise(self._ends[SKIPPED_STEPS - 1 :]))
        left = minutes * 60 - module.clock.seconds
        total = trainer.global_step + max(0, round(left / seconds_per_step))
        with together(trainer):
            known = read_steps(self._run, minutes=minutes) if self._run and trainer.is_global_zero else None
            total = total if known is None else max(known, trainer.global_step)
            if self._run is not None and trainer.is_global_zero:
                write_steps(self._run, minutes=minutes, steps=total)
        total = trainer.strategy.broadcast(total)
        module.total_steps = total
        _limit(trainer, total)
        reason = "" if known is None else ", as in the run that is repeated"
        logger.info("%.3f s a step: %g minutes are %d steps%s", seconds_per_step, minutes, total, reason)
        if known is None and total <= trainer.global_step:
            warnings.warn(
                f"optim.minutes: {minutes:g} minutes were over after {total} steps, "
                "spent on measuring the speed; give more time or use optim.max_steps",
                stacklevel=2,
            )


def _limit(trainer: Trainer, total_steps: int | None) -> None:
    # Trainer has no setter: a time budget becomes steps only after it was built.
    trainer.fit_loop.epoch_loop.max_steps = -1 if total_steps is None else total_steps
