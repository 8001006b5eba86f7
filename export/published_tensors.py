# The tensors of a published draft: ours by the names that engines know, ids as offsets, projections quantized, and the
# rows of the target that a draft has to bring along; and the manifest of them, worked out from numbers alone.

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.progress import over
from drafters.spec import TargetSpec
from export.compressed import manifest_of, tensors_of
from export.families import family_of
from export.formats import Manifest
from export.published import published_name
from export.quantize import DTYPES, is_quantized, quantize, scheme_of
from export.shapes import shapes_of
from export.source import Source
from export.target_rows import embedding_rows, head_rows

__all__ = ["Manifest", "left_out", "published_manifest", "published_tensors", "row_shapes"]

STORED = {"bf16": "BF16", "f16": "F16", "f32": "F32"}  # as safetensors spells them
IDS = "vocab.d2t"


def published_tensors(source: Source, quant: str, *, dtype: str, eagle3_layer: str = "midlayer") -> dict[str, Tensor]:
    """All tensors of the file. Raises CheckpointError for weights that are not finite, ConfigError where `dtype` or
    `quant` cannot hold them or the target's rows are not at hand."""
    family = family_of(source.node)
    written = _target_rows(source, dtype)
    for name, tensor in over(source.tensors.items(), "writing", unit="tensors", total=len(source.tensors)):
        published = published_name(name, family, eagle3_layer=eagle3_layer)
        if name == IDS:
            written[published] = tensor - torch.arange(len(tensor))
        elif name in left_out(source.node):
            continue
        elif quant != "none" and is_quantized(name):
            quantized = quantize(tensor, scheme_of(quant, dtype=dtype), name=name)
            written |= tensors_of(published.removesuffix(".weight"), quantized, DTYPES[dtype])
        else:
            written[published] = _cast(tensor, dtype, name)
    return {name: tensor.contiguous() for name, tensor in written.items()}


def published_manifest(
    node: Mapping[str, Any], spec: TargetSpec, quant: str, *, dtype: str, eagle3_layer: str = "midlayer"
) -> Manifest:
    """Shape and dtype (as safetensors spells it) of every tensor that must be in the file."""
    family = family_of(node)
    found: Manifest = {name: (shape, STORED[dtype]) for name, shape in row_shapes(node, spec)}
    if node["draft_vocab_size"] is not None:
        found["t2d"] = ((spec.vocab_size,), "BOOL")
    for name, shape in shapes_of(node, spec).items():
        published = published_name(name, family, eagle3_layer=eagle3_layer)
        if name == IDS:
            found[published] = (shape, "I64")
        elif name in left_out(node):
            continue
        elif quant != "none" and is_quantized(name):
            rows, columns = shape
            scheme = scheme_of(quant, dtype=dtype)
            found |= manifest_of(published.removesuffix(".weight"), (rows, columns), scheme, DTYPES[dtype])
        else:
            found[published] = (shape, STORED[dtype])
    return found


def left_out(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Tensors of ours that a published draft has no place for: DFlash has no confidence head."""
    if family_of(node) == "parallel" and node["confidence"]:
        return ("confidence_head.proj.weight", "confidence_head.proj.bias")
    return ()


def row_shapes(node: Mapping[str, Any], spec: TargetSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of the target's rows that go along."""
    family, size = family_of(node), node["draft_vocab_size"]
    if family == "medusa":
        if not node["own_projection"]:
            yield "lm_heads.0.weight", (spec.vocab_size, spec.hidden_size)
        return
    if spec.embed_scale != 1.0:
        yield "embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
    if family != "eagle3" and size is not None:
        yield "lm_head.weight", (size, spec.hidden_size)


def _target_rows(source: Source, dtype: str) -> dict[str, Tensor]:
    """The target's rows that go along, and for a reduced vocabulary which of its tokens are in."""
    ids_V = source.tensors.get(IDS)
    rows: dict[str, Tensor] = {}
    for name, _ in row_shapes(source.node, source.spec):
        if name == "embed_tokens.weight":
            rows[name] = _cast(embedding_rows(source.target_folder, source.spec), dtype, name)
        else:
            rows[name] = _cast(head_rows(source.target_folder, source.spec, ids_V=ids_V), dtype, name)
    if ids_V is not None:
        rows["t2d"] = torch.zeros(source.spec.vocab_size, dtype=torch.bool).index_fill(0, ids_V, True)
    return rows


def _cast(tensor: Tensor, dtype: str, name: str) -> Tensor:
    if not tensor.isfinite().all():
        raise CheckpointError(
            f"{name}: holds NaN or infinite weights; a damaged drafter is not exported: train it again"
        )
    cast = tensor.to(DTYPES[dtype], copy=True)
    if not cast.isfinite().all():
        raise ConfigError(
            f"dtype: got {dtype}, but {name} has weights as large as {tensor.abs().max():.3g}; accepted: bf16, f32"
        )
    return cast
