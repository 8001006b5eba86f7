# From a cache to training batches. A batch is a pure function of (seed, epoch, step): batch_plan.py draws which
# conversations make which step, and each step is shared out over the ranks. The position is the number of batches that
# the trainer has finished, which Lightning counts and saves; nothing else is needed to resume exactly.

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.batch_plan import Epoch, EvenSteps, LengthBuckets, StepPlan, batch_seed, check_batch_size, parts_of
from drafters.cache import CachedSample
from drafters.errors import CheckpointError, DataError
from drafters.prefetch import AUTO, CudaTransfer, Prefetch, check_prefetch, prefetch_depth
from drafters.types import Batch, Needs

__all__ = [
    "BatchConfig",
    "StateSource",
    "StatesDataModule",
    "StatesLoader",
    "collate",
]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """`batch_size` counts the conversations of one forward and backward pass over all ranks together, so that the
    number of ranks changes neither the steps nor what is in them. With `max_tokens` a pass holds conversations of
    similar length instead, as many as their rows x longest stay within it. `prefetch` is the number of batches made
    ahead, or "auto"; it does not change them."""

    batch_size: int = 2
    seed: int = 0
    max_tokens: int | None = None
    prefetch: int | str = AUTO

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size}; accepted: 1 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens: got {self.max_tokens}; accepted: 1 or more, or null for data.batch_size")
        check_prefetch(self.prefetch)


class StateSource(Protocol):
    """Where samples with their states come from: a cache, or the target itself."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample."""

    def read(self, indices: Sequence[int], needs: Needs | None = None) -> list[CachedSample]:
        """Samples with the layers of `needs`, in its order."""


def collate(samples: Sequence[CachedSample], *, layer_ids: tuple[int, ...], seeds: Sequence[int]) -> Batch:
    """Right-pad samples into one batch. `layer_ids` are the layers of their `aux_TLD`, `seeds` one a sample."""

    def padded(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    aux = [sample.aux_TLD for sample in samples if sample.aux_TLD is not None]
    return Batch(
        tokens_BT=padded([sample.tokens_T for sample in samples]),
        lengths_B=torch.tensor([len(sample.tokens_T) for sample in samples]),
        loss_mask_BT=padded([sample.loss_mask_T for sample in samples]),
        aux_BTLD=padded(aux) if aux else None,
        last_BTD=padded([sample.last_TD for sample in samples]),
        lse_BT=padded([sample.lse_T for sample in samples]),
        layer_ids=layer_ids,
        seeds=tuple(seeds),
        sample_ids=tuple(sample.index for sample in samples),
    )


class Ahead(Protocol):
    """`map`, or what runs before it is asked."""

    def __call__(
        self, make: Callable[[tuple[int, int]], Batch], steps: Iterable[tuple[int, int]], /
    ) -> Iterable[Batch]: ...


class StatesLoader:
    """Batches of the samples `indices`, for one rank. Iterating goes on where `finished` says: at that many batches
    since the start of training. Without it each iteration is the whole of epoch 0, and nothing is shuffled. `seconds`
    counts what reading took, which whoever asks for a batch waits for."""

    def __init__(
        self,
        source: StateSource,
        indices: Sequence[int],
        config: BatchConfig,
        *,
        needs: Needs,
        rank: tuple[int, int] = (0, 1),
        finished: "Position | None" = None,
    ) -> None:
        """`rank` is (this rank, number of ranks). Raises DataError when there are fewer samples than ranks."""
        self.source, self.config, self.needs, self.finished = source, config, needs, finished
        self.rank, self.num_ranks = rank
        self.seconds = 0.0
        if len(indices) < self.num_ranks:
            raise DataError(
                f"data: {len(indices)} conversations for {self.num_ranks} ranks; each rank needs one of every split: "
                "use more data, a larger validation share, or fewer devices"
            )
        # Steps of validation need not be mixed: equal lengths waste no padding.
        lengths = source.lengths
        self.indices = list(indices) if finished else sorted(indices, key=lambda i: (lengths[i], i))
        self.plan = self._plan()
        self._latest: tuple[int, Epoch] = (-1, Epoch(order=(), cuts=(0,)))
        # How the batches of steps are made: when they are asked for, or before, as a target that makes their states
        # by itself may do.
        self.ahead: Ahead = getattr(source, "ahead", map)

    def __len__(self) -> int:
        return self.plan.num_steps

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.finished(), len(self)) if self.finished else (0, 0)
        batches = iter(self.ahead(lambda at: self.batch(*at), ((epoch, step) for step in range(first, len(self)))))
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def batch(self, epoch: int, step: int) -> Batch:
        """This rank's part of a step. The steps of an epoch hold every sample once, and each has a part for every
        rank, so that none is ever left without a batch."""
        drawn = self._epoch(epoch)
        start, stop = drawn.cuts[step : step + 2]
        rows = [self.indices[i] for i in drawn.order[start:stop]]
        part = parts_of([self.source.lengths[i] for i in rows], self.num_ranks)[self.rank]
        samples = self.source.read([rows[row] for row in part], self.needs)
        kind = "train" if self.finished else "validation"
        seeds = [batch_seed(kind, self.config.seed, epoch, start + row) for row in part]
        return collate(samples, layer_ids=self.needs.layer_ids, seeds=seeds)

    def _epoch(self, epoch: int) -> Epoch:
        # A thread that reads ahead and was closed may be at the end of another epoch.
        latest = self._latest
        if latest[0] != epoch:
            seed = batch_seed("order", self.config.seed, epoch) if self.finished else None
            latest = self._latest = (epoch, self.plan.epoch(seed))
        return latest[1]

    def _plan(self) -> StepPlan:
        if self.config.max_tokens is None:
            check_batch_size(self.config.batch_size, self.num_ranks)
            return EvenSteps(len(self.indices), self.config.batch_size)
        buckets = LengthBuckets([self.source.lengths[i] for i in self.indices], self.config.max_tokens)
        buckets.check(self.num_ranks)
        return buckets

    def state_dict(self) -> dict[str, Any]:
        """Tells Lightning that this loader can resume; the position itself is the trainer's own count."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class Position(Protocol):
    """The number of training batches finished so far, over all epochs."""

    def __call__(self) -> int: ...


class StatesDataModule(lightning.LightningDataModule):
    """Training and validation batches from cached states, exact under resume on any number of ranks.

    A checkpoint is exact when it is taken between optimizer steps. The trainer's epoch is our epoch unless it limits
    its batches; the sequence of batches is the same in any case.
    """

    def __init__(
        self,
        source: StateSource,
        *,
        train: Sequence[int],
        validation: Sequence[int],
        needs: Needs,
        config: BatchConfig,
    ) -> None:
        super().__init__()
        self.source, self.train, self.validation = source, tuple(train), tuple(validation)
        self.needs, self.config = needs, config

    def train_dataloader(self) -> StatesLoader:
        """Shuffled, from the trainer's position on."""
        return self._loader(self.train, finished=self.finished)

    def val_dataloader(self) -> StatesLoader:
        """Sorted by length; the same batches and seeds at every validation, equally many on every rank."""
        return self._loader(self.validation, finished=None)

    def finished(self) -> int:
        """Training batches that the trainer has finished; batches read ahead do not count."""
        assert self.trainer is not None
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        return int(progress.total.processed)

    def state_dict(self) -> dict[str, Any]:
        """What fixes the order of batches, to be compared on resume."""
        config, samples = self.config, hashlib.sha256(repr(self.train).encode())
        state = {"batch_size": config.batch_size, "seed": config.seed}
        if config.max_tokens is not None:
            samples.update(repr([self.source.lengths[i] for i in self.train]).encode())
            state = {"max_tokens": config.max_tokens, "seed": config.seed}
        return {**state, "samples": samples.hexdigest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises CheckpointError when the order of batches would not be the one that training began with."""
        own = self.state_dict()
        differs = [name for name in sorted({*own, *state_dict}) if state_dict.get(name) != own.get(name)]
        if differs:
            pairs = ", ".join(f"data.{name} was {state_dict.get(name)}, is {own.get(name)}" for name in differs)
            raise CheckpointError(f"resume: {pairs}; resume with the data it began with, or choose another name=")

    def _loader(self, indices: Sequence[int], *, finished: Position | None) -> StatesLoader:
        assert self.trainer is not None
        rank = (self.trainer.global_rank, self.trainer.world_size)
        loader = StatesLoader(self.source, indices, self.config, needs=self.needs, rank=rank, finished=finished)
        device = self.trainer.strategy.root_device
        if loader.ahead is map and (depth := prefetch_depth(self.config.prefetch, device)):
            loader.ahead = Prefetch(depth, CudaTransfer(device) if device.type == "cuda" else None)
        return loader
