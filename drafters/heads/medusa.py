# Medusa (2401.10774): independent heads on the target's last state, each residual blocks and an output projection.
# They do not know each other's drafts, so all are made at once; trees of them cost the drafter nothing more.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.errors import ConfigError
from drafters.heads.anchors import sample_anchors, with_a_row
from drafters.heads.base import Drafter
from drafters.heads.distillation import Blocks, Distillation, no_anchors
from drafters.heads.draft_vocab import check_vocab, new_vocab
from drafters.heads.layers import compute_dtype
from drafters.losses import LossWeights
from drafters.spec import TargetSpec
from drafters.types import Batch, Losses, Needs
from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.heads.medusa_session import MedusaSession
    from drafters.heads.start import Start
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["MedusaDrafter", "MedusaHead", "ResidualBlock"]


class ResidualBlock(nn.Module):
    """h + SiLU(W h + b), with W and b zero at the start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_XD: Tensor) -> Tensor:
        """In the dtype of the input."""
        weight, bias = self.linear.weight.to(hidden_XD.dtype), self.linear.bias.to(hidden_XD.dtype)
        return hidden_XD + F.silu(F.linear(hidden_XD, weight, bias))


class MedusaHead(nn.Module):
    """The residual blocks of one draft position and, where heads own theirs, its output projection `lm_head`."""

    def __init__(self, hidden_size: int, num_layers: int, num_draft: int | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers)))
        self.lm_head = None if num_draft is None else nn.Linear(hidden_size, num_draft, bias=False)


class MedusaDrafter(Drafter):
    """Head k reads the target's last state h before the anchor at p and predicts token p + k: its logits are
    W_k^out (h + SiLU(W_k h + b_k)). Raises ConfigError for settings that do not fit the target."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`block_size`: number of heads. `num_layers`: residual blocks of each. `own_projection`: every head has an
        output projection of its own, which starts as the target's; else they share the target's frozen one.
        `num_anchors`: places drawn per conversation and step. `draft_vocab_size` None = the whole vocabulary.
        """

        name: str = "medusa"
        block_size: int = 4
        num_layers: int = 1
        own_projection: bool = True
        num_anchors: int = 64
        draft_vocab_size: int | None = None
        loss: LossWeights = field(default_factory=LossWeights)

        def __post_init__(self) -> None:
            for name in ("block_size", "num_layers", "num_anchors", "draft_vocab_size"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: got {value}; accepted: 1 or more")

    def __init__(self, config: Config, spec: TargetSpec, *, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        check_vocab(config.draft_vocab_size, spec, vocab)
        if config.own_projection and spec.logit_softcap is not None:
            raise ConfigError(
                f"drafter.own_projection: got true for a target that caps its logits at {spec.logit_softcap}, which a "
                "projection of its own would not reach; accepted: false"
            )
        self.config, self.spec = config, spec
        self._distill = Distillation(config.loss, vocab)
        num_draft = spec.vocab_size if vocab is None else vocab.size
        own = num_draft if config.own_projection else None
        self.heads = nn.ModuleList(
            [MedusaHead(spec.hidden_size, config.num_layers, own) for _ in range(config.block_size)]
        )
        self.vocab = vocab

    @classmethod
    def create(cls, config: Config, spec: TargetSpec, start: "Start") -> "MedusaDrafter":
        """Counts the draft vocabulary in the training text; every head starts as the target's own."""
        drafter = cls(config, spec, vocab=new_vocab(config.draft_vocab_size, spec, start))
        rows_VD = start.target.head.rows(None if drafter.vocab is None else drafter.vocab.ids_V)
        with torch.no_grad():
            for projection in drafter.projections:
                projection.copy_(rows_VD.float() * spec.logit_scale)
        return drafter

    @property
    def needs(self) -> Needs:
        """The last state."""
        return Needs(last=True, last_input=True)

    @property
    def block_size(self) -> int:
        """One draft a head."""
        return self.config.block_size

    @property
    def drafts_trees(self) -> bool:
        """Yes: slots of one depth share a head."""
        return True

    @property
    def projections(self) -> Sequence[Tensor]:
        """The heads' own output projections [V', D]; none where they share the target's."""
        heads = [cast(MedusaHead, head) for head in self.heads]
        return [head.lm_head.weight for head in heads if head.lm_head is not None]

    def session(self, target: "FrozenTarget", batch_size: int) -> "MedusaSession":
        """A decoding session in the dtype of the target."""
        from drafters.heads.medusa_session import MedusaSession

        return MedusaSession(self, target.head, batch_size)

    def loss(self, batch: Batch, target_head: "TargetHead") -> Losses:
        """Distillation after sampled anchors; products in the autocast dtype, float32 outside of autocast."""
        device = batch.last_BTD.device
        anchors = with_a_row(sample_anchors(batch, num_anchors=self.config.num_anchors, block_size=self.block_size))
        dtype = compute_dtype(device)
        with torch.autocast(device.type, enabled=False):
            if len(anchors.rows_A) == 0:
                return no_anchors(self, device)
            before_AD = batch.last_BTD[anchors.rows_A, anchors.positions_A - 1].to(dtype)
            blocks = Blocks(hidden_AGD=self.states(before_AD), own=self.projections)
            return self._distill(batch, anchors, blocks, target_head, want_metrics=not self.training)

    def states(self, last_ND: Tensor) -> Tensor:
        """States [N, G, D] of all heads before their output projections, in the dtype of `last_ND`."""
        return torch.stack([cast(MedusaHead, head).blocks(last_ND) for head in self.heads], dim=1)
