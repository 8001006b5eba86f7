# Finished shards before the manifest lists them: beside each stands a small record of its size and checksum, so that no
# two processes write one file, and what a process has finished outlives it. The next start merges records into the
# manifest.

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from drafters.cache_manifest import Manifest, Shard, json_bytes, shard_name
from drafters.files import file_sha256, save_tensors
from drafters.plain_json import parse
from drafters.storage import Folder

__all__ = ["read_record", "record_name", "shard_name", "write_record", "write_shard"]


def record_name(number: int) -> str:
    """File of a shard's record."""
    return f"shard-{number:05d}.json"


def write_shard(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> Shard:
    """Write a shard under a temporary name, flush it to the disk, and move it into its place."""
    with folder.scratch() as scratch:
        path: Path = scratch / name
        save_tensors(tensors, path)
        sha256, num_bytes = file_sha256(path), path.stat().st_size
        folder.put(path, name)
    num_samples, num_tokens = len(tensors["offsets"]) - 1, len(tensors["tokens"])
    return Shard(name=name, sha256=sha256, num_bytes=num_bytes, num_samples=num_samples, num_tokens=num_tokens)


def write_record(folder: Folder, number: int, shard: Shard, manifest: Manifest) -> None:
    """Say that a shard is complete. Call it once the shard is in its place."""
    values = {"key_digest": manifest.key.digest, "content_digest": manifest.content_digest, **asdict(shard)}
    folder.write(record_name(number), json_bytes(values, indent=1))


def read_record(folder: Folder, number: int, sizes: Mapping[str, int], manifest: Manifest) -> Shard | None:
    """The shard that a record describes; None where there is none, or one of another capture, or where the file is not
    there in its full size. `sizes` are those of the folder's files, in bytes."""
    if record_name(number) not in sizes:
        return None
    try:
        values = parse(folder.read(record_name(number)))
        digests, shard = (values.pop("key_digest"), values.pop("content_digest")), Shard(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    is_whole = shard.name == shard_name(number) and sizes.get(shard.name) == shard.num_bytes
    return shard if is_whole and digests == (manifest.key.digest, manifest.content_digest) else None
