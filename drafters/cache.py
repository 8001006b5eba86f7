# Target states on disk: `cache.json` (what it is, and every shard with its checksum), `samples.json` (id, source and
# length of each sample), `splits.json`, and safetensors shards. A shard holds the rows of its samples one after the
# other, each layer a tensor of its own, so that a reader maps the file and touches only what a batch needs.

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.cache_manifest import (
    ALL,
    MANIFEST,
    SAMPLES,
    SPLITS,
    CacheKey,
    Manifest,
    Shard,
    data_hash,
    example_digest,
)
from drafters.cache_records import record_name
from drafters.codecs import find_codec
from drafters.errors import DataError
from drafters.plain_json import parse, unsealed
from drafters.states import predicts
from drafters.storage import Folder, open_folder
from drafters.types import Needs

__all__ = ["CacheKey", "CachedSample", "HiddenCache", "Manifest", "Shard", "data_hash", "example_digest"]


@dataclass(frozen=True, kw_only=True)
class CachedSample:
    """One conversation with its states. `last_TD` is 0 where a cache does not store it. `lse_T[t]` is the log-sum-exp
    of the target's logits at t where `loss_mask_T[t + 1]`, else 0. States may be views of the mapped file: read them,
    never write."""

    index: int
    id: str
    source: str
    tokens_T: Tensor  # int64
    loss_mask_T: Tensor  # bool
    aux_TLD: Tensor | None
    last_TD: Tensor
    lse_T: Tensor  # float32


class HiddenCache:
    """A finished cache, opened for reading. Sample i is the i-th row of `ids`, whatever shard it lies in."""

    def __init__(self, folder: Folder, manifest: Manifest, *, verify: bool = True) -> None:
        """Use `open`, which checks what it opens."""
        self.folder = folder
        self.manifest = manifest
        self.verify = verify
        self.shards = tuple(shard for shard in manifest.shards if shard is not None)
        rows = self._read_json(SAMPLES, sha256=manifest.samples_sha256)
        splits = self._read_json(SPLITS)
        if problem := _problem(manifest, rows, splits):
            raise DataError(f"cache: {folder}: {problem}; it is damaged: remove {MANIFEST} there and capture again")
        self.ids: tuple[str, ...] = tuple(rows["ids"])
        self.sources: tuple[str, ...] = tuple(rows["sources"])
        self.lengths: tuple[int, ...] = tuple(rows["lengths"])
        self.splits: dict[str, tuple[int, ...]] = {k: tuple(v) for k, v in splits.items()}
        self._places: list[tuple[int, int]] = []  # (shard, first row) of each sample
        for number, shard in enumerate(self.shards):
            row = 0
            for _ in range(shard.num_samples):
                self._places.append((number, row))
                row += self.lengths[len(self._places) - 1]
        self._codec = find_codec(manifest.key.codec)
        self._files: dict[int, Any] = {}
        self._before: dict[int, Tensor] = {}

    @classmethod
    def open(
        cls,
        folder: Folder | Path | str,
        *,
        expect: CacheKey | None = None,
        needs: Needs | None = None,
        verify: bool = True,
    ) -> "HiddenCache":
        """Open a finished cache, in a local folder or at a URL that fsspec knows. `verify=False` trusts the local disk
        and skips the checksum at the first read of a shard.

        Raises DataError when it is unfinished or not whole, when it is not the one `expect` describes, or when it lacks
        layers of `needs`; ConfigError for a URL that cannot be read here.
        """
        folder = open_folder(folder)
        manifest = Manifest.load(folder)
        if expect is not None:
            manifest.check_key(expect, folder)
        manifest.check_needs(needs or Needs(), folder)
        sizes = folder.sizes()
        unlisted = [number for number, shard in enumerate(manifest.shards) if shard is None]
        if unlisted:
            to_do = sum(record_name(number) not in sizes for number in unlisted)
            raise DataError(
                f"cache: {folder} is unfinished, {to_do} of {len(manifest.shards)} shards are to do; "
                "the command that began it finishes it"
            )
        for number in manifest.missing(sizes):
            shard = manifest.shards[number]
            assert shard is not None
            found = "cut or grown" if shard.name in sizes else "missing"
            raise DataError(f"cache: shard {folder.name_of(shard.name)} is {found}; the capture command makes it again")
        return cls(folder, manifest, verify=verify)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers stored."""
        return self.manifest.layer_ids

    @property
    def data_hash(self) -> str:
        """A hash of the conversations."""
        return self.manifest.key.data_hash

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> CachedSample:
        return self.read([index])[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}  # mapped files do not travel between processes

    def split(self, name: str) -> tuple[int, ...]:
        """Indices of the samples of a split. Raises DataError with the splits there are."""
        if name not in self.splits:
            raise DataError(f"cache: {self.folder} has no split '{name}'; it has {', '.join(self.splits)}")
        return self.splits[name]

    def read(self, indices: Sequence[int], needs: Needs | None = None) -> list[CachedSample]:
        """Samples with the layers of `needs`, in its order (None: every stored layer). Raises DataError for a damaged
        shard, by name."""
        needs = Needs(layer_ids=self.layer_ids) if needs is None else needs
        self.manifest.check_needs(needs, self.folder)
        try:
            return [self._sample(index, needs.layer_ids) for index in indices]
        except (SafetensorError, RuntimeError, IndexError, TypeError) as error:  # of shards that are not what was said
            raise DataError(
                f"cache: a shard of {self.folder} does not hold what {MANIFEST} says: {error}; remove that folder and "
                "capture again"
            ) from error

    def _sample(self, index: int, layer_ids: tuple[int, ...]) -> CachedSample:
        number, start = self._places[index]
        stop = start + self.lengths[index]
        file = self._file(number)

        def rows(name: str, span: slice = slice(start, stop)) -> Tensor:
            part: Tensor = file.get_slice(name)[span]
            return part

        def states(name: str, span: slice = slice(start, stop), out: Tensor | None = None) -> Tensor:
            return self._codec.decode({part: rows(f"{name}.{part}", span) for part in self._codec.parts}, out)

        aux_TLD = None
        if layer_ids:
            shape = (stop - start, len(layer_ids), self.manifest.hidden_size)
            aux_TLD = torch.empty(shape, dtype=self._codec.dtype)
            for place, layer in enumerate(layer_ids):
                states(f"layer.{layer}", out=aux_TLD[:, place])

        loss_mask_T = rows("loss_mask")
        if self.manifest.last == ALL:
            last_TD = states("last")
        else:
            read_T, before = predicts(loss_mask_T), self._read_before(number)
            found_ND = states("last", slice(int(before[start]), int(before[stop])))
            last_TD = found_ND.new_zeros(len(read_T), found_ND.shape[1])
            last_TD[read_T] = found_ND
        return CachedSample(
            index=index,
            id=self.ids[index],
            source=self.sources[index],
            tokens_T=rows("tokens").to(torch.int64),
            loss_mask_T=loss_mask_T,
            aux_TLD=aux_TLD,
            last_TD=last_TD,
            lse_T=rows("lse"),
        )

    def _read_before(self, number: int) -> Tensor:
        """How many of a shard's rows before each one, and of all, predict a supervised token, int64 [rows + 1]."""
        if number not in self._before:
            file = self._file(number)
            mask_N, ends = file.get_tensor("loss_mask"), file.get_tensor("offsets")[1:]
            read_N = predicts(mask_N)
            read_N[ends - 1] = False  # the next row is another sample's
            self._before[number] = F.pad(read_N.cumsum(0), (1, 0))
        return self._before[number]

    def _file(self, number: int) -> Any:
        if number not in self._files:
            shard = self.shards[number]
            try:
                path = self.folder.fetch(shard.name, sha256=shard.sha256, num_bytes=shard.num_bytes, verify=self.verify)
                self._files[number] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"cache: shard {self.folder.name_of(shard.name)} cannot be read: {error}; the capture command "
                    "makes it again"
                ) from error
        return self._files[number]

    def _read_json(self, name: str, *, sha256: str | None = None) -> dict[str, Any]:
        try:
            text = self.folder.read(name)
            if sha256 and hashlib.sha256(text).hexdigest() != sha256:
                raise ValueError("its checksum is wrong")
            values = unsealed(parse(text))
        except (OSError, ValueError) as error:
            raise DataError(
                f"cache: {self.folder.name_of(name)}: {error}; the capture command makes it again"
            ) from error
        return values


def _problem(manifest: Manifest, rows: dict[str, Any], splits: dict[str, Any]) -> str | None:
    """What does not fit together in what a cache says of its samples, if anything does not."""
    lists: list[Any] = [rows.get(name) for name in ("ids", "sources", "lengths")]
    if not all(isinstance(one, list) for one in lists):
        return f"{SAMPLES} has no lists of ids, sources and lengths"
    if len({manifest.num_samples, *map(len, lists)}) > 1:
        return f"{SAMPLES} is not of the {manifest.num_samples} samples that {MANIFEST} counts"
    if not all(type(length) is int and length > 0 for length in rows["lengths"]):
        return f"{SAMPLES} has a length that is no whole number above 0"
    shards = [shard for shard in manifest.shards if shard is not None]
    if sum(shard.num_samples for shard in shards) != manifest.num_samples or any(s.num_samples < 0 for s in shards):
        return f"the shards in {MANIFEST} are not of its {manifest.num_samples} samples"
    if not all(isinstance(part, list) and all(type(place) is int for place in part) for part in splits.values()):
        return f"{SPLITS} has no lists of samples"
    if sorted(place for part in splits.values() for place in part) != [*range(manifest.num_samples)]:
        return f"{SPLITS} does not have each of the {manifest.num_samples} samples once"
    return None
