# The floating-point operations of a step of the block drafter, from its shapes: what MFU is a share of. Counted are the
# products (2 m n k each), forward and backward, the vocabulary's among them; of the attention only what a block sees.
# Nothing that is computed again counts. Tests compare these with torch's counter, product by product.

from dataclasses import dataclass

import torch

from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.block import BlockDrafter
from drafters.loss_chunks import chunk_rows
from drafters.types import Batch
from drafters.vocab_products import OFFSET_COLUMNS

__all__ = ["Work", "of_reference", "of_step"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of a step: the draft layers and what leads to them; their attention; the loss's vocabulary products
    (of the draft, of the target, of the sequential head)."""

    layers: int
    attention: int
    vocabulary: int
    positions: int  # supervised

    @property
    def total(self) -> int:
        return self.layers + self.attention + self.vocabulary


def of_step(drafter: BlockDrafter, batch: Batch, *, dense_attention: bool = False) -> Work:
    """Of `drafter.loss` and its backward pass. `dense_attention`: every block sees the whole context, as the CPU's
    path computes it; else each sees what lies before its anchor.

    The loss keeps supervised slots alone, and computes the target's logits once for slots of a chunk that share a
    state: forward products of N draft and U target rows; backward one for the rows (the vocabulary's are frozen).
    """
    anchors = _anchors(drafter, batch)
    num_rows, width = batch.tokens_BT.shape
    blocks, slots = len(anchors.rows_A), drafter.num_slots
    if dense_attention:
        longest = int(torch.bincount(anchors.rows_A, minlength=num_rows).max())
        pairs = num_rows * longest * slots * (width + slots)
    else:
        pairs = slots * (int(anchors.positions_A.sum()) + blocks * slots)
    kept = anchors.states_AG[anchors.counted_AG]
    spec, rank = drafter.spec, _rank(drafter)
    columns = spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    num_distinct = sum(len(part.unique()) for part in kept.split(_chunk(drafter, columns, batch)))
    folds = drafter.vocab is not None or (rank > 0 and batch.last_BTD.device.type == "cpu")
    if not folds:
        target, draft = num_distinct * spec.hidden_size, len(kept) * (spec.hidden_size + rank)
    else:  # one product with the offset's columns and the sequential head's
        folded = spec.hidden_size + OFFSET_COLUMNS
        target, draft = num_distinct * folded, len(kept) * (folded + rank)
    # Forward of both, backward for the draft's rows, and for the sequential head's matrix.
    vocabulary = 2 * columns * (target + 2 * draft + len(kept) * rank)
    return Work(
        layers=_layers(drafter, batch, blocks * slots) + _confidence(drafter, blocks * drafter.block_size),
        attention=_attention(drafter, pairs),
        vocabulary=vocabulary,
        positions=len(kept),
    )


def of_reference(drafter: BlockDrafter, batch: Batch) -> Work:
    """Of `reference_loss` and its backward pass: as many blocks in every text, all of which its dense mask lets see
    everything; draft and target logits of all slots, supervised or not."""
    anchors = _anchors(drafter, batch)
    num_rows, width = batch.tokens_BT.shape
    spec, rank, size = drafter.spec, _rank(drafter), drafter.block_size
    slots = num_rows * drafter.config.num_anchors * size
    columns = spec.vocab_size if drafter.vocab is None else drafter.vocab.size
    rows = len(anchors.rows_A) * size
    vocabulary = 2 * columns * rows * (3 * spec.hidden_size + 3 * rank)
    return Work(
        layers=_layers(drafter, batch, slots) + _confidence(drafter, rows),
        attention=_attention(drafter, slots * (width + drafter.config.num_anchors * size)),
        vocabulary=vocabulary,
        positions=int(anchors.counted_AG.sum()),
    )


def _anchors(drafter: BlockDrafter, batch: Batch) -> Anchors:
    return sample_anchors(batch, num_anchors=drafter.config.num_anchors, block_size=drafter.block_size)


def _rank(drafter: BlockDrafter) -> int:
    return 0 if drafter.markov_head is None else drafter.markov_head.markov_w1.embedding_dim


def _chunk(drafter: BlockDrafter, columns: int, batch: Batch) -> int:
    return drafter.config.loss.chunk or chunk_rows(batch.last_BTD.device, columns)


def _layers(drafter: BlockDrafter, batch: Batch, slots: int) -> int:
    """Forward, and backward for weights and for inputs: 6 a weight and row; 4 for `fc`, whose inputs are frozen."""
    spec, count = drafter.spec, len(drafter.layers)
    hidden, queries = spec.hidden_size, spec.num_heads * spec.head_dim
    key_values = 2 * spec.num_kv_heads * spec.head_dim
    context = batch.tokens_BT.numel() * hidden * (4 * len(drafter.config.layer_ids) * hidden + 6 * count * key_values)
    weights = hidden * (queries + key_values) + queries * hidden + 3 * hidden * spec.intermediate_size
    return context + 6 * slots * count * weights


def _attention(drafter: BlockDrafter, pairs: int) -> int:
    """Two products forward and four backward, for each pair of a slot and a key."""
    return 12 * pairs * len(drafter.layers) * drafter.spec.num_heads * drafter.spec.head_dim


def _confidence(drafter: BlockDrafter, slots: int) -> int:
    return 0 if drafter.confidence_head is None else 6 * slots * drafter.confidence_head.proj.in_features
