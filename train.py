# The main job: `python train.py drafter=markov` takes a frozen target and conversations to a trained drafter and its
# measured speed. Read `train` from top to bottom: it is the whole story, each line a room of `drafters/`.

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from data.command import CHECKOUT, CONF, begin, check_settings, launch_in_order

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

    from drafters.cache import HiddenCache
    from drafters.cache_manifest import CacheKey
    from drafters.chat import ChatEncoder
    from drafters.decoding.dialogue import Dialogue
    from drafters.distributed import Ranks
    from drafters.heads.base import Drafter
    from drafters.online import OnlineStates
    from drafters.runs import Run
    from drafters.storage import Folder
    from drafters.target import FrozenTarget
    from drafters.training.plan import Plan
    from drafters.types import Conversation, Example, Needs

NUM_PROBED = 8  # prompts of a probe in the middle of training


def train(cfg: DictConfig, ranks: "Ranks | None" = None) -> None:
    """Capture (or reuse) the target's states, train (or resume), measure, and write `outputs/<name>/`. All `ranks` do
    so together."""
    from drafters.config import to_plain
    from drafters.distributed import Ranks
    from drafters.door import say
    from drafters.rerun import following, record
    from drafters.runs import claim
    from drafters.training.determinism import reproducible

    ranks = ranks or Ranks()
    with following(cfg.get("run")) as origin:
        plan, settings = read_plan(cfg, ranks), {**to_plain(cfg), "cwd": os.getcwd()}
        settings.pop("run", None)
        if origin is not None:
            origin.check_folder(cfg.run_dir)
        with claim(cfg.run_dir, settings, resume=plan.resume, ranks=ranks) as run:
            # A finished run whose drafter was lost writes it again from its checkpoint.
            if ranks.share(run.report.is_file() and (run.has_drafter or run.checkpoint is None)):
                say(f"{run.folder} is finished: see {run.folder / 'report.md'}. For another run choose another name=")
                return
            with reproducible(deterministic=plan.deterministic, seed=plan.seed):
                if ranks.is_first:
                    record(plan, run, settings, origin, processes=ranks.size)
                learn(cfg, plan, run, settings, ranks)


def learn(cfg: DictConfig, plan: "Plan", run: "Run", settings: Mapping[str, Any], ranks: "Ranks") -> None:
    """From the target's states to a report: what there is of them is not made again."""
    import torch

    from data.sources import load_splits
    from drafters.chat import ChatEncoder
    from drafters.door import load_target, pick_device, say
    from drafters.heads.start import Start, check_block_size
    from drafters.splits import ONLINE, encode_splits, states_place
    from drafters.training.fit import begin_logging, build_probe, check_fits, fit, start_drafter
    from drafters.training.module import DistillModule
    from drafters.training.plan import how_computed
    from drafters.training.strategies import check_strategy, placement
    from drafters.warm_start import folder_of, load_warm_start
    from drafters.weights import resolve_node

    data = plan.data
    warm_start = plan.warm_start if run.checkpoint is None else None
    if warm_start is not None:
        folder_of(warm_start)
    with ranks.first_goes_first():
        parts = load_splits(plan.source, validation=data.validation, seed=data.seed)
        weights = resolve_node(settings["target"])
    device = torch.device(pick_device(asked := ranks.device(cfg.device)))
    load = partial(load_target, settings["target"], device=data.target_device or asked)
    target = load(is_outline=not plan.decodes and data.states != ONLINE)
    check_strategy(settings["trainer"], run.checkpoint, averages=plan.optim.ema_decay is not None, size=ranks.size)
    outline = check_fits(*plan.drafter, target)
    warm = None if warm_start is None else load_warm_start(warm_start, *plan.drafter, target.spec)
    encoder = ChatEncoder(target.tokenizer, max_length=data.max_length, template_kwargs=data.template_kwargs)
    splits, reports = encode_splits(parts, encoder, weights_hash=target.spec.weights_hash)
    for name, counted in reports.items():
        say(f"{name}: {counted.summary()}")
    check_block_size(splits["train"], outline.block_size)
    prompts = report_prompts(plan, parts[1], encoder, target, outline)
    if not target.has_layers:
        cache = states_place(target.spec, splits, plan.cache, encoder=encoder)
        target = read_head_or_load(target, cache, (weights, device), load, ranks)
    place = placement(settings["trainer"], ranks, target.device if data.target_device is None else device)
    states = find_states(plan, target, splits, encoder, outline.needs, ranks)
    start = Start(target=target, examples=splits["train"], states=states, indices=states.split("train"), warm=warm)
    drafter = start_drafter(plan, run, start)
    probe = build_probe(plan, target, prompts[:NUM_PROBED]) if plan.decodes else None
    module = DistillModule(drafter, target.head, plan.optim, sample_names=states.ids, how=how_computed(cfg.trainer))
    begin_logging(plan, run, module, ranks)
    fit(plan, run, module, states, probe=probe, trainer=partial(build_trainer, cfg, **place))
    end(plan, run, target, prompts, settings, ranks)


def read_head_or_load(
    outline: "FrozenTarget",
    cache: "tuple[CacheKey, Folder]",
    weights: "tuple[Path, torch.device]",
    load: "Callable[[], FrozenTarget]",
    ranks: "Ranks",
) -> "FrozenTarget":
    """Of a run that does not decode: the target's head, read where the cache is finished, or else all of it, loaded.
    `weights`: their folder, and the device for the head."""
    from drafters.cache import HiddenCache
    from drafters.cache_target import find_spec
    from drafters.door import say
    from drafters.head_only import check_head, read_head

    key, folder = cache
    found = ranks.share(find_spec(folder, key, outline.spec) if ranks.is_first else None)
    if found is None or isinstance(found, str):
        say(f"The target's layers are loaded: {found}")
        return load()
    target = read_head(outline, found, weights[0], device=weights[1])
    check_head(target.head, HiddenCache.open(folder, expect=key))
    say(
        "The target's layers are not loaded: nothing of this run decodes with them (report.num_prompts=0, "
        "callbacks.probe_every_n_steps=null)"
    )
    return target


def find_states(
    plan: "Plan",
    target: "FrozenTarget",
    splits: "Mapping[str, Sequence[Example]]",
    encoder: "ChatEncoder",
    needs: "Needs",
    ranks: "Ranks",
) -> "HiddenCache | OnlineStates":
    """The target's states of the conversations: a cache, captured as far as it is not there, or the target itself."""
    from data.capture import capture_states
    from data.sources import ONLINE
    from drafters.online import OnlineStates

    if plan.data.states == ONLINE:
        return OnlineStates(target, splits, plan.cache)
    layer_ids = tuple(sorted({*plan.cache.layer_ids, *needs.layer_ids}))
    return capture_states(target, splits, replace(plan.cache, layer_ids=layer_ids), encoder=encoder, ranks=ranks)


def started_here(cfg: DictConfig, ranks: "Ranks") -> bool:
    """Whether this process, being alone, has started the processes that `trainer.devices` asks for, and they have
    trained. Raises ConfigError for a number that does not fit what was started, SystemExit where they failed."""
    from hydra.core.hydra_config import HydraConfig

    from drafters.config import to_plain
    from drafters.distributed import launch
    from drafters.stopping import INTERRUPTED
    from drafters.training.strategies import num_processes

    count = num_processes(to_plain(cfg.trainer), ranks)
    if count == ranks.size:
        return False
    given = HydraConfig.get().overrides
    status = launch(count, sys.argv[0], [*given.task, "hydra.mode=RUN", f"outputs={cfg.outputs}"])
    if status:
        raise SystemExit(status if status == INTERRUPTED else 1)
    return True


def read_plan(cfg: DictConfig, ranks: "Ranks | None" = None) -> "Plan":
    """Raises ConfigError for the first setting that is unknown or wrong."""
    from data.sources import DataConfig
    from drafters.batch_plan import check_batch_size
    from drafters.config import to_plain
    from drafters.distributed import Ranks
    from drafters.training import plan
    from drafters.training.strategies import RanksEnvironment, check_kind, check_strategy, num_processes

    alone = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "logger": False, "enable_checkpointing": False}
    ranks = ranks or Ranks()
    alone["plugins"] = [RanksEnvironment(ranks, per_node=1)]
    check_kind(to_plain(cfg.trainer))
    is_object = not isinstance(cfg.trainer.get("strategy", "auto"), str)  # made where the processes are known
    build_trainer(cfg, **alone, **({"strategy": "auto"} if is_object else {}))
    num_processes(to_plain(cfg.trainer), ranks)
    plan.how_computed(to_plain(cfg.trainer))
    made = plan.read_plan(to_plain(cfg), data=DataConfig, logger=build_logger(cfg))
    if made.data.max_tokens is None:
        check_batch_size(made.data.batch_size, ranks.size)
    check_strategy(to_plain(cfg.trainer), None, averages=made.optim.ema_decay is not None, size=ranks.size)
    return made


def build_trainer(cfg: DictConfig, **given: Any) -> "Trainer":
    """Lightning's Trainer. Raises ConfigError for a setting that it refuses, or that is not its own to decide."""
    from hydra.utils import instantiate
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from drafters.config import suited, to_plain
    from drafters.errors import ConfigError
    from drafters.training.plan import OWN, check_trainer, one_line

    decided = check_trainer(to_plain(cfg.trainer))
    try:
        settings = {name: value for name, value in to_plain(cfg.trainer).items() if name not in OWN}
        trainer: Trainer = instantiate(suited(settings, key="trainer"), _partial_=True)(**decided | given)
    except (hydra.errors.HydraException, MisconfigurationException, TypeError, ValueError) as error:
        raise ConfigError(f"trainer: {one_line(error)}") from error
    return trainer


def build_logger(cfg: DictConfig) -> Any:
    """A logger of Lightning, or False for none. Raises ConfigError."""
    from hydra.utils import instantiate

    from drafters.config import suited, to_plain
    from drafters.errors import ConfigError
    from drafters.training.plan import one_line

    node = to_plain(cfg.get("logger"))
    if isinstance(node, list):
        raise ConfigError(f"logger: got {node}; accepted: one logger, as conf/logger has them, or null")
    try:
        return instantiate(suited(node, key="logger") if isinstance(node, dict) and node else node) or False
    except (hydra.errors.HydraException, TypeError, ValueError) as error:
        raise ConfigError(f"logger: {one_line(error)}") from error


def report_prompts(
    plan: "Plan", part: Sequence["Conversation"], encoder: "ChatEncoder", target: "FrozenTarget", outline: "Drafter"
) -> list["Dialogue"]:
    """What the report and the probes decode. Raises ConfigError for settings of `report` that do not fit."""
    from data.prompts import held_out_prompts
    from drafters.decoding.measure import check_settings
    from drafters.training.fit import measured_as

    room = target.spec.max_position - plan.report.max_new_tokens
    prompts = held_out_prompts(part, encoder, num_prompts=plan.num_prompts or NUM_PROBED, room=room)
    if plan.decodes:
        check_settings(outline, prompts, measured_as(plan, target), key="report")
    return prompts


def end(
    plan: "Plan",
    run: "Run",
    target: "FrozenTarget",
    prompts: list["Dialogue"],
    settings: Mapping[str, Any],
    ranks: "Ranks",
) -> None:
    """Real decoding with the best weights of the run, on held-out prompts, if the report is wanted; before it, the
    picture of the training."""
    from drafters.checkpoint import load_drafter, provenance
    from drafters.decoding.measure import Contestant
    from drafters.door import Place, measure_and_write, say
    from drafters.training.curve import save_curve
    from drafters.training.fit import measured_as
    from drafters.training.loggers import REPORT, log_report

    if ranks.is_first:
        save_curve(run.folder)
    if plan.num_prompts == 0:
        say(f"Trained: {run.drafter}; not measured (report.num_prompts=0): python evaluate.py run={run.folder} does it")
        return
    drafter = load_drafter(run.drafter, spec=target.spec).to(target.device)
    contestants = {run.folder.name: Contestant(drafter=drafter, provenance=provenance(run.drafter))}
    place = Place(
        out=run.folder,
        facts={"weights": settings["target"]["weights"]},
        ranks=ranks,
        kept=f"{run.drafter} is trained and kept; the same command measures it",
        environment=str(run.environment.relative_to(run.folder)),
    )
    measured = measure_and_write(target, contestants, prompts, measured_as(plan, target), place)
    for found in measured.values():  # on the first rank
        log_report(run.folder, settings, found, run.folder, prefix=REPORT)


def is_local_sweep() -> bool:
    """Whether this job is one of several that run here, one after another."""
    return sweep_launcher().startswith("hydra._internal.core_plugins.basic_launcher")


def is_submitted() -> bool:
    """Whether this job was submitted to a cluster."""
    return "submitit_launcher" in sweep_launcher()


def job_log() -> str:
    """Where the errors of this submitted job are written."""
    import submitit

    return str(submitit.JobEnvironment().paths.stderr)


def sweep_launcher() -> str:
    """The class that launched this job of a sweep; empty where there is no sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    job = HydraConfig.get()
    return str(job.launcher["_target_"]) if job.mode == RunMode.MULTIRUN else ""


def chosen_launcher() -> str | None:
    """The name of the launcher that this command or its experiment chose."""
    from hydra.core.hydra_config import HydraConfig

    name: str | None = HydraConfig.get().runtime.choices.get("hydra/launcher")
    return name


failed_jobs: list[str] = []


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from drafters.distributed import Ranks, leave
    from drafters.door import door, only_first_speaks
    from drafters.launcher import check_named
    from drafters.rerun import check_composed

    try:
        with door():
            check_settings(cfg, "train")
            with Ranks.from_environment() as ranks:
                only_first_speaks(ranks)
                if ranks.size == 1:
                    check_named(chosen_launcher(), is_sweep=sweep_launcher() != "", checkout=CHECKOUT)
                check_composed(cfg.run, HydraConfig.get().job.config_name)
                if not started_here(cfg, ranks):
                    train(cfg, ranks)
            if ranks.size > 1:
                leave()
    except SystemExit as stop:
        # Who submitted the job waits for its result, or for its return to the queue after a signal.
        if stop.code == 1 and is_submitted():
            raise CompactHydraException(f"error: not trained: {cfg.name}; its log says why: {job_log()}") from None
        # A sweep goes on with its other jobs; Ctrl-C ends it.
        if stop.code != 1 or not is_local_sweep():
            raise
        failed_jobs.append(cfg.name)


def prepare() -> None:
    """Before Hydra: a launcher that cannot be used is told in one line, for Hydra would not say why; the others are
    started in order; and a run that is to be repeated gives the settings."""
    from drafters.launcher import check_launcher

    compose_run()
    check_launcher(sys.argv[1:], checkout=CHECKOUT)
    launch_in_order()


def compose_run() -> None:
    """Where the command names a run=, let Hydra compose the settings of that run in place of conf/train.yaml."""
    if not any(word.lstrip("+").startswith("run=") for word in sys.argv[1:]):
        return
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from drafters.environment import REPEATING
    from drafters.rerun import CONFIG, stored_node

    node = stored_node(sys.argv[1:])
    if node is not None:
        today: Any = OmegaConf.load(CONF / "train.yaml")
        ConfigStore.instance().store(name=CONFIG, node={**node, "hydra": today.hydra})
        sys.argv[1:1] = REPEATING


if __name__ == "__main__":
    # Before torch is loaded: each rank would say that this drafter used all of its parts in the first step.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    begin(main, prepare=prepare)
    if failed_jobs:
        sys.exit(f"error: not trained: {', '.join(failed_jobs)} (see above); the same command goes on with them")
