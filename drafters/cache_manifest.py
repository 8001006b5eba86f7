# What a folder of states says of itself: the key (everything that changes the numbers), the shards with their
# checksums, and `cache.json`, which holds both.

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from drafters.errors import DataError
from drafters.plain_json import parse, sealed, unsealed
from drafters.spec import TargetSpec
from drafters.storage import Folder, open_folder
from drafters.types import Example, Needs

__all__ = ["CacheKey", "Manifest", "Shard", "data_hash", "example_digest", "json_bytes", "shard_name"]

SCHEMA = 1
MANIFEST, SAMPLES, SPLITS = "cache.json", "samples.json", "splits.json"
ALL, SUPERVISED = "all", "supervised"  # positions whose state after the final norm is stored


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
    def load(cls, folder: Folder | Path | str) -> "Manifest":
        """Raises DataError when there is none, or it is damaged or written by another version."""
        folder = open_folder(folder)
        try:
            values = parse(folder.read(MANIFEST))
            if (schema := values["key"]["schema"]) != SCHEMA:
                raise DataError(f"cache: {folder} has schema {schema}, this version reads {SCHEMA}; capture it again")
            values = unsealed(values)
            key = CacheKey(**values.pop("key"))
            shards = tuple(shard and Shard(**shard) for shard in values.pop("shards"))
            layer_ids = tuple(values.pop("layer_ids"))
            if values.pop("key_digest") != key.digest:
                raise ValueError("its key_digest is not of its key")
            for number, shard in enumerate(shards):
                if shard is not None and shard.name != shard_name(number):
                    raise ValueError(f"it names {shard.name!r:.80} as shard {number}, which is {shard_name(number)}")
            return cls(key=key, shards=shards, layer_ids=layer_ids, **values)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"cache: no {MANIFEST} in {folder}; make it with `python -m data.capture`") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"cache: {folder.name_of(MANIFEST)} is damaged ({error}); remove that file alone, the capture command "
                "makes it again and keeps the shards"
            ) from error

    @property
    def content_digest(self) -> str:
        """sha256 (hex) of everything but the shards: what each of them is to hold."""
        content = json.dumps({**asdict(self), "shards": len(self.shards)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    def save(self, folder: Folder) -> None:
        """Replace `cache.json` atomically."""
        folder.write(MANIFEST, json_bytes(sealed({"key_digest": self.key.digest, **asdict(self)}), indent=1))

    def with_shards(self, found: Mapping[int, Shard | None]) -> "Manifest":
        """The manifest with other shards in the places of `found`."""
        return replace(self, shards=tuple(found.get(i, shard) for i, shard in enumerate(self.shards)))

    def missing(self, sizes: Mapping[str, int]) -> list[int]:
        """Shards that are not finished, not there, or not whole, in a folder with files of these sizes in bytes."""
        return [i for i, shard in enumerate(self.shards) if shard is None or sizes.get(shard.name) != shard.num_bytes]

    def check_key(self, expected: CacheKey, folder: Folder) -> None:
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

    def check_needs(self, needs: Needs, folder: Folder) -> None:
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


def shard_name(number: int) -> str:
    """File of a shard."""
    return f"shard-{number:05d}.safetensors"


def json_bytes(values: dict[str, Any], *, indent: int | None = None) -> bytes:
    """JSON text with a newline at its end."""
    return (json.dumps(values, indent=indent) + "\n").encode()


def _short(value: Any) -> str:
    return f"{value:.12}" if isinstance(value, str) else str(value)
