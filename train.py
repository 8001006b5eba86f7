# The main job: `python train.py drafter=markov` takes a frozen target and conversations to a trained drafter and its
# measured speed. Read `train` from top to bottom: it is the whole story, each line a room of `drafters/`.

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

if TYPE_CHECKING:
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings, typed. All are read before anything is fetched or written, so that a wrong one costs nothing."""

    source: "SourceConfig"
    data: "DataConfig"
    cache: "CaptureConfig"
    drafter: tuple[type, Any]
    optim: "OptimConfig"
    callbacks: "CallbackConfig"
    report: "MeasureConfig"
    num_prompts: int


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

    plan, settings = read_plan(cfg), to_plain(cfg)
    data = plan.data
    with claim(cfg.run_dir, settings, resume=cfg.resume) as run:
        if run.report.is_file():
            say(f"{run.folder} is finished: see {run.folder / 'report.md'}. For another run choose another name=")
            return
        parts = load_splits(plan.source, validation=data.validation, seed=data.seed)
        target = load_target(settings["target"], device=cfg.device)
        encoder = ChatEncoder(target.tokenizer, max_length=data.max_length, template_kwargs=data.template_kwargs)
        prompts = held_out_prompts(parts[1], encoder, num_prompts=plan.num_prompts)
        splits, reports = encode_splits(parts, encoder)
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

    measured = to_plain(cfg.report)
    return Plan(
        source=build_config(cfg.source, key="source")[1],
        data=typed(DataConfig, cfg.data, key="data"),
        cache=typed(CaptureConfig, cfg.cache, key="cache"),
        drafter=build_config(cfg.drafter, key="drafter"),
        optim=build_config(cfg.optim, key="optim")[1],
        callbacks=build_config(cfg.callbacks, key="callbacks")[1],
        num_prompts=measured.pop("num_prompts"),
        report=typed(MeasureConfig, measured, key="report"),
    )


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
    from hydra.utils import instantiate

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
    accelerator = "gpu" if target.device.type == "cuda" else target.device.type
    given = {"accelerator": accelerator, "callbacks": callbacks, "default_root_dir": str(run.folder)}
    try:
        logger = instantiate(cfg.get("logger")) or False
        trainer = instantiate(cfg.trainer, _partial_=True)(logger=logger, **given)
    except (hydra.errors.HydraException, TypeError, ValueError) as error:
        raise ConfigError(f"trainer, logger: {error}") from error
    module = DistillModule(drafter, target.head, plan.optim)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)
    except TrainingInterrupted as stop:
        raise KeyboardInterrupt(str(stop)) from stop


def report(plan: Plan, run: "Run", target: "FrozenTarget", prompts: list["Prompt"], *, weights: str) -> None:
    """Real decoding with the best weights of the run, on held-out prompts."""
    from drafters.checkpoint import load_drafter, provenance
    from drafters.door import measure_and_write

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
