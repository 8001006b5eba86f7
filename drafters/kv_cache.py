# The target's key/value cache for rows that advance by different counts. Rejected slots may stay in it as holes
# under a 2-D attention mask; `compact` closes them by a gather, right-aligned. transformers counts sliding windows in
# slots, so a target that has them may have no hole between a new token and its past: it is compacted before a pass.

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
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
        """Keep slots `order_BS[b]` of each row, in that order. Room is kept to double in, not more."""
        room = min(self.buffers[0].shape[2], 2 * order_BS.shape[1])
        self._set(_pick(self.keys, order_BS), _pick(self.values, order_BS), room)

    def sort_tail(self, order_BS: Tensor) -> None:
        """Put the last S slots of each row in the order `order_BS` (indices into those S), in place."""
        for states in (self.keys, self.values):
            tail = states[:, :, states.shape[2] - order_BS.shape[1] :]
            tail.copy_(_pick(tail, order_BS))

    def select(self, rows: Tensor) -> None:
        """Keep `rows`, in that order, with room to double in."""
        slots = self.keys.shape[2]
        keys, values = (buffer[:, :, : 2 * slots][rows] for buffer in self.buffers)
        self.buffers = (keys, values)
        self.crop_to(slots)

    def join(self, other: "GrowingLayer", slots: int) -> None:
        """Put the rows of `other` behind one's own; both keep their last `slots` slots, after zeros if fewer."""

        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([F.pad(states, (0, 0, slots - states.shape[2], slots)) for states in (mine, theirs)])

        self.buffers = (both(self.keys, other.keys), both(self.values, other.values))
        self.crop_to(slots)

    def _set(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        def copy(x: Tensor) -> Tensor:
            buffer = x.new_empty(x.shape[0], x.shape[1], max(capacity, x.shape[2]), x.shape[3])
            buffer[:, :, : x.shape[2]] = x
            return buffer

        slots = keys.shape[2]
        self.buffers = (copy(keys), copy(values))
        self.crop_to(slots)


def _pick(states_BNSH: Tensor, order_BS: Tensor) -> Tensor:
    """Slots `order_BS[b]` of each row."""
    heads, size = states_BNSH.shape[1], states_BNSH.shape[3]
    return states_BNSH.gather(2, order_BS[:, None, :, None].expand(-1, heads, -1, size))


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
        self._close_holes()
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

    @contextmanager
    def draft(self) -> Iterator[None]:
        """What passes within it append, be it to some of the layers only, is gone at its end. None of them compacts,
        since layers may differ in slots: where windows ask for that, it is done at the beginning, as the target's next
        pass would."""
        self._close_holes()
        lengths_B, valid_BS, dense = self.lengths_B, self.valid_BS, self.dense
        try:
            yield
        finally:
            self.lengths_B, self.valid_BS, self.dense = lengths_B, valid_BS, dense
            for layer in self.hf.layers:
                layer.crop_to(self.num_slots)

    def rollback(self, lengths_B: Tensor) -> None:
        """Keep only the first `lengths_B[b]` tokens of each row b."""
        self.valid_BS = self.valid_BS & (self.valid_BS.cumsum(1) <= lengths_B[:, None])
        self.lengths_B = torch.minimum(self.lengths_B, lengths_B)
        self._tidy()

    @torch.inference_mode()
    def keep_path(self, kept_BS: Tensor) -> None:
        """Of the last S slots of each row keep the marked ones: after a pass over a tree, the anchor and the path that
        stood. They move to the front of the S, so that paths of equal length leave no holes."""
        past = self.num_slots - kept_BS.shape[1]
        kept_BS = kept_BS.to(self.valid_BS.device) & self.valid_BS[:, past:]
        if (kept_BS[:, 1:] & ~kept_BS[:, :-1]).any():
            order_BS = kept_BS.long().argsort(dim=1, descending=True, stable=True)
            for layer in self.hf.layers:
                layer.sort_tail(order_BS)
            kept_BS = kept_BS.gather(1, order_BS)
        self.valid_BS = torch.cat([self.valid_BS[:, :past], kept_BS], dim=1)
        self.lengths_B = self.valid_BS.sum(1)
        self._tidy()

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
        self.lengths_B, self.valid_BS = self.lengths_B[rows], self.valid_BS[rows]
        self._crop()
        for layer in self.hf.layers:
            layer.select(rows)
        self._tidy()

    def join(self, other: "TargetCache") -> None:
        """Take in the rows of another cache of the same target, behind one's own; `other` is not used again.

        Both end up right-aligned, in as many slots as the longest row has tokens.
        """
        if len(other.lengths_B) == 0:
            return
        if len(self.lengths_B) == 0:
            self.hf, self.lengths_B, self.valid_BS, self.dense = other.hf, other.lengths_B, other.valid_BS, other.dense
            return
        for cache in (self, other):
            if not cache._right_aligned():
                cache.compact()
        lengths_B = torch.cat([self.lengths_B, other.lengths_B])
        slots = int(lengths_B.max())
        for mine, theirs in zip(self.hf.layers, other.hf.layers, strict=True):
            mine.join(theirs, slots)
        valid = [F.pad(cache.valid_BS, (slots - cache.num_slots, 0)) for cache in (self, other)]
        self.lengths_B, self.valid_BS = lengths_B, torch.cat(valid)
        self.dense = bool(self.valid_BS.all())

    def _close_holes(self) -> None:
        """Compact where a hole would push tokens out of a window."""
        if self._sliding and not self.dense and not self._right_aligned():
            self.compact()

    def _right_aligned(self) -> bool:
        return bool((self.valid_BS[:, 1:] >= self.valid_BS[:, :-1]).all())

    def _tidy(self) -> None:
        """After slots have become holes: drop what no row uses at the end, and compact where too much is waste."""
        self._crop()
        self.dense = bool((self.lengths_B == self.num_slots).all())
        if self.num_slots and self.num_slots - int(self.lengths_B.max()) > MAX_WASTE * self.num_slots:
            self.compact()

    def _crop(self) -> None:
        used_S = self.valid_BS.any(0).nonzero()
        slots = int(used_S.max()) + 1 if len(used_S) else 0
        if slots == self.num_slots:
            return
        for layer in self.hf.layers:
            layer.crop_to(slots)
        self.valid_BS = self.valid_BS[:, :slots]
