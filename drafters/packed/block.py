# The one block that holds all tensors of a packed drafter. Its file is a safetensors file with a single tensor of
# bytes, and an index in the header says which part lies where. Matrices that are multiplied with the same input are one
# part, one below the other. Nothing is computed when a block is opened: parts are views of the mapped file.

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.errors import CheckpointError
from drafters.plain_json import parse

__all__ = ["ALIGNMENT", "Block", "Part", "block_size", "save_block"]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
TENSOR, INDEX = "block", "drafters.packed"
SCHEMA = 1
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}
FORMS = ("int8", "int4", *PLAIN)

# dtype and shape of each array of a part, in the order in which they lie
Arrays = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors `names` with `rows` each, joined along their first axis to `shape`. `form`: a dtype, for what is not
    quantized; "int8": values [N, K] with a scale a row, in the dtype that its kernel reads; "int4": two values a byte,
    in tiles (see `nibbles`), with a bfloat16 pair (scale, offset) for `group_size` neighbours of a row. `symmetric`: a
    value of 0 means 0. `quantized_inputs`: its products quantize what comes in, too."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    form: str
    group_size: int | None = None
    symmetric: bool = True
    quantized_inputs: bool = False

    def arrays(self) -> Arrays:
        """What is stored. Raises ValueError for numbers that no part has."""
        if self.form in PLAIN:
            return {"values": (PLAIN[self.form], self.shape)}
        if self.form not in ("int8", "int4") or len(self.shape) != 2:
            raise ValueError(f"shape {self.shape} as {self.form!r}")
        rows, width = self.shape
        if self.form == "int8":
            zero: Arrays = {} if self.symmetric else {"zero": (torch.int8, (rows,))}
            scale = torch.float32 if self.quantized_inputs else torch.bfloat16
            return {"values": (torch.int8, (rows, width)), "scale": (scale, (rows,)), **zero}
        if not self.group_size or width % self.group_size or width % 2:
            raise ValueError(f"group size {self.group_size} of width {width}")
        return {
            "values": (torch.uint8, (rows, width // 2)),
            "scale_zero": (torch.bfloat16, (width // self.group_size, rows, 2)),
        }

    @property
    def label(self) -> str:
        """The tensors' names, for messages."""
        return ", ".join(self.names)


def block_size(parts: Sequence[Part]) -> tuple[int, int]:
    """Bytes of the block of these parts, and how many of them are padding."""
    spans = list(_spans(parts))
    size = _aligned(spans[-1][1]) if spans else 0
    return size, size - sum(end - start for start, end in spans)


def save_block(parts: Mapping[Part, Mapping[str, Tensor]], path: Path) -> None:
    """Writes a block with the arrays of each part, in this order. Raises OSError when the disk does not take it."""
    size, _ = block_size(list(parts))
    data, entries = torch.zeros(size, dtype=torch.uint8), []
    spans = _spans(list(parts))
    for part, arrays in parts.items():
        at, sums = {}, {}
        for name, (dtype, shape) in part.arrays().items():
            array = arrays[name]
            assert (array.dtype, tuple(array.shape)) == (dtype, shape), f"{part.label}: {name} is {array.dtype}"
            start, end = next(spans)
            data[start:end] = array.detach().cpu().contiguous().flatten().view(torch.uint8)
            at[name], sums[name] = [start, end], _checksum(data[start:end])
        entries.append({**asdict(part), "at": at, "crc32": sums})
    index = json.dumps({"schema": SCHEMA, "parts": entries}, separators=(",", ":"))
    header = json.dumps(
        {
            "__metadata__": {"format": "pt", INDEX: index},
            TENSOR: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        },
        separators=(",", ":"),
    ).encode()
    # The format allows spaces after the header: with them the block is aligned in the file, and so in memory.
    header += b" " * (_aligned(8 + len(header)) - 8 - len(header))
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.write(data.numpy().data)


class Block:
    """An opened block: `parts` and, for each, views of the file's memory map. The map is private and copied on write:
    the file never changes through it."""

    def __init__(self, data: Tensor, parts: Sequence[Part], sums: Sequence[Mapping[str, int]], path: Path) -> None:
        self.data, self.parts, self.path = data, tuple(parts), path
        self._sums = tuple(sums)
        self._arrays: dict[Part, dict[str, Tensor]] = {}
        spans = _spans(self.parts)
        for part in self.parts:
            self._arrays[part] = {}
            for name, (dtype, shape) in part.arrays().items():
                start, end = next(spans)
                self._arrays[part][name] = data[start:end].view(dtype).view(shape)

    @classmethod
    def open(cls, path: Path) -> "Block":
        """Map the file of a block. Raises CheckpointError, naming what is wrong, for a file that is missing, cut short,
        or has another index than its size and shapes allow. The bytes of the parts are not read: `check` does that."""
        header, start = _read_header(path)
        try:
            held = header[TENSOR]
            index = parse(header["__metadata__"][INDEX])
            size = held["shape"][0]
            if held["dtype"] != "U8" or held["data_offsets"] != [0, size]:
                raise ValueError(f"'{TENSOR}' is no tensor of bytes")
            if index["schema"] != SCHEMA:
                raise CheckpointError(
                    f"{path}: schema of its index is {index['schema']!r}; this version reads {SCHEMA}"
                )
            entries = index["parts"]
            parts, sums = [_part(entry) for entry in entries], [dict(entry["crc32"]) for entry in entries]
            places = [dict(entry["at"]) for entry in entries]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: its index is damaged ({error!r}); export the drafter again") from error
        _check_places(path, parts, places, size)
        found = path.stat().st_size - start
        if found != size:
            raise CheckpointError(
                f"{path}: its block has {found} bytes, its index says {size}; the file is "
                f"{'cut short' if found < size else 'damaged'}: copy it again"
            )
        data = torch.from_file(str(path), shared=False, size=start + size, dtype=torch.uint8)[start:]
        return cls(data, parts, sums, path)

    def arrays(self, part: Part) -> dict[str, Tensor]:
        """The stored arrays of a part, as views."""
        return self._arrays[part]

    def check(self) -> None:
        """Read every byte once. Raises CheckpointError naming the tensors that are damaged."""
        damaged = [
            part.label
            for part, sums in zip(self.parts, self._sums, strict=True)
            for name, array in self._arrays[part].items()
            if _checksum(array.flatten().view(torch.uint8)) != sums.get(name)
        ]
        if damaged:
            raise CheckpointError(f"{self.path}: {damaged[0]}: its bytes are damaged; copy the file again")


def _spans(parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Where every array lies, [start, end) from the beginning of the block."""
    end = 0
    for part in parts:
        for dtype, shape in part.arrays().values():
            start = _aligned(end)
            end = start + math.prod(shape) * dtype.itemsize
            yield start, end


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _checksum(data: Tensor) -> int:
    return zlib.crc32(data.numpy().data)


def _part(entry: Mapping[str, Any]) -> Part:
    given: dict[str, Any] = {}
    for field in fields(Part):
        value = entry[field.name]
        given[field.name] = tuple(value) if isinstance(value, list) else value
    part = Part(**given)
    whole = isinstance(part.rows, tuple) and all(isinstance(n, int) and n >= 0 for n in (*part.rows, *part.shape))
    if not whole or len(part.names) != len(part.rows) or (part.shape and sum(part.rows) != part.shape[0]):
        raise ValueError(f"rows {part.rows} of {part.names} are not those of shape {part.shape}")
    part.arrays()
    return part


def _check_places(path: Path, parts: Sequence[Part], places: Sequence[Mapping[str, list[int]]], size: int) -> None:
    names = [name for part in parts for name in part.names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckpointError(f"{path}: {twice[0]} is in its index twice; export the drafter again")
    spans = _spans(parts)
    for part, at in zip(parts, places, strict=True):
        wanted = {name: list(next(spans)) for name in part.arrays()}
        if at != wanted:
            raise CheckpointError(
                f"{path}: {part.label}: its index says {at}, {list(part.shape)} as {part.form} needs {wanted}; "
                "the index is damaged: export the drafter again"
            )
    if size != block_size(parts)[0]:
        raise CheckpointError(
            f"{path}: its index says {size} bytes, its parts need {block_size(parts)[0]}; the index is damaged: export "
            "the drafter again"
        )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data starts."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= path.stat().st_size else b""
        header = parse(text)
        if not isinstance(header, dict):
            raise ValueError("it holds no object")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}; give the folder of a packed drafter"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is damaged ({error}); copy the file again") from error
    return header, 8 + length
