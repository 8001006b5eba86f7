# The measure: `python evaluate.py run=outputs/NAME` decodes prompts for real, with and without the drafter of a run,
# and writes report.json, report.md and pictures. `compare=[a,b,ngram]` measures several side by side, `task=show`
# prints what one does.

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from data.command import begin, check_settings

if TYPE_CHECKING:
    from data.prompts import PromptConfig, Trained
    from data.sources import SourceConfig
    from drafters.chat import ChatEncoder
    from drafters.contestants import Entry
    from drafters.decoding.dialogue import Dialogue
    from drafters.decoding.measure import Contestant, MeasureConfig
    from drafters.distributed import Ranks
    from drafters.target import FrozenTarget
    from drafters.types import Sampling

CONF = str(Path(__file__).resolve().parent / "conf")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MEASURE = ("max_new_tokens", "length", "tree", "batch_size", "seed", "num_speed_prompts", "profile_rounds")
PROMPTS = ("split", "num_prompts", "turns", "system")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The settings of this door beside those of the source, the target, the prompts and the measurement."""

    run: str | None = None
    compare: tuple[str, ...] | None = None
    out: str | None = None
    resume: bool = False
    thinking: bool | None = None
    text: str | None = None
    by_round: bool = False
    allow_other_target: bool = False
    profile: str | None = None
    calibrated: bool = True
    device: str | None = None
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.compare is None):
            raise ValueError(
                f"run: got run={self.run} and compare={self.compare}; set one of them: run=outputs/NAME, or "
                "compare=[outputs/a,outputs/b,ngram]"
            )
        if self.out == "":
            raise ValueError("out: got ''; accepted: a folder, or null")

    @property
    def names(self) -> tuple[str, ...]:
        """What is measured: run folders and baselines."""
        return self.compare if self.compare is not None else (str(self.run),)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A task without settings of its own."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that is there before the first prompt is decoded."""

    choice: Choice
    settings: Any
    config: "MeasureConfig"
    entries: "Sequence[Entry]"
    weights: str
    target: "FrozenTarget"
    contestants: "Mapping[str, Contestant]"
    dialogues: "list[Dialogue]"
    facts: Mapping[str, Any]


def evaluate(cfg: DictConfig) -> None:
    """Do what `cfg.task` says with what `cfg` names, on the prompts of `cfg.source`."""
    from drafters import progress
    from drafters.distributed import Ranks, leave

    with Ranks.from_environment() as ranks:
        progress.show(ranks.is_first)
        if not ranks.is_first:
            ranks.barrier()  # the first one fetches and unpacks what is not there yet
        task = read_task(cfg, ranks)
        if ranks.is_first:
            ranks.barrier()
        work = {"measure": measure, "show": show}.get(task.settings.name, study)
        work(task, ranks)
    if ranks.size > 1:
        leave()


def read_task(cfg: DictConfig, ranks: "Ranks") -> Task:
    """The settings, typed, with the target, the drafters and the prompts that they name."""
    from data.prompts import PromptConfig
    from drafters.config import build_config, to_plain, typed
    from drafters.contestants import find_entries, target_node
    from drafters.decoding.measure import MeasureConfig
    from drafters.decoding.sampling import effective_sampling
    from drafters.door import load_target

    plain = to_plain(cfg)
    choice = typed(Choice, {f.name: plain[f.name] for f in fields(Choice)}, key="")
    config = typed(MeasureConfig, {name: plain[name] for name in MEASURE}, key="")
    wanted = typed(PromptConfig, {name: plain[name] for name in PROMPTS}, key="")
    settings = task_settings(plain["task"], choice, has_schedule=plain.get("schedule") is not None)
    if settings.name == "show" and wanted.num_prompts is None:
        wanted = replace(wanted, num_prompts=1)
    _, source = build_config(cfg.source, key="source")
    for name, baseline in plain["baselines"].items():
        build_config(baseline, key=f"baselines.{name}")
    entries = find_entries(choice.names, plain["baselines"], key="run" if choice.compare is None else "compare")
    node = target_node(entries, plain.get("target"))
    target = load_target(node, device=ranks.device(choice.device))
    contestants = {one.name: one.load(target, allow_other_target=choice.allow_other_target) for one in entries}
    asked = {name: getattr(choice, name) for name in SAMPLING}
    config = replace(config, sampling=effective_sampling(target.model.generation_config, asked))
    if plain.get("schedule") is not None:
        contestants = scheduled(plain["schedule"], choice, entries, contestants, target, config.sampling)
    encoder = encoder_of(entries, target, thinking=choice.thinking)
    room = target.spec.max_position - config.max_new_tokens
    facts: dict[str, Any] = {}
    if choice.text is not None:
        dialogues = [own_dialogue(choice.text, encoder, wanted)]
    else:
        dialogues, facts = find_dialogues(source, encoder, wanted, entries, room=room)
    return Task(
        choice=choice,
        settings=settings,
        config=config,
        entries=entries,
        weights=node["weights"],
        target=target,
        contestants=contestants,
        dialogues=dialogues,
        facts=facts,
    )


def measure(task: Task, ranks: "Ranks") -> None:
    """Reports and pictures of all contestants; wandb gets them where the run has it."""
    from drafters.door import Place, measure_and_write
    from drafters.training.loggers import log_report

    out = place_of(task)
    facts = {"weights": task.weights, "prompts": task.facts}
    place = Place(out=out, facts=facts, resume=task.choice.resume, ranks=ranks)
    reports = measure_and_write(task.target, task.contestants, task.dialogues, task.config, place)
    for entry in task.entries:
        if entry.run is not None and entry.name in reports:
            log_report(entry.run.folder, entry.settings, reports[entry.name], out, prefix=f"evaluate/{out.name}")


def show(task: Task, ranks: "Ranks") -> None:
    """Print the answer to the first prompts as they are decoded, coloured by who wrote each token."""
    from drafters.decoding.loop import DecodeConfig
    from drafters.decoding.measure import check_settings, tree_of
    from drafters.decoding.show import printable, watch
    from drafters.door import say, screen
    from drafters.errors import ConfigError

    if not ranks.is_first:
        return
    (contestant,) = task.contestants.values()
    drafter, config = contestant.drafter, task.config
    if config.tree == "auto":
        raise ConfigError("tree: got auto, which needs a measurement; with task=show give null, or such as [3,2,1]")
    least = drafter.block_size + 2  # what a measurement needs; a text may be shorter
    check_settings(drafter, task.dialogues, replace(config, max_new_tokens=max(config.max_new_tokens, least)))
    decoding = DecodeConfig(
        max_new_tokens=config.max_new_tokens,
        sampling=config.sampling,
        length=config.length if isinstance(config.length, int) else None,
        tree=tree_of(config),
        seed=config.seed,
    )
    for number, dialogue in enumerate(task.dialogues):
        prompt = dialogue.encode(())
        say(f"\n{printable(task.target.tokenizer.decode(prompt))}")
        one = replace(decoding, numbers=(number,))
        watch(task.target, drafter, prompt, one, screen(), rounds=task.choice.by_round)


def study(task: Task, ranks: "Ranks") -> None:
    """What the drafter's confidence is worth, what rounds cost here, and what schedules make of both."""
    from drafters.door import Place
    from drafters.scheduling.studies import Job, run_study

    (entry,), ((name, contestant),) = task.entries, task.contestants.items()
    facts = {"weights": task.weights, "prompts": task.facts}
    job = Job(
        target=task.target,
        name=name,
        contestant=contestant,
        dialogues=task.dialogues,
        config=task.config,
        place=Place(out=place_of(task), facts=facts, resume=task.choice.resume, ranks=ranks),
        folder=None if entry.run is None else entry.run.drafter,
        profile=task.choice.profile,
        calibrated=task.choice.calibrated,
    )
    run_study(job, task.settings)


def task_settings(node: Mapping[str, Any], choice: Choice, *, has_schedule: bool = False) -> Any:
    """What one of conf/task says, typed. Raises ConfigError for a setting that is unknown or wrong, and for settings
    that the task has no use for."""
    from drafters.config import typed
    from drafters.errors import ConfigError

    name = str(node["name"])
    kind: type = Plain
    if name not in ("measure", "show"):
        from drafters.scheduling.studies import STUDIES

        if name not in STUDIES:
            raise ConfigError(
                f"task.name: got '{name}'; accepted: measure, show, {', '.join(STUDIES)}; give task= alone"
            )
        kind = STUDIES[name][0]
    if name != "show" and choice.by_round:
        raise ConfigError(f"by_round: got true; it is for task=show, task={name} prints no rounds; leave it out")
    if name != "measure" and choice.run is None:
        raise ConfigError(f"compare: task={name} is about one drafter; give run= instead")
    if name != "show" and choice.text is not None:
        raise ConfigError(f"text: a prompt of your own is for task=show; task={name} needs a source of prompts")
    if name != "measure" and has_schedule:
        raise ConfigError(
            f"schedule: it is for task=measure; task={name} decodes without one; accepted: null (task=simulate takes "
            "its schedules from task.schedules)"
        )
    return typed(kind, node, key="task")


def encoder_of(entries: "Sequence[Entry]", target: "FrozenTarget", *, thinking: bool | None) -> "ChatEncoder":
    """Encodes prompts as the first run's training did, but for `thinking`."""
    from data.prompts import prompt_encoder
    from data.sources import DataConfig
    from drafters.config import typed

    nodes = [entry.settings["data"] for entry in entries if entry.run is not None]
    data = typed(DataConfig, nodes[0], key="data") if nodes else DataConfig()
    limit = target.spec.max_position
    return prompt_encoder(target.tokenizer, max_length=limit, template_kwargs=data.template_kwargs, thinking=thinking)


def own_dialogue(text: str, encoder: "ChatEncoder", wanted: "PromptConfig") -> "Dialogue":
    """A prompt of the user's own."""
    from drafters.decoding.dialogue import Dialogue
    from drafters.types import Message

    system = [Message(role="system", content=wanted.system)] if wanted.system else []
    tokens_T = encoder.prompt([*system, Message(role="user", content=text)])
    return Dialogue(source="text", key=text, num_turns=1, encode=lambda answers: tokens_T)


def find_dialogues(
    source: "SourceConfig", encoder: "ChatEncoder", wanted: "PromptConfig", entries: "Sequence[Entry]", *, room: int
) -> tuple[list["Dialogue"], dict[str, Any]]:
    """The dialogues to measure on, without what any of the runs trained on, and what reports say of them."""
    from data.prompts import source_prompts

    trained = trained_by(entries, source) if wanted.split else None
    dialogues, part = source_prompts(source, encoder, wanted, room=room, trained=trained)
    facts = {
        "source": source.hub_id or [str(path) for path in source.paths],
        "split": part,
        "num_prompts": len(dialogues),
        "template_hash": encoder.template_hash,
        **{name: getattr(wanted, name) for name in ("turns", "system") if getattr(wanted, name) is not None},
    }
    return dialogues, facts


def trained_by(entries: "Sequence[Entry]", source: "SourceConfig") -> "Trained | None":
    """What any of the runs trained on, where that can be told from the source."""
    from data.prompts import trained_on
    from data.sources import DataConfig, SourceConfig
    from drafters.config import build_config, typed

    found: list[Trained] = []
    for entry in entries:
        if entry.run is not None:
            own: SourceConfig = build_config(entry.settings["source"], key="source", base=SourceConfig)[1]
            data: DataConfig = typed(DataConfig, entry.settings["data"], key="data")
            part = trained_on(source, own=own.seen_from(entry.settings["cwd"]), data=data)
            found += [] if part is None else [part]
    return frozenset().union(*found) if found else None


def scheduled(
    node: Mapping[str, Any],
    choice: Choice,
    entries: "Sequence[Entry]",
    contestants: "Mapping[str, Contestant]",
    target: "FrozenTarget",
    sampling: "Sampling",
) -> "dict[str, Contestant]":
    """The contestants, each with the schedule of `node`, its own calibration and the profile of this machine."""
    from drafters.config import build_config
    from drafters.scheduling.policy import find_calibration, find_costs, make_policy

    scheduler = build_config(node, key="schedule")[1]
    found: dict[str, Contestant] = {}
    for entry, (name, one) in zip(entries, contestants.items(), strict=True):
        folder = None if entry.run is None else entry.run.drafter
        policy = make_policy(
            scheduler,
            costs=partial(find_costs, choice.profile, folder),
            calibration=partial(find_calibration, folder, one, target, sampling) if choice.calibrated else None,
        )
        found[name] = replace(one, policy=policy)
    return found


def place_of(task: Task) -> Path:
    """The folder that the results go to."""
    choice, first = task.choice, task.entries[0]
    if choice.out is not None:
        return Path(choice.out).expanduser()
    # Weights tell trainings of one run folder apart, settings the baselines.
    drafters = [[name, one.provenance] for name, one in task.contestants.items()]
    more: list[Any] = [task.target.spec.weights_hash, drafters]
    folder = "evaluate" if task.settings.name == "measure" else task.settings.name
    if folder == "profile" and first.run is not None:
        return first.run.folder / folder  # of this machine: the newest counts
    more += [asdict(task.settings), [repr(one.policy) for one in task.contestants.values()]]
    name = folder_name(task.dialogues, task.config, more)
    if choice.compare is None and first.run is not None:
        return first.run.folder / folder / name
    return Path("outputs") / ("compare" if choice.compare else first.name) / name


def folder_name(dialogues: Sequence["Dialogue"], config: "MeasureConfig", more: Sequence[Any]) -> str:
    """At most 60 characters that people can read, and a hash of all that is measured, so that no measurement takes the
    place of another."""
    import hashlib
    import json
    import re

    marks = [f"t{config.sampling.temperature:g}"] if config.sampling.temperature else []
    marks += [f"length{config.length}"] if config.length != "auto" else []
    marks += ["tree"] if config.tree is not None else []
    marks += [f"batch{config.batch_size}"] if config.batch_size > 1 else []
    what = [asdict(config), [dialogue.key for dialogue in dialogues], *more]
    marks.append(hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:6])
    end = "-" + "-".join(marks)
    names = "-".join(dict.fromkeys(dialogue.source for dialogue in dialogues))
    return re.sub(r"[^\w.-]+", "_", names)[: 60 - len(end)].strip("-_.") + end


@hydra.main(version_base="1.3", config_path=CONF, config_name="evaluate")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        check_settings(cfg, "evaluate")
        evaluate(cfg)


if __name__ == "__main__":
    begin(main)
