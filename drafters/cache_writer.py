# Filling a cache, alone or as one of many processes, on one machine or several. Each takes every n-th of the shards
# that are missing; the first alone writes what is common. A capture killed anywhere goes on with the shards that are
# missing, with any number of processes, and ends with the same bytes.

import errno
import hashlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.background import OneInFlight
from drafters.cache import HiddenCache
from drafters.cache_config import CaptureConfig, Crew, Estimate, Watcher, cache_folder
from drafters.cache_manifest import ALL, MANIFEST, SAMPLES, SPLITS, SUPERVISED, CacheKey, Manifest, Shard, json_bytes
from drafters.cache_plan import ShardPlan, plan_shards, split_places
from drafters.cache_records import read_record, record_name, shard_name, write_record, write_shard
from drafters.cache_target import keep_spec
from drafters.codecs import find_codec
from drafters.errors import DataError
from drafters.plain_json import parse, sealed, unsealed
from drafters.planning import stored_bytes
from drafters.progress import over
from drafters.spec import check_layer_ids
from drafters.states import log_sum_exp, predicts, target_states
from drafters.storage import Folder, LocalFolder, open_folder
from drafters.system_errors import advice
from drafters.types import Example, Needs

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["CaptureConfig", "Crew", "Estimate", "ShardPlan", "Watcher", "cache_folder", "capture", "plan_shards"]

REFUSED = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ELOOP)  # by a disk
BROKEN = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EFBIG,
    errno.EISDIR,
)  # a disk that is gone
SPARE_BYTES = 64 * 2**20  # what a capture leaves free beside 5 % of its own size


def capture(
    target: "FrozenTarget",
    splits: Mapping[str, Sequence[Example]],
    folder: Folder | Path | str,
    *,
    key: CacheKey,
    config: CaptureConfig,
    crew: Crew | None = None,
) -> HiddenCache:
    """Store the target's states for all examples in `folder`, or finish or reuse what is there, and open it. All ranks
    of `crew` call it alike, with the same examples.

    The splits are names for sets of samples; they may change without a new capture. Raises DataError when the folder
    belongs to something else, lacks layers or is in use by another capture, and when the disk is or gets too full;
    ConfigError for layers that the target does not have.
    """
    check_layer_ids(config.layer_ids, target.spec, key="cache.layer_ids")
    if not any(splits.values()):
        raise DataError("cache: there is no conversation to capture; check the source and its filters")
    crew, folder = crew or Crew(), open_folder(folder, mirror=config.mirror)
    make = partial(_Job, target, splits, folder, key=key, config=config)
    with _disk_errors(folder), ExitStack() as held:
        start = crew.ranks.share(_take(make, folder, held) if crew.ranks.is_first else None)
        if start is not None:
            make(begun=start.manifest).run(start, crew)
    if target.has_layers and crew.ranks.is_first:
        keep_spec(folder, target.spec)
    return HiddenCache.open(folder, expect=key, needs=Needs(layer_ids=config.layer_ids))


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What the first rank finds: the manifest without the shards that are not whole, and what records say of those."""

    manifest: Manifest
    recorded: dict[int, Shard]


def _take(make: Any, folder: Folder, held: ExitStack) -> _Start | None:
    """Hold a folder in which something is to do; None when there is nothing."""
    if make(begun=_begun(folder)).is_done():
        return None
    folder.make()
    if held.enter_context(folder.lock()):
        folder.clean()
    start: _Start = make(begun=_begun(folder)).start()
    return start


def _begun(folder: Folder) -> Manifest | None:
    return Manifest.load(folder) if MANIFEST in folder.sizes() else None


class _Job:
    """A folder, and what is to be in it. Making one changes nothing."""

    def __init__(
        self,
        target: "FrozenTarget",
        splits: Mapping[str, Sequence[Example]],
        folder: Folder,
        *,
        key: CacheKey,
        config: CaptureConfig,
        begun: Manifest | None,
    ) -> None:
        self.target, self.folder, self.config = target, folder, config
        self.codec = find_codec(key.codec)
        self.examples = [example for split in splits.values() for example in split]
        if begun:
            begun.check_key(key, folder)
            begun.check_needs(Needs(layer_ids=config.layer_ids, last_input=config.last == ALL), folder)
        sizes = begun or config
        self.plans = plan_shards(
            self.examples, tokens_per_shard=sizes.tokens_per_shard, batch_tokens=sizes.batch_tokens
        )
        ordered = [i for plan in self.plans for i in plan.samples]
        self.splits = {name: list(places) for name, places in split_places(ordered, splits).items()}
        self.lists = {SAMPLES: json_bytes(self._samples(ordered)), SPLITS: json_bytes(sealed(self.splits))}
        self.manifest = begun or Manifest(
            key=key,
            layer_ids=config.layer_ids,
            hidden_size=target.spec.hidden_size,
            tokens_per_shard=config.tokens_per_shard,
            batch_tokens=config.batch_tokens,
            num_samples=len(ordered),
            num_tokens=self.num_tokens(ordered),
            num_supervised=sum(int(example.loss_mask_T.sum()) for example in self.examples),
            samples_sha256=hashlib.sha256(self.lists[SAMPLES]).hexdigest(),
            shards=(None,) * len(self.plans),
            last=config.last,
        )

    def is_done(self) -> bool:
        """Whether everything is there as it should be, checksums of shards aside."""
        sizes = self.folder.sizes()
        is_listed = all(name in sizes and self._is_right(name) for name in self.lists)
        return is_listed and MANIFEST in sizes and not self.manifest.missing(sizes)

    def _is_right(self, name: str) -> bool:
        """Whether a list is there as it would be written; SPLITS may be without a checksum, as once."""
        content = self.folder.read(name)
        try:
            return content == self.lists[name] or (name == SPLITS and unsealed(parse(content)) == self.splits)
        except ValueError:
            return False

    def start(self) -> _Start:
        """What the folder holds. Called by the first rank."""
        sizes = self.folder.sizes()
        missing = self.manifest.missing(sizes)
        if MANIFEST in sizes and missing and _sizes(self.manifest) != _sizes(self.config):
            warnings.warn(
                f"cache: {self.folder} was begun with tokens_per_shard, batch_tokens = {_sizes(self.manifest)} and is "
                f"finished so; {_sizes(self.config)} is ignored",
                stacklevel=4,
            )
        found = {number: read_record(self.folder, number, sizes, self.manifest) for number in missing}
        return _Start(
            manifest=self.manifest.with_shards(dict.fromkeys(missing)),
            recorded={number: shard for number, shard in found.items() if shard is not None},
        )

    def run(self, start: _Start, crew: Crew) -> None:
        """Write what is missing, with the other ranks."""
        ranks = crew.ranks
        mine = ranks.mine(sorted(start.recorded.items()))
        shown = over(mine, "checking what was captured", unit="shards")
        whole = [(number, shard) for number, shard in shown if self.folder.is_intact(shard.name, shard.sha256)]
        self.manifest = start.manifest.with_shards(dict(ranks.gather(whole)))
        missing = [number for number, shard in enumerate(self.manifest.shards) if shard is None]
        if ranks.is_first:
            self._prepare(missing)
        ranks.barrier()
        if missing:
            writing = _Writing(self, missing, crew)
            self.manifest = self.manifest.with_shards(dict(ranks.gather(writing.run())))
            writing.end()
            if ranks.is_first:
                self.manifest.save(self.folder)
                if not isinstance(self.folder, LocalFolder):
                    self.folder.clean()
        ranks.barrier()

    def _prepare(self, missing: Sequence[int]) -> None:
        """Write what all ranks share, and forget what was recorded of shards that are made again."""
        num_bytes, free_bytes = self.num_bytes(missing), self.folder.free_bytes()
        if free_bytes is not None and 1.05 * num_bytes + SPARE_BYTES > free_bytes:
            raise DataError(
                f"cache: {num_bytes / 1e9:.2f} GB of states do not fit into {self.folder}: {free_bytes / 1e9:.2f} GB "
                "are free, of which 5 % and 64 MiB stay spare. Choose another disk (cache.root=...), or fewer layers "
                "or conversations"
            )
        names = self.folder.names()
        for number in missing:
            if record_name(number) in names:
                self.folder.remove(record_name(number))
        for name, text in self.lists.items():
            if name not in names or not self._is_right(name):
                self.folder.write(name, text)
        self.manifest.save(self.folder)

    def rows(self, members: Sequence[int]) -> dict[str, Tensor]:
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

    def num_tokens(self, samples: Sequence[int]) -> int:
        return sum(len(self.examples[i].tokens_T) for i in samples)

    def padded(self, batch: Sequence[int]) -> int:
        return len(batch) * max(len(self.examples[i].tokens_T) for i in batch)

    def num_bytes(self, shards: Sequence[int]) -> int:
        samples = [i for number in shards for i in self.plans[number].samples]
        tokens, masks = self.num_tokens(samples), (self.examples[i].loss_mask_T for i in samples)
        last = tokens if self.manifest.last == ALL else sum(int(predicts(mask_T).sum()) for mask_T in masks)
        sizes = {"hidden_size": self.manifest.hidden_size, "num_layers": len(self.manifest.layer_ids)}
        return stored_bytes(self.codec, num_tokens=tokens, num_last=last, **sizes)


class _Writing:
    """One rank's part of the missing shards."""

    def __init__(self, job: _Job, missing: Sequence[int], crew: Crew) -> None:
        self.job, self.missing, self.crew = job, missing, crew
        self.mine = crew.ranks.mine(missing)
        self.watcher = crew.watcher or _Silent()
        self.total = self._num_tokens(missing)
        self.done: dict[int, Shard] = {}
        self._begun: set[int] = set()  # shards that this rank has written, is writing, or has found
        self._own, self._others, self._told = 0, 0, 0

    def run(self) -> list[tuple[int, Shard]]:
        """Number and description of each shard of this rank, each recorded as soon as it is complete."""
        first = self._first()
        with OneInFlight() as writer:
            for number in self.mine:
                taken = self._look(number)
                self._begun.add(number)
                if taken is None or first is not None:
                    self._write(number, first, writer)
                    first = None
                else:
                    self.done[number] = taken
                    self._others -= self._num_tokens([number])
                    self._tell(self._num_tokens([number]))
        return list(self.done.items())

    def end(self) -> None:
        """All ranks are done."""
        if self._told < self.total:
            self._others = self.total - self._own
            self._tell(0)

    def _first(self) -> dict[str, Tensor] | None:
        """The first batch, from which the time of all is told."""
        if not self.mine:
            return None
        job, size = self.job, self.crew.ranks.size
        members = job.plans[self.mine[0]].batches[0]
        started = time.perf_counter()
        first = job.rows(members)
        pace = (time.perf_counter() - started) / job.padded(members)
        batches = [batch for number in self.missing for batch in job.plans[number].batches]
        self.watcher.begin(
            Estimate(
                folder=job.folder,
                num_samples=sum(map(len, batches)),
                num_tokens=self.total,
                num_bytes=job.num_bytes(self.missing),
                free_bytes=job.folder.free_bytes(),
                seconds=pace * sum(map(job.padded, batches)) / min(size, len(self.missing)),
                num_processes=size,
            )
        )
        return first

    def _look(self, number: int) -> Shard | None:
        """See which shards others have finished, this one perhaps included: on disks without locks another capture may
        be at work here."""
        names = self.job.folder.names()
        others = [one for one in self.missing if one not in self._begun and record_name(one) in names]
        self._others = self._num_tokens(others)
        if number not in others:
            return None
        return read_record(self.job.folder, number, self.job.folder.sizes(), self.job.manifest)

    def _write(self, number: int, first: dict[str, Tensor] | None, writer: OneInFlight) -> None:
        """Make a shard's states, then hand them over to be written while those of the next one are made."""
        job, rows = self.job, []
        for members in job.plans[number].batches:
            rows.append(first if first is not None else job.rows(members))
            first = None
            self._tell(job.num_tokens(members))
            writer.check()
        tensors = {name: torch.cat([part.pop(name) for part in rows]) for name in list(rows[0])}
        ends = torch.tensor([len(job.examples[i].tokens_T) for i in job.plans[number].samples]).cumsum(0)
        tensors["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        writer.start(partial(self._store, number, tensors))

    def _store(self, number: int, tensors: dict[str, Tensor]) -> None:
        shard = write_shard(self.job.folder, shard_name(number), tensors)
        write_record(self.job.folder, number, shard, self.job.manifest)
        self.done[number] = shard

    def _tell(self, tokens: int) -> None:
        """The first rank says what is done: its own batches, and the finished shards of others."""
        self._own += tokens
        done = min(self.total, self._own + self._others)
        self.watcher.advance(done, self.total, done - self._told)
        self._told = done

    def _num_tokens(self, shards: Sequence[int]) -> int:
        return sum(self.job.num_tokens(self.job.plans[number].samples) for number in shards)


class _Silent:
    def begin(self, estimate: Estimate) -> None: ...

    def advance(self, done: int, total: int, tokens: int) -> None: ...


@contextmanager
def _disk_errors(folder: Folder) -> Iterator[None]:
    setting = "cache.root" if isinstance(folder, LocalFolder) else "cache.mirror"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"cache: no space left on the disk of {folder.disk}; make room, the same command goes on from there"
            ) from error
        if error.errno == errno.ENOENT and folder.disk.parent.exists():
            raise DataError(
                f"cache: {error}: removed by another process, perhaps a second capture into {folder}; the same "
                "command goes on from there"
            ) from error
        dangling = next((path for path in folder.disk.parents if path.is_symlink() and not path.exists()), None)
        if dangling is not None:
            raise DataError(
                f"cache: {dangling} is a link to {dangling.readlink()}, which is not there; mount or make it, or "
                f"choose another {setting}"
            ) from error
        if error.errno in REFUSED:
            raise DataError(f"cache: cannot write to {folder.disk}: {error}; choose another {setting}") from error
        if error.errno in BROKEN:
            raise DataError(
                f"cache: cannot write to {folder.disk}: {error}; once that is mended ({advice(error) or 'see the disk'}"
                f"), the same command goes on from there; or choose another {setting}"
            ) from error
        raise


def _sizes(of: CaptureConfig | Manifest) -> tuple[int, int]:
    return of.tokens_per_shard, of.batch_tokens
