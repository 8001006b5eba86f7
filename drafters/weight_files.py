# What the files of a folder of weights say of it: its fingerprint, and which shards its index names.

import hashlib
import json
from pathlib import Path
from typing import Any

from drafters.errors import CheckpointError
from drafters.files import plain_name
from drafters.plain_json import parse

__all__ = ["INDEX", "SOURCE_FILE", "fingerprint", "read_values", "shard_files"]

INDEX = "model.safetensors.index.json"
SOURCE_FILE = "drafters_source.json"  # in a folder that was made of one file: which one


def fingerprint(folder: Path) -> str:
    """A hash of the weights that is fast for any size: of config.json, which changes the states as well, and of every
    safetensors file's header, length and 64 evenly spaced blocks of 64 KiB; for a folder that was made of one file, the
    sha256 of that file."""
    source = folder / SOURCE_FILE
    if source.is_file():
        return str(read_values(source)["sha256"])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"target.weights: {folder} holds no .safetensors file; give the folder of a model in that format"
        )
    config = read_values(folder / "config.json")
    kept = {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, 1 << 26)))
            for block in range(64):
                stream.seek(size * block // 64)
                digest.update(stream.read(1 << 16))
    return digest.hexdigest()


def read_values(path: Path) -> dict[str, Any]:
    """A JSON object of a folder of weights. Raises CheckpointError where it is none."""
    try:
        values = parse(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"target.weights: {path} cannot be read: {error}; fetch the weights again") from error
    return values


def shard_files(index: Path) -> list[Path]:
    """The files that an index of safetensors names, all beside it. Raises CheckpointError where it is damaged, or names
    one elsewhere."""
    try:
        names = {plain_name(name) for name in read_values(index)["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"target.weights: {index} is damaged: {error}; fetch the weights again") from error
    return [index.with_name(name) for name in sorted(names)]
