# The tasks of evaluate.py that say what thresholds and schedules would give, from recorded rounds and what task=profile
# measured.

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from drafters.config import build_config
from drafters.decoding.render import markdown, tables
from drafters.door import say
from drafters.progress import phase_bars
from drafters.scheduling.jobs import (
    CalibrateConfig,
    Job,
    ProfileTask,
    calibrate,
    observe,
    profile,
    recorded,
    write_study,
)
from drafters.scheduling.pictures import draw_frontier
from drafters.scheduling.policy import profile_of
from drafters.scheduling.simulate import Replay, SimulateConfig, Simulation, frontier, frontier_section
from drafters.scheduling.sweep import draw_sweep, recommended, sweep, sweep_section
from drafters.stopping import keeping

__all__ = ["Job", "SimulateTask", "SweepTask", "run_study", "simulate_schedules", "sweep_thresholds"]


@dataclass(frozen=True, kw_only=True)
class SweepTask:
    """`observations`: what task=calibrate recorded; None = the newest of the run. `thresholds`: what to try."""

    name: str = "sweep"
    observations: str | None = None
    thresholds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SimulateTask:
    """`observations`: what an earlier task=simulate recorded, in place of decoding. `schedules`: schedulers by name.
    `concurrency`: requests at once, at most. The rest: see SimulateConfig."""

    name: str = "simulate"
    observations: str | None = None
    schedules: dict[str, Any] = field(default_factory=dict)
    concurrency: tuple[int, ...] = ()
    rate: float | None = None
    tokens_per_request: int = 256
    num_steps: int = 2000
    warmup_steps: int = 200
    num_seeds: int = 3

    def __post_init__(self) -> None:
        self.settings(0)
        if not self.concurrency:
            raise ValueError("concurrency: got []; accepted: one or more numbers of requests")
        if wrong := [value for value in self.concurrency if value < 1]:
            raise ValueError(f"concurrency: got {wrong}; accepted: numbers of requests, 1 or more each")

    def settings(self, seed: int) -> SimulateConfig:
        """As the simulator takes them."""
        names = ("rate", "tokens_per_request", "num_steps", "warmup_steps", "num_seeds")
        return SimulateConfig(**{name: getattr(self, name) for name in names}, seed=seed)


def sweep_thresholds(job: Job, config: SweepTask) -> dict[str, Any]:
    """What each threshold gives, in tokens per second too where there is a profile. Writes sweep.json, sweep.md and
    sweep.png into the folder of the place."""
    observations = recorded(job, config.observations)
    confidence_NG = raw_NG = observations.confidence_NG
    if job.calibrated:
        calibration = job.calibration()
        confidence_NG = calibration.apply(observations.by(calibration.signal).confidence_NG)
    has_profile = job.profile is not None or (job.folder is not None and profile_of(job.folder).is_file())
    costs = job.costs() if has_profile else None
    rows = sweep(observations, confidence_NG, config.thresholds, costs)
    best = recommended(rows, sweep(observations, raw_NG, config.thresholds, costs))
    section = sweep_section(rows, found=best, calibrated=job.calibrated)
    say(tables([section], width=80))
    found = {
        "schema": 1,
        "calibrated": job.calibrated,
        "rounds": observations.num_rounds,
        "thresholds": [asdict(row) for row in rows],
        "recommended": best,
        "provenance": job.provenance(),
    }
    write_study(job.place.out, "sweep", found, markdown(section), draw_sweep(rows))
    return found


def simulate_schedules(job: Job, config: SimulateTask) -> list[Simulation]:
    """What each schedule gives under load. Writes simulation.json, .md and .png into the folder of the place; returns
    nothing where another process writes."""
    schedulers = {name: _built(name, node) for name, node in config.schedules.items()}
    costs, calibration = job.costs(), job.calibration() if job.calibrated else None
    if config.observations is None:
        observations = observe(job, everywhere=True)
    else:
        observations = recorded(job, config.observations, everywhere=True)
    if not job.is_first:
        return []
    replay = Replay(observations, calibration)
    again = f"the rounds are kept in {job.place.out}; task.observations= takes them without decoding"
    with keeping(again), phase_bars(True, verb="running the", unit="simulations") as progress:
        found = frontier(
            replay,
            costs,
            schedulers,
            config.concurrency,
            config.settings(job.config.seed),
            progress=lambda done, total: progress("simulation", done, total, float("nan")),
        )
    section = frontier_section(found)
    say(tables([section], width=100))
    values = {
        "schema": 1,
        "calibrated": job.calibrated,
        "settings": {**asdict(config), "seed": job.config.seed},
        "profile": {"hardware": dict(costs.hardware), "layout": costs.layout, "dtype": costs.dtype},
        "simulations": [one.to_dict() for one in found],
        "provenance": job.provenance(),
    }
    write_study(job.place.out, "simulation", values, markdown(section), draw_frontier(found))
    return found


def _built(name: str, node: Mapping[str, Any]) -> Any:
    return build_config(node, key=f"task.schedules.{name}")[1]


STUDIES: dict[str, tuple[type, Callable[[Job, Any], Any]]] = {
    "calibrate": (CalibrateConfig, calibrate),
    "profile": (ProfileTask, profile),
    "sweep": (SweepTask, sweep_thresholds),
    "simulate": (SimulateTask, simulate_schedules),
}


def run_study(job: Job, config: Any) -> None:
    """Do what the settings of a task, of one of the classes in STUDIES, ask for. Of several ranks all decode, where
    something is decoded; else the first one works alone."""
    if config.name in ("calibrate", "simulate") or job.is_first:
        STUDIES[config.name][1](job, config)
        job.place.record()
