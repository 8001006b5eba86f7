# A copy of a target's folder with other tensors in it. Shards that stay as they are get a hard link or are copied byte
# by byte; tensors that move travel as bytes, whatever their dtype; the index is made anew. config.json comes last: a
# folder without it is nothing that any loader takes for a checkpoint.

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from drafters.checkpoint import replace_path, write_error
from drafters.errors import CheckpointError, ConfigError
from drafters.files import plain_name
from drafters.plain_json import parse
from drafters.progress import over
from export.mtp_names import model_type_of, module_prefix, spelling_of, text_section, with_count

__all__ = [
    "DTYPE_NAMES",
    "Stitch",
    "Stored",
    "load_stored",
    "read_json",
    "restore",
    "stitch",
    "stored_metadata",
    "stored_tensors",
]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATS = ("F64", "F32", "BF16", "F16")
# Weights in other formats, and what tells a folder's origin, are not carried along.
LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
LEFT_OUT_FILES = ("README.md", "drafters_source.json", CONFIG)
CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a safetensors file: bytes `start` to `stop`, dtype as safetensors spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Stitch:
    """What changes: `tensors` come in (from memory, or out of a file as they are), `drop` goes, `config` and `files`
    (by name) are new JSON, `metadata` describes the file of what comes in."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor | Stored] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError when it is missing or no JSON object."""
    try:
        content = parse(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; give a folder in the Hugging Face layout") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); the file is damaged") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object; the file is damaged")
    return content


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder, by its index where it has one. Raises CheckpointError for files that are
    missing or damaged, and for what the index names but no file holds."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map", {})
        try:
            names = sorted({plain_name(name) for name in index.values()})
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX}: {error}; it is damaged: copy it again") from error
    else:
        index = None
        names = [SINGLE] if (folder / SINGLE).is_file() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{folder}: no .safetensors file; give a folder in the Hugging Face layout")
    found: dict[str, Stored] = {}
    for name in names:
        for key, stored in _header(folder / name)[0].items():
            if index is None or index.get(key) == name:
                found[key] = stored
    if missing := sorted(set(index or ()) - found.keys()):
        raise CheckpointError(f"{folder / INDEX}: names {missing[0]}, which its file does not hold; copy it again")
    return found


def stored_metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself."""
    return _header(file)[1]


def load_stored(stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The tensors as they are in their files."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in sorted({one.file for one in stored.values()}):
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name, one in stored.items() if one.file == file})
    return tensors


def stitch(target: Path, out: Path, what: Stitch, *, link: bool = True) -> None:
    """Fill the empty folder `out` with `target` changed as `what` says; `link` makes hard links of shards that stay
    (a copy where the disks differ). Raises CheckpointError when the disk is too small or does not take it; a folder
    that is not finished has no config.json."""
    stored = stored_tensors(target)
    if clash := sorted(what.tensors.keys() & (stored.keys() - what.drop)):
        raise CheckpointError(f"{target}: holds {clash[0]} already; it would be there twice")
    kept: dict[Path, list[str]] = {}
    for name, one in stored.items():
        kept.setdefault(one.file, []).extend([] if name in what.drop else [name])
    parts = {file: names for file, names in kept.items() if names}
    out_names = _out_names(parts, added=bool(what.tensors))
    link = link and _same_disk(parts, out)
    _check_space(out, parts, stored, what, link=link)
    try:
        weight_map: dict[str, str] = {}
        for file, names in over(parts.items(), "copying the target", unit="files", total=len(parts)):
            weight_map.update(dict.fromkeys(names, out_names[file]))
            if what.drop.intersection(_header(file)[0]):
                _write({name: stored[name] for name in names}, out / out_names[file], _header(file)[1])
            else:
                _place(file, out / out_names[file], link=link)
        if what.tensors:
            added = _added_name(out_names.values())
            weight_map.update(dict.fromkeys(what.tensors, added))
            _write(what.tensors, out / added, {"format": "pt", **what.metadata})
        if len(set(weight_map.values())) > 1 or (target / INDEX).is_file():
            _write_json(_index(target, stored, what, weight_map), out / INDEX)
        _copy_rest(target, out, what)
        _write_json(what.config, out / f"{CONFIG}.tmp")
        (out / f"{CONFIG}.tmp").replace(out / CONFIG)
    except OSError as error:
        raise write_error(out, error) from error


def restore(quantized: Path, source: Path, out: Path, *, link: bool = True) -> list[str]:
    """Write `out`, the folder `quantized` with the MTP modules that `source` was published with and that saving or
    quantizing lost, byte by byte; where `quantized` has a quantization_config, it says that they are float. Returns the
    names of what came back.

    Raises CheckpointError when `source` has none or `quantized` still has some, ConfigError when they do not belong
    together or their config cannot say it.
    """
    from export.mtp_quant import as_float

    if out.exists():
        raise CheckpointError(f"{out}: exists; give a name that is free")
    config, origin = read_json(quantized / CONFIG), read_json(source / CONFIG)
    mine, theirs = text_section(config), text_section(origin)
    for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size"):
        if mine.get(key) != theirs.get(key):
            raise ConfigError(
                f"{quantized / CONFIG}: {key} is {mine.get(key)}, in {source} it is {theirs.get(key)}; "
                "accepted: the folder that it was made of"
            )
    spelling, num_layers = spelling_of(model_type_of(origin)), theirs["num_hidden_layers"]
    count = theirs.get(spelling.count_key) or 1
    prefixes = tuple(module_prefix(spelling, i, num_layers=num_layers) for i in range(count))
    lost = {name: one for name, one in stored_tensors(source).items() if name.startswith(prefixes)}
    if not lost:
        raise CheckpointError(f"{source}: holds no MTP modules ({prefixes[0]}...); give the folder that has them")
    if left := [name for name in stored_tensors(quantized) if name.startswith(prefixes)]:
        raise CheckpointError(f"{quantized}: holds {left[0]} already; there is nothing to restore")
    if strange := [name for name, one in lost.items() if one.dtype not in FLOATS]:
        raise ConfigError(f"{source}: {strange[0]} is {lost[strange[0]].dtype}; accepted: float tensors")
    modules = [name.rpartition(".")[0] for name, one in lost.items() if len(one.shape) == 2]
    config = with_count(config, spelling, count)
    config, files = as_float(quantized, config, spelling, modules, num_layers=num_layers)
    temp = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        stitch(quantized, temp, Stitch(config=config, tensors=lost, files=files), link=link)
        replace_path(temp, out)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return sorted(lost)


def _header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header is longer than the file")
            header = parse(stream.read(length))
            metadata = header.pop("__metadata__", {})
            begin = 8 + length
            found = {
                name: Stored(
                    file=file,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    start=begin + entry["data_offsets"][0],
                    stop=begin + entry["data_offsets"][1],
                )
                for name, entry in header.items()
            }
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file, though the folder needs it; copy it again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: no safetensors file ({error}); it is damaged: copy it again") from error
    if any(one.stop > size for one in found.values()):
        raise CheckpointError(f"{file}: shorter than its header says; it is damaged: copy it again")
    return found, metadata


def _write(tensors: Mapping[str, Tensor | Stored], path: Path, metadata: Mapping[str, str]) -> None:
    """A safetensors file. The widest numbers come first, so that every tensor is aligned."""
    facts: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, one in tensors.items():
        if isinstance(one, Stored):
            width = (one.stop - one.start) // max(1, _numel(one.shape))
            facts[name] = one.dtype, one.shape, one.stop - one.start, width
        else:
            facts[name] = DTYPE_NAMES[one.dtype], tuple(one.shape), one.nbytes, one.element_size()
    order = sorted(facts, key=lambda name: (-facts[name][3], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        dtype, shape, size, _ = facts[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in order:
            one = tensors[name]
            if isinstance(one, Stored):
                _copy_bytes(one, stream)
            elif one.numel():
                stream.write(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    path.chmod(0o644)


def _copy_bytes(stored: Stored, stream: BinaryIO) -> None:
    with stored.file.open("rb") as source:
        source.seek(stored.start)
        left = stored.stop - stored.start
        while left:
            part = source.read(min(CHUNK, left))
            stream.write(part)
            left -= len(part)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _out_names(parts: Iterable[Path], *, added: bool) -> dict[Path, str]:
    """A single file becomes the first of two: loaders that find `model.safetensors` look at no index."""
    names = {file: file.name for file in parts}
    if added and list(names.values()) == [SINGLE]:
        return dict.fromkeys(names, "model-00001-of-00002.safetensors")
    return names


def _added_name(others: Iterable[str]) -> str:
    taken = set(others)
    if taken == {"model-00001-of-00002.safetensors"}:
        return "model-00002-of-00002.safetensors"
    free = ("model-mtp.safetensors", *(f"model-mtp-{i}.safetensors" for i in range(2, len(taken) + 3)))
    return next(name for name in free if name not in taken)


def _same_disk(parts: Iterable[Path], out: Path) -> bool:
    if all(file.stat().st_dev == out.stat().st_dev for file in parts):
        return True
    warnings.warn(f"{out}: on another disk than the target; its files are copied, not linked", stacklevel=3)
    return False


def _check_space(
    out: Path, parts: Mapping[Path, list[str]], stored: Mapping[str, Stored], what: Stitch, *, link: bool
) -> None:
    needed = sum(one.stop - one.start if isinstance(one, Stored) else one.nbytes for one in what.tensors.values())
    for file, names in parts.items():
        if what.drop.intersection(_header(file)[0]):
            needed += sum(stored[name].stop - stored[name].start for name in names)
        elif not link:
            needed += file.stat().st_size
    free = shutil.disk_usage(out).free
    if needed > free:
        advice = "free some, or choose another folder" if link else "free some, or link=true on the target's own disk"
        raise CheckpointError(f"{out}: needs {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free; {advice}")


def _place(file: Path, destination: Path, *, link: bool) -> None:
    file = file.resolve()  # what the cache of the hub holds are links
    if link:
        try:
            os.link(file, destination)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
    shutil.copyfile(file, destination)


def _index(target: Path, stored: Mapping[str, Stored], what: Stitch, weight_map: Mapping[str, str]) -> dict[str, Any]:
    """As transformers writes it: the bytes of all tensors, and where each is."""
    old = read_json(target / INDEX).get("metadata", {}) if (target / INDEX).is_file() else {}
    size = count = 0
    for name in weight_map:
        one = what.tensors[name] if name in what.tensors else stored[name]
        size += one.stop - one.start if isinstance(one, Stored) else one.nbytes
        count += _numel(tuple(one.shape)) * (name in what.tensors)
    metadata = {**old, "total_size": size}
    if "total_parameters" in old:
        gone = sum(_numel(stored[name].shape) for name in what.drop)
        metadata["total_parameters"] = old["total_parameters"] + count - gone
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _copy_rest(target: Path, out: Path, what: Stitch) -> None:
    """Tokenizer, chat template, code, license."""
    for path in sorted(target.iterdir()):
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, out / path.name)
        is_left = path.name.startswith(".") or path.name.endswith(LEFT_OUT)
        if path.is_file() and not is_left and path.name not in (*LEFT_OUT_FILES, *what.files):
            shutil.copyfile(path, out / path.name)
    for name, content in what.files.items():
        _write_json(content, out / name)


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
