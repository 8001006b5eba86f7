# The matrix products between hidden states and vocabulary rows, and their gradients, for one chunk of rows.
# In bfloat16 a logit near 20 is rounded by up to 0.06. So where the vocabulary rows are copied, the draft's bias and
# the target's log-sum-exp ride along as extra columns of the same product: it is rounded once, and the logits that
# matter lie near zero. A `Workspace` keeps what is the same in every step.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.loss_chunks import chunk_rows, scratch_rows

if TYPE_CHECKING:
    from drafters.target import TargetHead

__all__ = ["Chunk", "VocabProducts", "Workspace", "logits_in_parts"]

# The offset takes two columns (its bfloat16 value and the rest); a multiple of 32 keeps the products fast.
OFFSET_COLUMNS = 32


@dataclass(kw_only=True)
class Chunk:
    """Raw products of some rows; `VocabProducts.write` puts gradients in their place. `own`: of W_2 alone."""

    raw_NV: Tensor
    own: bool = False
    bias_NV: Tensor | None = None
    offset_N: Tensor | None = None


class VocabProducts:
    """Logits softcap(logit_scale * x @ W^T) + bias @ W_2^T - offset over `support_V` (None = the whole vocabulary).

    The bias and the offset come after the softcap. A drafter with an output projection of its own has no x: its weight
    is W_2, and its states are the factor. `folded`: no softcap and a copy of the rows, so one product
    does it all; of a reduced vocabulary, and on a CPU where drafts are `biased`.
    """

    def __init__(
        self,
        head: "TargetHead",
        *,
        support_V: Tensor | None,
        dtype: torch.dtype,
        workspace: "Workspace",
        biased: bool = False,
    ) -> None:
        self.scale = head.spec.logit_scale
        self.cap = head.spec.logit_softcap
        self.width = head.lm_head_VD.shape[1]
        self.workspace = workspace
        self.bias_weight_VR: Tensor | None = None
        # On a CPU a copy of all rows costs less than a product, a buffer and two passes for the bias alone.
        copied = support_V is not None or (biased and head.lm_head_VD.device.type == "cpu")
        self.folded = copied and self.cap is None
        self.at_bias = self.width + OFFSET_COLUMNS
        if not self.folded:
            self.weight_VK = head.rows(support_V).to(dtype)
            return
        rows_VD = head.lm_head_VD if support_V is None else head.lm_head_VD.index_select(0, support_V)
        self.weight_VK = rows_VD.new_zeros(len(rows_VD), self.at_bias, dtype=dtype)
        self.weight_VK[:, : self.width] = rows_VD
        self.weight_VK[:, self.width : self.width + 2] = 1.0

    def set_bias(self, bias_weight_VR: Tensor | None) -> None:
        """Use this W_2 from now on; its width must stay the same."""
        if bias_weight_VR is None:
            return
        if not self.folded:
            self.bias_weight_VR = bias_weight_VR.detach().to(self.weight_VK.dtype)
            return
        num_rows, columns = len(self.weight_VK), self.at_bias + bias_weight_VR.shape[1]
        if self.weight_VK.shape[1] != columns:
            wider_VK = self.weight_VK.new_empty(num_rows, columns)
            wider_VK[:, : self.at_bias] = self.weight_VK[:, : self.at_bias]
            self.weight_VK = wider_VK
        self.bias_weight_VR = self.weight_VK[:, self.at_bias :]
        self.bias_weight_VR.copy_(bias_weight_VR.detach())

    def multiply(
        self,
        hidden_ND: Tensor | None,
        *,
        bias_NR: Tensor | None = None,
        offset_N: Tensor | None = None,
        buffer: str = "raw",
    ) -> Chunk:
        """The products of N rows; `offset_N` float32, `bias_NR` the factor before W_2. Valid until the next call with
        the same `buffer`."""
        if hidden_ND is None:
            return self._multiply_own(bias_NR, offset_N)
        hidden_ND = (hidden_ND if self.scale == 1.0 else hidden_ND * self.scale).to(self.weight_VK.dtype)
        raw_NV = self.workspace.buffer(buffer, len(hidden_ND), len(self.weight_VK), like=hidden_ND)
        if not self.folded:
            bias_NV = None
            if bias_NR is not None and self.bias_weight_VR is not None:
                bias_NV = torch.mm(bias_NR.to(self.weight_VK.dtype), self.bias_weight_VR.T)
            torch.mm(hidden_ND, self.weight_VK.T, out=raw_NV)
            return Chunk(raw_NV=raw_NV, bias_NV=bias_NV, offset_N=offset_N)
        num_columns = self.at_bias if bias_NR is None else self.weight_VK.shape[1]
        wide_NK = self.weight_VK.new_zeros(len(hidden_ND), num_columns)
        wide_NK[:, : self.width] = hidden_ND
        self._fill(wide_NK[:, self.width :], bias_NR, offset_N)
        return Chunk(raw_NV=torch.mm(wide_NK, self.weight_VK[:, :num_columns].T, out=raw_NV))

    def _multiply_own(self, factor_NR: Tensor | None, offset_N: Tensor | None) -> Chunk:
        assert factor_NR is not None
        assert self.bias_weight_VR is not None
        factor_NR = factor_NR.to(self.weight_VK.dtype)
        raw_NV = self.workspace.buffer("raw", len(factor_NR), len(self.weight_VK), like=factor_NR)
        if not self.folded:
            return Chunk(raw_NV=torch.mm(factor_NR, self.bias_weight_VR.T, out=raw_NV), own=True, offset_N=offset_N)
        weight_VK = self.weight_VK[:, self.width :]
        wide_NK = weight_VK.new_zeros(len(factor_NR), weight_VK.shape[1])
        self._fill(wide_NK, factor_NR, offset_N)
        return Chunk(raw_NV=torch.mm(wide_NK, weight_VK.T, out=raw_NV), own=True)

    def _fill(self, extra_NK: Tensor, bias_NR: Tensor | None, offset_N: Tensor | None) -> None:
        """The columns after the hidden state's: the offset and the factor."""
        if offset_N is not None:
            high_N = offset_N.to(extra_NK.dtype)
            extra_NK[:, 0] = -high_N
            extra_NK[:, 1] = high_N - offset_N
        if bias_NR is not None:
            extra_NK[:, OFFSET_COLUMNS:] = bias_NR

    def read(self, chunk: Chunk, rows: slice, out: Tensor) -> Tensor:
        """Float logits of some rows of the chunk, into `out`."""
        out.copy_(chunk.raw_NV[rows])
        if self.cap is not None and not chunk.own:
            out.div_(self.cap).tanh_().mul_(self.cap)
        if chunk.bias_NV is not None:
            out.add_(chunk.bias_NV[rows])
        if chunk.offset_N is not None:
            out.sub_(chunk.offset_N[rows, None])
        return out

    def write(self, chunk: Chunk, rows: slice, gradient_NV: Tensor) -> None:
        """Replace the raw products of some rows by the gradients of a loss with respect to them."""
        if chunk.bias_NV is not None:
            chunk.bias_NV[rows] = gradient_NV
        if self.cap is not None and not chunk.own:
            capped_NV = chunk.raw_NV[rows].to(gradient_NV.dtype).div_(self.cap).tanh_()
            gradient_NV.addcmul_(gradient_NV * capped_NV, capped_NV, value=-1.0)
        chunk.raw_NV[rows] = gradient_NV

    def backward(self, chunk: Chunk, bias_NR: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the rows [N, D], of the bias factor [N, R] and of W_2 [V', R], after every row was written."""
        bias_grad_NV = chunk.raw_NV if chunk.bias_NV is None else chunk.bias_NV
        if chunk.own:
            assert bias_NR is not None
            assert self.bias_weight_VR is not None
            factor_NR = torch.mm(bias_grad_NV, self.bias_weight_VR)
            return None, factor_NR, torch.mm(bias_grad_NV.T, bias_NR.to(bias_grad_NV.dtype))
        if self.folded:
            wide_NK = torch.mm(chunk.raw_NV, self.weight_VK)
            hidden_ND, factor_NR = wide_NK[:, : self.width], wide_NK[:, self.at_bias :]
        else:
            hidden_ND = torch.mm(chunk.raw_NV, self.weight_VK)
            factor_NR = bias_grad_NV if self.bias_weight_VR is None else torch.mm(bias_grad_NV, self.bias_weight_VR)
        hidden_ND = hidden_ND if self.scale == 1.0 else hidden_ND * self.scale
        if bias_NR is None:
            return hidden_ND, None, None
        return hidden_ND, factor_NR, torch.mm(bias_grad_NV.T, bias_NR.to(bias_grad_NV.dtype))


def logits_in_parts(head: "TargetHead", hidden_ND: Tensor, *, dtype: torch.dtype) -> Iterator[Tensor]:
    """Float logits [rows, V] over the whole vocabulary of states after the final norm, in order, each valid until the
    next: products of many rows in `dtype`, which a few rows at a time become float in memory that stays in the cache.
    """
    products = VocabProducts(head, support_V=None, dtype=dtype, workspace=Workspace())
    device, num_vocab = hidden_ND.device, len(products.weight_VK)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scratch = hidden_ND.new_empty(scratch_rows(device, num_vocab), num_vocab, dtype=wide)
    for states in hidden_ND.split(chunk_rows(device, num_vocab)):
        chunk = products.multiply(states)
        for first in range(0, len(states), len(scratch)):
            part = slice(first, min(first + len(scratch), len(states)))
            yield products.read(chunk, part, scratch[: part.stop - first])


class Workspace:
    """What repeated calls share: gathered vocabulary rows and scratch tensors. Empty when copied or pickled."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}
        self._products: VocabProducts | None = None
        self._made_of: tuple[Tensor, Tensor | None, torch.dtype, bool] | None = None

    def __reduce__(self) -> tuple[type["Workspace"], tuple[()]]:
        return Workspace, ()

    def products(
        self, head: "TargetHead", support_V: Tensor | None, dtype: torch.dtype, *, biased: bool = False
    ) -> VocabProducts:
        """Products over `support_V`, made anew when the head, the support or the dtype is another."""
        made_of = (head.lm_head_VD, support_V, dtype, biased)
        if self._products is None or self._made_of is None or any(map(lambda a, b: a is not b, made_of, self._made_of)):
            self._products = VocabProducts(head, support_V=support_V, dtype=dtype, workspace=self, biased=biased)
            self._made_of = made_of
        return self._products

    def buffer(self, name: str, rows: int, columns: int, *, like: Tensor) -> Tensor:
        """Uninitialised [rows, columns] of the dtype and device of `like`; the next call of that name reuses it."""
        flat = self._flat.get(name)
        if flat is None or flat.numel() < rows * columns or flat.dtype != like.dtype or flat.device != like.device:
            flat = self._flat[name] = like.new_empty(rows * columns)
        return flat[: rows * columns].view(rows, columns)
