# Self-speculation: the target's first layers draft, all of them verify, and the key/value cache of the first ones is
# shared (Draft & Verify 2309.08168, LayerSkip 2404.16710). A state of an early layer goes through the target's own
# final norm and output projection; on a checkpoint that was not trained for that, a small adapter before them repairs
# it (Kangaroo 2404.18911). Without an adapter there is nothing to train: plain layer skip.

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.aux_states import aux_of
from drafters.heads.base import Drafter
from drafters.heads.distillation import Blocks, Distillation, no_anchors
from drafters.heads.draft_vocab import check_vocab, new_vocab
from drafters.heads.final_norm import norm_gain
from drafters.heads.layers import RMSNorm, compute_dtype, join, rms_norm
from drafters.losses import LossWeights
from drafters.spec import TargetSpec, check_layer_ids
from drafters.types import Batch, Losses, Needs
from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.heads.exit_session import ExitSession
    from drafters.heads.start import Start
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["Adapter", "AdapterConfig", "ExitDrafter"]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`size`: width of the gated MLP."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size: got {self.size}; accepted: 1 or more")


class Adapter(nn.Module):
    """x + down(silu(gate(n)) * up(n)) with n = norm(x); at first, with `down` zero, x itself."""

    def __init__(self, config: AdapterConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.gate_proj = nn.Linear(spec.hidden_size, config.size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, config.size, bias=False)
        self.down_proj = nn.Linear(config.size, spec.hidden_size, bias=False)
        for linear in (self.gate_proj, self.up_proj):
            nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(self.down_proj.weight)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[gate; up] and down in the dtype of products, for `forward`."""
        return join(dtype, self.gate_proj.weight, self.up_proj.weight), self.down_proj.weight.to(dtype)

    def forward(self, states_XD: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Repaired states [..., D], float32."""
        gate_up, down = weights
        gate, up = F.linear(self.norm(states_XD, dtype=gate_up.dtype), gate_up).chunk(2, dim=-1)
        return states_XD.float() + F.linear(F.silu(gate) * up, down).float()


class ExitDrafter(Drafter):
    """`gain_D` is the gain of the target's final norm, kept with the drafter since training sees only the head (None =
    ones, until weights are loaded). Raises ConfigError for settings that do not fit the target."""

    gain_D: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`exit_layer`: the last layer that runs for a draft, from 0; None = number `num_layers // 4`. `adapter` None =
        layer skip. `block_size`: most drafts a round. `num_anchors`: blocks a conversation and step. A position is
        drafted in the same way in every slot, so `loss.gamma` does not act.
        """

        name: str = "exit"
        exit_layer: int | None = None
        adapter: AdapterConfig | None = None
        block_size: int = 4
        num_anchors: int = 64
        draft_vocab_size: int | None = None
        loss: LossWeights = field(default_factory=LossWeights)

        def __post_init__(self) -> None:
            for name in ("block_size", "num_anchors", "draft_vocab_size"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: got {value}; accepted: 1 or more")
            if self.adapter is None and self.draft_vocab_size is not None:
                raise ValueError(
                    f"draft_vocab_size: got {self.draft_vocab_size}; accepted: null where adapter is null, since it is "
                    "counted in training (and without an adapter there is nothing to train: evaluate.py run=layer_skip)"
                )

    def __init__(
        self, config: Config, spec: TargetSpec, *, vocab: DraftVocab | None = None, gain_D: Tensor | None = None
    ) -> None:
        super().__init__()
        self.exit_layer = spec.num_layers // 4 if config.exit_layer is None else config.exit_layer
        check_layer_ids((self.exit_layer,), spec, key="drafter.exit_layer")
        check_vocab(config.draft_vocab_size, spec, vocab)
        self.config, self.spec, self.vocab = config, spec, vocab
        self._distill = Distillation(config.loss, vocab)
        self.adapter: Adapter | None = None
        if config.adapter is not None:
            self.adapter = Adapter(config.adapter, spec)
            self.register_buffer("gain_D", torch.ones(spec.hidden_size) if gain_D is None else gain_D)

    @classmethod
    def trains(cls, config: Config) -> bool:
        """Only with an adapter."""
        return config.adapter is not None

    @classmethod
    def complete(cls, config: Config, target: "FrozenTarget") -> Config:
        """Nothing to fill in; an adapter stands before a final norm that has to be known."""
        if config.adapter is not None:
            norm_gain(target)
        return config

    @classmethod
    def create(cls, config: Config, spec: TargetSpec, start: "Start") -> "ExitDrafter":
        """Counts the draft vocabulary in the training text and copies the gain of the target's final norm."""
        vocab = new_vocab(config.draft_vocab_size, spec, start)
        return cls(config, spec, vocab=vocab, gain_D=None if config.adapter is None else norm_gain(start.target))

    @property
    def needs(self) -> Needs:
        """The exit layer's state, and the last one, which the loss compares with; nothing without an adapter, for a
        session reads the target's cache instead."""
        return Needs() if self.adapter is None else Needs(layer_ids=(self.exit_layer,), last=True)

    @property
    def block_size(self) -> int:
        """The most drafts of a round; each is a pass of the first layers."""
        return self.config.block_size

    def session(self, target: "FrozenTarget", batch_size: int) -> "ExitSession":
        """A decoding session in the dtype of the target."""
        from drafters.heads.exit_session import ExitSession

        return ExitSession(self, target, batch_size)

    def loss(self, batch: Batch, target_head: "TargetHead") -> Losses:
        """Distillation on what single positions draft, all of one weight; products in the autocast dtype.

        Blocks of neighbouring anchors would hold the same positions, so training draws `num_anchors * block_size`
        positions, each once. Outside of training mode it takes whole blocks, for the metrics; the loss is the mean over
        drafted positions in both.
        """
        device, num_anchors, block_size = batch.last_BTD.device, self.config.num_anchors, self.block_size
        dtype = compute_dtype(device)
        if self.training:
            num_anchors, block_size = num_anchors * block_size, 1
        anchors = sample_anchors(batch, num_anchors=num_anchors, block_size=block_size)
        with torch.autocast(device.type, enabled=False):
            if len(anchors.rows_A) == 0:
                return no_anchors(self, device)
            blocks = Blocks(hidden_AGD=self.states(batch, anchors, dtype), weights_G=torch.ones(block_size))
            return self._distill(batch, anchors, blocks, target_head, want_metrics=not self.training)

    def states(self, batch: Batch, anchors: Anchors, dtype: torch.dtype) -> Tensor:
        """States [A, G, D] of the positions that draft, after the final norm, in `dtype`."""
        weights = self._trained().weights(dtype)
        aux_MD = aux_of(batch, (self.exit_layer,)).flatten(0, 2)
        # Draft k comes from where the target predicts the same token, so from the position of that state.
        return self.hidden(aux_MD[anchors.states_AG], weights)

    def hidden(self, states_XD: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Exit states [..., D] after the adapter, with its `weights`, and the final norm, in the dtype of these."""
        repaired_XD = self._trained()(states_XD, weights)
        return rms_norm(repaired_XD, self.gain_D, self.spec.rms_norm_eps, dtype=weights[0].dtype)

    def _trained(self) -> Adapter:
        if self.adapter is None:
            raise NotImplementedError("ExitDrafter without an adapter has nothing to train")
        return self.adapter
