# How many rows of vocabulary-wide tensors a loss works on at once. On a CPU few, which stay in the cache; on a GPU as
# many as keep it busy: three rows of 152k tokens are a kernel of microseconds, a chunk of 384 reads all vocabulary rows
# from memory for hardly more arithmetic than that takes.

import torch

__all__ = ["chunk_rows", "scratch_rows"]

# Elements of one float scratch tensor. CPU: four of them stay in the last-level cache. GPU: a kernel of 0.1 ms or more.
CPU_ELEMENTS, GPU_ELEMENTS = 2**19, 2**26
CPU_CHUNK = 384
# Bytes of a chunk's tensors on a GPU, the products in bfloat16 and the target's distribution in float32, of which the
# GPU spares this part at most.
GPU_BYTES, GPU_PART, BYTES = 2 * 2**30, 16, 2 + 2 + 4
GPU_CHUNKS = (256, 8192)  # fewest and most rows


def scratch_rows(device: torch.device, num_vocab: int) -> int:
    """Rows of a float scratch tensor [rows, V']."""
    return max(1, (GPU_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS) // num_vocab)


def chunk_rows(device: torch.device, num_vocab: int) -> int:
    """Rows whose vocabulary-wide products are alive at once, where `loss.chunk` leaves it open."""
    if device.type != "cuda":
        return CPU_CHUNK
    spared = min(GPU_BYTES, torch.cuda.get_device_properties(device).total_memory // GPU_PART)
    fewest, most = GPU_CHUNKS
    return max(fewest, min(most, spared // (BYTES * num_vocab) // fewest * fewest))
