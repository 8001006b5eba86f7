# Folders that hold a cache: one on a disk that this machine mounts, read in place, or one behind a URL (an object
# store, anything that fsspec knows), read through a mirror on a local disk. The few operations that a cache needs, no
# more. A file appears under its name whole or not at all.

import errno
import fcntl
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from drafters.errors import DataError
from drafters.files import file_sha256, flush

__all__ = ["Folder", "LocalFolder", "is_url", "open_folder"]

PARTIAL = "partial"  # where files live until they are complete: on the same disk, so that a rename is atomic
LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

# (file, sha256) of files whose checksum this process has seen to be right.
_verified: set[tuple[str, str]] = set()


class Folder(ABC):
    """A flat folder of files. Printed, it says where it is, without credentials."""

    @property
    @abstractmethod
    def disk(self) -> Path:
        """The local folder that files are written to first."""

    @abstractmethod
    def name_of(self, name: str) -> str:
        """Where a file is, for people."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, those left out that are not complete; none where the folder is absent."""

    @abstractmethod
    def names(self) -> set[str]:
        """Names of the files, without asking for each one's size."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Room for more, where that is known."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Content of a small file. Raises FileNotFoundError."""

    @abstractmethod
    def put(self, source: Path, name: str) -> None:
        """Move a local file of `scratch` here, in the place of what has this name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder where it is absent."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[bool]:
        """Hold the folder, and say whether it is held: some disks and all object stores know no locks. Raises DataError
        when another process holds it."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what killed writers left. Called while the folder is held, or at a capture's end."""

    @abstractmethod
    def is_intact(self, name: str, sha256: str) -> bool:
        """Whether a complete file has this content, as far as that can be told without fetching it."""

    @abstractmethod
    def fetch(self, name: str, *, sha256: str, num_bytes: int, verify: bool) -> Path:
        """A local file with this content. `verify=False` trusts the local disk. Raises DataError for a damaged file,
        OSError for one that cannot be read."""

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A local folder of this process's own, for files on their way here; removed at the end."""
        partial = self.disk / PARTIAL
        made = _made_inside(partial)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)
            with suppress(OSError):  # another process writes, too
                partial.rmdir()

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file."""
        with self.scratch() as scratch:
            (scratch / name).write_bytes(content)
            self.put(scratch / name, name)


class LocalFolder(Folder):
    """A folder that this machine mounts. Files are mapped where they are."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def disk(self) -> Path:
        return self.path

    def name_of(self, name: str) -> str:
        return str(self.path / name)

    def sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def names(self) -> set[str]:
        return set(os.listdir(self.path))

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.path).free

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, source: Path, name: str) -> None:
        flush(source)
        os.replace(source, self.path / name)
        flush(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def lock(self) -> AbstractContextManager[bool]:
        return _locked(self.path / LOCK)

    def clean(self) -> None:
        shutil.rmtree(self.path / PARTIAL, ignore_errors=True)

    def is_intact(self, name: str, sha256: str) -> bool:
        return file_sha256(self.path / name) == sha256

    def fetch(self, name: str, *, sha256: str, num_bytes: int, verify: bool) -> Path:
        path = self.path / name
        if verify and not has_content(path, sha256):
            raise DataError(f"cache: shard {path} is damaged; remove that file, the capture command makes it again")
        return path


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """A lock that ends with its process. The file stays."""
    with path.open("w") as file:
        is_held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"cache: {path.parent} is in use: another process captures into it; wait for it to end"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            is_held = False
            warnings.warn(
                f"cache: the disk of {path.parent} knows no locks ({error.strerror}); see to it that one command "
                "at a time captures into it",
                stacklevel=4,
            )
        yield is_held


def is_url(place: str) -> bool:
    """Whether this names a place of fsspec's, `protocol://...`, and no local path."""
    return "://" in place


def open_folder(place: Folder | Path | str, *, mirror: str | None = None) -> Folder:
    """The folder at a path or URL. `mirror` is where files of a URL are kept, by default `$DRAFTERS_CACHE/mirror`.
    Raises ConfigError for a URL that nothing here reads."""
    if isinstance(place, Folder):
        return place
    if isinstance(place, str) and is_url(place):
        from drafters.storage_remote import RemoteFolder

        return RemoteFolder(place, mirror=mirror)
    return LocalFolder(place)


def has_content(path: Path, sha256: str) -> bool:
    """Whether a file has this content, read once a process."""
    mark = (str(path.resolve()), sha256)
    if mark not in _verified:
        if file_sha256(path) != sha256:
            return False
        _verified.add(mark)
    return True


def _made_inside(folder: Path, *, tries: int = 100) -> Path:
    """A new folder in `folder`, which another process may remove, once empty, at any moment."""
    while True:
        tries -= 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(dir=folder))
        except (FileNotFoundError, FileExistsError):
            if not tries:
                raise
