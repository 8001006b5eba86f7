# The tasks of evaluate.py about confidence and costs: each goes from a target, a drafter and prompts to files in a
# folder. What was decoded is kept beside what it says, so that it can be judged, swept and simulated again without
# decoding.

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drafters.checkpoint import write_error
from drafters.decoding.dialogue import Dialogue
from drafters.decoding.measure import Contestant, MeasureConfig, check_settings
from drafters.decoding.records import Round
from drafters.decoding.report import plain, read_json, write_json
from drafters.decoding.runner import Runner
from drafters.door import Place, decoding_into, say
from drafters.errors import ConfigError, DataError
from drafters.progress import phase_bars
from drafters.scheduling.calibration import METHODS, Calibration, fit
from drafters.scheduling.check import check_confidence
from drafters.scheduling.observations import Observations
from drafters.scheduling.policy import find_calibration, find_costs
from drafters.scheduling.profile import CostProfile
from drafters.scheduling.profiler import ProfileConfig, measure_profile
from drafters.stopping import keeping
from drafters.types import SIGNALS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from drafters.target import FrozenTarget

__all__ = ["CalibrateConfig", "Job", "ProfileTask", "calibrate", "profile", "recorded", "write_study"]

OBSERVATIONS, PROFILE = "observations.safetensors", "profile.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A task on one drafter. `folder` is its `drafter` folder; None for a baseline, with which nothing is stored.
    `profile`: where costs come from, None = the run's own; `calibrated`: whether confidence is corrected first."""

    target: "FrozenTarget"
    name: str
    contestant: Contestant
    dialogues: Sequence[Dialogue]
    config: MeasureConfig
    place: Place
    folder: Path | None = None
    profile: str | None = None
    calibrated: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this process writes; of several, one does."""
        return self.place.ranks is None or self.place.ranks.is_first

    def calibration(self) -> Calibration:
        """The one that is stored with the drafter."""
        return find_calibration(self.folder, self.contestant, self.target, self.config.sampling)

    def costs(self) -> CostProfile:
        """By `profile`."""
        return find_costs(self.profile, self.folder)

    @property
    def hashes(self) -> dict[str, str]:
        """Whose confidence it is: of the drafter's weights (of a baseline, its name) and of the target's."""
        drafter_sha256 = str(self.contestant.provenance.get("sha256", self.name))
        return {"drafter_sha256": drafter_sha256, "target_hash": self.target.spec.weights_hash}

    def circumstances(self, *, everywhere: bool) -> dict[str, Any]:
        """What rounds are recorded under."""
        return {"schema": 3, **self.hashes, "sampling": asdict(self.config.sampling), "everywhere": everywhere}

    def provenance(self) -> dict[str, Any]:
        """What the files say of where they come from."""
        return {**self.place.provenance(self.target), "drafter": dict(self.contestant.provenance)}


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """`method`: of `calibration.fit`. `signal`: which of SIGNALS is calibrated; "auto" = the one that says more, by
    cross-validation. `fit` False judges the stored calibration and changes nothing. `observations`: what an earlier
    task=calibrate recorded, in place of decoding."""

    name: str = "calibrate"
    method: str = "beta"
    signal: str = "auto"
    fit: bool = True
    observations: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: got '{self.method}'; accepted: {', '.join(METHODS)}")
        if self.signal not in ("auto", *SIGNALS):
            raise ValueError(f"signal: got '{self.signal}'; accepted: auto, {', '.join(SIGNALS)}")


@dataclass(frozen=True, kw_only=True)
class ProfileTask:
    """See ProfileConfig."""

    name: str = "profile"
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_length: int | None = None
    repeats: int = 10
    warmup: int = 2


def write_study(folder: Path, name: str, found: Mapping[str, Any], page: str, figure: "Figure") -> None:
    """A study's name.png, name.md (the page with the picture) and, last, name.json, in `folder`."""
    with writing(folder):
        figure.savefig(folder / f"{name}.png", dpi=150)
        (folder / f"{name}.md").write_text(f"{page}\n![{name}]({name}.png)\n", encoding="utf-8")
        write_json(plain(found), folder / f"{name}.json")
    say(f"Written: {folder / name}.md")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises CheckpointError for what the disk does not take."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise write_error(folder, error) from error


def observe(job: Job, *, everywhere: bool = False) -> Observations:
    """Decode all prompts at the full block and keep what the drafter said of each draft; a stopped one goes on.
    `everywhere`: a round from every place of the texts, as schedules that cut drafts come to more of them."""
    drafter, config = job.contestant.drafter, job.config
    check_settings(drafter, job.dialogues, replace(config, length="auto"))
    check_confidence(job.target, drafter, job.dialogues[0].encode(()))
    decoding = config.decoding(record_confidence=True, advance=1 if everywhere else None)
    what = ["observe everywhere" if everywhere else "observe", [one.key for one in job.dialogues], asdict(config)]
    with decoding_into(job.place, job.target, {job.name: job.contestant}, what) as execution:
        with phase_bars(execution.ranks.is_first) as progress:
            runner = Runner(job.target, {job.name: drafter}, decoding, replace(execution, progress=progress))
            runs = runner.turns("confidence", job.dialogues, [job.name], {})[job.name]
        rows = [pair for run in runs for pair in zip(run.unit.items, run.rows, strict=True)]
        # By dialogue: its turns are judged together, since they resemble each other.
        rounds: dict[int, list[Round]] = {}
        for item, row in sorted(rows, key=lambda pair: pair[0].number):
            rounds.setdefault(item.dialogue, []).extend(row.rounds)
        observations = Observations.of_rounds(rounds.values(), drafter.block_size)
        if execution.ranks.is_first:
            path = observations.save(job.place.out / OBSERVATIONS)
            with writing(path.parent):
                write_json(job.circumstances(everywhere=everywhere), path.with_suffix(".json"))
            say(f"Rounds: {path}; task.observations= takes them without decoding")
    return observations


def recorded(job: Job, path: str | None, *, everywhere: bool = False) -> Observations:
    """The observations of `path`, or the newest of the run's task=calibrate. Raises ConfigError when there are none, or
    they are of another drafter, target, sampling or kind (see `observe`)."""
    if path is not None:
        chosen = Path(path).expanduser()
        if not chosen.is_file():
            raise ConfigError(
                f"task.observations: got '{path}', which is no file; accepted: the {OBSERVATIONS} of an earlier task"
            )
    else:
        run = None if job.folder is None else job.folder.parent
        found = [] if run is None else sorted(run.glob(f"calibrate/*/{OBSERVATIONS}"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise ConfigError("task.observations: got null, and the run has none; run task=calibrate, or give a file")
        chosen = found[-1]
    say(f"Rounds: {chosen}")
    observations = Observations.load(chosen)
    told = read_json(_circumstances, chosen.with_suffix(".json"))
    for name, wanted in job.circumstances(everywhere=everywhere).items():
        if told.get(name) != wanted:
            task = "simulate" if everywhere else "calibrate"
            raise ConfigError(
                f"task.observations: {chosen} was recorded with {name} = {told.get(name)}, this is {wanted}; accepted: "
                f"rounds of the same drafter and target, at the same sampling, as task={task} records them"
            )
    return observations


def _circumstances(values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise DataError(f"got {str(values)[:60]}; accepted: values by name; decode the prompts again")
    return values


def calibrate(job: Job, config: CalibrateConfig) -> dict[str, Any]:
    """Fit a calibration to what the drafter says of its drafts and store it with the drafter, or judge the stored one.

    A fit is judged by cross-validation: each prompt by what the others taught. Writes reliability.json, .md and .png
    into the folder of the place; returns what stands in the first, or nothing where another process writes.
    """
    from drafters.scheduling.reliability import (
        draw_reliability,
        measure_reliability,
        reliability_tables,
        reliability_to_markdown,
    )

    stored = None if config.fit else job.calibration()
    if stored is None and config.observations is None and len(job.dialogues) < 2:
        raise ConfigError(
            f"num_prompts: got {len(job.dialogues)} prompt for a fit; accepted: 2 or more, to fit on some and judge "
            "others; or task.fit=false"
        )
    observations = observe(job) if config.observations is None else recorded(job, config.observations)
    if not job.is_first:
        return {}
    errors: dict[str, float] = {}
    if stored is None:
        calibration, observations, judged_NG, errors = _fitted(job, config, observations)
    else:
        calibration, observations = stored, observations.by(stored.signal)
        judged_NG = stored.apply(observations.confidence_NG)
    found = {
        "schema": 2,
        "signal": calibration.signal,
        "squared_errors": errors,
        "method": calibration.method,
        "fitted_here": config.fit,
        **{name: list(values) for name, values in calibration.curves._asdict().items()},
        **measure_reliability(observations, judged_NG, seed=job.config.seed),
        "provenance": job.provenance(),
    }
    say(reliability_tables(found))
    if config.fit and job.folder is not None:
        say(f"Written: {calibration.save(job.folder)}")
    page = f"# Confidence against what stood\n\n{reliability_to_markdown(found)}"
    write_study(job.place.out, "reliability", found, page, draw_reliability(observations, judged_NG))
    return found


def _fitted(
    job: Job, config: CalibrateConfig, observations: Observations
) -> tuple[Calibration, Observations, Tensor, dict[str, float]]:
    """The calibration of the signal that says most, the rounds by that signal, what it says of each by what the others
    taught, and the squared errors of all signals."""
    from drafters.scheduling.reliability import cross_validated, squared_error

    names = SIGNALS if config.signal == "auto" else (config.signal,)
    judged = {name: cross_validated(observations.by(name), method=config.method) for name in names}
    errors = {name: squared_error(observations, values_NG) for name, values_NG in judged.items()}
    signal = min(names, key=lambda name: errors[name])
    curves = fit(observations.by(signal), method=config.method)
    calibration = Calibration(
        temperatures=curves.temperatures,
        biases=curves.biases,
        skews=curves.skews,
        method=config.method,
        sampling=job.config.sampling,
        **job.hashes,
        signal=signal,
        provenance={**job.provenance(), "rounds": observations.num_rounds},
    )
    return calibration, observations.by(signal), judged[signal], errors


def profile(job: Job, config: ProfileTask) -> CostProfile:
    """Time the target's steps and the drafter on this machine. Writes profile.json and profile.png into the folder of
    the place."""
    from drafters.scheduling.pictures import draw_profile

    wanted = {name: value for name, value in asdict(config).items() if name != "name"}
    settings = ProfileConfig(**wanted, sampling=job.config.sampling, seed=job.config.seed)
    prompts = [dialogue.encode(()) for dialogue in job.dialogues]
    with (
        keeping("nothing of a profile is kept; the same command begins anew"),
        phase_bars(True, unit="laps") as progress,
    ):
        found = measure_profile(job.target, job.contestant.drafter, prompts, settings, progress=progress)
    out = job.place.out
    with writing(out):
        found.save(out / PROFILE)
        draw_profile(found).savefig(out / "profile.png", dpi=150)
    say(f"Written: {out / PROFILE}")
    return found
