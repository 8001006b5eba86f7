# What DeepSpeed's parts of a checkpoint may hold. DeepSpeed reads them as pickles, which can run what they name, so
# their names are read first, without running one.

import pickle
import struct
import zipfile
from pathlib import Path

from torch.serialization import get_unsafe_globals_in_checkpoint

__all__ = ["ALLOWED", "foreign_names"]

FOLDER, LATEST = "checkpoint", "latest"  # Lightning's, and DeepSpeed's file that names the folder to read
ALLOWED = frozenset(
    {
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    }
)
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, struct.error),
)


def foreign_names(checkpoint: Path) -> str | None:
    """What is wrong with the folder of a checkpoint in parts, in words, if anything is: a part that cannot be read, or
    one that names what DeepSpeed does not write."""
    try:
        latest = (checkpoint / LATEST).read_text().strip()
        if latest != FOLDER:
            return f"its file '{LATEST}' says {latest!r:.80}, accepted: {FOLDER}"
        for part in sorted((checkpoint / FOLDER).glob("*.pt")):
            if others := sorted({*get_unsafe_globals_in_checkpoint(part)} - ALLOWED):
                return f"{part.name} names {others[0]}, which would run code when it is read"
    except UNREADABLE as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return None
