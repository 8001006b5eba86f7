# Real decoding in the middle of training, beside the teacher-forced number: logged together, so that a gap between them
# is seen while there is still something to mend.

# mypy: disable-error-code="override"
# Lightning's hooks name LightningModule; these callbacks serve DistillModule alone.

import logging
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from drafters.heads.base import Drafter
from drafters.training.saving import averaged_weights, validation_follows
from drafters.training.strategies import whole_drafter

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = ["CAUSES", "WARN_EVERY", "AcceptanceProbe", "OnMeasured", "Probe"]

logger = logging.getLogger(__name__)

Probe = Callable[[Drafter], dict[str, float]]
OnMeasured = Callable[[Trainer, "DistillModule", dict[str, float]], None]

STATE_KEY = "probe"
LEAST = 0.2  # drafts a round
WARN_EVERY = 5  # probes: a gap that stays is said again, but not each time
CAUSES = (
    "training sees later context that decoding does not have (a leak)",
    "the loss mask covers other text than the answers",
    "another chat template than in training",
    "states of the wrong layer, or on the other side of a norm",
    "states of another dtype",
    "validation text unlike the prompts, or not written by this target",
)


class AcceptanceProbe(Callback):
    """Every `every_n_steps` steps, and after the last one, calls `probe(drafter)` (real decoding on a few held-out
    prompts, on the first rank, with averaged weights if the run averages) and logs what it returns as `probe/<name>`.
    Where a validation follows the step it waits for it, so that both numbers are of the same weights.

    `forced` names the teacher-forced counterpart of the probe's `accepted_length`. The latest one stands in the same
    row, with `probe/validated_step` (its step) and `probe/gap` = 1 - decoded / teacher-forced, both without the bonus
    token, which no drafter can lose. A gap above `tolerance` warns with likely CAUSES, then not again for WARN_EVERY
    probes; not while teacher forcing itself says less than LEAST drafts a round, where the share is noise.
    `on_measured` gets the numbers, all ranks the same.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        every_n_steps: int,
        tolerance: float = 0.5,
        forced: str = "val/accepted_length_greedy",
        on_measured: OnMeasured | None = None,
    ) -> None:
        self.probe, self.every_n_steps, self.tolerance = probe, every_n_steps, tolerance
        self.forced, self.on_measured = forced, on_measured
        self.latest: dict[str, float] = {}
        self._step = 0
        self._is_due = False
        self._validated: tuple[float, int] | None = None  # the latest teacher-forced number and its step
        self._quiet = 0  # probes left without a warning

    def on_train_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        has_stepped, self._step = step != self._step, step  # else it is in the middle of an accumulation
        self._is_due = has_stepped and (step % self.every_n_steps == 0 or step == pl_module.total_steps)
        if self._is_due and not validation_follows(trainer):
            self._measure(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = float(trainer.callback_metrics.get(self.forced, math.nan))
        if math.isfinite(value):
            self._validated = value, trainer.global_step
        if self._is_due:
            self._measure(trainer, pl_module)

    # Not in `state_dict`: Lightning would warn where a run goes on without probes.
    def on_save_checkpoint(self, trainer: Trainer, pl_module: "DistillModule", checkpoint: dict[str, Any]) -> None:
        checkpoint[STATE_KEY] = {"validated": self._validated, "quiet": self._quiet}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: "DistillModule", checkpoint: dict[str, Any]) -> None:
        if STATE_KEY in checkpoint:  # else that run had no probes
            state = checkpoint[STATE_KEY]
            self._validated, self._quiet = state["validated"], state["quiet"]

    def _measure(self, trainer: Trainer, module: "DistillModule") -> None:
        self._is_due = False
        with module.clock.paused():
            with averaged_weights(trainer, module):
                drafter = whole_drafter(trainer, module)
                found = self._decode(drafter) if drafter is not None and trainer.is_global_zero else {}
            self.latest = trainer.strategy.broadcast(found)
            measured = {f"probe/{name}": value for name, value in self.latest.items()}
            row = measured | self._beside() | module.progress()
            # Lightning numbers its rows from 0; a validation of this step has the same number.
            for one in trainer.loggers:
                finite = {name: value for name, value in row.items() if math.isfinite(value)}
                one.log_metrics(finite, step=trainer.global_step - 1)
            if trainer.is_global_zero:
                self._say(trainer.global_step)
            if self.on_measured is not None:
                self.on_measured(trainer, module, measured)

    def _decode(self, drafter: Drafter) -> dict[str, float]:
        was_training = drafter.training
        drafter.eval()
        with torch.no_grad():
            found = self.probe(drafter)
        drafter.train(was_training)
        return found

    def _gap(self) -> float:
        """1 - decoded / teacher-forced accepted drafts, of the latest numbers. NaN where one is not known, or none."""
        forced = self._validated[0] - 1 if self._validated else math.nan
        return 1 - (self.latest.get("accepted_length", math.nan) - 1) / forced if forced > 0 else math.nan

    def _beside(self) -> dict[str, float]:
        """What stands in the row of a probe beside its own numbers."""
        if self._validated is None:
            return {}
        forced, validated = self._validated
        return {self.forced: forced, "probe/validated_step": validated - 1.0, "probe/gap": self._gap()}

    def _say(self, step: int) -> None:
        """Both numbers in the log, and a warning when they are too far apart."""
        self._quiet = max(0, self._quiet - 1)
        real = self.latest.get("accepted_length", math.nan)
        if self._validated is None:
            logger.info("step %d: accepted length %.2f decoded", step, real)
            return
        forced, validated = self._validated
        where = "" if validated == step else f" at step {validated}"
        logger.info("step %d: accepted length %.2f decoded, %.2f teacher-forced%s", step, real, forced, where)
        if self._gap() > self.tolerance and forced - 1 >= LEAST and self._quiet == 0:
            self._quiet = WARN_EVERY
            warnings.warn(
                f"step {step}: accepted length is {real:.2f} in real decoding but {forced:.2f} teacher-forced{where}: "
                f"{self._gap():.0%} fewer drafts, beyond callbacks.probe_tolerance={self.tolerance:g}. Likely causes: "
                f"{'; '.join(CAUSES)}",
                stacklevel=2,
            )
