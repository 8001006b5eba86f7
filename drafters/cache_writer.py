# Filling a cache. The plan (which samples make a shard, which make a batch) follows from the examples alone, so that a
# shard made again has the same bytes, and a killed capture goes on with the shards that are missing.

import errno
import fcntl
import hashlib
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from drafters.cache import (
    ALL,
    MANIFEST,
    PARTIAL,
    SAMPLES,
    SPLITS,
    SUPERVISED,
    CacheKey,
    HiddenCache,
    Manifest,
    example_digest,
    json_bytes,
    write_file,
    write_shard,
)
from drafters.codecs import find_codec
from drafters.errors import DataError
from drafters.planning import stored_bytes
from drafters.spec import check_layer_ids
from drafters.states import log_sum_exp, predicts, target_states
from drafters.types import Example, Needs
from drafters.weights import cache_root

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["CaptureConfig", "Estimate", "ShardPlan", "Watcher", "cache_folder", "capture", "plan_shards"]

SPARE_BYTES = 64 * 2**20  # what a capture leaves free beside 5 % of its own size


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """How states are stored. `root` None is `$DRAFTERS_CACHE/states`; `last`: "all" positions have their state after
    the final norm stored, or "supervised" ones (whose prediction is) alone, which is enough for drafters that do not
    read it; `batch_tokens` counts padding; the two sizes fix the composition of batches and hold for the whole life of
    a cache."""

    name: str = "states"
    root: str | None = None
    layer_ids: tuple[int, ...] = ()
    codec: str = "bf16"
    last: str = ALL
    tokens_per_shard: int = 32_768
    batch_tokens: int = 4_096

    def __post_init__(self) -> None:
        if self.last not in (ALL, SUPERVISED):
            raise ValueError(f"last: got '{self.last}'; accepted: {ALL}, {SUPERVISED}")
        if self.tokens_per_shard < 1 or self.batch_tokens < 1:
            raise ValueError("tokens_per_shard and batch_tokens must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is to do, told after the first batch and before anything is stored. `num_bytes` is the size on disk."""

    folder: Path
    num_samples: int
    num_tokens: int
    num_bytes: int
    free_bytes: int
    seconds: float


class Watcher(Protocol):
    """Who wants to know how a capture goes. Not called at all when there is nothing to do."""

    def begin(self, estimate: Estimate) -> None:
        """Called once, before the first shard."""

    def advance(self, done: int, total: int, tokens: int) -> None:
        """Called after each batch: tokens done, tokens in all, tokens of this batch."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Positions in the list of examples; the rows of a shard follow the order of its batches."""

    batches: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples of the shard, in order."""
        return tuple(i for batch in self.batches for i in batch)


def cache_folder(config: CaptureConfig, key: CacheKey) -> Path:
    """`<root>/<name>-<first 12 digits of the key>`."""
    root = Path(config.root).expanduser() if config.root else cache_root() / "states"
    return root / f"{config.name}-{key.digest[:12]}"


def plan_shards(examples: Sequence[Example], *, tokens_per_shard: int, batch_tokens: int) -> list[ShardPlan]:
    """Shards of about `tokens_per_shard` tokens, each in batches of at most `batch_tokens` tokens, padding included
    (one sample may exceed either).

    The order of `examples` does not matter: samples are dealt out by their digest, so each shard is a fair mix, and
    sorted by length inside it, the longest first, so that a batch that does not fit into memory fails at once.
    """
    digests = [example_digest(example) for example in examples]
    shards: list[list[int]] = [[]]
    room = tokens_per_shard
    for i in sorted(range(len(examples)), key=lambda i: digests[i]):
        length = len(examples[i].tokens_T)
        if length > room and shards[-1]:
            shards.append([])
            room = tokens_per_shard
        shards[-1].append(i)
        room -= length
    plans = []
    for shard in shards:
        batches: list[list[int]] = []
        for i in sorted(shard, key=lambda i: (-len(examples[i].tokens_T), digests[i])):
            width = len(examples[batches[-1][0]].tokens_T) if batches else 0
            if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
                batches.append([])
            batches[-1].append(i)
        plans.append(ShardPlan(batches=tuple(map(tuple, batches))))
    return plans


def capture(
    target: "FrozenTarget",
    splits: Mapping[str, Sequence[Example]],
    folder: Path,
    *,
    key: CacheKey,
    config: CaptureConfig,
    watcher: Watcher | None = None,
) -> HiddenCache:
    """Store the target's states for all examples in `folder`, or finish or reuse what is there, and open it.

    The splits are names for sets of samples; they may change without a new capture. Raises DataError when the folder
    belongs to something else, lacks layers or is in use by another process, and when the disk is or gets too full;
    ConfigError for layers that the target does not have.
    """
    check_layer_ids(config.layer_ids, target.spec, key="cache.layer_ids")
    if not any(splits.values()):
        raise DataError("cache: there is no conversation to capture; check the source and its filters")
    if not _Job(target, splits, folder, key=key, config=config).is_done():
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder), _partial(folder):
                _Job(target, splits, folder, key=key, config=config).run(watcher)
    return HiddenCache.open(folder, expect=key, needs=Needs(layer_ids=config.layer_ids))


class _Job:
    """A folder, and what is to be in it. Making one changes nothing."""

    def __init__(
        self,
        target: "FrozenTarget",
        splits: Mapping[str, Sequence[Example]],
        folder: Path,
        *,
        key: CacheKey,
        config: CaptureConfig,
    ) -> None:
        self.target, self.folder = target, folder
        self.codec = find_codec(key.codec)
        self.examples = [example for split in splits.values() for example in split]
        begun = Manifest.load(folder) if (folder / MANIFEST).exists() else None
        if begun:
            begun.check_key(key, folder)
            begun.check_needs(Needs(layer_ids=config.layer_ids, last_input=config.last == ALL), folder)
        sizes = begun or config
        self.plans = plan_shards(
            self.examples, tokens_per_shard=sizes.tokens_per_shard, batch_tokens=sizes.batch_tokens
        )
        ordered = [i for plan in self.plans for i in plan.samples]
        self.lists = {SAMPLES: json_bytes(self._samples(ordered)), SPLITS: json_bytes(self._splits(ordered, splits))}
        self.manifest = begun or Manifest(
            key=key,
            layer_ids=config.layer_ids,
            hidden_size=target.spec.hidden_size,
            tokens_per_shard=config.tokens_per_shard,
            batch_tokens=config.batch_tokens,
            num_samples=len(ordered),
            num_tokens=self._num_tokens(ordered),
            num_supervised=sum(int(example.loss_mask_T.sum()) for example in self.examples),
            samples_sha256=hashlib.sha256(self.lists[SAMPLES]).hexdigest(),
            shards=(None,) * len(self.plans),
            last=config.last,
        )
        if begun and begun.missing(folder) and _sizes(begun) != _sizes(config):
            warnings.warn(
                f"cache: {folder} was begun with tokens_per_shard, batch_tokens = {_sizes(begun)} and is finished so; "
                f"{_sizes(config)} is ignored",
                stacklevel=3,
            )

    def is_done(self) -> bool:
        """Whether everything is there as it should be, checksums of shards aside."""
        lists_are_right = all(_content(self.folder / name) == text for name, text in self.lists.items())
        return lists_are_right and (self.folder / MANIFEST).exists() and not self.manifest.missing(self.folder)

    def run(self, watcher: Watcher | None) -> None:
        """Write what is missing."""
        missing = self.manifest.missing(self.folder)
        num_bytes = self._num_bytes(missing)
        free_bytes = shutil.disk_usage(self.folder).free
        if 1.05 * num_bytes + SPARE_BYTES > free_bytes:
            raise DataError(
                f"cache: {num_bytes / 1e9:.2f} GB of states do not fit into {self.folder}: {free_bytes / 1e9:.2f} GB "
                "are free, of which 5 % and 64 MiB stay spare. Choose another disk (cache.root=...), or fewer layers "
                "or conversations"
            )
        for name, text in self.lists.items():
            if _content(self.folder / name) != text:
                write_file(self.folder / name, text)
        self.manifest.save(self.folder)
        if missing:
            self._write_shards(missing, num_bytes, free_bytes, watcher or _Silent())

    def _write_shards(self, missing: list[int], num_bytes: int, free_bytes: int, watcher: Watcher) -> None:
        started = time.perf_counter()
        members = self.plans[missing[0]].batches[0]
        first: dict[str, Tensor] | None = self._rows(members)
        pace = (time.perf_counter() - started) / self._padded(members)
        batches = [batch for number in missing for batch in self.plans[number].batches]
        samples = [i for batch in batches for i in batch]
        done, total = 0, self._num_tokens(samples)
        watcher.begin(
            Estimate(
                folder=self.folder,
                num_samples=len(samples),
                num_tokens=total,
                num_bytes=num_bytes,
                free_bytes=free_bytes,
                seconds=pace * sum(map(self._padded, batches)),
            )
        )
        for number in missing:
            rows = []
            for members in self.plans[number].batches:
                rows.append(first if first is not None else self._rows(members))
                first = None
                tokens = self._num_tokens(members)
                done += tokens
                watcher.advance(done, total, tokens)
            tensors = {name: torch.cat([part.pop(name) for part in rows]) for name in list(rows[0])}
            ends = torch.tensor([len(self.examples[i].tokens_T) for i in self.plans[number].samples]).cumsum(0)
            tensors["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
            shard = write_shard(self.folder, f"shard-{number:05d}.safetensors", tensors)
            self.manifest = self.manifest.with_shard(number, shard)
            self.manifest.save(self.folder)

    def _rows(self, members: Sequence[int]) -> dict[str, Tensor]:
        """Everything a shard stores of one batch; samples follow each other without padding."""
        examples = [self.examples[i] for i in members]
        states = target_states(self.target, examples, layer_ids=self.manifest.layer_ids)
        read_N = torch.cat([predicts(example.loss_mask_T) for example in examples])
        last_ND = states.last_ND
        if self.manifest.last == SUPERVISED:
            last_ND = last_ND[read_N.to(last_ND.device)]
        coded = {"last": self.codec.encode(last_ND)}
        for layer, rows_ND in zip(self.manifest.layer_ids, states.aux_LND, strict=True):
            coded[f"layer.{layer}"] = self.codec.encode(rows_ND)
        lse_N = torch.zeros(len(read_N))
        # From the states as a reader will see them, so that exp(logits - lse) sums to 1 there.
        read_ND = self.codec.decode(coded["last"])
        if self.manifest.last == ALL:
            read_ND = read_ND[read_N]
        lse_N[read_N] = log_sum_exp(self.target.head, read_ND.to(self.target.device)).cpu()
        if not lse_N.isfinite().all():
            raise DataError(
                f"cache: the target's logits are not finite in one of {[example.id for example in examples]}; "
                f"its states overflow {self.manifest.key.dtype}: use target.dtype=bfloat16 or float32"
            )
        return {
            "tokens": torch.cat([example.tokens_T for example in examples]).to(torch.int32),
            "loss_mask": torch.cat([example.loss_mask_T for example in examples]),
            "lse": lse_N,
            **{f"{name}.{part}": tensor for name, parts in coded.items() for part, tensor in parts.items()},
        }

    def _samples(self, ordered: Sequence[int]) -> dict[str, Any]:
        examples = [self.examples[i] for i in ordered]
        return {
            "ids": [example.id for example in examples],
            "sources": [example.source for example in examples],
            "lengths": [len(example.tokens_T) for example in examples],
        }

    def _splits(self, ordered: Sequence[int], splits: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
        place = {i: rank for rank, i in enumerate(ordered)}
        members, start = {}, 0
        for name, examples in splits.items():
            members[name] = sorted(place[i] for i in range(start, start + len(examples)))
            start += len(examples)
        return members

    def _num_tokens(self, samples: Sequence[int]) -> int:
        return sum(len(self.examples[i].tokens_T) for i in samples)

    def _padded(self, batch: Sequence[int]) -> int:
        return len(batch) * max(len(self.examples[i].tokens_T) for i in batch)

    def _num_bytes(self, shards: Sequence[int]) -> int:
        samples = [i for number in shards for i in self.plans[number].samples]
        tokens, masks = self._num_tokens(samples), (self.examples[i].loss_mask_T for i in samples)
        last = tokens if self.manifest.last == ALL else sum(int(predicts(mask_T).sum()) for mask_T in masks)
        sizes = {"hidden_size": self.manifest.hidden_size, "num_layers": len(self.manifest.layer_ids)}
        return stored_bytes(self.codec, num_tokens=tokens, num_last=last, **sizes)


class _Silent:
    def begin(self, estimate: Estimate) -> None: ...

    def advance(self, done: int, total: int, tokens: int) -> None: ...


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"cache: {folder} is in use: another process captures into it; wait for it to end"
            ) from error
        yield


@contextmanager
def _partial(folder: Path) -> Iterator[None]:
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # left behind by a process that was killed
    partial.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"cache: no space left on the disk of {folder}; make room, the same command goes on from there"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            raise DataError(f"cache: cannot write to {folder}: {error}; choose another cache.root") from error
        raise


def _sizes(of: CaptureConfig | Manifest) -> tuple[int, int]:
    return of.tokens_per_shard, of.batch_tokens


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
