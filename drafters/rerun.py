# `train.py run=FOLDER name=NEW`: the run in FOLDER once more. Its stored settings, not today's conf/, are what Hydra
# composes, so that single settings of the command go over them; minutes become the number of steps that they were.

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drafters.door import say
from drafters.environment import REPEATING, environment, read_environments, record_environment
from drafters.environment import differences as unlike
from drafters.errors import CheckpointError, ConfigError
from drafters.runs import SETTINGS, Run, differences, open_run, read_steps, settings_sha256, write_steps

if TYPE_CHECKING:
    from drafters.training.plan import Plan

__all__ = ["CONFIG", "Origin", "check_composed", "following", "record", "stored_node"]

CONFIG = REPEATING[-1]  # the name under which Hydra finds the settings
KEY = "run"
OWN = ("name", "outputs", "run_dir", "resume", "cwd", "run")  # of a run's own, never repeated
NEEDED = ("name", "outputs", "run_dir", "cache", "loss", "drafter", "optim", "trainer", "callbacks", "report")
# Groups of conf/ that do not change what is learned: another choice may be made.
CHOSEN = ("logger", "profiler", "callbacks", "report")
# Settings that conf/ copies from others: where they are equal, they follow them.
COPIES = {
    "drafter.loss": "loss",
    "drafter.layer_ids": "target.layer_ids",
    "cache.layer_ids": "target.layer_ids",
    "cache.name": "target.name",
}
# What a stored run may have called by Hydra; other classes are only looked for, and hold settings.
CALLED = re.compile(
    r"lightning\.pytorch\.(Trainer|loggers\.\w+)|drafters\.training\.(loggers\.wandb_logger|strategies\.\w+Strategy)"
)


def stored_node(words: Sequence[str]) -> dict[str, Any] | None:
    """What Hydra composes for a command of these words (without the first one) in place of conf/train.yaml; None where
    they name no run. Raises ConfigError for a word that goes against it, CheckpointError for a folder that is no run.
    """
    given = [word.partition("=") for word in words if "=" in word and not word.startswith("-")]
    named = [value.strip("'\"") for key, _, value in given if key.lstrip("+") == KEY]
    if not named or named[-1] in ("", "null"):
        return None
    folder = named[-1]
    run, settings = _open(folder)
    if "name" not in [key for key, _, _ in given]:
        new = f"{run.folder.resolve().name}-again"
        raise ConfigError(
            f"name: missing; run={folder} is left as it is, so give the new run a name, such as name={new}"
        )
    for key, _, value in given:
        _check_word(key, value, settings)
    _check_trust(run, settings, {key.lstrip("+"): value for key, _, value in given})
    chosen = {key: value for key, _, value in given if key in CHOSEN}
    return {
        "defaults": [
            "_self_",
            *({key: value} for key, value in chosen.items()),
            *({f"override hydra/{name}": "disabled"} for name in ("job_logging", "hydra_logging")),
        ],
        **{key: value for key, value in _linked(settings).items() if key not in chosen},
    }


def _check_trust(run: Run, settings: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """A folder does not decide what code is run: the command does. Raises ConfigError, CheckpointError."""
    key = "target.trust_remote_code"
    if settings["target"].get("trust_remote_code") and key not in given:
        raise ConfigError(f"{key}: {run.folder} was trained with true; say {key}=true in this command, too, or false")
    for group in ("trainer", "logger"):
        for name in [] if group in given else _called(settings.get(group)):
            if not (isinstance(name, str) and CALLED.fullmatch(name)):
                raise CheckpointError(
                    f"run: {run.folder / SETTINGS} names {group}._target_={name}, which is not called because a folder "
                    "says so; train with the settings themselves, without run="
                )


def _called(node: Any) -> Iterator[Any]:
    """All values of `_target_` in a node."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield value
            yield from _called(value)
    elif isinstance(node, list):
        for one in node:
            yield from _called(one)


def check_composed(run: str | None, composed: str | None) -> None:
    """Raises ConfigError where `run` was named elsewhere than in the command, so that another config is composed."""
    if run is not None and composed != CONFIG:
        raise ConfigError(f"run: got '{run}' in a YAML; accepted in the command alone: train.py run={run} name=NEW")


def _open(folder: str | Path) -> tuple[Run, dict[str, Any]]:
    run, settings = open_run(folder, needs_drafter=False)
    if absent := [name for name in NEEDED if name not in settings]:
        raise CheckpointError(
            f"run: {run.folder / SETTINGS} lacks {', '.join(absent)}; it is damaged or of another version"
        )
    return run, settings


def _check_word(key: str, value: str, settings: Mapping[str, Any]) -> None:
    name = key.lstrip("+~")
    is_group = name == "experiment" or "@" in name or ("." not in name and isinstance(settings.get(name), dict))
    if name in CHOSEN or name.startswith("hydra") or not is_group:
        return
    raise ConfigError(
        f"{name}: got '{value}' with run=, which repeats the settings of a run and takes nothing else from conf/; give "
        f"single settings, such as {name if name != 'experiment' else 'optim'}.SETTING=VALUE, or leave run= out"
    )


def _linked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with those that others are copies of as such, written as OmegaConf reads them."""
    node: dict[str, Any] = _escaped({key: value for key, value in settings.items() if key not in OWN})
    for key, other in COPIES.items():
        *groups, last = key.split(".")
        holder = _at(node, ".".join(groups))
        if isinstance(holder, dict) and last in holder and holder[last] == _at(node, other):
            holder[last] = f"${{{other}}}"
    logger = node.get("logger")
    if isinstance(logger, dict):
        for key, value in logger.items():
            if isinstance(value, str) and f"{value}/".startswith(f"{settings['run_dir']}/"):
                logger[key] = "${run_dir}" + value[len(settings["run_dir"]) :]
            elif key == "name" and value == settings["name"]:
                logger[key] = "${name}"
    own = {"name": "???", "outputs": settings["outputs"], "run_dir": "${outputs}/${name}", "resume": False}
    # In the order of the file, so that settings written anew are the same bytes.
    inside = {key: own.get(key, node.get(key)) for key in settings if key not in ("cwd", KEY)}
    return {**inside, **_added(settings), KEY: None}


def _added(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that runs of earlier versions lack, as they were then."""
    return {key: value for key, value in (("seed", None), ("deterministic", False)) if key not in settings}


def _at(node: Any, key: str) -> Any:
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that is repeated. `called_from` is the folder that the command was given in."""

    run: Run
    settings: Mapping[str, Any]
    environments: Sequence[Mapping[str, Any]]
    called_from: str

    def check_folder(self, folder: str | Path) -> None:
        """Raises ConfigError where `folder` is that of this run itself."""
        if Path(folder).resolve() == self.run.folder:
            raise ConfigError(f"name: got the name of {self.run.folder} itself; accepted: a name that no run has")

    def take_steps(self, run: Run, settings: Mapping[str, Any]) -> int | None:
        """Let `run` be as long as this one where both have the same budget of minutes: the number of steps, None for
        another budget. Raises CheckpointError where this run did not come so far that the number was known."""
        minutes = settings["optim"]["minutes"]
        if minutes is None or minutes != self.settings["optim"].get("minutes"):
            return None
        steps = read_steps(self.run, minutes=minutes) or _steps_of(self.run.checkpoint)
        if steps is None:
            raise CheckpointError(
                f"run: {self.run.folder} did not come so far that its {minutes:g} minutes were a number of steps; go "
                "on with it first, or give a length: optim.minutes=null optim.max_steps=N"
            )
        write_steps(run, minutes=minutes, steps=steps)
        return steps

    def told(
        self, settings: Mapping[str, Any], *, steps: int | None, processes: int = 1, code: type | None = None
    ) -> Iterator[str]:
        """In a line each: what the new settings change, the length, and what is another in the environment."""
        node = {key: value for key, value in settings.items() if key != "logger"}
        before = {key: value for key, value in self.settings.items() if key != "logger"}
        changed = sorted(differences({**_added(before), **before}, node, without=OWN))
        text = "; ".join(f"{key} was {old}, now {new}" for key, old, new in changed)
        yield f"Once more {self.run.folder}: " + (text or "the same settings")
        if steps is not None:
            minutes = settings["optim"]["minutes"]
            yield f"Its {minutes:g} minutes were {steps} steps: so many are taken, however long they last"
        if len({one.get("settings_sha256") for one in self.environments}) > 1:
            yield "warning: it was continued with other settings than it began with; the last ones are repeated"
        if settings["cwd"] != self.settings["cwd"]:
            there, here = self.settings["cwd"], settings["cwd"]
            yield f"It was begun in {there}, which is not here: relative paths are meant from {here}"
        elif settings["cwd"] != self.called_from:
            yield f"Works in {settings['cwd']}, where it was begun: all relative paths are meant from there"
        if not self.environments:
            yield "Its environment was not recorded; other versions or another machine may give other numbers"
            return
        then = self.environments[-1]
        unequal = unlike(then["environment"], environment(code))
        if (before_it := then.get("processes", 1)) != processes:
            unequal.append(f"processes {before_it} -> {processes}")
        yield "Its environment: " + ("; ".join(unequal) + "; numbers may differ" if unequal else "the same as now")


def _steps_of(checkpoint: Path | None) -> int | None:
    """The length that a checkpoint of a version which kept it nowhere else knows."""
    if checkpoint is None or not checkpoint.is_file():
        return None
    try:
        found = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["drafters"]["total_steps"]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"run: {checkpoint} is damaged ({str(error).splitlines()[0]})") from error
    return None if found is None else int(found)


@contextlib.contextmanager
def following(folder: str | None) -> Iterator[Origin | None]:
    """The run in `folder`, if one is named; inside, this process works in the folder that it was begun in (if there is
    such a folder here), so that relative paths are meant as they were."""
    if folder is None:
        yield None
        return
    run, settings = _open(Path(folder).resolve())
    environments = read_environments(run.environment)
    there, here = Path(settings["cwd"]), os.getcwd()
    with contextlib.chdir(there if there.is_dir() else here):
        yield Origin(run=run, settings=settings, environments=environments, called_from=here)


def record(plan: "Plan", run: Run, settings: Mapping[str, Any], origin: Origin | None, *, processes: int) -> None:
    """Keep in the folder of `run` what this command computes with; where it repeats `origin`, say what differs and take
    its length. Raises CheckpointError."""
    code = plan.drafter[0]
    facts: dict[str, Any] = {"seed": plan.seed, "deterministic": plan.deterministic, "processes": processes}
    facts["settings_sha256"] = settings_sha256(settings)
    if origin is not None:
        steps = origin.take_steps(run, settings)
        for line in origin.told(settings, steps=steps, processes=processes, code=code):
            say(line)
        facts["repeats"] = str(origin.run.folder)
    record_environment(run.environment, facts, code=code)
