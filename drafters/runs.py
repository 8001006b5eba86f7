# A run's folder, `outputs/<name>/`: who may write into it, and what it was begun with. The settings are written before
# anything else, so that a second command with others is refused instead of mixing two runs.

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.checkpoint import replace_path
from drafters.errors import CheckpointError

__all__ = ["Run", "claim", "open_run"]

SETTINGS = Path(".hydra") / "settings.json"
# These may change between a run and its continuation: they do not change what is learned.
FREE = ("resume", "logger", "run_dir", "outputs", "device", "callbacks", "report")


@dataclass(frozen=True)
class Run:
    """A claimed run folder. `checkpoint` is what to resume from, None for a fresh start."""

    folder: Path
    checkpoint: Path | None

    @property
    def report(self) -> Path:
        """`report.json`; it exists once the run has finished."""
        return self.folder / "report.json"

    @property
    def drafter(self) -> Path:
        """The drafter folder."""
        return self.folder / "drafter"


@contextmanager
def claim(folder: Path | str, settings: Mapping[str, Any], *, resume: bool = False) -> Iterator[Run]:
    """Hold `folder` for this process and write its settings, or find them equal to the ones there.

    Raises CheckpointError when another process holds it, or when it was begun with other settings (`resume` goes on
    all the same, e.g. with a longer budget).
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"run_dir: cannot make {folder}: {error.strerror}; choose another outputs= or name=") from error
    with (folder / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"run_dir: {folder} is in use by another process; wait for it, or choose another name=") from error
        _check_settings(folder, settings, resume=resume)
        last = folder / "checkpoints" / "last.ckpt"
        yield Run(folder, last if last.is_file() else None)


def open_run(folder: Path | str) -> tuple[Run, dict[str, Any]]:
    """A run to read from, with its settings. Raises CheckpointError when it is none."""
    folder = Path(folder)
    path = folder / SETTINGS
    if not folder.is_dir():
        raise CheckpointError(f"run: no folder {folder}; give one that train.py wrote, such as outputs/markov-smollm2")
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"run: {folder} is not a run of train.py: {path} cannot be read ({error})") from error
    return Run(folder, None), settings


def _check_settings(folder: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
    path = folder / SETTINGS
    if path.is_file():
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"run_dir: {path} is damaged ({error}); choose another name=") from error
        changed = sorted(_differences(before, dict(settings)))
        if changed and not resume:
            key, old, new = changed[0]
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise CheckpointError(
                f"run_dir: {folder} holds a run with other settings: {key} was {old}, now {new}{more}; "
                "choose another name=, or resume=true to go on with the new ones"
            )
        if not changed:
            return
    temp = path.with_name(path.name + ".tmp")
    temp.parent.mkdir(exist_ok=True)
    temp.write_text(json.dumps(dict(settings), indent=1) + "\n")
    replace_path(temp, path)


def _differences(before: Any, after: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() | after.keys():
            if key or name not in FREE:
                yield from _differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        yield key, json.dumps(before), json.dumps(after)
