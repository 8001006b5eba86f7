# A run's folder, `outputs/<name>/`: who may write into it, and what it was begun with. The settings are written before
# anything else, so that a second command with others is refused instead of mixing two runs.

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.checkpoint import replace_path, write_error, write_whole
from drafters.distributed import Ranks
from drafters.environment import ENVIRONMENT
from drafters.errors import CheckpointError
from drafters.plain_json import parse

__all__ = ["SETTINGS", "Run", "claim", "differences", "open_run", "read_steps", "settings_sha256", "write_steps"]

SETTINGS = Path(".hydra") / "settings.json"
STEPS = Path(".hydra") / "steps.json"
# These may change between a run and its continuation: they do not change what is learned.
FREE = (
    *("cwd", "name", "outputs", "run_dir", "resume", "logger", "profiler", "device", "callbacks", "report"),
    "deterministic",
    *("target.device_map", "target.tp_plan", "data.states", "data.target_device", "data.prefetch"),
)


# Of settings that runs of earlier versions do not have.
BEFORE = {"target.trust_remote_code": False}
# What stored settings are, as far as all that read them rely on it.
KINDS: dict[str, Any] = {
    **dict.fromkeys(("cwd", "name", "outputs", "run_dir"), str),
    **dict.fromkeys(("source", "data", "target", "cache", "loss", "drafter", "optim", "trainer", "callbacks"), dict),
    "report": dict,
    "logger": dict | bool | None,
}
# What a checkpoint cannot go on with once it is another; `resume` is for the rest, such as a longer budget.
FIXED = ("target", "source", "data", "drafter", "warm_start", "seed")


@dataclass(frozen=True)
class Run:
    """A run's folder and what may lie in it."""

    folder: Path

    @property
    def checkpoint(self) -> Path | None:
        """What to resume from; None before anything was saved."""
        path = self.folder / "checkpoints" / "last.ckpt"
        return path if path.exists() else None

    @property
    def environment(self) -> Path:
        """`environment.json`, what the commands of this run computed with."""
        return (self.folder / SETTINGS).with_name(ENVIRONMENT)

    @property
    def report(self) -> Path:
        """`report.json`; it exists once the run has finished."""
        return self.folder / "report.json"

    @property
    def drafter(self) -> Path:
        """The drafter folder."""
        return self.folder / "drafter"

    @property
    def has_drafter(self) -> bool:
        """Whether weights were saved; in a moment of their replacement only `drafter.old` is there."""
        return self.drafter.is_dir() or self.drafter.with_name("drafter.old").is_dir()


@contextmanager
def claim(
    folder: Path | str, settings: Mapping[str, Any], *, resume: bool = False, ranks: Ranks | None = None
) -> Iterator[Run]:
    """Hold `folder` for this process (of several: the first one for all) and write its settings, or find them equal to
    the ones there.

    Raises CheckpointError when the folder cannot be written or another process holds it, or when it holds results of
    other settings. `resume` goes on all the same (e.g. with a longer budget); a report of before is then kept as
    `report.before.json`.
    """
    run = Run(Path(folder))
    if ranks is not None and not ranks.is_first:
        ranks.barrier()
        yield run
        return
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        lock = (run.folder / "run.lock").open("w")
    except OSError as error:
        raise CheckpointError(
            f"run_dir: cannot write to {folder}: {error.strerror}; choose another outputs= or name="
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"run_dir: {folder} is in use by another process; wait for it, or choose another name="
            ) from error
        _check_settings(run, settings, resume=resume)
        if ranks is not None:
            ranks.barrier()
        yield run


def open_run(folder: Path | str, *, needs_drafter: bool = True) -> tuple[Run, dict[str, Any]]:
    """A run (with a drafter to read from, unless none is needed) and its settings. Raises CheckpointError when it is
    none, or not that far."""
    run = Run(Path(folder))
    if not run.folder.is_dir():
        raise CheckpointError(f"run: no folder {folder}; give one that train.py wrote, such as outputs/markov-smollm2")
    settings = _read_settings(run)
    if settings is None:
        raise CheckpointError(
            f"run: {folder} is not a run of train.py: it has no {SETTINGS}; give a folder such as "
            "outputs/markov-smollm2"
        )
    absent = [name for name in ("cwd", "source", "data", "target") if name not in settings]
    if absent:
        raise CheckpointError(
            f"run: {run.folder / SETTINGS} lacks {', '.join(absent)}; it is damaged or of another version"
        )
    for name, value in settings.items():
        kind = KINDS.get(name, Any)
        if kind is not Any and not isinstance(value, kind):
            raise CheckpointError(
                f"run: {run.folder / SETTINGS} has {name}={json.dumps(value)}, which should be "
                f"{'text' if kind is str else 'settings by name'}; it is damaged or of another version"
            )
    if needs_drafter and not run.has_drafter:
        raise CheckpointError(f"run: {folder} has no drafter yet; go on with the train.py command that began it")
    return run, settings


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """A hash of the settings that a run of one length is made of: those outside of FREE."""
    own = {key: value for key, value in settings.items() if key not in FREE}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def write_steps(run: Run, *, minutes: float, steps: int) -> None:
    """Keep how many steps a budget of `minutes` was. Raises CheckpointError when the disk does not take it."""
    text = json.dumps({"minutes": minutes, "steps": steps}) + "\n"
    write_whole(run.folder / STEPS, lambda temp: temp.write_text(text))


def read_steps(run: Run, *, minutes: float) -> int | None:
    """How many steps these `minutes` were in `run`; None where that was not kept. Raises CheckpointError."""
    path = run.folder / STEPS
    try:
        found = json.loads(path.read_text())
        return int(found["steps"]) if found["minutes"] == minutes else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"run: {path} is damaged ({error}); delete it, and the minutes are turned into steps anew"
        ) from error


def _check_settings(run: Run, settings: Mapping[str, Any], *, resume: bool) -> None:
    before = _read_settings(run)
    changed = [] if before is None else sorted(differences(before, dict(settings)))
    # Where nothing was saved yet, as after a wrong setting, nothing can be mixed.
    has_results = run.checkpoint is not None or run.has_drafter or run.report.is_file()
    if changed and has_results and not resume:
        key, old, new = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise CheckpointError(
            f"run_dir: {run.folder} holds a run with other settings: {key} was {old}, now {new}{more}; "
            "choose another name=, or resume=true to go on with the new ones"
        )
    fixed = [change for change in changed if change[0].split(".")[0] in FIXED]
    if fixed and run.checkpoint is not None:
        key, old, new = fixed[0]
        raise CheckpointError(
            f"run_dir: {run.folder} cannot go on with another {key}: it was {old}, now {new}; choose another name="
        )
    if before is not None and not changed:
        return
    path = run.folder / SETTINGS
    temp = path.with_name(path.name + ".tmp")
    try:
        (run.folder / STEPS).unlink(missing_ok=True)
        if run.report.is_file():
            run.report.replace(run.folder / "report.before.json")
        temp.parent.mkdir(exist_ok=True)
        temp.write_text(json.dumps(dict(settings), indent=1) + "\n")
        replace_path(temp, path)
    except OSError as error:
        raise write_error(path, error) from error


def _read_settings(run: Run) -> dict[str, Any] | None:
    path = run.folder / SETTINGS
    try:
        settings: Any = parse(path.read_text())
        if not isinstance(settings, dict):
            raise ValueError("it should hold an object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"run: {path} is damaged ({error}); choose another name=") from error
    return settings


def differences(
    before: Any, after: Any, key: str = "", *, without: tuple[str, ...] = FREE
) -> Iterator[tuple[str, str, str]]:
    """Dotted name, old and new value (as JSON) of the settings that are not the same, but for those `without`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() | after.keys():
            path = f"{key}.{name}" if key else name
            if path not in without:
                yield from differences(before.get(name, BEFORE.get(path)), after.get(name), path, without=without)
    elif before != after:
        yield key, json.dumps(before), json.dumps(after)
