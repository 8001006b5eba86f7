# How weights move: settings, AdamW groups and the learning-rate schedule. The schedule is a pure function of the step
# and of the run's length, which may still be unknown (a time budget): until it is known, only the warm-up acts.

import math
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["MEASURED_STEPS", "SKIPPED_STEPS", "OptimConfig", "build_optimizer", "parameter_groups", "schedule_factor"]

# A time budget is turned into steps from the speed of MEASURED_STEPS steps, after SKIPPED_STEPS that warm caches up.
SKIPPED_STEPS = 5
MEASURED_STEPS = 40
SCHEDULES = ("wsd", "cosine", "constant")
PRECISIONS = ("bf16", "float32")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW on float32 masters. A run's length is `max_steps` or `minutes`, never both: minutes of training proper
    (validation, probes and saving do not count), turned into steps once and stored. `precision` is that of the
    products; weights, optimizer state and losses stay float32. `ema_decay` saves averaged weights."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "wsd"
    warmup_steps: int = 50
    decay_fraction: float = 0.3  # of all steps; wsd only
    final_factor: float = 0.0  # learning rate at the end, relative to lr
    max_steps: int | None = None
    minutes: float | None = None
    precision: str = "bf16"
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        _require(self.schedule in SCHEDULES, f"schedule: got '{self.schedule}'; accepted: {', '.join(SCHEDULES)}")
        _require(self.precision in PRECISIONS, f"precision: got '{self.precision}'; accepted: {', '.join(PRECISIONS)}")
        _require(self.lr > 0, f"lr: got {self.lr}; must be above 0")
        _require(self.warmup_steps >= 0, f"warmup_steps: got {self.warmup_steps}; must be 0 or more")
        _require(0 < self.decay_fraction <= 1, f"decay_fraction: got {self.decay_fraction}; must be in (0, 1]")
        _require(0 <= self.final_factor <= 1, f"final_factor: got {self.final_factor}; must be in [0, 1]")
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"ema_decay: got {self.ema_decay}; must be in (0, 1), or null for no averaging",
        )
        _require(
            (self.max_steps is None) != (self.minutes is None),
            f"max_steps: got {self.max_steps} with minutes={self.minutes}; give one and set the other to null",
        )
        _require(self.max_steps is None or self.max_steps > 0, f"max_steps: got {self.max_steps}; must be above 0")
        _require(self.minutes is None or self.minutes > 0, f"minutes: got {self.minutes}; must be above 0")
        least = SKIPPED_STEPS + MEASURED_STEPS
        _require(
            self.minutes is None or self.warmup_steps >= least,
            f"warmup_steps: got {self.warmup_steps}; with `minutes` at least {least}, the steps that measure the speed",
        )


def schedule_factor(step: int, total_steps: int | None, config: OptimConfig) -> float:
    """Learning rate of 0-based optimizer step `step`, relative to `config.lr`.

    `wsd`: linear warm-up, stable, linear decay over the last `decay_fraction` of the steps (arXiv:2405.18392).
    `cosine`: from the end of the warm-up to the end of the run. `total_steps` None: the end is not known yet.
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if total_steps is None or config.schedule == "constant":
        return warm
    if config.schedule == "wsd":
        start = total_steps - max(1, round(config.decay_fraction * total_steps))
        shape = 1 - _progress(step, start, total_steps)
    else:
        shape = 0.5 * (1 + math.cos(math.pi * _progress(step, config.warmup_steps, total_steps)))
    return min(warm, config.final_factor + (1 - config.final_factor) * shape)


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: matrices decay; norms, biases and embeddings do not."""
    embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if is_matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, one fused kernel per step on CPU and GPU alike."""
    groups = parameter_groups(module, weight_decay=config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _progress(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
