# Lightning's loggers serve as they are; what is here keeps wandb from asking for an account, and a run of ours one run
# there: resumed trainings and evaluations find it again by the id that the run's folder keeps. What a run is made of
# (settings, versions, sizes) goes to whichever logger was chosen, in run_facts.py.

import json
import math
import netrc
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from drafters.checkpoint import read_config, replace_path, write_error
from drafters.errors import ConfigError
from drafters.plain_json import parse

if TYPE_CHECKING:
    from lightning.pytorch.loggers import WandbLogger

    from drafters.decoding.report import Report

__all__ = [
    "REPORT",
    "Evaluation",
    "has_wandb_account",
    "log_evaluation",
    "log_report",
    "remember_wandb",
    "wandb_logger",
]

WANDB_RUN = Path(".hydra") / "wandb.json"
REPORT = "report"  # the prefix of what ends a training
WANDB_SECONDS = 30  # for an evaluation to reach the server
WANDB_LOGGERS = ("drafters.training.loggers.wandb_logger", "lightning.pytorch.loggers.WandbLogger")
TENSORBOARD_LOGGER = "lightning.pytorch.loggers.TensorBoardLogger"
SECRET = re.compile(r"api_?key|token|secret|password", re.IGNORECASE)
REPORT_NUMBERS = ("accepted_length", "speedup", "tokens_per_second", "baseline_tokens_per_second", "draft_length")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a measurement adds to a run's logger: `values` by the names they shall have there, `pictures` (image files)
    likewise. `drafter` is the folder to keep as an artifact with `facts`, None for none; `step` is the optimizer step
    of the weights."""

    values: Mapping[str, float] = field(default_factory=dict)
    pictures: Mapping[str, Path] = field(default_factory=dict)
    drafter: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {k: v for k, v in self.values.items() if math.isfinite(v)})


def wandb_logger(
    *, save_dir: str, name: str, project: str = "drafters", log_drafter: bool = False, **options: Any
) -> "WandbLogger":
    """A WandbLogger that goes on with the wandb run that the folder `save_dir` remembers, and runs offline where nobody
    is logged in; `WANDB_MODE` decides if it is set. `options` are those of WandbLogger and `wandb.init`. `log_drafter`
    is for `log_report`, which reads it from the settings. Raises ValueError for a secret among the options."""
    from lightning.pytorch.loggers import WandbLogger

    _refuse_secrets(options)
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
    """Start the wandb run of a logger, if it is one of wandb, and write down in the run's folder which one it is; on
    the first rank alone. Raises CheckpointError when the folder cannot be written."""
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.utilities import rank_zero_only

    if isinstance(logger, WandbLogger):
        rank_zero_only(_begin_wandb)(run, logger)


def _begin_wandb(run: Path, logger: "WandbLogger") -> None:
    import wandb

    # In a sweep of one process: Lightning would log to the run of the job before.
    if wandb.run is not None and wandb.run.id != logger.version:
        wandb.run.finish()
    try:
        begun = logger.experiment
    except wandb.errors.Error as error:
        raise ConfigError(f"logger: wandb: {error}; WANDB_MODE=offline asks for no server") from error
    path = run / WANDB_RUN
    temp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps({"id": begun.id, "project": begun.project, "entity": begun.entity or None}) + "\n")
        replace_path(temp, path)
    except OSError as error:
        raise write_error(path, error) from error


def log_report(run: Path, settings: Mapping[str, Any], report: "Report", folder: Path, *, prefix: str) -> bool:
    """`log_evaluation` of the main numbers of a report and of the pictures in its folder, under `prefix`. The report
    that ends a training, `prefix` REPORT, takes the drafter with it where the settings say so."""
    config = read_config(run / "drafter")
    wants_drafter = prefix == REPORT and bool((settings.get("logger") or {}).get("log_drafter"))
    evaluation = Evaluation(
        values={f"{prefix}/{name}": float(getattr(report, name)) for name in REPORT_NUMBERS},
        pictures={f"{prefix}/{path.stem}": path for path in sorted(folder.glob("*.png"))},
        drafter=run / "drafter" if wants_drafter else None,
        facts={
            "accepted_length": report.accepted_length,
            "target": config["target"]["name"],
            "target_weights_hash": config["target"]["weights_hash"],
            "weights_sha256": config["weights"]["sha256"],
            "drafter": config["drafter"]["_target_"],
        },
        step=int(config["provenance"].get("step", 0)),
    )
    return log_evaluation(run, settings, evaluation)


def log_evaluation(run: Path, settings: Mapping[str, Any], evaluation: Evaluation) -> bool:
    """Add an evaluation to what a training logged, if that was to wandb (its values go to the summary) or to
    TensorBoard. Whether it was logged.

    `run` is the training's folder, `settings` those it was begun with; nothing is done when they chose another logger.
    Offline where nobody is logged in. A failure of the logger warns and loses nothing else.
    """
    chosen = settings.get("logger") or {}
    if chosen.get("_target_") == TENSORBOARD_LOGGER:
        try:
            _log_tensorboard(run / (chosen.get("name") or "") / (chosen.get("version") or ""), evaluation)
        except OSError as error:
            warnings.warn(f"tensorboard: the evaluation is not logged there: {error}", stacklevel=2)
            return False
        return True
    if chosen.get("_target_") not in WANDB_LOGGERS:
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
        _log_wandb(wandb, run, remembered, evaluation)
    except failures as error:
        warnings.warn(f"wandb: the evaluation is not logged there: {error}", stacklevel=2)
        return False
    return True


def _log_wandb(wandb: Any, run: Path, remembered: Mapping[str, Any], evaluation: Evaluation) -> None:
    is_active = wandb.run is not None and wandb.run.id == remembered["id"]  # right after the training itself
    mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_account() else "offline")
    # "resume" is for the server, which knows the run; offline, `wandb sync` joins what has the same id.
    resume = {} if mode in ("offline", "dryrun", "disabled") else {"resume": "allow"}
    options = {"dir": str(run), "mode": mode, "reinit": "create_new", **remembered, **resume}
    one = wandb.run if is_active else wandb.init(**options, settings=wandb.Settings(init_timeout=WANDB_SECONDS))
    try:
        one.summary.update(dict(evaluation.values))
        if evaluation.pictures:
            one.log({name: wandb.Image(str(path)) for name, path in evaluation.pictures.items()})
        if evaluation.drafter is not None:
            name = re.sub(r"[^\w.-]", "-", run.name, flags=re.ASCII)
            artifact = wandb.Artifact(name, type="drafter", metadata=dict(evaluation.facts))
            kept = _kept(evaluation.drafter, run / "wandb" / f"drafter-{evaluation.facts['weights_sha256'][:12]}")
            artifact.add_dir(str(kept), policy="immutable")
            one.log_artifact(artifact)
    finally:
        if not is_active:
            one.finish()


def _log_tensorboard(folder: Path, evaluation: Evaluation) -> None:
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, value in evaluation.values.items():
            writer.add_scalar(name, value, evaluation.step)
        for name, path in evaluation.pictures.items():
            writer.add_image(name, imread(path), evaluation.step, dataformats="HWC")


def _kept(drafter: Path, folder: Path) -> Path:
    """These weights in a folder of the wandb run, for a `wandb sync` to come. Hard links where the disk has them: a
    drafter folder is only ever replaced as a whole, so that its files never change."""
    if folder.is_dir():
        return folder

    def copy(source: str, to: str) -> None:
        try:
            os.link(source, to)
        except OSError:
            shutil.copy2(source, to)

    temp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temp, ignore_errors=True)
    shutil.copytree(drafter, temp, copy_function=copy)
    temp.replace(folder)
    return folder


def _refuse_secrets(options: Mapping[str, Any], key: str = "") -> None:
    for name, value in options.items():
        if SECRET.search(str(name)):
            raise ValueError(
                f"{key}{name}: got a secret (not shown); settings are saved and logged, so none is accepted: set "
                "WANDB_API_KEY or use `wandb login`"
            )
        if isinstance(value, Mapping):
            _refuse_secrets(value, f"{key}{name}.")


def _remembered(run: Path) -> dict[str, Any] | None:
    """id, project and entity of the wandb run that a folder belongs to; None when there is none."""
    path = run / WANDB_RUN
    try:
        found = parse(path.read_text())
        return {name: found[name] for name in ("id", "project", "entity")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} is damaged ({error}); a new wandb run is begun", stacklevel=3)
        return None
