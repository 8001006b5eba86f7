# What a decode run needs to schedule its rounds: the rule, what things cost here, and what the drafter's own confidence
# is worth. One value, made once, for the decode loop and the reports.

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from drafters.errors import ConfigError
from drafters.scheduling.calibration import Calibration
from drafters.scheduling.gate import Gated
from drafters.scheduling.profile import CostProfile
from drafters.scheduling.schedulers import Fixed, Off, Schedule, Scheduler, Threshold
from drafters.types import Proposal, Sampling

if TYPE_CHECKING:
    from drafters.decoding.measure import Contestant
    from drafters.target import FrozenTarget

__all__ = ["Policy", "find_calibration", "find_costs", "make_policy", "profile_of", "reads_confidence", "reads_costs"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """`scheduler` decides by `costs` and by the drafter's confidence after `calibration`; None where it needs none, and
    for a calibration where confidences are taken as they are. `schedule` is a state that goes on from one decode run to
    the next; None: each begins anew."""

    scheduler: Scheduler
    costs: CostProfile | None = None
    calibration: Calibration | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        assert self.costs is not None or not reads_costs(self.scheduler)

    def __repr__(self) -> str:
        """Short, and different for what decides differently: journals name units by it."""
        deciding = [None if part is None else asdict(part) for part in (self.costs, self.calibration)]
        return f"Policy({self.scheduler!r}, {hashlib.sha256(repr(deciding).encode()).hexdigest()[:12]})"

    def begin(self, num_slots: int) -> Schedule:
        """The state of one decode run with up to `num_slots` drafts a round, or the one that goes on."""
        if self.schedule is not None:
            return self.schedule
        return self.scheduler.begin(cast(CostProfile, self.costs), num_slots)

    @property
    def reads_confidence(self) -> bool:
        """Whether it decides by the drafter's confidence."""
        return reads_confidence(self.scheduler)

    def going_on(self, num_slots: int) -> "Policy":
        """The same with one state for all decode runs, as a server has: what it learnt of past rounds stays."""
        return replace(self, schedule=self.begin(num_slots))

    def survival(self, proposal: Proposal) -> Tensor:
        """The calibrated probability [B, S] that each draft and all before it stand; 0 where a row has no draft."""
        if self.calibration is None:
            survival_BS = proposal.signal("confidence").cumprod(-1)
        else:
            survival_BS = self.calibration.survival(proposal.signal(self.calibration.signal))
        slots_S = torch.arange(survival_BS.shape[1], device=survival_BS.device)
        return survival_BS.masked_fill(slots_S >= proposal.lengths_B[:, None], 0.0)

    def describe(self) -> dict[str, Any]:
        """What reports say of it."""
        return {
            "scheduler": type(self.scheduler).__name__,
            "settings": asdict(self.scheduler),  # type: ignore[call-overload]
            "calibration": None if self.calibration is None else self.calibration.method,
            "signal": "confidence" if self.calibration is None else self.calibration.signal,
        }


def make_policy(
    scheduler: Scheduler,
    *,
    costs: Callable[[], CostProfile],
    calibration: Callable[[], Calibration] | None,
) -> Policy:
    """A policy with what its scheduler reads, and nothing else looked for. `calibration` None: confidence as it is."""
    return Policy(
        scheduler=scheduler,
        costs=costs() if reads_costs(scheduler) else None,
        calibration=calibration() if calibration is not None and reads_confidence(scheduler) else None,
    )


def find_costs(profile: str | None, folder: Path | None) -> CostProfile:
    """The profile of that path, or that of the run of a `drafter` folder, with a monotone fit. Raises ConfigError when
    it is not there, or not right."""
    if profile is not None:
        path = Path(profile).expanduser()
    elif folder is None:
        raise ConfigError("profile: got null for a baseline, which has no folder; give the path of a profile.json")
    else:
        path = profile_of(folder)
        if not path.is_file():
            raise ConfigError(f"profile: {path}: no such file; make it with task=profile, or give another profile=")
    return CostProfile.load(path).fit()


def profile_of(folder: Path) -> Path:
    """Where task=profile puts the costs of the run of a `drafter` folder."""
    return folder.parent / "profile" / "profile.json"


def find_calibration(
    folder: Path | None, contestant: "Contestant", target: "FrozenTarget", sampling: Sampling
) -> Calibration:
    """The calibration that is stored in a `drafter` folder, checked against what it is used for. Raises ConfigError for
    a baseline, CheckpointError when there is none or it is of other weights; warns of another sampling."""
    if folder is None:
        raise ConfigError("calibrated: a baseline has no folder with a calibration; accepted: false, or a run")
    calibration = Calibration.load(folder)
    calibration.check(sampling, drafter_sha256=contestant.provenance["sha256"], target_hash=target.spec.weights_hash)
    return calibration


def reads_confidence(scheduler: Scheduler) -> bool:
    """Whether it decides by the drafter's confidence."""
    if isinstance(scheduler, Gated):
        return reads_confidence(scheduler.inner)
    return not isinstance(scheduler, Off | Fixed)


def reads_costs(scheduler: Scheduler) -> bool:
    """Whether it decides by what rounds cost."""
    return not isinstance(scheduler, Off | Fixed | Threshold)
