# States without a cache: the frozen target computes them for each batch, when it is asked for. Samples have the numbers
# that a cache of the same settings gives them, so batches, their seeds and the losses are those of offline training.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.cache import CachedSample
from drafters.cache_config import CaptureConfig
from drafters.cache_manifest import data_hash
from drafters.cache_plan import plan_shards, split_places
from drafters.errors import DataError
from drafters.prefetch import settle
from drafters.spec import check_layer_ids
from drafters.states import log_sum_exp, predicts
from drafters.types import Batch, Example, Needs

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["OnlineStates"]

Step = tuple[int, int]


class OnlineStates:
    """Conversations whose states the target makes when they are read. Stands where a HiddenCache does."""

    def __init__(self, target: "FrozenTarget", splits: Mapping[str, Sequence[Example]], config: CaptureConfig) -> None:
        """`config` gives the sizes that decide the order of samples in a cache. Raises DataError without samples, and
        ConfigError for layers that the target has not."""
        check_layer_ids(config.layer_ids, target.spec, key="cache.layer_ids")
        self.target = target
        given = [example for split in splits.values() for example in split]
        if not given:
            raise DataError("data: there is no conversation to train on; check the source and its filters")
        sizes = {"tokens_per_shard": config.tokens_per_shard, "batch_tokens": config.batch_tokens}
        order = [i for plan in plan_shards(given, **sizes) for i in plan.samples]
        self.examples = [given[i] for i in order]
        self.ids = tuple(example.id for example in self.examples)
        self.lengths = tuple(len(example.tokens_T) for example in self.examples)
        self.data_hash = data_hash(self.examples)
        self._splits = {name: tuple(members) for name, members in split_places(order, splits).items()}
        self._stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.examples)

    def split(self, name: str) -> tuple[int, ...]:
        """Indices of the samples of a split. Raises DataError with the splits there are."""
        if name not in self._splits:
            raise DataError(f"data: there is no split '{name}'; there are {', '.join(self._splits)}")
        return self._splits[name]

    @torch.inference_mode()
    def read(self, indices: Sequence[int], needs: Needs | None = None) -> list[CachedSample]:
        """Samples with the layers of `needs`, of one pass of the target over all of them, on its device."""
        layer_ids = () if needs is None else needs.layer_ids
        examples = [self.examples[index] for index in indices]
        tokens_BT = pad_sequence([example.tokens_T for example in examples], batch_first=True)
        states = self.target.states(tokens_BT, needs=Needs(layer_ids=layer_ids, last=True))
        assert states.last_BTD is not None
        lse_BT = self._log_sum_exp(states.last_BTD, [example.loss_mask_T for example in examples])
        samples = []
        for row, (index, example) in enumerate(zip(indices, examples, strict=True)):
            length = len(example.tokens_T)
            samples.append(
                CachedSample(
                    index=index,
                    id=example.id,
                    source=example.source,
                    tokens_T=example.tokens_T,
                    loss_mask_T=example.loss_mask_T,
                    aux_TLD=None if states.aux_BTLD is None else states.aux_BTLD[row, :length],
                    last_TD=states.last_BTD[row, :length],
                    lse_T=lse_BT[row, :length],
                )
            )
        return samples

    def _log_sum_exp(self, last_BTD: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """[B, T], where a prediction is supervised. The places are found on the CPU: no waiting for a GPU."""
        width = last_BTD.shape[1]
        places_N = torch.cat([row * width + predicts(mask_T).nonzero()[:, 0] for row, mask_T in enumerate(masks)])
        places_N = places_N.to(last_BTD.device, non_blocking=True)
        lse_BT = torch.zeros(last_BTD.shape[:2], device=last_BTD.device)
        found_N = log_sum_exp(self.target.head, last_BTD.flatten(0, 1)[places_N]) if len(places_N) else lse_BT[:0, 0]
        lse_BT.view(-1)[places_N] = found_N
        return lse_BT

    def ahead(self, make: Callable[[Step], Batch], steps: Iterable[Step]) -> Iterator[Batch]:
        """The batches of `steps`. On a GPU the target begins the next one, in a stream of its own, before a batch is
        handed out, so that it runs while the drafter learns."""
        if self._stream is None:
            yield from map(make, steps)
            return
        waiting: tuple[Batch, torch.cuda.Event] | None = None
        for step in steps:
            with torch.cuda.stream(self._stream):
                begun = make(step), self._stream.record_event()
            if waiting is not None:
                yield settle(*waiting, device=self.target.device)
            waiting = begun
        if waiting is not None:
            yield settle(*waiting, device=self.target.device)
