# Reading and writing GGUF files through the `gguf` package, which is imported here alone and only when it is used. It
# needs no llama.cpp, and knows neither of its draft architectures: keys and names of tensors are plain text here.

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.progress import over
from export.gguf_tokenizer import Field

__all__ = ["open_gguf", "read_tensors", "stored_tensors", "write_gguf"]

_FILE_TYPE, _LAYOUT_VERSION = "general.file_type", 2


def write_gguf(
    path: Path, *, arch: str, fields: Iterable[Field], tensors: Mapping[str, tuple[Tensor, str]], file_type: int
) -> None:
    """A GGUF file: `fields` as they are, `tensors` by name with the type that each is rounded to. Raises ConfigError
    where a weight is too large for its type, CheckpointError for one that is no number, OSError when the disk does not
    take the file."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, arch)
    writer.add_uint32(_FILE_TYPE, file_type)
    writer.add_uint32("general.quantization_version", _LAYOUT_VERSION)
    for field in fields:
        _add(writer, field)
    for name, (tensor, type_name) in over(tensors.items(), "writing", unit="tensors", total=len(tensors)):
        if type_name == "I64":
            writer.add_tensor(name, tensor.contiguous().numpy())
            continue
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name}: holds NaN or infinite weights; a damaged drafter is not exported: train it again"
            )
        limit = torch.finfo(torch.float16).max
        if type_name not in ("F32", "BF16") and bool(tensor.abs().max() > limit):
            raise ConfigError(
                f"{name}: weights as large as {tensor.abs().max():.3g} do not fit {type_name}; "
                "accepted: to.type=BF16 or F32"
            )
        kind = GGMLQuantizationType[type_name]
        writer.add_tensor(name, quants.quantize(tensor.float().contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, field: Field) -> None:
    """Whole numbers are unsigned of 32 bits, lists of them signed: what llama.cpp reads them as."""
    value = field.value
    if isinstance(value, bool):
        writer.add_bool(field.key, value)
    elif isinstance(value, int):
        writer.add_uint32(field.key, value)
    elif isinstance(value, float):
        writer.add_float32(field.key, value)
    elif isinstance(value, str):
        writer.add_string(field.key, value)
    else:
        writer.add_array(field.key, value)


def open_gguf(path: Path, *, key: str) -> Any:
    """A reader of the file. Raises CheckpointError, naming `key`, when it is missing or damaged."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise CheckpointError(f"{key}: {path} cannot be read as GGUF: {error}; copy or export it again") from error


def stored_tensors(reader: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape, as we write it, and type of every tensor."""
    return {one.name: (_shape(one), one.tensor_type.name) for one in reader.tensors}


def read_tensors(reader: Any) -> dict[str, Tensor]:
    """Every tensor, dequantized to float32 (int64 as it is)."""
    from gguf import quants

    found = {}
    for one in reader.tensors:
        is_ids = one.tensor_type.name == "I64"
        array = one.data if is_ids else quants.dequantize(one.data, one.tensor_type)
        found[one.name] = torch.from_numpy(array.copy()).view(_shape(one))
    return found


def _shape(one: Any) -> tuple[int, ...]:
    """GGUF counts dimensions from the fastest."""
    return tuple(int(size) for size in reversed(one.shape))
