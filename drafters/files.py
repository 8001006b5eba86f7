# Files that must survive a crash (written beside their place, flushed to the disk, then renamed), and where files that
# can be made again are kept.

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["cache_root", "file_sha256", "flush", "plain_name", "save_tensors"]


def cache_root() -> Path:
    """`$DRAFTERS_CACHE`, or `~/.cache/drafters` (`$XDG_CACHE_HOME` respected)."""
    if own := os.environ.get("DRAFTERS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drafters"


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file, readable for all. Raises OSError with its number when the disk does not take it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        # It tells the number of an operating system's error in its text only.
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), str(error)) from error
        raise
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def plain_name(name: object) -> str:
    """`name`, where it names a file in the folder that it is looked up in. Raises ValueError for a path that leads
    elsewhere, as a list of files that was tampered with may hold; a link in the folder is its owner's business."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or "/" in name or "\\" in name:
        raise ValueError(f"it names {name!r:.80}, which is no file name; accepted: names of files in its own folder")
    return name


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(PermissionError):  # some network disks do not sync folders
            os.fsync(handle)
    finally:
        os.close(handle)
