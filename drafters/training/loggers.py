# Lightning's loggers serve as they are; this one only keeps wandb from asking for an account.

import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import WandbLogger

__all__ = ["has_wandb_account", "wandb_logger"]


def wandb_logger(*, save_dir: str, name: str, project: str = "drafters", **options: Any) -> WandbLogger:
    """A WandbLogger that runs offline where nobody is logged in; `WANDB_MODE` decides if it is set. `options` are those
    of WandbLogger and `wandb.init`."""
    if "WANDB_MODE" not in os.environ:
        options.setdefault("offline", not has_wandb_account())
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
