# Target states on disk: `cache.json` (what it is, and every shard with its checksum), `samples.json` (id, source and
# length of each sample), `splits.json`, and safetensors shards. A shard holds the rows of its samples one after the
# other, each layer a tensor of its own, so that a reader maps the file and touches only what a batch needs.

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.codecs import find_codec
from drafters.errors import DataError
from drafters.files import file_sha256, flush, save_tensors
from drafters.spec import TargetSpec
from drafters.states import predicts
from drafters.types import Example, Needs

__all__ = ["CacheKey", "CachedSample", "HiddenCache", "Manifest", "Shard", "data_hash", "example_digest"]

SCHEMA = 1
MANIFEST, SAMPLES, SPLITS = "cache.json", "samples.json", "splits.json"
ALL, SUPERVISED = "all", "supervised"  # positions whose state after the final norm is stored
PARTIAL = "partial"  # where files live until they are complete: on the same disk, so that a rename is atomic

# (file, sha256) of shards whose checksum this process has seen to be right.
_verified: set[tuple[str, str]] = set()


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Everything that changes the stored numbers. Which layers are stored is content, not key."""

    weights_hash: str
    template_hash: str
    data_hash: str
    max_length: int
    codec: str
    dtype: str
    schema: int = SCHEMA

    @classmethod
    def of(
        cls, spec: TargetSpec, examples: Iterable[Example], *, template_hash: str, max_length: int, codec: str
    ) -> "CacheKey":
        """The key of these encoded examples under this target."""
        return cls(
            weights_hash=spec.weights_hash,
            template_hash=template_hash,
            data_hash=data_hash(examples),
            max_length=max_length,
            codec=codec,
            dtype=spec.dtype,
        )

    @property
    def digest(self) -> str:
        """sha256 (hex) of the canonical JSON."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def example_digest(example: Example) -> bytes:
    """sha256 of id, source, tokens and loss mask."""
    digest = hashlib.sha256(json.dumps([example.id, example.source]).encode())
    digest.update(example.tokens_T.to(torch.int64).numpy().tobytes())
    digest.update(example.loss_mask_T.to(torch.bool).numpy().tobytes())
    return digest.digest()


def data_hash(examples: Iterable[Example]) -> str:
    """A hash of the set of examples; their order and their split do not matter."""
    return hashlib.sha256(b"".join(sorted(example_digest(example) for example in examples))).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One finished file."""

    name: str
    sha256: str
    num_bytes: int
    num_samples: int
    num_tokens: int

    def fits(self, folder: Path) -> bool:
        """Whether the file is there in its full size."""
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.num_bytes


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`cache.json`. A shard is None until its file is complete; the geometry is fixed when a capture begins, since the
    composition of batches changes the last bits of the states. `last`: whether states after the final norm are stored
    of all positions, or of those alone whose prediction is supervised."""

    key: CacheKey
    layer_ids: tuple[int, ...]
    hidden_size: int
    tokens_per_shard: int
    batch_tokens: int
    num_samples: int
    num_tokens: int
    num_supervised: int
    samples_sha256: str
    shards: tuple[Shard | None, ...]
    last: str = ALL

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Raises DataError when there is none, or it is damaged or written by another version."""
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text())
            if (schema := values["key"]["schema"]) != SCHEMA:
                raise DataError(f"cache: {folder} has schema {schema}, this version reads {SCHEMA}; capture it again")
            key = CacheKey(**values.pop("key"))
            shards = tuple(shard and Shard(**shard) for shard in values.pop("shards"))
            layer_ids = tuple(values.pop("layer_ids"))
            values.pop("key_digest")
            return cls(key=key, shards=shards, layer_ids=layer_ids, **values)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"cache: no {MANIFEST} in {folder}; make it with `python -m data.capture`") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"cache: {path} is damaged ({error}); remove the folder and capture it again") from error

    def save(self, folder: Path) -> None:
        """Replace `cache.json` atomically."""
        write_file(folder / MANIFEST, json_bytes({"key_digest": self.key.digest, **asdict(self)}, indent=1))

    def with_shard(self, number: int, shard: Shard) -> "Manifest":
        """The manifest with one more finished shard."""
        return replace(self, shards=(*self.shards[:number], shard, *self.shards[number + 1 :]))

    def missing(self, folder: Path) -> list[int]:
        """Shards that are not finished, not there, or not whole."""
        return [i for i, shard in enumerate(self.shards) if shard is None or not shard.fits(folder)]

    def check_key(self, expected: CacheKey, folder: Path) -> None:
        """Raises DataError that names each field in which the cache differs from `expected`."""
        differs = [f.name for f in fields(CacheKey) if getattr(self.key, f.name) != getattr(expected, f.name)]
        if differs:
            pairs = [
                f"{name} {_short(getattr(self.key, name))} instead of {_short(getattr(expected, name))}"
                for name in differs
            ]
            raise DataError(
                f"cache: {folder} belongs to something else: it has {'; '.join(pairs)}. "
                "Capture again into another folder (cache.root=...), or remove this one"
            )

    def check_needs(self, needs: Needs, folder: Path) -> None:
        """Raises DataError that says how to recapture when a state is not stored."""
        if needs.last_input and self.last != ALL:
            raise DataError(
                f"cache: {folder} stores the state after the final norm where its prediction is supervised, and this "
                "drafter reads it everywhere. Remove that folder and capture it again with cache.last=all"
            )
        if absent := sorted(set(needs.layer_ids) - set(self.layer_ids)):
            union = sorted({*needs.layer_ids, *self.layer_ids})
            raise DataError(
                f"cache: {folder} stores the layers {list(self.layer_ids)}, not {absent}. To store them too, remove "
                f"that folder and run `python -m data.capture 'cache.layer_ids={union}'` on the same source"
            )


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

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool = True) -> None:
        """Use `open`, which checks what it opens."""
        self.folder = folder
        self.manifest = manifest
        self.verify = verify
        self.shards = tuple(shard for shard in manifest.shards if shard is not None)
        rows = self._read_json(SAMPLES, sha256=manifest.samples_sha256)
        self.ids: tuple[str, ...] = tuple(rows["ids"])
        self.sources: tuple[str, ...] = tuple(rows["sources"])
        self.lengths: tuple[int, ...] = tuple(rows["lengths"])
        self.splits: dict[str, tuple[int, ...]] = {k: tuple(v) for k, v in self._read_json(SPLITS).items()}
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
        cls, folder: Path | str, *, expect: CacheKey | None = None, needs: Needs | None = None, verify: bool = True
    ) -> "HiddenCache":
        """Open a finished cache. `verify=False` trusts the disk and skips the checksum at the first read of a shard.

        Raises DataError when it is unfinished or not whole, when it is not the one `expect` describes, or when it lacks
        layers of `needs`.
        """
        folder = Path(folder).expanduser()
        manifest = Manifest.load(folder)
        if expect is not None:
            manifest.check_key(expect, folder)
        manifest.check_needs(needs or Needs(), folder)
        unfinished = sum(shard is None for shard in manifest.shards)
        if unfinished:
            raise DataError(
                f"cache: {folder} is unfinished, {unfinished} of {len(manifest.shards)} shards are to do; "
                "the command that began it finishes it"
            )
        for number in manifest.missing(folder):
            shard = manifest.shards[number]
            assert shard is not None
            found = "cut or grown" if (folder / shard.name).exists() else "missing"
            raise DataError(f"cache: shard {folder / shard.name} is {found}; the capture command makes it again")
        return cls(folder, manifest, verify=verify)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers stored."""
        return self.manifest.layer_ids

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
        return [self._sample(index, needs.layer_ids) for index in indices]

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
            path = self.folder / shard.name
            try:
                if self.verify and (mark := (str(path.resolve()), shard.sha256)) not in _verified:
                    if file_sha256(path) != shard.sha256:
                        raise DataError(
                            f"cache: shard {path} is damaged; remove that file, the capture command makes it again"
                        )
                    _verified.add(mark)
                self._files[number] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"cache: shard {path} cannot be read: {error}; the capture command makes it again"
                ) from error
        return self._files[number]

    def _read_json(self, name: str, *, sha256: str | None = None) -> dict[str, Any]:
        path = self.folder / name
        try:
            text = path.read_bytes()
            if sha256 and hashlib.sha256(text).hexdigest() != sha256:
                raise ValueError("its checksum is wrong")
            values: dict[str, Any] = json.loads(text)
        except (OSError, ValueError) as error:
            raise DataError(f"cache: {path}: {error}; the capture command makes it again") from error
        return values


def write_shard(folder: Path, name: str, tensors: dict[str, Tensor]) -> Shard:
    """Write a shard under a temporary name, flush it to the disk, and rename it."""
    partial = folder / PARTIAL / name
    save_tensors(tensors, partial)
    sha256, num_bytes = file_sha256(partial), partial.stat().st_size
    _into_place(partial, folder / name)
    num_samples, num_tokens = len(tensors["offsets"]) - 1, len(tensors["tokens"])
    return Shard(name=name, sha256=sha256, num_bytes=num_bytes, num_samples=num_samples, num_tokens=num_tokens)


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, by way of the folder PARTIAL beside it."""
    partial = path.parent / PARTIAL / path.name
    partial.write_bytes(content)
    _into_place(partial, path)


def json_bytes(values: dict[str, Any], *, indent: int | None = None) -> bytes:
    """JSON text with a newline at its end."""
    return (json.dumps(values, indent=indent) + "\n").encode()


def _into_place(partial: Path, path: Path) -> None:
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)


def _short(value: Any) -> str:
    return f"{value:.12}" if isinstance(value, str) else str(value)
