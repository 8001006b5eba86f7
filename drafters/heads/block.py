# The semi-autoregressive drafter (DFlash 2602.06036, DSpark 2607.05147): a parallel backbone that reads the target's
# aux states as extra keys and values and drafts a whole block in one pass, with an optional sequential head and an
# optional confidence head. Embedding and output projection are the target's; they are passed in, never owned.

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import build_config
from drafters.errors import ConfigError
from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.aux_states import aux_of
from drafters.heads.base import Drafter
from drafters.heads.confidence import ConfidenceHead
from drafters.heads.distillation import Blocks, Distillation, no_anchors
from drafters.heads.draft_vocab import check_vocab, new_vocab
from drafters.heads.layers import LAYER_OUTPUTS, DraftLayer, LayerWeights, RMSNorm, compute_dtype, rope_table
from drafters.heads.masks import BlockLayout, block_attention
from drafters.heads.sequential import SequentialHead, teacher_forced
from drafters.losses import LossWeights
from drafters.spec import TargetSpec, check_layer_ids
from drafters.types import Batch, Losses, Needs
from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.heads.block_session import BlockSession
    from drafters.heads.start import Start
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["BlockDrafter"]


class BlockDrafter(Drafter):
    """`vocab` None drafts over the whole vocabulary. Raises ConfigError for settings that do not fit the target."""

    inv_freq: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`layer_ids`: target layers whose outputs are read. `block_size`: tokens drafted. `sample_from_anchor`: the
        anchor's slot drafts the first (DSpark); else every draft has a mask token of its own (DFlash). `window`:
        context positions that a block sees, the newest before its anchor; None = all. `num_anchors`: blocks drawn per
        conversation and step. `sequential`: a node with `_target_` of a sequential head, or None. `draft_vocab_size`
        None = the whole vocabulary. `init`: "target" copies the target's last layers, "random" does not.
        `init_markov`: "zero", or "bigram" from counts.
        """

        name: str = "block"
        layer_ids: tuple[int, ...]
        num_layers: int = 2
        block_size: int = 5
        sample_from_anchor: bool = True
        window: int | None = 64
        num_anchors: int = 64
        sequential: dict[str, Any] | None = None
        confidence: bool = True
        draft_vocab_size: int | None = None
        init: str = "target"
        init_markov: str = "zero"
        loss: LossWeights = field(default_factory=LossWeights)

        def __post_init__(self) -> None:
            for name in ("num_layers", "block_size", "num_anchors", "window", "draft_vocab_size"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: got {value}; accepted: 1 or more")
            for name, accepted in (("init", ("target", "random")), ("init_markov", ("zero", "bigram"))):
                if getattr(self, name) not in accepted:
                    raise ValueError(f"{name}: got '{getattr(self, name)}'; accepted: {', '.join(accepted)}")
            if not self.layer_ids:
                raise ValueError("layer_ids: empty; name at least one target layer to read")
            # A wrong setting shows before anything is done.
            head = None if self.sequential is None else build_config(self.sequential, key="drafter.sequential")[0]
            if head is not None and not issubclass(head, SequentialHead):
                raise ValueError(
                    f"sequential: {head.__name__} is no sequential head; accepted: a SequentialHead, or null"
                )

    def __init__(self, config: Config, spec: TargetSpec, *, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        check_layer_ids(config.layer_ids, spec, key="drafter.layer_ids")
        check_vocab(config.draft_vocab_size, spec, vocab)
        self.config, self.spec = config, spec
        self._distill = Distillation(config.loss, vocab)
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList([DraftLayer(spec) for _ in range(config.num_layers)])
        self.norm = RMSNorm(hidden, eps=eps)
        for linear in [self.fc, *(m for m in self.layers.modules() if isinstance(m, nn.Linear))]:
            nn.init.normal_(linear.weight, std=0.02)
        self.vocab = vocab
        self.register_buffer("inv_freq", torch.tensor(spec.rope_inv_freq), persistent=False)
        self.markov_head: SequentialHead | None = None
        if config.sequential is not None:
            cls, head_config = build_config(config.sequential, key="drafter.sequential")
            self.markov_head = cls(head_config, spec, spec.vocab_size if vocab is None else vocab.size)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence:
            rank = 0 if self.markov_head is None else self.markov_head.markov_w1.embedding_dim
            self.confidence_head = ConfidenceHead(hidden, rank)

    @classmethod
    def create(cls, config: Config, spec: TargetSpec, start: "Start") -> "BlockDrafter":
        """Counts the draft vocabulary in the training text and starts from the target as `config` says."""
        drafter = cls(config, spec, vocab=new_vocab(config.draft_vocab_size, spec, start))
        drafter.init_from_target(start.target_tensors(), start.sample(drafter.needs), start.supervised_pairs())
        return drafter

    @property
    def needs(self) -> Needs:
        """Aux states; the last state too, which the loss compares with."""
        return Needs(layer_ids=self.config.layer_ids, last=True)

    @property
    def block_size(self) -> int:
        """Tokens drafted per block."""
        return self.config.block_size

    @property
    def num_slots(self) -> int:
        """Slots of a pass: one a draft, and the anchor's where that drafts nothing."""
        return self.block_size + (not self.config.sample_from_anchor)

    @property
    def drafts_trees(self) -> bool:
        """Yes: every slot of the block has a distribution."""
        return True

    def session(self, target: "FrozenTarget", batch_size: int) -> "BlockSession":
        """A decoding session in the dtype of the target."""
        from drafters.heads.block_session import BlockSession

        return BlockSession(self, target.head, batch_size)

    def loss(self, batch: Batch, target_head: "TargetHead") -> Losses:
        """Distillation on blocks after sampled anchors; products in the autocast dtype, float32 outside of autocast.

        Outside of training mode it also fills the metrics that need the target's whole vocabulary.
        """
        device = batch.last_BTD.device
        dtype = compute_dtype(device)
        anchors = sample_anchors(batch, num_anchors=self.config.num_anchors, block_size=self.block_size)
        with torch.autocast(device.type, enabled=False):
            if len(anchors.rows_A) == 0:
                return no_anchors(self, device)
            blocks = self._blocks(anchors, self.states(batch, anchors, target_head, dtype))
            return self._distill(batch, anchors, blocks, target_head, want_metrics=not self.training)

    def states(self, batch: Batch, anchors: Anchors, head: "TargetHead", dtype: torch.dtype) -> Tensor:
        """Backbone states [A, G, D] of the slots that draft, after the final norm, in `dtype`."""
        weights = self.layer_weights(dtype)
        layout = BlockLayout(
            rows_A=anchors.rows_A,
            positions_A=anchors.positions_A,
            num_rows=batch.tokens_BT.shape[0],
            num_context=batch.tokens_BT.shape[1],
            block_size=self.num_slots,
            window=self.config.window,
        )
        contexts = self._contexts(batch, weights, dtype)
        slots_AG = anchors.tokens_AG.new_full((len(anchors.rows_A), self.num_slots), self.spec.mask_token_id)
        slots_AG[:, 0] = anchors.tokens_AG[:, 0]
        x_MD = head.embed(slots_AG.flatten()).float()
        cos, sin = rope_table(layout.slots().flatten(), self.inv_freq)
        for layer, context in zip(weights, contexts, strict=True):
            query, keys, values = layer.project(x_MD, cos, sin)
            x_MD = layer.finish(x_MD, block_attention(query, context, (keys, values), layout))
        drafting_AGD = x_MD.unflatten(0, slots_AG.shape)[:, self.num_slots - self.block_size :]
        return self.norm(drafting_AGD, dtype=dtype)

    def layer_weights(self, dtype: torch.dtype) -> list[LayerWeights]:
        """The layers' weights, cast and joined."""
        return [cast(DraftLayer, layer).weights(dtype) for layer in self.layers]

    def context_states(self, aux_MLD: Tensor, fc: Tensor) -> Tensor:
        """Fused aux states [M, D]; `fc` is the projection in the compute dtype."""
        return self.hidden_norm(F.linear(aux_MLD.flatten(1).to(fc.dtype), fc), dtype=fc.dtype)

    def _contexts(self, batch: Batch, weights: list[LayerWeights], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B * T, K, H] of the context, for each layer, projected once per conversation."""
        num_rows, width = batch.tokens_BT.shape
        fused_MD = self.context_states(aux_of(batch, self.config.layer_ids).flatten(0, 1), self.fc.weight.to(dtype))
        all_kv = F.linear(fused_MD, torch.cat([w.kv for w in weights])).chunk(len(weights), dim=-1)
        positions_M = torch.arange(width, device=fused_MD.device).repeat(num_rows)
        cos, sin = rope_table(positions_M, self.inv_freq)
        return [w.context(kv, cos, sin) for w, kv in zip(weights, all_kv, strict=True)]

    def _blocks(self, anchors: Anchors, hidden_AGD: Tensor) -> Blocks:
        blocks, embedded_AGR = Blocks(hidden_AGD=hidden_AGD), None
        if self.markov_head is not None:
            embedded_AGR = self.markov_head.markov_w1(anchors.tokens_AG)
            blocks.bias_AGR = teacher_forced(self.markov_head, embedded_AGR, hidden_AGD)
            blocks.bias_weight_VR = self.markov_head.markov_w2.weight
        if self.confidence_head is not None:
            blocks.confidence_AG = self.confidence_head(hidden_AGD, embedded_AGR)
        return blocks

    @torch.no_grad()
    def begin_neutral(self, new: Collection[str]) -> None:
        """New layers pass their input on, and a new sequential head adds no bias."""
        for name, parameter in self.named_parameters():
            if name in new and name.endswith((*LAYER_OUTPUTS, "markov_w2.weight")):
                parameter.zero_()

    def init_from_target(
        self, tensors: Mapping[str, Tensor], sample: Batch | None = None, tokens: Tensor | None = None
    ) -> None:
        """Start from the target as `config.init` and `config.init_markov` say; warns and stays random where it cannot.

        `tensors` are the target's weights by their usual names, `sample` a batch that scales are measured on, and
        `tokens` [P, 2] pairs of a training token and the one after it (for "bigram").
        """
        from drafters.heads.block_init import bigram_factors, copy_target_layers

        if self.config.init == "target":
            copy_target_layers(self, tensors, sample)
        if self.config.init_markov == "bigram" and self.markov_head is None:
            warnings.warn("drafter.init_markov: 'bigram' is ignored, there is no sequential head", stacklevel=2)
        elif self.config.init_markov == "bigram" and self.markov_head is not None:
            if tokens is None:
                raise ConfigError("drafter.init_markov: 'bigram' needs training tokens; use 'zero'")
            head = self.markov_head
            with torch.no_grad():
                first, second = bigram_factors(
                    tokens, vocab=self.vocab, vocab_size=self.spec.vocab_size, rank=head.markov_w1.embedding_dim
                )
                head.markov_w1.weight.copy_(first)
                head.markov_w2.weight.copy_(second)
