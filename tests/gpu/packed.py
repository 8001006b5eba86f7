# Packed products on an NVIDIA GPU, against the definition, and timed against bfloat16 side by side:
#   python -m tests.gpu.packed
# Prints a line a product; exit code 1 when one is wrong.

import sys
import time
from statistics import median

import torch
import torch.nn.functional as F

from drafters.packed.products import Matrix
from tests.packed_doubles import NaiveMatrix
from tests.test_packed_products import make

SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (8192, 576)}


def milliseconds(product) -> float:
    found = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        product()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return median(found[5:])


def error_of(matrix: Matrix, x_MK: torch.Tensor, start: int, stop: int) -> float:
    """Of the product on the GPU, relative to the one by definition with float inputs."""
    moved = matrix.to(torch.device("cuda"))
    found = moved.product(x_MK.cuda().bfloat16(), start, stop).float().cpu()
    wanted = (x_MK.bfloat16().double() @ NaiveMatrix(matrix).weight_NK[start:stop].T).float()
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    wrong = False
    for kind in ("int8", "int8 asymmetric", "int4", "int4 asymmetric"):
        for name, (rows, width) in SHAPES.items():
            matrix = make(kind, rows, width)
            for count in (1, 5, 40):
                x_MK = torch.randn(count, width)
                error = max(error_of(matrix, x_MK, *at) for at in ((0, rows), (64, rows), (8, 24)))
                moved, x = matrix.to(torch.device("cuda")), x_MK.cuda().bfloat16()
                plain = matrix.rows(torch.arange(rows)).cuda().bfloat16()
                own = milliseconds(lambda moved=moved, x=x, rows=rows: moved.product(x, 0, rows))
                other = milliseconds(lambda plain=plain, x=x: F.linear(x, plain))
                wrong |= not error < 1e-2
                print(f"{kind:16s}{name:8s}{count:4d} rows: error {error:.1e}, {own:.3f} ms, bfloat16 {other:.3f} ms")
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
