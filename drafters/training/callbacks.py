# What watches a run: a table of what is trained, progress with an estimate, and the proof that the target did not move.
# `build_callbacks` puts these together with the budget, the probe and what saves.

# mypy: disable-error-code="override"
# Lightning's hooks name LightningModule; these callbacks serve DistillModule alone.

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from drafters.progress import Work
from drafters.runs import Run
from drafters.training.budget import StepBudget
from drafters.training.meter import ThroughputMeter
from drafters.training.optim import OptimConfig
from drafters.training.probing import AcceptanceProbe, Probe
from drafters.training.saving import PROBED, LastCheckpoint, SaveDrafter
from drafters.types import Sampling

if TYPE_CHECKING:
    from drafters.target import TargetHead
    from drafters.training.module import DistillModule

__all__ = [
    "CallbackConfig",
    "ParameterTable",
    "StepProgress",
    "TargetUnchanged",
    "build_callbacks",
]

# What `monitor` may be, as far as it is known before training: a drafter may report more.
MONITORS = ("val/accepted_length", "val/accepted_length_greedy", "val/acceptance@K", PROBED)


class ParameterTable(Callback):
    """Shows trainable and frozen parameters when a fit starts."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_fit_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if not trainer.is_global_zero:
            return
        drafter = pl_module.drafter
        table = Table(title=f"{type(drafter).__name__} on {pl_module.target_head.spec.name or 'the target'}")
        for heading in ("module", "trainable", "frozen", "dtype"):
            table.add_column(heading, justify="left" if heading == "module" else "right")
        rows = [(name, list(child.parameters())) for name, child in drafter.named_children()]
        rows.append(("(own)", list(drafter.parameters(recurse=False))))
        rows.append(("drafter, all", list(drafter.parameters())))
        for name, parameters in rows:
            if parameters:
                _add_row(table, name, parameters)
        head = list(_head_tensors(pl_module.target_head).values())
        table.add_row("target head", "0", f"{sum(t.numel() for t in head):,}", _dtypes(head))
        self.console.print(table)


class StepProgress(Callback):
    """A bar over optimizer steps with rate, estimate, loss, the last validation's accepted length, tokens a second and
    the share of the time that waits for data."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._since = (0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        if trainer.is_global_zero:
            step = trainer.global_step
            self._since = (step, pl_module.clock.seconds)
            self._work = Work("training", unit="steps", begun_at=step).__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "DistillModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._show(trainer, pl_module, "training")

    def on_validation_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._show(trainer, pl_module, "validating")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: "DistillModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._show(trainer, pl_module, "validating")  # a log gets a sign of life where a validation takes long

    def on_validation_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._show(trainer, pl_module, "training")

    def on_train_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: "DistillModule", exception: BaseException) -> None:
        self._stop()

    def _show(self, trainer: Trainer, module: "DistillModule", what: str) -> None:
        if self._work is None:
            return
        step, seconds = trainer.global_step - self._since[0], module.clock.seconds - self._since[1]
        known = (("loss", "train/loss"), ("accepted", "val/accepted_length"), ("greedy", "val/accepted_length_greedy"))
        metrics = trainer.callback_metrics
        parts = [f"{short} {float(metrics[name]):.3f}" for short, name in known if name in metrics]
        if "throughput/tokens_per_second" in metrics:
            parts.append(f"{float(metrics['throughput/tokens_per_second']):,.0f} tokens/s")
        if "throughput/data_wait" in metrics:
            parts.append(f"data wait {float(metrics['throughput/data_wait']):.1%}")
        rate = f"{step / seconds:.2f} steps/s" if step and seconds else ""
        self._work(trainer.global_step, module.total_steps, rate=rate, note=", ".join(parts), what=what)

    def _stop(self) -> None:
        if self._work is not None:
            self._work.__exit__()
            self._work = None


class TargetUnchanged(Callback):
    """Fails the run if training moved a bit of the target's embedding or output projection."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        self._before = _bit_sums(pl_module.target_head)

    def on_train_end(self, trainer: Trainer, pl_module: "DistillModule") -> None:
        changed = [name for name, bits in _bit_sums(pl_module.target_head).items() if bits != self._before[name]]
        if changed:
            raise RuntimeError(f"training changed the frozen target: {changed}")


@dataclass(frozen=True, kw_only=True)
class CallbackConfig:
    """How often a run saves and probes, and which metric names its best weights (higher is better).
    `probe_every_n_steps` None: never. `probe_tolerance`: the share by which real decoding may accept fewer
    drafts than teacher forcing says before a run warns."""

    monitor: str = "val/accepted_length"
    save_every_n_steps: int = 500
    save_every_minutes: float = 5.0
    probe_every_n_steps: int | None = None
    probe_tolerance: float = 0.5

    def __post_init__(self) -> None:
        if self.save_every_n_steps < 1:
            raise ValueError(f"save_every_n_steps: got {self.save_every_n_steps}; accepted: 1 or more")
        if not self.save_every_minutes > 0:
            raise ValueError(f"save_every_minutes: got {self.save_every_minutes}; must be above 0")
        if self.probe_every_n_steps is not None and self.probe_every_n_steps < 1:
            raise ValueError(
                f"probe_every_n_steps: got {self.probe_every_n_steps}; accepted: 1 or more, or null for never"
            )
        if not 0 < self.probe_tolerance < 1:
            raise ValueError(f"probe_tolerance: got {self.probe_tolerance}; must be in (0, 1)")
        is_known = self.monitor == PROBED or self.monitor.startswith("val/")
        if not is_known or self.monitor == "val/loss":
            raise ValueError(
                f"monitor: got '{self.monitor}'; accepted: {', '.join(MONITORS)}, or another val/ metric of the "
                "drafter; the highest value wins"
            )
        if self.monitor == PROBED and self.probe_every_n_steps is None:
            raise ValueError(
                f"monitor: got '{PROBED}', but probe_every_n_steps is null, so it is never measured; give "
                f"probe_every_n_steps, or monitor={MONITORS[0]}"
            )


def build_callbacks(
    run: Path,
    *,
    optim: OptimConfig,
    config: CallbackConfig,
    console: Console,
    probe: tuple[Probe, Sampling] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> list[Callback]:
    """All callbacks of a run in the folder `run`: `checkpoints/last.ckpt`, `drafter/`, budget, probe, table, bar.

    `probe`: what decodes, and how it samples. Its teacher-forced counterpart is the greedy number at temperature 0,
    else the probabilistic one, which is exact at temperature 1.
    """
    callbacks: list[Callback] = []
    if optim.ema_decay is not None:
        # Buffers are copied, not averaged: the mean of two token ids is another token.
        callbacks.append(EMAWeightAveraging(decay=optim.ema_decay, use_buffers=False))
    callbacks += [StepBudget(Run(run)), TargetUnchanged(), ParameterTable(console)]
    callbacks += [StepProgress(), ThroughputMeter(run, console)]
    saver = SaveDrafter(run / "drafter", monitor=config.monitor, provenance=provenance)
    if probe is not None and config.probe_every_n_steps is not None:
        decoding, sampling = probe
        callbacks.append(
            AcceptanceProbe(
                decoding,
                every_n_steps=config.probe_every_n_steps,
                tolerance=config.probe_tolerance,
                forced="val/accepted_length" if sampling.temperature else "val/accepted_length_greedy",
                on_measured=saver.offer if config.monitor == PROBED else None,
            )
        )
    callbacks.append(saver)
    steps, minutes = config.save_every_n_steps, config.save_every_minutes
    callbacks.append(LastCheckpoint(run / "checkpoints", every_n_steps=steps, every_minutes=minutes))
    return callbacks


def _add_row(table: Table, name: str, parameters: list[nn.Parameter]) -> None:
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trainable
    table.add_row(name, f"{trainable:,}", f"{frozen:,}", _dtypes(parameters))


def _dtypes(tensors: list[Any]) -> str:
    return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def _head_tensors(head: "TargetHead") -> dict[str, Tensor]:
    tensors = {"embedding": head.embedding_VD}
    return tensors if head.lm_head_VD is head.embedding_VD else tensors | {"lm_head": head.lm_head_VD}


def _bit_sums(head: "TargetHead") -> dict[str, int]:
    """Sum of the bit patterns of each tensor: one pass on its own device, and any changed element moves it."""
    views = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: int(tensor.detach().view(views[tensor.element_size()]).sum(dtype=torch.int64))
        for name, tensor in _head_tensors(head).items()
    }
