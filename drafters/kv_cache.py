# The target's key/value cache for rows that advance by different counts. Rejected slots may stay in it as holes
# under a 2-D attention mask; `compact` closes them by a gather, right-aligned. transformers counts sliding windows in
# slots, so a target that has them may have no hole between a new token and its past: it is compacted before a pass.

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

__all__ = ["GrowingLayer", "TargetCache"]

MAX_WASTE = 0.25  # share of slots that may be holes before the cache is compacted


class GrowingLayer(DynamicLayer):
    """Keys and values [B, heads, slots, H] as views of buffers that double when full, so that a decode step writes
    its own slots only instead of copying everything before it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append states; returns all keys and values."""
        old = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = (key_states[:, :, :0], value_states[:, :, :0])
        end = old + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self._set(self.buffers[0][:, :, :old], self.buffers[1][:, :, :old], 2 * end)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, old:end] = new
        self.crop_to(end)
        return self.keys, self.values

    def crop_to(self, slots: int) -> None:
        """Show the first `slots` slots."""
        self.keys, self.values = self.buffers[0][:, :, :slots], self.buffers[1][:, :, :slots]

    def take(self, order_BS: Tensor) -> None:
        """Keep slots `order_BS[b]` of each row, in that order."""
        keys = self.keys.gather(2, order_BS[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3]))
        index = order_BS[:, None, :, None].expand(-1, self.values.shape[1], -1, self.values.shape[3])
        self._set(keys, self.values.gather(2, index), self.buffers[0].shape[2])

    def select(self, rows: Tensor) -> None:
        """Keep `rows`, in that order."""
        slots = self.keys.shape[2]
        self.buffers = (self.buffers[0][rows], self.buffers[1][rows])
        self.crop_to(slots)

    def _set(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        def copy(x: Tensor) -> Tensor:
            buffer = x.new_empty(x.shape[0], x.shape[1], max(capacity, x.shape[2]), x.shape[3])
            buffer[:, :, : x.shape[2]] = x
            return buffer

        slots = keys.shape[2]
        self.buffers = (copy(keys), copy(values))
        self.crop_to(slots)


class TargetCache:
    """Keys and values of `batch_size` rows. `lengths_B` counts the valid tokens of each row."""

    def __init__(self, *, batch_size: int, sliding: bool, device: torch.device) -> None:
        self.hf = Cache(layer_class_to_replicate=GrowingLayer)
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.valid_BS = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        self.dense = True  # no holes: every slot of every row is valid
        self._sliding = sliding

    @property
    def num_slots(self) -> int:
        """Slots that the cache holds for every row, holes included."""
        return self.valid_BS.shape[1]

    def append(self, lengths_B: Tensor | None, width: int) -> Tensor | None:
        """Book `width` new slots a row, the first `lengths_B` of them valid (None = all).

        Returns the attention mask [B, slots] for the pass that fills them, None when all slots are valid.
        """
        if self._sliding and not self.dense and not self._right_aligned():
            self.compact()
        batch = self.lengths_B.shape[0]
        if lengths_B is None:
            new = torch.ones(batch, width, dtype=torch.bool, device=self.valid_BS.device)
            self.lengths_B = self.lengths_B + width
        else:
            new = torch.arange(width, device=self.valid_BS.device) < lengths_B[:, None]
            self.lengths_B = self.lengths_B + lengths_B
            self.dense = self.dense and bool((lengths_B == width).all())
        self.valid_BS = torch.cat([self.valid_BS, new], dim=1)
        return None if self.dense else self.valid_BS.long()

    def rollback(self, lengths_B: Tensor) -> None:
        """Keep only the first `lengths_B[b]` tokens of each row b."""
        self.valid_BS = self.valid_BS & (self.valid_BS.cumsum(1) <= lengths_B[:, None])
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)
        used_S = self.valid_BS.any(0).nonzero()
        self._crop(int(used_S.max()) + 1 if len(used_S) else 0)
        self.dense = bool((self.lengths_B == self.num_slots).all())
        if self.num_slots - int(self.lengths_B.max()) > MAX_WASTE * self.num_slots:
            self.compact()

    def compact(self) -> None:
        """Close all holes: every row's valid slots move to the right end, in order."""
        longest = int(self.lengths_B.max())
        order = self.valid_BS.long().argsort(dim=1, stable=True)[:, self.num_slots - longest :]
        for layer in self.hf.layers:
            layer.take(order)
        self.valid_BS = self.valid_BS.gather(1, order)
        self.dense = bool(self.valid_BS.all())

    def keep(self, rows: Tensor) -> None:
        """Go on with `rows` (indices, in the new order)."""
        for layer in self.hf.layers:
            layer.select(rows)
        self.lengths_B, self.valid_BS = self.lengths_B[rows], self.valid_BS[rows]
        if len(rows):
            self.rollback(self.lengths_B)

    def _right_aligned(self) -> bool:
        return bool((self.valid_BS[:, 1:] >= self.valid_BS[:, :-1]).all())

    def _crop(self, slots: int) -> None:
        if slots == self.num_slots:
            return
        for layer in self.hf.layers:
            layer.crop_to(slots)
        self.valid_BS = self.valid_BS[:, :slots]
