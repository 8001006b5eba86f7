# The semi-autoregressive drafter (DFlash 2602.06036, DSpark 2607.05147): a parallel backbone that reads the target's
# aux states as extra keys and values and drafts a whole block in one pass, with an optional sequential head and an
# optional confidence head. Embedding and output projection are the target's; they are passed in, never owned.

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import build_config
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.base import Drafter
from drafters.heads.block_metrics import block_metrics
from drafters.heads.confidence import ConfidenceHead, confidence_loss
from drafters.heads.layers import DraftLayer, LayerWeights, RMSNorm, compute_dtype, rope_table
from drafters.heads.masks import BlockLayout, block_attention
from drafters.heads.sequential import SequentialHead, teacher_forced
from drafters.losses import DistillInput, LossWeights, distill, position_weights
from drafters.spec import TargetSpec, check_layer_ids
from drafters.types import Batch, Losses, Needs
from drafters.vocab import DraftVocab, count_vocab, coverage
from drafters.vocab_products import Workspace

if TYPE_CHECKING:
    from drafters.heads.block_session import BlockSession
    from drafters.heads.start import Start
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["BlockDrafter"]

logger = logging.getLogger(__name__)


class BlockDrafter(Drafter):
    """`vocab` None drafts over the whole vocabulary. Raises ConfigError for settings that do not fit the target."""

    d2t: Tensor
    t2d: Tensor
    inv_freq: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`layer_ids`: target layers whose outputs are read. `window`: context positions that a block sees, the
        newest before its anchor; None = all. `num_anchors`: blocks drawn per conversation and step. `sequential`: a
        node with `_target_` of a sequential head, or None. `draft_vocab_size` None = the whole vocabulary. `init`:
        "target" copies the target's last layers, "random" does not. `init_markov`: "zero", or "bigram" from counts.
        """

        name: str = "block"
        layer_ids: tuple[int, ...]
        num_layers: int = 2
        block_size: int = 5
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
            if self.sequential is not None:
                build_config(self.sequential, key="drafter.sequential")  # a wrong setting shows before anything is done

    def __init__(self, config: Config, spec: TargetSpec, *, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        check_layer_ids(config.layer_ids, spec, key="drafter.layer_ids")
        _check_vocab(config, spec, vocab)
        self.config, self.spec = config, spec
        self._workspace = Workspace()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList([DraftLayer(spec) for _ in range(config.num_layers)])
        self.norm = RMSNorm(hidden, eps=eps)
        for linear in [self.fc, *(m for m in self.layers.modules() if isinstance(m, nn.Linear))]:
            nn.init.normal_(linear.weight, std=0.02)
        self.vocab = vocab
        if vocab is not None:
            self.register_buffer("d2t", vocab.d2t)
            self.register_buffer("t2d", vocab.t2d)
            self.register_load_state_dict_post_hook(_follow_buffers)
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
        vocab = None
        if config.draft_vocab_size is not None:
            tokens, size = start.supervised_tokens(), config.draft_vocab_size
            vocab = count_vocab(tokens, size=size, vocab_size=spec.vocab_size, always=spec.eos_ids)
            logger.info("draft vocabulary: %d tokens hold %.1f %% of the text", size, 100 * coverage(tokens, vocab))
        drafter = cls(config, spec, vocab=vocab)
        drafter.init_from_target(start.target_tensors(), start.sample(drafter.needs), start.supervised_pairs())
        return drafter

    @classmethod
    def from_tensors(cls, config: Config, spec: TargetSpec, tensors: Mapping[str, Tensor]) -> "BlockDrafter":
        """A drafter of the shape of stored `tensors`, whose draft vocabulary it takes; the weights load later."""
        if (config.draft_vocab_size is None) != ("d2t" not in tensors):
            raise CheckpointError(
                f"d2t: {'present' if 'd2t' in tensors else 'missing'}, but draft_vocab_size is "
                f"{config.draft_vocab_size}; the folder is damaged or its config was edited"
            )
        vocab = DraftVocab(tensors["d2t"], num_full=spec.vocab_size) if "d2t" in tensors else None
        return cls(config, spec, vocab=vocab)

    def _apply(self, fn: Any, recurse: bool = True) -> "BlockDrafter":
        super()._apply(fn, recurse)
        _follow_buffers(self)
        return self

    @property
    def needs(self) -> Needs:
        """Aux states; the last state too, which the loss compares with."""
        return Needs(layer_ids=self.config.layer_ids, last=True)

    @property
    def block_size(self) -> int:
        """Tokens drafted per block."""
        return self.config.block_size

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
                nothing = sum(p.sum() * 0.0 for p in self.parameters())
                return Losses(total=torch.as_tensor(nothing), count=torch.zeros((), device=device))
            hidden_AGD = self.states(batch, anchors, target_head, dtype)
            return self._distill(batch, anchors, target_head, hidden_AGD)

    def states(self, batch: Batch, anchors: Anchors, head: "TargetHead", dtype: torch.dtype) -> Tensor:
        """Backbone states [A, G, D] after the final norm, in `dtype`."""
        weights = self.layer_weights(dtype)
        layout = BlockLayout(
            rows_A=anchors.rows_A,
            positions_A=anchors.positions_A,
            num_rows=batch.tokens_BT.shape[0],
            num_context=batch.tokens_BT.shape[1],
            block_size=self.block_size,
            window=self.config.window,
        )
        contexts = self._contexts(batch, weights, dtype)
        slots_AG = torch.full_like(anchors.tokens_AG, self.spec.mask_token_id)
        slots_AG[:, 0] = anchors.tokens_AG[:, 0]
        x_MD = head.embed(slots_AG.flatten()).float()
        cos, sin = rope_table(layout.slots().flatten(), self.inv_freq)
        for layer, context in zip(weights, contexts, strict=True):
            query, keys, values = layer.project(x_MD, cos, sin)
            x_MD = layer.finish(x_MD, block_attention(query, context, (keys, values), layout))
        return self.norm(x_MD, dtype=dtype).unflatten(0, slots_AG.shape)

    def layer_weights(self, dtype: torch.dtype) -> list[LayerWeights]:
        """The layers' weights, cast and joined."""
        return [cast(DraftLayer, layer).weights(dtype) for layer in self.layers]

    def context_states(self, aux_MLD: Tensor, fc: Tensor) -> Tensor:
        """Fused aux states [M, D]; `fc` is the projection in the compute dtype."""
        return self.hidden_norm(F.linear(aux_MLD.flatten(1).to(fc.dtype), fc), dtype=fc.dtype)

    def _contexts(self, batch: Batch, weights: list[LayerWeights], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B * T, K, H] of the context, for each layer, projected once per conversation."""
        num_rows, width = batch.tokens_BT.shape
        fused_MD = self.context_states(self._aux(batch).flatten(0, 1), self.fc.weight.to(dtype))
        all_kv = F.linear(fused_MD, torch.cat([w.kv for w in weights])).chunk(len(weights), dim=-1)
        positions_M = torch.arange(width, device=fused_MD.device).repeat(num_rows)
        cos, sin = rope_table(positions_M, self.inv_freq)
        return [w.context(kv, cos, sin) for w, kv in zip(weights, all_kv, strict=True)]

    def _aux(self, batch: Batch) -> Tensor:
        missing = set(self.config.layer_ids) - set(batch.layer_ids)
        if batch.aux_BTLD is None or missing:
            raise DataError(f"batch: no states of target layers {sorted(missing)}; it has {list(batch.layer_ids)}")
        if batch.layer_ids == self.config.layer_ids:
            return batch.aux_BTLD
        return batch.aux_BTLD[:, :, [batch.layer_ids.index(i) for i in self.config.layer_ids]]

    def _distill(self, batch: Batch, anchors: Anchors, head: "TargetHead", hidden_AGD: Tensor) -> Losses:
        weights, want_metrics = self.config.loss, not self.training
        kept_N = anchors.counted_AG.flatten().nonzero().squeeze(1)
        hidden_ND = hidden_AGD.flatten(0, 1).index_select(0, kept_N)
        decay_G = position_weights(self.block_size, weights.gamma).to(hidden_ND.device)
        weights_N = decay_G.expand_as(anchors.counted_AG).flatten()[kept_N]
        embedded_NR = bias_NR = bias_weight_VR = None
        if self.markov_head is not None:
            embedded_AGR = self.markov_head.markov_w1(anchors.tokens_AG)
            bias_AGR = teacher_forced(self.markov_head, embedded_AGR, hidden_AGD)
            embedded_NR = embedded_AGR.flatten(0, 1).index_select(0, kept_N)
            bias_NR = bias_AGR.flatten(0, 1).index_select(0, kept_N).to(hidden_ND.dtype)
            bias_weight_VR = self.markov_head.markov_w2.weight
        found = distill(
            DistillInput(
                hidden_ND=hidden_ND,
                target_MD=batch.last_BTD.flatten(0, 1),
                target_rows_N=anchors.states_AG.flatten()[kept_N],
                labels_N=anchors.labels_AG.flatten()[kept_N],
                weights_N=weights_N,
                lse_M=batch.lse_BT.flatten(),
                bias_NR=bias_NR,
                bias_weight_VR=bias_weight_VR,
                vocab=self.vocab,
            ),
            head,
            weights,
            want_accept=self.confidence_head is not None,
            want_metrics=want_metrics,
            workspace=self._workspace,
        )
        total, terms, confidence_N = found.total, dict(found.terms), None
        if self.confidence_head is not None and found.accept_N is not None:
            logits_N = self.confidence_head(hidden_ND, embedded_NR)
            term = confidence_loss(logits_N, found.accept_N, weights_N)
            total, terms["confidence"] = total + weights.confidence * term, term.detach()
            confidence_N = logits_N.detach().sigmoid()
        metrics = block_metrics(anchors, accept_N=found.accept_N, agree_N=found.agree_N, confidence_N=confidence_N)
        count = torch.tensor(float(len(kept_N)), device=hidden_ND.device)
        return Losses(total=total, count=count, terms=terms, metrics=metrics)

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


def _follow_buffers(drafter: BlockDrafter, _: Any = None) -> None:
    # The lookup is made of the stored ids: after loading, and on another device.
    if drafter.vocab is not None:
        drafter.vocab = DraftVocab(drafter.d2t, num_full=drafter.spec.vocab_size)


def _check_vocab(config: BlockDrafter.Config, spec: TargetSpec, vocab: DraftVocab | None) -> None:
    given = None if vocab is None else vocab.size
    if given != config.draft_vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size: got {config.draft_vocab_size} with a draft vocabulary of {given}; "
            "they must agree (count_vocab makes one from the training tokens)"
        )
    if vocab is not None and vocab.num_full != spec.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size: the draft vocabulary was counted for {vocab.num_full} target tokens, "
            f"this target has {spec.vocab_size}"
        )
