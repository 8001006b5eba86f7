# From a cache to training batches. A batch is a pure function of (seed, epoch, step): the epoch's order is a
# permutation drawn from both, cut into even steps, each shared out over the ranks. The position is the number of
# batches that the trainer has finished, which Lightning counts and saves; nothing else is needed to resume exactly.

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.cache import CachedSample
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.types import Batch, Needs

__all__ = [
    "BatchConfig",
    "StateSource",
    "StatesDataModule",
    "StatesLoader",
    "batch_seed",
    "check_batch_size",
    "collate",
]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """`batch_size` counts the conversations of one forward and backward pass over all ranks together, so that the
    number of ranks changes neither the steps nor what is in them."""

    batch_size: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: got {self.batch_size}; accepted: 1 or more")


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


def batch_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def check_batch_size(batch_size: int, num_ranks: int) -> None:
    """Raises ConfigError where a step has fewer conversations than ranks."""
    if batch_size < num_ranks:
        raise ConfigError(
            f"data.batch_size: got {batch_size} for {num_ranks} ranks; it counts the conversations of a step over all "
            f"ranks: accepted is {num_ranks} or more"
        )


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
        check_batch_size(config.batch_size, self.num_ranks)
        # Steps of validation need not be mixed: equal lengths waste no padding.
        lengths = source.lengths
        self._last_order: tuple[int, list[int]] = (-1, [])
        self.indices = list(indices) if finished else sorted(indices, key=lambda i: (lengths[i], i))

    def __len__(self) -> int:
        return max(1, len(self.indices) // self.config.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.finished(), len(self)) if self.finished else (0, 0)
        # Read when asked: a mapped read takes a hundredth of a step, and a thread that runs torch operators brings a
        # second OpenMP pool that takes cores from the first (measured: a third of the training speed on two cores).
        # A target that makes its states itself may begin a batch before it is asked for.
        ahead = getattr(self.source, "ahead", map)
        batches = iter(ahead(lambda at: self.batch(*at), ((epoch, step) for step in range(first, len(self)))))
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def batch(self, epoch: int, step: int) -> Batch:
        """This rank's part of a step. The steps of an epoch hold every sample once; they are even, `batch_size`
        samples or a few more, and so are the parts, so that no rank is ever left without a batch."""
        order = self._order(epoch)
        start, stop = share(len(order), step, len(self))
        first, last = share(stop - start, self.rank, self.num_ranks)
        places = range(start + first, start + last)
        samples = self.source.read([self.indices[order[i]] for i in places], self.needs)
        kind = "train" if self.finished else "validation"
        seeds = [batch_seed(kind, self.config.seed, epoch, i) for i in places]
        return collate(samples, layer_ids=self.needs.layer_ids, seeds=seeds)

    def _order(self, epoch: int) -> list[int]:
        if self._last_order[0] != epoch:
            self._last_order = (epoch, self._draw_order(epoch))
        return self._last_order[1]

    def _draw_order(self, epoch: int) -> list[int]:
        if not self.finished:
            return list(range(len(self.indices)))
        generator = torch.Generator().manual_seed(batch_seed("order", self.config.seed, epoch))
        order: list[int] = torch.randperm(len(self.indices), generator=generator).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """Tells Lightning that this loader can resume; the position itself is the trainer's own count."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""


class Position(Protocol):
    """The number of training batches finished so far, over all epochs."""

    def __call__(self) -> int: ...


def share(total: int, part: int, num_parts: int) -> tuple[int, int]:
    """Begin and end of one of `num_parts` even, contiguous parts of `total` things."""
    return part * total // num_parts, (part + 1) * total // num_parts


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
        samples = hashlib.sha256(repr(self.train).encode()).hexdigest()
        return {"batch_size": self.config.batch_size, "seed": self.config.seed, "samples": samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises CheckpointError when the order of batches would not be the one that training began with."""
        own = self.state_dict()
        differs = [name for name in own if state_dict.get(name) != own[name]]
        if differs:
            pairs = ", ".join(f"data.{name} was {state_dict.get(name)}, is {own[name]}" for name in differs)
            raise CheckpointError(f"resume: {pairs}; resume with the data it began with, or choose another name=")

    def _loader(self, indices: Sequence[int], *, finished: Position | None) -> StatesLoader:
        assert self.trainer is not None
        rank = (self.trainer.global_rank, self.trainer.world_size)
        return StatesLoader(self.source, indices, self.config, needs=self.needs, rank=rank, finished=finished)
