# Matrices in a block and the kernels that multiply with them, chosen by measurement (tests/bench/packed.py). Eight bits
# on a CPU: integer products with inputs quantized row by row, so that a row's result is the same to the bit in any
# batch; or float inputs, a few rows at a time. Four bits: float inputs. On a GPU torch's weight-only kernels. Where no
# kernel is fast, a copy in floats is made when it is first needed, and kept.

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.packed.block import Block, Part
from drafters.packed.nibbles import TILE, tile, untile

__all__ = ["Int4Matrix", "Int8Matrix", "Matrix", "dequantize", "matrix_of", "quantize_rows"]

# Kernels with float inputs unpack the weights again for every four rows of these: above so many, floats are faster.
MOST_ROWS = 16
# The eight-bit one reads beyond rows whose width is no multiple of its vectors, unchecked: of 16 with AVX-512.
WIDTHS = 32


class Matrix(ABC):
    """A matrix [N, K]. Rows `start` to `stop` of it serve as a matrix of their own."""

    shape: tuple[int, int]
    device: torch.device

    @abstractmethod
    def product(self, x_MK: Tensor, start: int, stop: int) -> Tensor:
        """x W^T [M, stop - start] with these rows, in float32 or the dtype of `x_MK`, as the kernel gives it."""

    @abstractmethod
    def rows(self, ids_X: Tensor) -> Tensor:
        """Float32 rows [X, K] by number."""

    @abstractmethod
    def to(self, device: torch.device) -> "Matrix":
        """The same matrix on another device, ready for its kernels."""

    @abstractmethod
    def arrays(self) -> tuple[Tensor, ...]:
        """All that it holds: views of the block, and what was made of them."""


def matrix_of(block: Block, part: Part) -> Matrix:
    """The matrix of a quantized part, on views of the block."""
    arrays = block.arrays(part)
    if part.form == "int8":
        return Int8Matrix(arrays["values"], arrays["scale"], arrays.get("zero"), quantized_inputs=part.quantized_inputs)
    return Int4Matrix(arrays["values"], arrays["scale_zero"])


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [M, K] from -127 to 127, and the float32 step [M, 1] between them, for every row by itself."""
    x_MK = x_MK.float()
    # A row of zeros stays one.
    step_M1 = x_MK.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
    return (x_MK / step_M1).round_().to(torch.int8), step_M1


def dequantize(values_NK: Tensor, scale_zero_GN2: Tensor) -> Tensor:
    """Float32 weights [N, K] of four-bit values: value * scale + offset of a row and group."""
    scale_NG1, offset_NG1 = scale_zero_GN2.float().permute(2, 1, 0)[..., None]
    groups = values_NK.float().unflatten(1, (len(scale_zero_GN2), -1))
    return (groups * scale_NG1 + offset_NG1).flatten(1)


class Int8Matrix(Matrix):
    """`values_NK` int8, `scale_N` as its kernel reads it, `zero_N` int8 (None = 0): a weight is (value - zero) * scale
    of its row."""

    def __init__(
        self, values_NK: Tensor, scale_N: Tensor, zero_N: Tensor | None = None, *, quantized_inputs: bool = True
    ) -> None:
        self.values_NK, self.scale_N, self.zero_N = values_NK, scale_N, zero_N
        self.quantized_inputs = quantized_inputs
        self.shape, self.device = (values_NK.shape[0], values_NK.shape[1]), values_NK.device
        self._floats = _Floats(self)

    def product(self, x_MK: Tensor, start: int, stop: int) -> Tensor:
        """With quantized inputs in float32."""
        # torch's integer product reads a matrix of one column wrongly.
        if self.quantized_inputs and self.device.type == "cpu" and self.shape[1] > 1:
            return self._integers(x_MK, start, stop)
        few = len(x_MK) <= MOST_ROWS if self.device.type == "cpu" else self.device.type == "cuda"
        if not few or self.zero_N is not None or self.shape[1] % WIDTHS:
            return F.linear(x_MK, self._floats(start, stop, x_MK.dtype))
        return torch._weight_int8pack_mm(x_MK, self.values_NK[start:stop], self.scale_N[start:stop].to(x_MK.dtype))

    def rows(self, ids_X: Tensor) -> Tensor:
        """Gathered before they become floats."""
        values_XK = self.values_NK[ids_X].float()
        if self.zero_N is not None:
            values_XK -= self.zero_N[ids_X, None]
        return values_XK.mul_(self.scale_N[ids_X, None])

    def to(self, device: torch.device) -> "Int8Matrix":
        """A copy."""
        zero_N = None if self.zero_N is None else self.zero_N.to(device)
        values_NK, scale_N = self.values_NK.to(device), self.scale_N.to(device)
        return Int8Matrix(values_NK, scale_N, zero_N, quantized_inputs=self.quantized_inputs)

    def arrays(self) -> tuple[Tensor, ...]:
        """The block's, and floats."""
        held = (self.values_NK, self.scale_N, self.zero_N)
        return (*(array for array in held if array is not None), *self._floats.made.values())

    def _integers(self, x_MK: Tensor, start: int, stop: int) -> Tensor:
        steps_MK, step_M1 = quantize_rows(x_MK)
        sums_MN = torch._int_mm(steps_MK, self.values_NK[start:stop].T)
        if self.zero_N is not None:
            sums_MN -= steps_MK.sum(-1, keepdim=True, dtype=torch.int32) * self.zero_N[start:stop]
        return (sums_MN * self.scale_N[start:stop]).mul_(step_M1)


class Int4Matrix(Matrix):
    """On a CPU. `packed` holds values as `nibbles` lays them out, `scale_zero_GN2` bfloat16 scales and offsets."""

    def __init__(self, packed: Tensor, scale_zero_GN2: Tensor) -> None:
        self.packed, self.scale_zero_GN2 = packed, scale_zero_GN2
        self.shape, self.device = (packed.shape[0], 2 * packed.shape[1]), packed.device
        self.group_size = self.shape[1] // len(scale_zero_GN2)
        self._kernel_form = packed if _reads_tiles() else _cpu_form(untile(packed))
        self._scales: dict[tuple[int, int], Tensor] = {}
        self._floats = _Floats(self)

    def product(self, x_MK: Tensor, start: int, stop: int) -> Tensor:
        """The kernel is for bfloat16."""
        whole, at = self.shape[0], (start, stop)
        if len(x_MK) > MOST_ROWS or x_MK.dtype != torch.bfloat16:
            return F.linear(x_MK, self._floats(start, stop, x_MK.dtype))
        if start % TILE or (stop % TILE and stop != whole):
            return self.product(x_MK, 0, whole)[:, start:stop]
        if at not in self._scales:
            self._scales[at] = self.scale_zero_GN2[:, start:stop].contiguous()
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_MK, self._kernel_form[start:stop], self.group_size, self._scales[at]
        )
        return product

    def rows(self, ids_X: Tensor) -> Tensor:
        """From the whole matrix as floats: it is no table to look things up in."""
        return dequantize(untile(self.packed), self.scale_zero_GN2)[ids_X]

    def to(self, device: torch.device) -> Matrix:
        """In the layout of that device's kernel."""
        if device.type == "cpu":
            return self
        if device.type == "cuda":
            return _CudaInt4Matrix(untile(self.packed), self.scale_zero_GN2, device)
        return _FloatMatrix(self.rows(torch.arange(self.shape[0])).to(device))

    def arrays(self) -> tuple[Tensor, ...]:
        """The block's; what a CPU without AVX-512 needs instead; scales and floats of some rows."""
        made = () if self._kernel_form is self.packed else (self._kernel_form,)
        return (self.packed, self.scale_zero_GN2, *made, *self._scales.values(), *self._floats.made.values())


class _Floats:
    """Rows of a matrix as floats, each range of them made once."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self.made: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def __call__(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if (start, stop, dtype) not in self.made:
            ids_X = torch.arange(start, stop, device=self._matrix.device)
            self.made[start, stop, dtype] = self._matrix.rows(ids_X).to(dtype)
        return self.made[start, stop, dtype]


class _CudaInt4Matrix(Matrix):
    """Four bits in the layout of the tensor-core kernel, whose tiles are 8 rows high."""

    def __init__(self, values_NK: Tensor, scale_zero_GN2: Tensor, device: torch.device) -> None:
        raised = (values_NK + 8).to(torch.uint8).to(device)
        self.shape, self.device = (values_NK.shape[0], values_NK.shape[1]), device
        self.group_size = self.shape[1] // len(scale_zero_GN2)
        # Columns in a tile, 16 each: as many as divide the width.
        inner = next(n for n in (8, 4, 2) if self.shape[1] % (16 * n) == 0)
        self._kernel_form = torch.ops.aten._convert_weight_to_int4pack(raised[:, ::2] << 4 | raised[:, 1::2], inner)
        self._scale_zero_GN2 = scale_zero_GN2.to(device)

    def product(self, x_MK: Tensor, start: int, stop: int) -> Tensor:
        """bfloat16."""
        if start % 8 or stop % 8:
            return self.product(x_MK, 0, self.shape[0])[:, start:stop]
        scales = self._scale_zero_GN2[:, start:stop].contiguous()
        form = self._kernel_form[start // 8 : stop // 8]
        return torch.ops.aten._weight_int4pack_mm(x_MK.bfloat16(), form, self.group_size, scales)

    def rows(self, ids_X: Tensor) -> Tensor:
        """As products with a unit matrix."""
        unit = torch.eye(self.shape[1], device=self.device)
        return self.product(unit, 0, self.shape[0]).T.float()[ids_X]

    def to(self, device: torch.device) -> Matrix:
        """It stays: load the drafter again for another device."""
        if device.type != "cuda":
            raise NotImplementedError("a packed drafter goes to a GPU once; load it again for another device")
        return self

    def arrays(self) -> tuple[Tensor, ...]:
        """Made from the block."""
        return self._kernel_form, self._scale_zero_GN2


class _FloatMatrix(Matrix):
    """For devices without a kernel."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK
        self.shape, self.device = (weight_NK.shape[0], weight_NK.shape[1]), weight_NK.device

    def product(self, x_MK: Tensor, start: int, stop: int) -> Tensor:
        """Float32."""
        return F.linear(x_MK.float(), self.weight_NK[start:stop])

    def rows(self, ids_X: Tensor) -> Tensor:
        """As they are."""
        return self.weight_NK[ids_X]

    def to(self, device: torch.device) -> Matrix:
        """A copy."""
        return _FloatMatrix(self.weight_NK.to(device))

    def arrays(self) -> tuple[Tensor, ...]:
        """One."""
        return (self.weight_NK,)


def _cpu_form(values_NK: Tensor) -> Tensor:
    form: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_NK.int() + 8, 1)
    return form


@cache
def _reads_tiles() -> bool:
    """Whether this CPU's kernel reads four-bit values as `nibbles` lays them out."""
    probe = (torch.arange(TILE * 4) % 16 - 8).to(torch.int8).view(TILE, 4)
    return torch.equal(_cpu_form(probe), tile(probe))
