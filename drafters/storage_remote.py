# A folder behind a URL that fsspec knows. Files are uploaded under a temporary key and moved to their own; what is read
# is kept in a mirror on a local disk, each file fetched once, checked and then renamed, so that processes may fetch at
# once.

import errno
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import fsspec

from drafters.errors import ConfigError, DataError
from drafters.files import cache_root, file_sha256
from drafters.storage import Folder, has_content

__all__ = ["RemoteFolder", "check_url", "without_secrets"]

TEMPORARY = ".partial-"  # keys of files that are not complete
BLOCK = 4 * 2**20  # bytes fetched at once
# Errors of drivers that are no OSError, by module, looked up where a driver has loaded that module.
DRIVER_ERRORS = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("paramiko", "SSHException"),
)


def check_url(url: str, *, key: str = "cache.root") -> None:
    """Raises ConfigError when the URL names no folder, or fsspec does not know the protocol or lacks its driver."""
    shown = without_secrets(url)
    if not url.rpartition("://")[2].strip("/"):
        raise ConfigError(f"{key}: got '{shown}', which names no folder; accepted: protocol://bucket/folder")
    for part in url.split("::"):
        protocol = part.partition("://")[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise ConfigError(
                f"{key}: got '{shown}': unknown protocol '{protocol}'; accepted: a local path, or a URL of fsspec's, "
                "such as s3://bucket/folder, gs://bucket/folder, abfs://container/folder"
            ) from error
        except ImportError as error:
            package = error.__cause__.name if isinstance(error.__cause__, ImportError) else error.name
            raise ConfigError(
                f"{key}: got '{shown}': the driver of {protocol}:// is not installed ({error}); "
                f"pip install {(package or protocol).partition('.')[0]}"
            ) from error


def without_secrets(text: str) -> str:
    """A text in which URLs have neither user, password nor query."""
    text = re.sub(r"(://)[^/\s'\"]*@", r"\1***@", text)
    return re.sub(r"(://[^\s?'\"]*\?)[^\s'\"]+", r"\1***", text)


class RemoteFolder(Folder):
    """A folder behind `url`; its mirror lies in `mirror`, under a hash of the URL. No lock: see to it that one command
    at a time captures into it. Every operation raises DataError where the store refuses it."""

    def __init__(self, url: str, *, mirror: str | None = None) -> None:
        check_url(url)
        self._url = url.rstrip("/")
        root = Path(mirror).expanduser() if mirror else cache_root() / "mirror"
        self._mirror = root / hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return without_secrets(self._url)

    @property
    def disk(self) -> Path:
        return self._mirror

    def name_of(self, name: str) -> str:
        return f"{self}/{name}"

    def sizes(self) -> dict[str, int]:
        with self._store("list") as (files, root):
            files.invalidate_cache()
            try:
                found = files.ls(root, detail=True)
            except FileNotFoundError:
                return {}
        names = {one["name"].rstrip("/").rpartition("/")[2]: one for one in found if one["type"] == "file"}
        return {name: one["size"] for name, one in names.items() if not name.startswith(TEMPORARY)}

    def names(self) -> set[str]:
        return set(self.sizes())

    def free_bytes(self) -> int | None:
        return None

    def read(self, name: str) -> bytes:
        with self._store("read") as (files, root):
            content: bytes = files.cat_file(f"{root}/{name}")
            return content

    def put(self, source: Path, name: str) -> None:
        with self._store("write to") as (files, root):
            temporary = f"{root}/{TEMPORARY}{uuid4().hex}-{name}"
            is_moved = False
            try:
                files.put_file(str(source), temporary)
                files.mv(temporary, f"{root}/{name}")
                is_moved = True
            except FileNotFoundError as error:
                raise DataError(
                    f"cache: cannot write to {self}: {self._told(error)}; it is not there, or a second capture removed "
                    "this file; the same command goes on from there"
                ) from error
            finally:
                if not is_moved:
                    with suppress(*_store_errors()):
                        files.rm_file(temporary)

    def remove(self, name: str) -> None:
        with self._store("remove from") as (files, root), suppress(FileNotFoundError):
            files.rm_file(f"{root}/{name}")

    def make(self) -> None:
        with self._store("make") as (files, root):
            try:
                files.makedirs(root, exist_ok=True)
            except FileNotFoundError as error:
                raise DataError(f"cache: cannot make {self}: {self._told(error)}") from error

    def lock(self) -> AbstractContextManager[bool]:
        return nullcontext(False)  # stores know none

    def clean(self) -> None:
        with self._store("list") as (files, root), suppress(FileNotFoundError):
            files.invalidate_cache()
            for path in files.ls(root, detail=False):
                if path.rpartition("/")[2].startswith(TEMPORARY):
                    with suppress(FileNotFoundError):
                        files.rm_file(path)

    def is_intact(self, name: str, sha256: str) -> bool:
        """An upload ends whole or not at all, and a record is written after it: the size, known already, is enough."""
        return True

    def fetch(self, name: str, *, sha256: str, num_bytes: int, verify: bool) -> Path:
        path = self._mirror / name
        with self._mirror_errors():
            if _size(path) == num_bytes and (not verify or has_content(path, sha256)):
                return path
        with self._mirror_errors(), self.scratch() as scratch:
            try:
                with self._store("read") as (files, root):
                    _download(files, f"{root}/{name}", scratch / name)
            except FileNotFoundError as error:
                raise DataError(
                    f"cache: shard {self.name_of(name)} is missing; the capture command makes it again"
                ) from error
            if file_sha256(scratch / name) != sha256:
                raise DataError(
                    f"cache: shard {self.name_of(name)} is damaged (or its transfer was); remove that file, the "
                    "capture command makes it again"
                )
            os.replace(scratch / name, path)
        return path

    @contextmanager
    def _store(self, doing: str) -> Iterator[tuple[Any, str]]:
        """fsspec's file system (one a process) and the path in it. Errors become a DataError without secrets, but for
        FileNotFoundError, and for errors of the mirror's disk."""
        try:
            yield fsspec.core.url_to_fs(self._url)
        except (FileNotFoundError, _MirrorError):
            raise
        except _store_errors() as error:
            raise DataError(f"cache: cannot {doing} {self}: {self._told(error)}") from error

    @contextmanager
    def _mirror_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cause = error.__cause__ if isinstance(error, _MirrorError) else error
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"cache: no space left on the disk of {self._mirror}, where the shards of {self} are kept; make "
                    "room, or choose another disk with cache.mirror=..."
                ) from error
            raise DataError(
                f"cache: cannot write to {self._mirror}, where the shards of {self} are kept: {cause}; choose another "
                "place with cache.mirror=..."
            ) from error

    def _told(self, error: BaseException) -> str:
        """The text of a driver's error on one line, without what the URL has of secrets."""
        text = without_secrets(" ".join(str(error).split()) or type(error).__name__)
        for info in re.findall(r"://([^/\s]*)@", self._url):
            password = info.partition(":")[2]
            for secret in filter(None, (password, unquote(password))):
                text = text.replace(secret, "***")
        return text[:300]


class _MirrorError(OSError):
    """The local disk refused what a store gave."""


def _store_errors() -> tuple[type[BaseException], ...]:
    """What drivers raise: OSError, and classes of the libraries that are loaded."""
    loaded = [(sys.modules.get(module), name) for module, name in DRIVER_ERRORS]
    return (OSError, *(vars(module)[name] for module, name in loaded if module is not None and name in vars(module)))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _download(files: Any, path: str, to: Path) -> None:
    """Copy a file, with errors of the local disk told from those of the store."""
    try:
        target = to.open("wb")
    except OSError as error:
        raise _MirrorError from error
    with files.open(path, "rb") as source, target:
        while block := source.read(BLOCK):
            try:
                target.write(block)
                target.flush()
            except OSError as error:
                raise _MirrorError from error
