# How four-bit values lie in a block: as torch's product for AVX-512 reads them. 64 rows are a tile; a byte of it holds
# a row's value in its low half and in its high half that of the row 32 below. In the narrower tile of the rows that are
# left over, it holds a row and the next one.

import torch
from torch import Tensor

__all__ = ["ROWS", "TILE", "tile", "untile"]

TILE = 64
ROWS = 16  # kernels take a matrix of a multiple of so many rows


def tile(values: Tensor) -> Tensor:
    """Bytes [N, K / 2] of int8 values [N, K] from -8 to 7; N is a multiple of `ROWS`, K even."""
    raised, width = (values + 8).to(torch.uint8), values.shape[1]
    whole = len(values) - len(values) % TILE
    full = raised[:whole].view(-1, 2, TILE // 2, width)
    rest = raised[whole:].view(-1, 2, width)
    # In memory the columns come first, the rows of a tile side by side.
    bytes_ = [full[:, 0] | full[:, 1] << 4, (rest[:, 0] | rest[:, 1] << 4)[None]]
    return torch.cat([part.transpose(1, 2).reshape(-1) for part in bytes_]).view(len(values), width // 2)


def untile(packed: Tensor) -> Tensor:
    """Inverse of `tile`: int8 [N, K]."""
    rows, width = packed.shape[0], 2 * packed.shape[1]
    whole = rows - rows % TILE
    full = packed[:whole].reshape(-1, width, TILE // 2).transpose(1, 2)
    rest = packed[whole:].reshape(width, -1).T
    raised = torch.cat(
        [
            torch.stack([full & 15, full >> 4], dim=1).view(whole, width),
            torch.stack([rest & 15, rest >> 4], dim=1).view(rows - whole, width),
        ]
    )
    return raised.to(torch.int8) - 8
