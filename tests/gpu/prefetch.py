# Reading ahead on a GPU: the same batches as without, and how much of the reading a step hides. The states are random,
# of the size of a small model's.

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from drafters.batches import BatchConfig, StatesLoader
from drafters.cache import CachedSample
from drafters.prefetch import CudaTransfer, Prefetch
from drafters.types import Batch, Needs

NEEDS = Needs(layer_ids=(0, 1, 2, 3, 4), last=True)


class RandomStates:
    """Samples made of their number when they are read: slow enough to be worth hiding."""

    def __init__(self, num: int, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.lengths = [200 + 37 * i % 600 for i in range(num)]

    def read(self, indices: Any, needs: Needs | None = None) -> list[CachedSample]:
        return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> CachedSample:
        length, generator = self.lengths[index], torch.Generator().manual_seed(index)
        shape = (length, len(NEEDS.layer_ids), self.hidden_size)
        return CachedSample(
            index=index,
            id=str(index),
            source="random",
            tokens_T=torch.randint(0, 1000, (length,), generator=generator),
            loss_mask_T=torch.ones(length, dtype=torch.bool),
            aux_TLD=torch.randn(shape, generator=generator).bfloat16(),
            last_TD=torch.randn(length, self.hidden_size, generator=generator).bfloat16(),
            lse_T=torch.randn(length, generator=generator),
        )


def batches(source: RandomStates, depth: int) -> Iterator[Batch]:
    """On the GPU, as training gets them."""
    config = BatchConfig(batch_size=4)
    loader = StatesLoader(source, range(len(source.lengths)), config, needs=NEEDS, finished=lambda: 0)
    device = torch.device("cuda", torch.cuda.current_device())
    if depth:
        loader.ahead = Prefetch(depth, CudaTransfer(device))
    return (batch.to(device) for batch in loader)


def epoch_seconds(source: RandomStates, depth: int, work: torch.Tensor, products: int) -> float:
    """Of an epoch whose steps are `products` matrix products each."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for batch in batches(source, depth):
        batch.last_BTD.float().sum()
        for _ in range(products):
            work = work @ work
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare() -> dict[str, Any]:
    """AssertionError where a batch differs. Seconds of an epoch: with each depth, and of the steps alone."""
    source = RandomStates(80, 2048)
    # Memory is reused while steps run: a batch that the allocator gave away too early would show.
    for plain, ahead in zip(batches(source, 0), batches(source, 2), strict=True):
        noise = [torch.randn_like(plain.last_BTD, dtype=torch.float32) for _ in range(3)]
        for name, tensor in vars(plain).items():
            other = vars(ahead)[name]
            same = torch.equal(tensor, other) if isinstance(tensor, torch.Tensor) else tensor == other
            assert same, f"{name} of samples {plain.sample_ids} differs when it is read ahead"
        del noise
    work = torch.eye(4096, device="cuda", dtype=torch.bfloat16)
    reading = epoch_seconds(source, 0, work, 0)
    one = epoch_seconds(source, 0, work, 20) - reading
    products = max(1, round(20 * reading / max(one, 1e-3)))  # a step takes about as long as its batch
    found = {depth: [epoch_seconds(source, depth, work, products) for _ in range(3)] for depth in (0, 2)}
    plain, ahead = (statistics.median(found[depth]) for depth in (0, 2))
    return {"seconds_reading": round(reading, 3), "seconds_plain": round(plain, 3), "seconds_ahead": round(ahead, 3)}
