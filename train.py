# The main job: `python train.py drafter=markov` takes a frozen target and conversations to a trained drafter and its
# measured speed. Read `train` from top to bottom: it is the whole story, each line a room of `drafters/`.

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

    from data.sources import DataConfig, SourceConfig
    from drafters.cache import HiddenCache
    from drafters.cache_writer import CaptureConfig
    from drafters.decoding.measure import MeasureConfig, Prompt
    from drafters.heads.base import Drafter
    from drafters.heads.start import Start
    from drafters.runs import Run
    from drafters.target import FrozenTarget
    from drafters.training.callbacks import CallbackConfig
    from drafters.training.optim import OptimConfig


# Settings of Lightning's Trainer that are decided elsewhere: the value they keep, and where to turn.
DECIDED = {
    "max_steps": (-1, "optim.max_steps or optim.minutes is the length of a run"),
    "max_epochs": (-1, "optim.max_steps or optim.minutes is the length of a run"),
    "max_time": (None, "optim.minutes is the length of a run"),
    "accelerator": ("auto", "device= says where a run computes"),
    "devices": (1, "several processes come with a later version, and device=cuda:N chooses one GPU"),
    "precision": ("32-true", "optim.precision says what products run in"),
    "num_nodes": (1, "several processes come with a later version"),
}


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Whether to go on in a folder that was begun with other settings."""

    resume: bool


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What the report is measured on."""

    num_prompts: int

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts: got {self.num_prompts}; accepted: 1 or more")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings, typed, before anything is fetched or written, so that a wrong one costs nothing. What must fit the
    target, the conversations or the cache is checked once these are there."""

    source: "SourceConfig"
    data: "DataConfig"
    cache: "CaptureConfig"
    drafter: tuple[type, Any]
    optim: "OptimConfig"
    callbacks: "CallbackConfig"
    report: "MeasureConfig"
    num_prompts: int
    resume: bool
    logger: Any


def train(cfg: DictConfig) -> None:
    """Capture (or reuse) the target's states, train (or resume), measure, and write `outputs/<name>/`."""
    from data.capture import capture_states, encode_splits
    from data.prompts import held_out_prompts
    from data.sources import load_splits
    from drafters.chat import ChatEncoder
    from drafters.config import to_plain
    from drafters.door import load_target, say
    from drafters.heads.start import Start
    from drafters.runs import claim

    plan, settings = read_plan(cfg), {**to_plain(cfg), "cwd": os.getcwd()}
    data = plan.data
    with claim(cfg.run_dir, settings, resume=plan.resume) as run:
        if run.report.is_file():
            say(f"{run.folder} is finished: see {run.folder / 'report.md'}. For another run choose another name=")
            return
        parts = load_splits(plan.source, validation=data.validation, seed=data.seed)
        target = load_target(settings["target"], device=cfg.device)
        encoder = ChatEncoder(target.tokenizer, max_length=data.max_length, template_kwargs=data.template_kwargs)
        room = target.spec.max_position - plan.report.max_new_tokens
        prompts = held_out_prompts(parts[1], encoder, num_prompts=plan.num_prompts, room=room)
        splits, reports = encode_splits(parts, encoder, weights_hash=target.spec.weights_hash)
        for name, counted in reports.items():
            say(f"{name}: {counted.summary()}")
        cache = capture_states(target, splits, plan.cache, encoder=encoder)
        start = Start(target=target, examples=splits["train"], states=cache, indices=cache.split("train"))
        drafter = start_drafter(plan, run, start, prompts)
        fit(cfg, plan, run, drafter, cache=cache, probe=(target, prompts))
        report(plan, run, target, prompts, weights=cfg.target.weights)


def read_plan(cfg: DictConfig) -> Plan:
    """Raises ConfigError for the first setting that is unknown or wrong."""
    from data.sources import DataConfig
    from drafters.cache_writer import CaptureConfig
    from drafters.config import build_config, to_plain, typed
    from drafters.decoding.measure import MeasureConfig
    from drafters.errors import ConfigError

    if not cfg.name or "/" in str(cfg.name):
        raise ConfigError(f"name: got '{cfg.name}'; accepted: the name of a folder, since a run lies in outputs/<name>")
    measured = to_plain(cfg.report)
    held_out = {"num_prompts": measured.pop("num_prompts", "???")}
    build_trainer(cfg, logger=False, enable_checkpointing=False)
    return Plan(
        source=build_config(cfg.source, key="source")[1],
        data=typed(DataConfig, cfg.data, key="data"),
        cache=typed(CaptureConfig, cfg.cache, key="cache"),
        drafter=build_config(cfg.drafter, key="drafter"),
        optim=build_config(cfg.optim, key="optim")[1],
        callbacks=build_config(cfg.callbacks, key="callbacks")[1],
        num_prompts=typed(HeldOut, held_out, key="report").num_prompts,
        report=typed(MeasureConfig, measured, key="report"),
        resume=typed(Resume, {"resume": cfg.resume}, key="").resume,
        logger=build_logger(cfg),
    )


def build_trainer(cfg: DictConfig, **given: Any) -> "Trainer":
    """Lightning's Trainer. Raises ConfigError for a setting that it refuses, or that is not its own to decide."""
    from hydra.utils import instantiate
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from drafters.config import to_plain
    from drafters.errors import ConfigError

    settings = to_plain(cfg.trainer)
    for name, (value, reason) in DECIDED.items():
        if settings.get(name, value) != value:
            raise ConfigError(f"trainer.{name}: got {settings[name]!r}; accepted: {value}, since {reason}")
    for name in ("val_check_interval", "accumulate_grad_batches"):
        if settings.get(name) == 0:
            raise ConfigError(f"trainer.{name}: got 0; must be above 0")
    decided = {name: value for name, (value, _) in DECIDED.items()}
    try:
        trainer: Trainer = instantiate(cfg.trainer, _partial_=True)(**decided | given)
    except (hydra.errors.HydraException, MisconfigurationException, TypeError, ValueError) as error:
        raise ConfigError(f"trainer: {one_line(error)}") from error
    return trainer


def build_logger(cfg: DictConfig) -> Any:
    """A logger of Lightning, or False for none. Raises ConfigError."""
    from hydra.utils import instantiate

    from drafters.errors import ConfigError

    try:
        return instantiate(cfg.get("logger")) or False
    except (hydra.errors.HydraException, TypeError, ValueError) as error:
        raise ConfigError(f"logger: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The text of a library's error, which may come on several lines."""
    return " ".join(str(error).split())


def start_drafter(plan: Plan, run: "Run", start: "Start", prompts: list["Prompt"]) -> "Drafter":
    """A new drafter, or the one of the checkpoint that the run goes on from (its vocabulary is never counted again)."""
    import torch

    from drafters.checkpoint import drafter_of_checkpoint
    from drafters.decoding.measure import check_settings

    cls, config = plan.drafter
    torch.manual_seed(plan.data.seed)
    if run.checkpoint is None:
        drafter = cls.create(config, start.target.spec, start)
    else:
        drafter = drafter_of_checkpoint(run.checkpoint, cls, config, start.target.spec)
    start.check_block_size(drafter.block_size)
    check_settings(drafter, prompts, plan.report, key="report")
    return drafter


def fit(
    cfg: DictConfig,
    plan: Plan,
    run: "Run",
    drafter: "Drafter",
    *,
    cache: "HiddenCache",
    probe: tuple["FrozenTarget", list["Prompt"]],
) -> None:
    """Lightning trains; its callbacks write `checkpoints/` and `drafter/`."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from drafters.batches import BatchConfig, StatesDataModule
    from drafters.decoding.probe import acceptance_probe
    from drafters.door import screen
    from drafters.errors import ConfigError
    from drafters.training.callbacks import build_callbacks
    from drafters.training.module import DistillModule
    from drafters.training.saving import TrainingInterrupted

    target, prompts = probe
    splits = {name: cache.split(name) for name in ("train", "validation")}
    batches = BatchConfig(batch_size=plan.data.batch_size, seed=plan.data.seed)
    data = StatesDataModule(cache, **splits, needs=drafter.needs, config=batches)
    callbacks = build_callbacks(
        run.folder,
        optim=plan.optim,
        config=plan.callbacks,
        console=screen(),
        probe=acceptance_probe(target, [tokens for _, tokens in prompts[:4]]),
        provenance={"run": str(cfg.name), "data_hash": cache.manifest.key.data_hash, "seed": plan.data.seed},
    )
    given = {"logger": plan.logger, "callbacks": callbacks, "default_root_dir": str(run.folder)}
    trainer = build_trainer(cfg, **given, **place(target.device))
    module = DistillModule(drafter, target.head, plan.optim, sample_names=cache.ids)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)
    except TrainingInterrupted as stop:
        raise KeyboardInterrupt(str(stop)) from stop
    except MisconfigurationException as error:
        raise ConfigError(f"trainer: {one_line(error)}") from error


def place(device: "torch.device") -> dict[str, Any]:
    """What makes Lightning's Trainer compute where the target is."""
    if device.type == "cuda":
        return {"accelerator": "gpu", "devices": [device.index]}
    return {"accelerator": device.type, "devices": 1}


def report(plan: Plan, run: "Run", target: "FrozenTarget", prompts: list["Prompt"], *, weights: str) -> None:
    """Real decoding with the best weights of the run, on held-out prompts; before it, the picture of the training."""
    from drafters.checkpoint import load_drafter, provenance
    from drafters.door import measure_and_write
    from drafters.training.curve import save_curve

    save_curve(run.folder)
    drafter = load_drafter(run.drafter, spec=target.spec).to(target.device)
    facts = {"weights": weights, "drafter": provenance(run.drafter)}
    measure_and_write(target, drafter, prompts, plan.report, out=run.folder, provenance=facts)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        train(cfg)


if __name__ == "__main__":
    main()
