# Lightning's loggers serve as they are; what is here keeps wandb from asking for an account, and a run of ours one run
# there: resumed trainings and evaluations find it again by the id that the run's folder keeps.

import json
import math
import netrc
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from drafters.checkpoint import replace_path, write_error

if TYPE_CHECKING:
    from lightning.pytorch.loggers import WandbLogger

    from drafters.decoding.report import Report

__all__ = ["has_wandb_account", "log_evaluation", "log_report", "remember_wandb", "wandb_logger"]

WANDB_RUN = Path(".hydra") / "wandb.json"
WANDB_SECONDS = 30  # for an evaluation to reach the server
WANDB_LOGGERS = ("drafters.training.loggers.wandb_logger", "lightning.pytorch.loggers.WandbLogger")


def wandb_logger(*, save_dir: str, name: str, project: str = "drafters", **options: Any) -> "WandbLogger":
    """A WandbLogger that goes on with the wandb run that the folder `save_dir` remembers, and runs offline where nobody
    is logged in; `WANDB_MODE` decides if it is set. `options` are those of WandbLogger and `wandb.init`."""
    from lightning.pytorch.loggers import WandbLogger

    if "WANDB_MODE" not in os.environ:
        options.setdefault("offline", not has_wandb_account())
    if not (options.get("id") or options.get("version")):
        remembered = _remembered(Path(save_dir))
        options["id"] = remembered["id"] if remembered else secrets.token_hex(4)
    return WandbLogger(save_dir=save_dir, name=name, project=project, **options)


def has_wandb_account() -> bool:
    """A key in the environment, or an entry for the wandb host in the netrc file. Asks no network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    candidates = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for path in (Path(one).expanduser() for one in candidates if one):
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def remember_wandb(run: Path, logger: Any) -> None:
    """Start the wandb run of a logger, if it is one of wandb, and write down in the run's folder which one it is.
    Raises CheckpointError when the folder cannot be written."""
    from lightning.pytorch.loggers import WandbLogger

    if not isinstance(logger, WandbLogger):
        return
    begun = logger.experiment
    path = run / WANDB_RUN
    temp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps({"id": begun.id, "project": begun.project, "entity": begun.entity or None}) + "\n")
        replace_path(temp, path)
    except OSError as error:
        raise write_error(path, error) from error


def log_report(run: Path, settings: Mapping[str, Any], report: "Report", folder: Path, *, prefix: str) -> bool:
    """`log_evaluation` of the main numbers of a report and of the pictures in its folder, under `prefix`."""
    names = ("accepted_length", "speedup", "tokens_per_second", "baseline_tokens_per_second", "draft_length")
    values = {f"{prefix}/{name}": float(getattr(report, name)) for name in names}
    pictures = {f"{prefix}/{path.stem}": path for path in sorted(folder.glob("*.png"))}
    return log_evaluation(run, settings, values, pictures)


def log_evaluation(
    run: Path, settings: Mapping[str, Any], values: Mapping[str, float], pictures: Mapping[str, Path]
) -> bool:
    """Add an evaluation to the wandb run of a training: `values` (by the names they shall have there) to its summary,
    and `pictures` (image files). Whether it was logged.

    `run` is the training's folder, `settings` those it was begun with; nothing is done when they chose another logger.
    Offline where nobody is logged in. A failure of wandb warns and loses nothing else.
    """
    if (settings.get("logger") or {}).get("_target_") not in WANDB_LOGGERS:
        return False
    remembered = _remembered(run)
    if remembered is None:
        warnings.warn(f"wandb: {run / WANDB_RUN} is missing, so the evaluation is not logged there", stacklevel=2)
        return False
    try:
        import wandb
    except ImportError as error:
        warnings.warn(f"wandb: the evaluation is not logged there: {error}", stacklevel=2)
        return False
    # Of wandb's failures these are the documented ones; its network library raises OSError, its service RuntimeError.
    failures = (wandb.errors.Error, OSError, RuntimeError, ValueError)
    try:
        _log(wandb, run, remembered, {k: v for k, v in values.items() if math.isfinite(v)}, pictures)
    except failures as error:
        warnings.warn(f"wandb: the evaluation is not logged there: {error}", stacklevel=2)
        return False
    return True


def _log(
    wandb: Any, run: Path, remembered: Mapping[str, Any], values: Mapping[str, float], pictures: Mapping[str, Path]
) -> None:
    is_active = wandb.run is not None and wandb.run.id == remembered["id"]  # right after the training itself
    mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_account() else "offline")
    # "resume" is for the server, which knows the run; offline, `wandb sync` joins what has the same id.
    resume = {} if mode in ("offline", "dryrun", "disabled") else {"resume": "allow"}
    options = {"dir": str(run), "mode": mode, "reinit": "create_new", **remembered, **resume}
    one = wandb.run if is_active else wandb.init(**options, settings=wandb.Settings(init_timeout=WANDB_SECONDS))
    try:
        one.summary.update(dict(values))
        if pictures:
            one.log({name: wandb.Image(str(path)) for name, path in pictures.items()})
    finally:
        if not is_active:
            one.finish()


def _remembered(run: Path) -> dict[str, Any] | None:
    """id, project and entity of the wandb run that a folder belongs to; None when there is none."""
    path = run / WANDB_RUN
    try:
        found = json.loads(path.read_text())
        return {name: found[name] for name in ("id", "project", "entity")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} is damaged ({error}); a new wandb run is begun", stacklevel=3)
        return None
