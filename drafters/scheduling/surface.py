# Seconds over two axes, rows and something else, from points that were measured: linear between them, and beyond them
# by a rule that never makes more work cheaper. numpy, since one number must not cost a dozen tensor operations.

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Surface"]


class Surface:
    """Seconds over rows and another axis: one piecewise linear curve for each number of rows, blended between two of
    them. `per_row`: the other axis counts over all rows, and curves are compared at the same count a row."""

    def __init__(
        self,
        name: str,
        rows: Sequence[int | None],
        curves: Sequence[tuple[Sequence[float], Sequence[float]]],
        *,
        per_row: bool = False,
    ) -> None:
        self.name, self.per_row = name, per_row
        self.rows = [0 if count is None else count for count in rows]
        self.curves = [(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)) for x, y in curves]
        if per_row:
            self.curves = [(x / count, y) for count, (x, y) in zip(self.rows, self.curves, strict=True)]
        self.warned = False

    def __call__(self, rows: int | Tensor, x: float | Tensor) -> Any:
        """Seconds at numbers, a float, or at tensors that broadcast, a float64 tensor."""
        if not isinstance(rows, Tensor):
            if not isinstance(x, Tensor):
                return float(self.at(rows, x))
            return torch.from_numpy(np.asarray(self.at(rows, _numpy(x)))).to(x.device)
        both = torch.broadcast_tensors(rows, x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64))
        rows_N, x_N = (_numpy(one.reshape(-1)) for one in both)
        seconds_N = np.zeros(len(rows_N))
        for count in np.unique(rows_N):
            here_N = rows_N == count
            seconds_N[here_N] = self.at(int(count), x_N[here_N])
        return torch.from_numpy(seconds_N).view(both[0].shape).to(rows.device)

    def at(self, rows: int, x: Any) -> Any:
        """Seconds at one number of rows and an array of `x`."""
        if rows == 0 or not self.curves:
            return np.zeros(np.shape(x))
        if len(self.curves) == 1:
            return self._along(0, x)
        place = x / rows if self.per_row else x
        right = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        left = right - 1
        if rows <= self.rows[0]:
            return self._along(0, place)
        share = (rows - self.rows[left]) / (self.rows[right] - self.rows[left])
        if share == 0 or share == 1:
            return self._along(left if share == 0 else right, place)
        low, high = self._along(left, place), self._along(right, place)
        if share < 1:
            return low + share * (high - low)
        self._warn()
        return high + (share - 1) * np.maximum(high - low, 0.0)

    def _along(self, i: int, x: Any) -> Any:
        """Seconds along one curve."""
        xs, ys = self.curves[i]
        inside = np.interp(x, xs, ys)
        beyond = np.maximum(x - xs[-1], 0.0)
        if not np.any(beyond > 0):
            return inside
        self._warn()
        return inside + beyond * self._slope(xs, ys)

    @staticmethod
    def _slope(xs: Any, ys: Any) -> float:
        if len(xs) == 1:
            return 0.0
        last = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return float(last) if last > 0 else max(float((ys[-1] - ys[0]) / (xs[-1] - xs[0])), 0.0)

    def _warn(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"profile: costs beyond the largest measured `{self.name}` point are asked for; they are drawn out "
                "linearly, which may be far off: measure more rows or tokens",
                stacklevel=4,
            )


def _numpy(values: Tensor) -> Any:
    return values.detach().to("cpu", torch.float64).numpy()
