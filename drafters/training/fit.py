# From a plan to trained weights: the drafter that a run starts from, and Lightning's fit with all that watches it.

import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from drafters.batches import BatchConfig, StatesDataModule
from drafters.cache import HiddenCache
from drafters.checkpoint import drafter_of_checkpoint
from drafters.decoding.dialogue import Dialogue
from drafters.decoding.measure import MeasureConfig
from drafters.decoding.probe import acceptance_probe
from drafters.decoding.sampling import effective_sampling
from drafters.distributed import Ranks
from drafters.door import screen
from drafters.errors import ConfigError, DraftersError
from drafters.heads.base import Drafter
from drafters.heads.draft_vocab import STORED
from drafters.heads.start import Start
from drafters.online import OnlineStates
from drafters.runs import Run
from drafters.target import FrozenTarget
from drafters.training.callbacks import build_callbacks
from drafters.training.loggers import remember_wandb
from drafters.training.module import DistillModule
from drafters.training.plan import Plan, one_line
from drafters.training.probing import Probe
from drafters.training.profiling import build_profiler
from drafters.training.run_facts import log_facts
from drafters.training.saving import WARNING, TrainingInterrupted
from drafters.vocab import check_vocab_size
from drafters.warm_start import begun_from, take_over

__all__ = ["begin_logging", "build_probe", "check_fits", "fit", "measured_as", "start_drafter"]


def start_drafter(plan: Plan, run: Run, start: Start) -> Drafter:
    """A new drafter, or the one of the checkpoint that the run goes on from (its vocabulary is never counted again)."""
    cls: Any
    cls, config = plan.drafter
    torch.manual_seed(plan.seed)
    drafter: Drafter
    if run.checkpoint is None:
        drafter = cls.create(config, start.target.spec, start)
        if start.warm is not None:
            take_over(drafter, start.warm)
    else:
        drafter = drafter_of_checkpoint(run.checkpoint, cls, cls.complete(config, start.target), start.target.spec)
    return drafter


def check_fits(cls: Any, config: Any, target: FrozenTarget) -> Drafter:
    """A drafter of `config` without memory for its weights, before anything is captured. Raises ConfigError where it
    does not fit `target`."""
    size, tensors = asdict(config).get("draft_vocab_size"), {}
    if size is not None:
        check_vocab_size(size, target.spec.vocab_size, always=target.spec.eos_ids)
        tensors[STORED] = torch.arange(size)
    config = cls.complete(config, target)
    with torch.device("meta"):
        drafter: Drafter = cls.from_tensors(config, target.spec, tensors)
    return drafter


def measured_as(plan: Plan, target: FrozenTarget) -> MeasureConfig:
    """The settings of the report, with the repetition penalty that the target's generation config may have."""
    asked = asdict(plan.report.sampling) | {"repetition_penalty": None}
    return replace(plan.report, sampling=effective_sampling(target.model.generation_config, asked))


def build_probe(plan: Plan, target: FrozenTarget, prompts: Sequence[Dialogue]) -> Probe:
    """What decodes `prompts` in the middle of training."""
    sampling = measured_as(plan, target).sampling
    return acceptance_probe(target, [one.encode(()) for one in prompts], sampling=sampling)


def fit(
    plan: Plan,
    run: Run,
    module: DistillModule,
    states: HiddenCache | OnlineStates,
    *,
    probe: Probe | None,
    trainer: Callable[..., Trainer],
) -> None:
    """Lightning trains; its callbacks write `checkpoints/` and `drafter/`. `trainer` builds a Trainer from what a run
    adds to its settings; without a `probe` nothing is decoded meanwhile. Raises KeyboardInterrupt after a signal, once
    everything is saved; a WARNING goes on to the launcher first."""
    splits = {name: states.split(name) for name in ("train", "validation")}
    batches = BatchConfig(
        batch_size=plan.data.batch_size,
        seed=plan.seed,
        max_tokens=plan.data.max_tokens,
        prefetch=plan.data.prefetch,
    )
    data = StatesDataModule(states, **splits, needs=module.drafter.needs, config=batches)
    callbacks = build_callbacks(
        run.folder,
        optim=plan.optim,
        config=plan.callbacks,
        console=screen(),
        probe=None if probe is None else (probe, plan.report.sampling),
        provenance={
            "run": plan.name,
            "data_hash": states.data_hash,
            "seed": plan.seed,
            "warm_start": None if plan.warm_start is None else begun_from(plan.warm_start, run),
        },
    )
    callbacks += build_profiler(plan.profiler, run.folder, optim=plan.optim, console=screen())
    fitting = trainer(logger=plan.logger, callbacks=callbacks, default_root_dir=str(run.folder))
    try:
        fitting.fit(module, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)
    except TrainingInterrupted as stop:
        if stop.number == WARNING:
            signal.raise_signal(WARNING)
        raise KeyboardInterrupt(str(stop)) from stop
    except MisconfigurationException as error:
        raise ConfigError(f"trainer: {one_line(error)}") from error


def begin_logging(plan: Plan, run: Run, module: DistillModule, ranks: Ranks) -> None:
    """The logger's run, and in it what this one is made of; on the first rank alone. Raises ConfigError for what the
    logger's own library refuses, which it says when it is first used."""
    try:
        with ranks.first_goes_first():
            if ranks.is_first:
                remember_wandb(run.folder, plan.logger)
                log_facts(run.folder, plan.logger, module)
    except DraftersError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"logger: {one_line(error)}; change or leave out that setting of logger=") from error
