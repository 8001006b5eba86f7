# The target states of a batch in the order in which a drafter reads its layers.

from torch import Tensor

from drafters.errors import DataError
from drafters.types import Batch

__all__ = ["aux_of"]


def aux_of(batch: Batch, layer_ids: tuple[int, ...]) -> Tensor:
    """States [B, T, L, D] of these layers of a batch that may hold more. Raises DataError where it lacks one."""
    missing = set(layer_ids) - set(batch.layer_ids)
    if batch.aux_BTLD is None or missing:
        raise DataError(f"batch: no states of target layers {sorted(missing)}; it has {list(batch.layer_ids)}")
    if batch.layer_ids == layer_ids:
        return batch.aux_BTLD
    return batch.aux_BTLD[:, :, [batch.layer_ids.index(i) for i in layer_ids]]
