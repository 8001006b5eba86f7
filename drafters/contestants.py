# What an evaluation is asked to measure, by name: the folder of a run, or a baseline that needs no training. All draft
# for one target, the first run's unless another is given.

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.checkpoint import load_drafter, provenance
from drafters.config import build_config
from drafters.decoding.measure import Contestant
from drafters.errors import ConfigError
from drafters.runs import Run, open_run

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["Entry", "find_entries", "target_node"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run with the settings that it was begun with, or a baseline with its config node."""

    name: str
    settings: Mapping[str, Any]
    run: Run | None = None

    def load(self, target: "FrozenTarget", *, allow_other_target: bool = False) -> Contestant:
        """Its drafter, on the target's device. Raises CheckpointError when it was trained for another target."""
        if self.run is None:
            cls, config = build_config(self.settings, key=f"baselines.{self.name}")
            drafter = cls(config, target.spec)
            facts = {"class": f"{cls.__module__}.{cls.__qualname__}", "config": asdict(config)}
            return Contestant(drafter=drafter, provenance=facts | drafter.identity(target))
        drafter = load_drafter(self.run.drafter, spec=target.spec, allow_other_target=allow_other_target)
        return Contestant(drafter=drafter.to(target.device), provenance=provenance(self.run.drafter))


def find_entries(names: Sequence[str], baselines: Mapping[str, Any], *, key: str) -> list[Entry]:
    """The runs and baselines of these names, under names that differ. Raises ConfigError, naming `key`, for a name that
    is neither, CheckpointError for a run that has no drafter."""
    if not names:
        raise ConfigError(f"{key}: it is empty; accepted: run folders and baselines ({', '.join(baselines)})")
    names = [each for name in names for each in _matches(name, key=key)]
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ConfigError(f"{key}: '{twice[0]}' is there twice; name each once")
    entries = [_find(name, baselines, key=key) for name in names]
    places = [entry.name if entry.run is None else str(entry.run.folder.resolve()) for entry in entries]
    if twice := [name for name, place in zip(names, places, strict=True) if places.count(place) > 1]:
        raise ConfigError(f"{key}: '{twice[-1]}' is there twice; name each once")
    short = [entry.name for entry in entries]
    # Where folders share their last name, the whole path tells them apart.
    return [
        Entry(name=given if short.count(entry.name) > 1 else entry.name, settings=entry.settings, run=entry.run)
        for given, entry in zip(names, entries, strict=True)
    ]


def _matches(name: str, *, key: str) -> list[str]:
    """The finished runs that a pattern such as `outputs/*-smollm2` matches, in order; another name as it is."""
    if not isinstance(name, str) or "*" not in name or Path(name).exists():
        return [name]
    runs = [path for path in sorted(iglob(name)) if (Path(path) / "drafter").is_dir()]
    if not runs:
        raise ConfigError(f"{key}: '{name}' matches no run with a drafter; accepted: folders such as outputs/*-smollm2")
    return runs


def _find(name: str, baselines: Mapping[str, Any], *, key: str) -> Entry:
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{key}: got {name!r} as a name; accepted: run folders and baselines ({', '.join(baselines)})"
        )
    if name in baselines:
        return Entry(name=name, settings=baselines[name])
    if not Path(name).exists() and "/" not in name:
        raise ConfigError(
            f"{key}: got '{name}', which is no folder and no baseline; accepted: the folder of a run, such as "
            f"outputs/markov-smollm2, or a baseline ({', '.join(baselines)})"
        )
    run, settings = open_run(name)
    return Entry(name=run.folder.resolve().name, settings=settings, run=run)


def target_node(entries: Sequence[Entry], given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The settings of the target: `given`, or those of the first run, where a relative path to the weights is meant
    from the folder that the run was begun in. Raises ConfigError when neither is there."""
    runs = [entry for entry in entries if entry.run is not None]
    if given is not None:
        return given
    if not runs:
        raise ConfigError("target: missing; a baseline alone needs one of conf/target, such as target=smollm2")
    settings, folder = runs[0].settings, runs[0].run and runs[0].run.folder
    if settings["target"].get("trust_remote_code"):
        raise ConfigError(
            f"target.trust_remote_code: {folder} was trained with true, but a folder does not decide that code is run; "
            "say it in this command: target=NAME target.trust_remote_code=true, as for train.py"
        )
    path = Path(settings["cwd"], settings["target"]["weights"])
    return {**settings["target"], "weights": str(path)} if path.exists() else settings["target"]
