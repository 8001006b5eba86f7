# Jobs on a cluster: what a door checks before Hydra's launcher submits anything. A launcher that is not installed, or
# that would silently not be used, is refused in one line.

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from drafters.errors import ConfigError

__all__ = ["LAUNCHER", "check_launcher"]

LAUNCHER = "hydra/launcher"
PLUGIN = "hydra_plugins.hydra_submitit_launcher"
SWEEPS = ("-m", "--multirun")


def check_launcher(arguments: Sequence[str], *, checkout: Path) -> str | None:
    """The launcher that a command line (without its first word) names, None for none; jobs of it will find the packages
    of `checkout`. Raises ConfigError where it is not installed, or where nothing would be submitted."""
    names = [word.partition("=")[2] for word in arguments if word.lstrip("+").partition("=")[0] == LAUNCHER]
    name = names[-1] if names else None
    if name in (None, "basic"):
        return None
    if not set(SWEEPS) & set(arguments):
        raise ConfigError(
            f"{LAUNCHER}: got '{name}' without -m, which would run here and submit nothing; add -m to submit one job a "
            f"choice, or leave {LAUNCHER}= out"
        )
    if not _is_installed(PLUGIN):
        raise ConfigError(
            f"{LAUNCHER}: got '{name}', whose plug-in is not installed; pip install -c constraints.txt '.[slurm]', or "
            "submit docs/slurm/train.sbatch, which needs none"
        )
    # Jobs begin in a module of submitit, not in the script, so they look for our packages in PYTHONPATH.
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), *([found] if found else [])])
    return name


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
