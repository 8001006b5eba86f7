# Jobs on a cluster: what a door checks before Hydra's launcher submits anything. A launcher that is not installed, or
# that would silently not be used, is refused in one line; so are jobs that SLURM refuses or that end without a word.

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from drafters.errors import ConfigError, DraftersError

__all__ = ["LAUNCHER", "check_jobs", "check_launcher", "check_named", "submitting"]

LAUNCHER = "hydra/launcher"
PLUGIN = "hydra_plugins.hydra_submitit_launcher"
SWEEPS = ("-m", "--multirun")
LOCAL = ("submitit_local",)  # launchers of the plug-in that need no SLURM


def check_launcher(arguments: Sequence[str], *, checkout: Path) -> str | None:
    """The launcher that a command line (without its first word) names, None for none; jobs of it will find the packages
    of `checkout`. Raises ConfigError where it is not installed, or where nothing would be submitted."""
    names = [word.partition("=")[2] for word in arguments if word.lstrip("+").partition("=")[0] == LAUNCHER]
    return check_named(names[-1] if names else None, is_sweep=bool(set(SWEEPS) & set(arguments)), checkout=checkout)


def check_named(name: str | None, *, is_sweep: bool, checkout: Path) -> str | None:
    """As `check_launcher`, of a launcher's name, which an experiment may give too."""
    if name in (None, "basic"):
        return None
    if not is_sweep:
        raise ConfigError(
            f"{LAUNCHER}: got '{name}' without -m, which would run here and submit nothing; add -m to submit one job a "
            f"choice, or leave {LAUNCHER}= out"
        )
    if not _is_installed(PLUGIN):
        raise ConfigError(
            f"{LAUNCHER}: got '{name}', whose plug-in is not installed; pip install -c constraints.txt '.[slurm]', or "
            "submit docs/slurm/train.sbatch, which needs none"
        )
    if name not in LOCAL and shutil.which("srun") is None:
        raise ConfigError(
            f"{LAUNCHER}: got '{name}', and there is no srun here; run this on a login node of the cluster, or leave "
            f"{LAUNCHER}= out to train here"
        )
    # Jobs begin in a module of submitit, not in the script, so they look for our packages in PYTHONPATH.
    found = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(checkout) not in found[:1]:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), *found])
    return name


def check_jobs(jobs: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError where the choices of a sweep name no job at all."""
    if not jobs:
        raise ConfigError(
            "-m: got choices that name no job, such as drafter=glob(x*) where no name begins with x; nothing was "
            "started"
        )


@contextmanager
def submitting(logs: str) -> Iterator[None]:
    """Around the submission of jobs and the wait for them. `logs`: the folder of their logs. Raises DraftersError for
    what submitit raises: jobs that SLURM refuses, one that ended without a result."""
    try:
        yield
    except RuntimeError as error:  # all errors of submitit are
        # Behind the facts it quotes the whole log.
        facts = re.split(r"\b(?:No )?(?:output/)?error stream produced", str(error), flags=re.IGNORECASE)[0]
        raise DraftersError(
            f"{LAUNCHER}: {' '.join(facts.split())}; logs of jobs that were submitted: {logs} (squeue --me shows those "
            "that still run); the same command leaves finished runs alone and goes on with the others"
        ) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "the waiting, not the jobs: squeue --me shows them, scancel ends them; once they have ended, the same "
            "command goes on with what is missing"
        ) from None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
