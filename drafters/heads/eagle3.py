# EAGLE-3 (2503.01840): one decoder layer reads the next token's embedding beside three fused target states; from the
# second draft on its own output stands for the states. It is trained on what it will meet: steps after an anchor are
# unrolled on the layer's own outputs (training-time test), each with its own token, label and target state.

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.heads.anchors import Anchors, sample_anchors, with_a_row
from drafters.heads.aux_states import aux_of
from drafters.heads.base import Drafter
from drafters.heads.block_init import HEAD_NORMS, PROJECTIONS, layer_mismatch
from drafters.heads.distillation import Blocks, Distillation, no_anchors
from drafters.heads.draft_vocab import check_vocab, new_vocab
from drafters.heads.eagle3_layer import Eagle3Layer, Unroll
from drafters.heads.layers import RMSNorm, compute_dtype, rope_table
from drafters.losses import LossWeights
from drafters.spec import TargetSpec, check_layer_ids
from drafters.types import Batch, Losses, Needs
from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.heads.eagle3_session import Eagle3Session
    from drafters.heads.start import Start
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["Eagle3Drafter"]


class Eagle3Drafter(Drafter):
    """`vocab` None drafts over the whole vocabulary. Raises ConfigError for settings that do not fit the target.

    Row i of a conversation reads token i + 1 and the fused states g_i; it predicts token i + 2. So the anchor at
    position p is read by row p - 1, and an anchor that opens a conversation has no row.
    """

    inv_freq: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`layer_ids`: target layers whose outputs are fused, from low to high (engines want three). `block_size`:
        tokens drafted at most, and steps unrolled in training. `norm_before_residual`: the layer's residual stream
        begins with the normed state. What goes from step to step is always the layer's output before the final norm.
        `num_anchors`: places unrolled per conversation and step. `draft_vocab_size` None = the whole vocabulary; the
        output projection is the drafter's own. `init`: "target" copies the target's last layer and output rows,
        "random" does not.
        """

        name: str = "eagle3"
        layer_ids: tuple[int, ...]
        block_size: int = 7
        norm_before_residual: bool = False
        num_anchors: int = 64
        draft_vocab_size: int | None = None
        init: str = "target"
        loss: LossWeights = field(default_factory=LossWeights)

        def __post_init__(self) -> None:
            for name in ("block_size", "num_anchors", "draft_vocab_size"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: got {value}; accepted: 1 or more")
            if self.init not in ("target", "random"):
                raise ValueError(f"init: got '{self.init}'; accepted: target, random")
            if not self.layer_ids:
                raise ValueError("layer_ids: empty; name at least one target layer to read")

    def __init__(self, config: Config, spec: TargetSpec, *, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        check_layer_ids(config.layer_ids, spec, key="drafter.layer_ids")
        check_vocab(config.draft_vocab_size, spec, vocab)
        self.config, self.spec = config, spec
        self._distill = Distillation(config.loss, vocab)
        hidden = spec.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(spec, norm_before_residual=config.norm_before_residual)
        self.norm = RMSNorm(hidden, eps=spec.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, spec.vocab_size if vocab is None else vocab.size, bias=False)
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)
        self.vocab = vocab
        self.register_buffer("inv_freq", torch.tensor(spec.rope_inv_freq), persistent=False)

    @classmethod
    def create(cls, config: Config, spec: TargetSpec, start: "Start") -> "Eagle3Drafter":
        """Counts the draft vocabulary in the training text and starts from the target as `config` says."""
        drafter = cls(config, spec, vocab=new_vocab(config.draft_vocab_size, spec, start))
        if config.init == "target":
            drafter.init_from_target(start.target_tensors(), start.target.head)
        return drafter

    @property
    def needs(self) -> Needs:
        """Aux states; the last state too, which the loss compares with."""
        return Needs(layer_ids=self.config.layer_ids, last=True)

    @property
    def block_size(self) -> int:
        """Tokens drafted at most."""
        return self.config.block_size

    @property
    def drafts_trees(self) -> bool:
        """Yes: the slots of a level are steps of blocks that branch."""
        return True

    def session(self, target: "FrozenTarget", batch_size: int) -> "Eagle3Session":
        """A decoding session in the dtype of the target."""
        from drafters.heads.eagle3_session import Eagle3Session

        return Eagle3Session(self, target.head, batch_size)

    def loss(self, batch: Batch, target_head: "TargetHead") -> Losses:
        """Distillation on the unrolled steps of sampled anchors; products in the autocast dtype, float32 outside."""
        device = batch.last_BTD.device
        dtype = compute_dtype(device)
        anchors = with_a_row(sample_anchors(batch, num_anchors=self.config.num_anchors, block_size=self.block_size))
        with torch.autocast(device.type, enabled=False):
            if len(anchors.rows_A) == 0:
                return no_anchors(self, device)
            hidden_AGD = self.states(batch, anchors, target_head, dtype)
            blocks = Blocks(hidden_AGD=hidden_AGD, own=[self.lm_head.weight])
            return self._distill(batch, anchors, blocks, target_head, want_metrics=not self.training)

    def states(self, batch: Batch, anchors: Anchors, head: "TargetHead", dtype: torch.dtype) -> Tensor:
        """Outputs [A, G, D] of the unrolled steps after the final norm, in `dtype`; no anchor at position 0.

        Step s at row i reads token i + 1 + s; its label is token i + 2 + s, with the target state that predicts it.
        """
        num_rows, width = batch.tokens_BT.shape
        layer = self.midlayer.weights(dtype)
        fused_BTD = self.fuse(aux_of(batch, self.config.layer_ids), self.fc.weight.to(dtype))
        positions_T = torch.arange(width, device=fused_BTD.device)
        # The last row has no next token and takes any: no anchor lies behind it.
        next_BTD = head.embed(batch.tokens_BT.roll(-1, dims=1))
        context = layer.context(next_BTD, fused_BTD, rope_table(positions_T, self.inv_freq))
        order_A, most = _order(anchors.rows_A, num_rows)
        places = (anchors.rows_A, order_A)
        # Conversations with fewer anchors are filled up with row 0, which nobody reads.
        row_BA = anchors.positions_A.new_zeros(num_rows, most).index_put(places, anchors.positions_A - 1)
        tokens_BAG = anchors.tokens_AG.new_zeros(num_rows, most, self.block_size)
        embedded_BAGD = head.embed(tokens_BAG.index_put(places, anchors.tokens_AG))
        unroll = Unroll(
            layer=layer,
            context=(context[0].transpose(1, 2).contiguous(), context[1].transpose(1, 2).contiguous()),
            allowed_XYS=positions_T < row_BA[..., None],
            positions_XY=row_BA,
            inv_freq=self.inv_freq,
        )
        state_BAD = fused_BTD[torch.arange(num_rows, device=row_BA.device)[:, None], row_BA]
        outputs = []
        for embedded_BAD in embedded_BAGD.unbind(2):
            state_BAD = unroll.step(embedded_BAD, state_BAD)
            outputs.append(state_BAD[places])
        return self.norm(torch.stack(outputs, dim=1), dtype=dtype)

    def fuse(self, aux_XLD: Tensor, fc: Tensor) -> Tensor:
        """g = fc [H_low ; H_mid ; H_high], float32 [..., D]; `fc` is the projection in the compute dtype."""
        return F.linear(aux_XLD.flatten(-2).to(fc.dtype), fc).float()

    @torch.no_grad()
    def init_from_target(self, tensors: Mapping[str, Tensor], head: "TargetHead") -> None:
        """Start as the target's last layer over the last fused state, with the target's own output rows.

        `tensors` are the target's weights by their usual names. The half of the attention that reads embeddings starts
        at zero. A target with q/k norm has those gains put into the projections, at the scale that inputs of
        independent unit entries would have. Warns and leaves the layer random when that is not a Llama-like one.
        """
        rows_VD = head.rows(None if self.vocab is None else self.vocab.ids_V)
        self.lm_head.weight.copy_(rows_VD.float() * self.spec.logit_scale)
        prefix, hidden = f"model.layers.{self.spec.num_layers - 1}.", self.spec.hidden_size
        reason = layer_mismatch(self.spec, tensors, [prefix])
        if reason is not None:
            warnings.warn(f"drafter.init: 'target' is not possible: {reason}; the layer starts random", stacklevel=2)
            return
        self.norm.weight.copy_(tensors["model.norm.weight"])
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].fill_diagonal_(1.0)
        own = dict(self.midlayer.named_parameters())
        for name in PROJECTIONS[3:]:
            own["hidden_norm.weight" if name == "input_layernorm.weight" else name].copy_(tensors[prefix + name])
        gain_D = tensors[prefix + "input_layernorm.weight"].float()
        for name, norm_name in zip(PROJECTIONS[:3], (*HEAD_NORMS, None), strict=True):
            weight = tensors[prefix + name].float()
            if norm_name is not None and prefix + norm_name in tensors:
                expected_rms = (weight * gain_D).square().sum(1).mean().sqrt()
                head_gain = tensors[prefix + norm_name].float()
                weight = weight * (head_gain / expected_rms).repeat(len(weight) // len(head_gain))[:, None]
            own[name].zero_()
            own[name][:, hidden:].copy_(weight)


def _order(rows_A: Tensor, num_rows: int) -> tuple[Tensor, int]:
    """The number [A] of each anchor among those of its conversation, and how many the longest list has."""
    counts_B = torch.bincount(rows_A, minlength=num_rows)
    first_B = counts_B.cumsum(0) - counts_B
    return torch.arange(len(rows_A), device=rows_A.device) - first_B[rows_A], int(counts_B.max())
