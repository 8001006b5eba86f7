# What one optimizer step is made of: the sums of its accumulated batches, and whether all they held was finite. It is
# gathered on the device without waiting for it; the step reads it once.

from collections.abc import Mapping

import torch
from torch import Tensor

from drafters.types import Batch, Losses

__all__ = ["Window"]


class Window:
    """The batches since the last optimizer step, on this rank."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self._finite: list[tuple[tuple[int, ...], dict[str, Tensor]]] = []

    def add(self, batch: Batch, losses: Losses) -> None:
        """Counts one batch in; keeps no reference to its tensors."""
        for name, value in ({"count": losses.count, "loss": losses.total} | dict(losses.terms)).items():
            self.sums[name] = self.sums.get(name, torch.zeros(())) + value.detach().double()
        checked = {
            "batch.aux_BTLD": batch.aux_BTLD,
            "batch.last_BTD": batch.last_BTD,
            "batch.lse_BT": batch.lse_BT,
            **{f"loss term '{name}'": term for name, term in losses.terms.items()},
            "loss": losses.total,
        }
        self._finite.append((batch.sample_ids, _finite(checked)))

    def finite(self) -> Tensor:
        """0-d bool: everything counted in was finite."""
        return torch.stack([flag for _, flags in self._finite for flag in flags.values()]).all()

    def first_alarm(self) -> tuple[str | None, tuple[int, ...]]:
        """(name of the first tensor that was not finite, ids of its batch), else (None, ids of all batches)."""
        for sample_ids, flags in self._finite:
            for name, flag in flags.items():
                if not flag:
                    return name, sample_ids
        return None, tuple(one for sample_ids, _ in self._finite for one in sample_ids)


def _finite(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: _all_finite(tensor.detach()) for name, tensor in tensors.items() if tensor is not None}


def _all_finite(tensor: Tensor) -> Tensor:
    # The extremes are nan where any element is: one pass and no mask, a tenth of the time of isfinite().all().
    low, high = tensor.aminmax()
    return low.isfinite() & high.isfinite()
