# What a capture is asked for, and who takes part in it and watches it.

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from drafters.cache_manifest import ALL, SUPERVISED, CacheKey
from drafters.codecs import find_codec
from drafters.distributed import Ranks
from drafters.files import cache_root
from drafters.storage import Folder, LocalFolder, is_url, open_folder
from drafters.storage_remote import check_url

__all__ = ["CaptureConfig", "Crew", "Estimate", "Watcher", "cache_folder"]


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """How states are stored. `root` is a folder or a URL that fsspec knows, None is `$DRAFTERS_CACHE/states`; `mirror`
    is where this machine keeps what it reads from a URL, None is `$DRAFTERS_CACHE/mirror`; `last`: "all" positions have
    their state after the final norm stored, or "supervised" ones (whose prediction is) alone, which is enough for
    drafters that do not read it; `batch_tokens` counts padding; the two sizes fix the composition of batches and hold
    for the whole life of a cache."""

    name: str = "states"
    root: str | None = None
    mirror: str | None = None
    layer_ids: tuple[int, ...] = ()
    codec: str = "bf16"
    last: str = ALL
    tokens_per_shard: int = 32_768
    batch_tokens: int = 4_096

    def __post_init__(self) -> None:
        find_codec(self.codec)
        if self.last not in (ALL, SUPERVISED):
            raise ValueError(f"last: got '{self.last}'; accepted: {ALL}, {SUPERVISED}")
        for name in ("tokens_per_shard", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; accepted: 1 or more")
        if self.mirror is not None and is_url(self.mirror):
            raise ValueError(f"mirror: got '{self.mirror}'; accepted: a folder of this machine, not a URL")
        if self.root is not None and is_url(self.root):
            check_url(self.root)
        elif self.mirror is not None:
            warnings.warn("cache.mirror: ignored, since cache.root is no URL", stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is to do, told after the first batch and before anything is stored. `num_bytes` is the size on disk, of
    the shards of all processes, as `seconds` is the time that all of them take together; `free_bytes` is None where a
    store does not tell."""

    folder: Folder
    num_samples: int
    num_tokens: int
    num_bytes: int
    free_bytes: int | None
    seconds: float
    num_processes: int


class Watcher(Protocol):
    """Who wants to know how a capture goes. Not called at all when there is nothing to do."""

    def begin(self, estimate: Estimate) -> None:
        """Called once, before the first shard."""

    def advance(self, done: int, total: int, tokens: int) -> None:
        """Called after each batch of the first process: tokens done by all, tokens in all, tokens done since the last
        call. What other processes do counts once a shard of theirs is finished."""


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Who captures: the processes that share the shards, and who on the first one wants to know how it goes."""

    ranks: Ranks = field(default_factory=Ranks)
    watcher: Watcher | None = None


def cache_folder(config: CaptureConfig, key: CacheKey) -> Folder:
    """`<root>/<name>-<first 12 digits of the key>`."""
    name = f"{config.name}-{key.digest[:12]}"
    if config.root is not None and is_url(config.root):
        return open_folder(f"{config.root.rstrip('/')}/{name}", mirror=config.mirror)
    return LocalFolder((Path(config.root) if config.root else cache_root() / "states") / name)
