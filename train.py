# The main job: `python train.py drafter=markov` takes a frozen target and conversations to a trained drafter and its
# measured speed. Read `train` from top to bottom: it is the whole story, each line a room of `drafters/`.

from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

if TYPE_CHECKING:
    from drafters.cache import HiddenCache
    from drafters.decoding.measure import Prompt
    from drafters.heads.base import Drafter
    from drafters.heads.start import Start
    from drafters.runs import Run
    from drafters.target import FrozenTarget


def train(cfg: DictConfig) -> None:
    """Capture (or reuse) the target's states, train (or resume), measure, and write `outputs/<name>/`."""
    from data.capture import capture_states, encode_splits
    from data.sources import load_splits
    from drafters.cache_writer import CaptureConfig
    from drafters.chat import ChatEncoder
    from drafters.config import build_config, to_plain, typed
    from drafters.door import load_target, say
    from drafters.heads.start import Start
    from drafters.runs import claim

    settings = to_plain(cfg)
    _, source = build_config(cfg.source, key="source")
    with claim(cfg.run_dir, settings, resume=cfg.resume) as run:
        if run.report.is_file():
            say(f"{run.folder} is finished: see {run.folder / 'report.md'}. For another run choose another name=")
            return
        target = load_target(settings["target"], device=cfg.device)
        kwargs = settings["data"]["template_kwargs"]
        encoder = ChatEncoder(target.tokenizer, max_length=cfg.data.max_length, template_kwargs=kwargs)
        splits, reports = encode_splits(source, encoder, validation=cfg.data.validation, seed=cfg.data.seed)
        for name, counted in reports.items():
            say(f"{name}: {counted.summary()}")
        cache = capture_states(target, splits, typed(CaptureConfig, cfg.cache, key="cache"), encoder=encoder)
        start = Start(target=target, examples=splits["train"], states=cache, indices=cache.split("train"))
        drafter = start_drafter(cfg, run, start)
        _, held_out = load_splits(source, validation=cfg.data.validation, seed=cfg.data.seed)
        prompts = held_out_prompts(held_out, encoder, num_prompts=cfg.report.num_prompts)
        fit(cfg, run, drafter, target=target, cache=cache, prompts=prompts)
        report(cfg, run, target=target, prompts=prompts)


def start_drafter(cfg: DictConfig, run: "Run", start: "Start") -> "Drafter":
    """A new drafter, or the one of the checkpoint that the run goes on from (its vocabulary is never counted again)."""
    from drafters.checkpoint import drafter_of_checkpoint
    from drafters.config import build_config

    cls, config = build_config(cfg.drafter, key="drafter")
    if run.checkpoint is not None:
        return drafter_of_checkpoint(run.checkpoint, cls, config, start.target.spec)
    return cls.create(config, start.target.spec, start)


def held_out_prompts(conversations: list[Any], encoder: Any, *, num_prompts: int) -> list["Prompt"]:
    """First user turns of evenly spaced held-out conversations, with the generation prompt."""
    from data.sources import prompts

    found = prompts(conversations)
    chosen = [found[i * len(found) // num_prompts] for i in range(min(num_prompts, len(found)))]
    from drafters.types import Message

    return [(name, encoder.prompt([Message(role="user", content=turns[0])])) for name, turns in chosen]


def fit(
    cfg: DictConfig,
    run: "Run",
    drafter: "Drafter",
    *,
    target: "FrozenTarget",
    cache: "HiddenCache",
    prompts: list["Prompt"],
) -> None:
    """Lightning trains; its callbacks write `checkpoints/` and `drafter/`."""
    from hydra.utils import instantiate
    from rich.console import Console

    from drafters.batches import BatchConfig, StatesDataModule
    from drafters.config import build_config
    from drafters.decoding.probe import acceptance_probe
    from drafters.training.callbacks import build_callbacks
    from drafters.training.module import DistillModule
    from drafters.training.saving import TrainingInterrupted

    _, optim = build_config(cfg.optim, key="optim")
    _, watch = build_config(cfg.callbacks, key="callbacks")
    batches = BatchConfig(batch_size=cfg.data.batch_size, seed=cfg.data.seed)
    split = {name: cache.split(name) for name in ("train", "validation")}
    data = StatesDataModule(cache, **split, needs=drafter.needs, config=batches)
    probe = acceptance_probe(target, [tokens for _, tokens in prompts[:4]])
    facts = {"cache": cache.manifest.key.digest, "name": cfg.name}
    callbacks = build_callbacks(
        run.folder, optim=optim, config=watch, console=Console(), probe=probe, provenance=facts
    )
    accelerator = "gpu" if target.device.type == "cuda" else target.device.type
    trainer = instantiate(cfg.trainer, accelerator=accelerator, logger=False, default_root_dir=str(run.folder))
    trainer.callbacks += callbacks
    trainer.loggers = [instantiate(cfg.logger)] if cfg.logger else []
    module = DistillModule(drafter, target.head, optim)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)
    except TrainingInterrupted as stop:
        raise KeyboardInterrupt(str(stop)) from stop


def report(cfg: DictConfig, run: "Run", *, target: "FrozenTarget", prompts: list["Prompt"]) -> None:
    """Real decoding with the best weights of the run, on held-out prompts."""
    from drafters.checkpoint import load_drafter
    from drafters.config import to_plain, typed
    from drafters.decoding.measure import MeasureConfig
    from drafters.door import measure_and_write

    node = {key: value for key, value in to_plain(cfg.report).items() if key != "num_prompts"}
    drafter = load_drafter(run.drafter, spec=target.spec).to(target.device)
    measure_and_write(target, drafter, prompts, typed(MeasureConfig, node, key="report"), out=run.folder)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        train(cfg)


if __name__ == "__main__":
    main()
