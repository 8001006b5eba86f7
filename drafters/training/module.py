# Distillation as a thin LightningModule: the drafter computes sums, this divides them by the global count. Everything
# one optimizer step needs from all ranks (counts, losses, alarms, requests to stop or save) travels in one reduction.
# The frozen target stands outside the module tree: nothing can save, wrap, train or copy it.

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from drafters.computing import Computing, computed_as
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.heads.base import Drafter
from drafters.heads.calibration_metrics import ACCEPTANCE, CONFIDENCE, auc_of, ece_of
from drafters.training.budget import Stopwatch
from drafters.training.optim import OptimConfig, build_optimizer, schedule_factor
from drafters.training.strategies import total_norm
from drafters.training.window import Window
from drafters.types import Batch, Losses

if TYPE_CHECKING:
    from drafters.target import TargetHead

__all__ = ["DistillModule"]

STATE_KEY = "drafters"
REQUESTS = ("stop", "save")
MOST_SUMS = 128  # that one step adds up over ranks


class _Outside:
    """Holds an object out of the module tree and out of deep copies (weight averaging copies the module)."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict) -> "_Outside":
        return self


def confidence_figures(total: dict[str, Tensor]) -> dict[str, float]:
    """Calibration error and ROC-AUC of the confidence head by position, of the histograms among the sums of a
    validation, which are taken out; none without a confidence head."""
    if CONFIDENCE not in total:
        return {}
    confidence, acceptance = total.pop(CONFIDENCE), total.pop(ACCEPTANCE)
    found = {"ece": ece_of((confidence[0], confidence[1]), (acceptance[0], acceptance[1]))}
    found["auc"] = auc_of((acceptance[0], acceptance[1]))
    return {
        f"val/confidence_{name}@{k}": value
        for name, values_G in found.items()
        for k, value in enumerate(values_G.tolist(), start=1)
        if math.isfinite(value)
    }


class DistillModule(LightningModule):
    """Trains `drafter` on batches of target states.

    Gradients are those of (sum of losses) / (sum of counts), both over all ranks and accumulated batches, then clipped
    by the Trainer. `requests` are this rank's wishes ("stop", "save"); after the next optimizer step `agreed` holds
    what any rank wished, the same on all of them. `tallies` are numbers of this rank, to be set before the step's
    reduction; after it, their sums over all ranks. `clock` counts training proper. `total_steps` is the run's length,
    None until a time budget is measured. `sample_names` are what errors call the samples of a batch, by their ids;
    `how` says how a step is computed.
    """

    def __init__(
        self,
        drafter: Drafter,
        target_head: "TargetHead",
        optim: OptimConfig,
        *,
        sample_names: Sequence[str] | None = None,
        how: Computing | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter.float()  # master weights; products run in `optim.precision`
        if not any(p.requires_grad for p in drafter.parameters()):
            raise ConfigError(f"drafter: {type(drafter).__name__} has no trainable parameter; choose another drafter")
        self.optim = optim
        self.how = how or Computing()
        self.total_steps = optim.max_steps
        self.positions = 0
        self.clock = Stopwatch()
        self.requests = dict.fromkeys(REQUESTS, False)
        self.agreed = dict.fromkeys(REQUESTS, False)
        self.tallies: Mapping[str, Tensor | float] = {}
        self._target = _Outside(target_head)
        self._sample_names = sample_names
        self._window = Window()
        self._validation: dict[str, Tensor] = {}  # [2], [2, G] or (histograms) [2, G, bins]: sums, counts

    @property
    def target_head(self) -> "TargetHead":
        """The frozen target's embedding and output projection, on this module's device."""
        return self._target.held

    @property
    def _owns_gradients(self) -> bool:
        """Whether gradients are here to be scaled; DeepSpeed keeps them in partitions of its own."""
        return not isinstance(self.trainer.strategy, DeepSpeedStrategy)

    def setup(self, stage: str) -> None:
        self._target.held = self.target_head.to(self.device)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.drafter, self.optim)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule_factor(step, self.total_steps, self.optim)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def autocast(self) -> torch.autocast:
        """The precision that this run computes in, as a context."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.optim.precision == "bf16")

    def progress(self) -> dict[str, float]:
        """How far training is, to be logged beside what was measured there."""
        return {"positions": float(self.positions), "minutes": self.clock.seconds / 60}

    def losses(self, batch: Batch) -> Losses:
        """The drafter's loss of a batch in the run's precision, as sums."""
        if self.optim.precision == "float32":
            aux_BTLD = None if batch.aux_BTLD is None else batch.aux_BTLD.float()
            batch = replace(batch, aux_BTLD=aux_BTLD, last_BTD=batch.last_BTD.float())
        with self.autocast(), computed_as(self.how):
            return self.drafter.loss(batch, self.target_head)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        done = 0.0 if self.total_steps is None else self.trainer.global_step / self.total_steps
        losses = self.losses(replace(batch, progress=min(1.0, done)))
        self._window.add(batch, losses)
        if self._owns_gradients:
            return losses.total
        count = self._reduce(losses.count.to(self.device, torch.float64)).clamp_min(1.0)
        return losses.total * (self.trainer.world_size / count).to(losses.total.dtype)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Lightning calls this after the last backward pass and before it clips.
        named = {n: p.grad for n, p in self.drafter.named_parameters() if p.grad is not None and self._owns_gradients}
        norm = total_norm(named.values())
        sums = self._window.sums | {f"request.{name}": torch.tensor(float(on)) for name, on in self.requests.items()}
        sums |= {f"tally.{name}": torch.as_tensor(one, dtype=torch.float64) for name, one in self.tallies.items()}
        sums["alarm"] = ~(self._window.finite() & norm.isfinite())
        total = self._sum_over_ranks(sums)
        if total["alarm"]:
            raise self._not_finite(named)
        count = max(total.pop("count"), 1.0)
        # Lightning divided each loss by the accumulation, the strategy's reduction by the ranks.
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches / count
        for gradient in named.values():
            gradient.mul_(scale)
        self.positions += round(count)
        self.agreed = {name: total.pop(f"request.{name}") > 0 for name in REQUESTS}
        self.tallies = {name: total.pop(f"tally.{name}") for name in self.tallies}
        self._window = Window()
        self._log_step(total, count, float(norm) * scale if self._owns_gradients else None, optimizer)

    def on_validation_epoch_start(self) -> None:
        self._validation = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses = self.losses(batch)
        pairs = {"loss": (losses.total, losses.count)}
        pairs |= {name: (term, losses.count) for name, term in losses.terms.items()}
        for name, pair in (pairs | dict(losses.metrics)).items():
            new = torch.stack([part.detach().double() for part in pair])
            self._validation[name] = self._validation[name] + new if name in self._validation else new

    def on_validation_epoch_end(self) -> None:
        shapes = {name: tuple(pair.shape) for name, pair in self._validation.items()}
        total = {}
        for name, shape in sorted(self._of_all_ranks(shapes).items()):  # a rank with no anchors has fewer
            own = self._validation.get(name, torch.zeros(shape, dtype=torch.float64, device=self.device))
            total[name] = self._reduce(own)
        values = confidence_figures(total)
        for name, (sums, counts) in total.items():
            if sums.ndim == 0:
                values[f"val/{name}"] = float(sums / counts)
                continue
            for k, (one, count) in enumerate(zip(sums.tolist(), counts.tolist(), strict=True), start=1):
                if count:
                    values[f"val/{name}@{k}"] = one / count
        values |= self.progress()
        self.log_dict({name: torch.tensor(value) for name, value in values.items()}, sync_dist=True)

    def on_train_start(self) -> None:
        self.clock.start()

    def on_train_end(self) -> None:
        self.clock.stop()

    def on_validation_start(self) -> None:
        self.clock.stop()

    def on_validation_end(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.clock.start()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[STATE_KEY] = {
            "target": self.target_head.spec.weights_hash,
            "total_steps": self.total_steps,
            "minutes": self.optim.minutes,
            "seconds": self.clock.seconds,
            "positions": self.positions,
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        if STATE_KEY not in checkpoint:
            raise CheckpointError(
                f"resume: the checkpoint has no '{STATE_KEY}' entry: not written by this trainer; choose another name="
            )
        state, target = checkpoint[STATE_KEY], self.target_head.spec.weights_hash
        if state["target"] != target:
            raise CheckpointError(
                f"resume: the checkpoint was trained for a target with weights {state['target'][:12]}, this one has "
                f"{target[:12]}; use that target, or choose another name="
            )
        self.positions = state["positions"]
        self.clock.reset(state["seconds"])
        # A longer budget is measured anew; the same one ends where it would have.
        if self.optim.minutes is not None and self.optim.minutes == state["minutes"]:
            self.total_steps = state["total_steps"]
        torch.set_rng_state(state["torch_rng"].cpu())
        if len(state["cuda_rng"]) == torch.cuda.device_count() > 0:
            torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda_rng"]])

    def _log_step(
        self, sums: dict[str, float], count: float, norm: float | None, optimizer: torch.optim.Optimizer
    ) -> None:
        values = {f"train/{name}": value / count for name, value in sums.items() if name != "alarm"}
        values |= {
            **({} if norm is None else {"train/grad_norm": norm}),
            "train/lr": optimizer.param_groups[0]["lr"],
            **{f"train/{name}": value for name, value in self.progress().items()},
        }
        self.log_dict(values)

    def _reduce(self, tensor: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(tensor, reduce_op="sum")

    def _sum_over_ranks(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums by name, all ranks added. One reduction of a fixed size; one more where a rank has other names, as with
        no anchors."""
        names = sorted(sums)
        mark = zlib.crc32(" ".join(names).encode()) % 2**20
        *total, marks, squares = self._reduce_named(names, sums, mark, mark**2)
        if marks**2 != squares * self.trainer.world_size:
            names = sorted(self._of_all_ranks(dict.fromkeys(names, ())))
            total = self._reduce_named(names, sums)
        return dict(zip(names, total, strict=False))

    def _reduce_named(self, names: Sequence[str], sums: Mapping[str, Tensor], *more: float) -> list[float]:
        if len(names) > MOST_SUMS:
            raise ConfigError(
                f"drafter: the losses of {type(self.drafter).__name__} have so many terms that a step adds up "
                f"{len(names)} sums; accepted: {MOST_SUMS} or fewer"
            )
        own = torch.zeros(MOST_SUMS + len(more), dtype=torch.float64, device=self.device)
        for place, name in enumerate(names):
            if name in sums:
                own[place] = sums[name]
        own[MOST_SUMS:] = torch.tensor(more, dtype=torch.float64)
        found: list[float] = self._reduce(own).tolist()
        return found

    def _of_all_ranks(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """What any rank has, by name."""
        if self.trainer.world_size == 1:
            return shapes
        told: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(told, shapes)
        return {name: shape for one in told for name, shape in one.items()}

    def _not_finite(self, gradients: Mapping[str, Tensor]) -> Exception:
        step = self.trainer.global_step
        where, samples = self._window.first_alarm()
        if where is None:
            bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
            where = f"gradient of drafter.{bad[0]}" if bad else None
        if where is None:
            return ConfigError(f"step {step}: a loss or gradient on another rank is not finite; that rank says which")
        named = list(samples) if self._sample_names is None else [self._sample_names[i] for i in samples]
        text = f"step {step}, samples {named}: {where} is not finite; the weights were not changed. "
        if where.startswith("batch."):
            return DataError(text + "The cached target states are damaged: capture them again")
        return ConfigError(text + f"optim.lr: got {self.optim.lr}; try a lower one, or a longer optim.warmup_steps")
