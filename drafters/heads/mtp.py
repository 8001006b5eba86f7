# Multi-token prediction by sequential modules (DeepSeek-V3, section 2.2; FastMTP 2509.18362). Depth k reads the state
# of depth k - 1 at a position and the token k places after it, and predicts the token after that one. It is trained on
# true tokens at all positions at once; embedding and output projection are the target's, frozen.

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.errors import ConfigError
from drafters.heads.anchors import Anchors, sample_anchors, with_a_row
from drafters.heads.base import Drafter
from drafters.heads.block_init import copy_layer, layer_mismatch
from drafters.heads.distillation import Blocks, Distillation, no_anchors
from drafters.heads.draft_vocab import check_vocab, new_vocab
from drafters.heads.final_norm import norm_gain
from drafters.heads.layers import DraftLayer, RMSNorm, compute_dtype
from drafters.heads.mtp_block import BlockKind, OwnBlock, TargetBlock, plain_config
from drafters.losses import LossWeights
from drafters.spec import TargetSpec
from drafters.types import Batch, Losses, Needs
from drafters.vocab import DraftVocab

if TYPE_CHECKING:
    from drafters.heads.mtp_session import MtpSession
    from drafters.heads.start import Start
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["MtpDepth", "MtpDrafter"]

CHOICES = {
    "order": ("embedding_first", "hidden_first"),
    "feedback": ("before_norm", "after_norm"),
    "block": ("qwen3", "target"),
    "init": ("target", "random"),
}


class MtpDepth(nn.Module):
    """One module: h' = M [norm(embedding) ; norm(state)] in the given order, a block, and a final norm."""

    def __init__(self, spec: TargetSpec, block: nn.Module, *, order: str) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.embedding_first = order == "embedding_first"
        self.token_layernorm = RMSNorm(hidden, eps=eps)
        self.hidden_layernorm = RMSNorm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.normal_(self.input_proj.weight, std=0.02)
        self.block = block
        self.final_layernorm = RMSNorm(hidden, eps=eps)

    def enter(self, embedded: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
        """What the block reads [..., D], float32 or wider; the product is in `dtype`."""
        parts = [self.token_layernorm(embedded, dtype=dtype), self.hidden_layernorm(state, dtype=dtype)]
        joined = torch.cat(parts if self.embedding_first else parts[::-1], dim=-1)
        entered = F.linear(joined, self.input_proj.weight.to(dtype))
        return entered if dtype == torch.float64 else entered.float()


class MtpDrafter(Drafter):
    """`vocab` None drafts over the whole vocabulary. Raises ConfigError for settings that do not fit the target.

    At index i of a conversation depth k reads its input state i and token i + k, and predicts token i + k + 1; an
    anchor at p is drafted from index p - 1.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`block_size`: number of depths. `share_depths`: one module serves all (FastMTP). `order`: of the halves
        before the projection (DeepSeek-V3 and Qwen3-Next: "embedding_first", MiMo: "hidden_first"). `feedback`: the
        state that goes to the next depth, "before_norm" or "after_norm" (of the depth's final norm). `block`: "qwen3",
        our own layer, or "target", the target's own class of layer; `target_config` is filled in for that one.
        `num_anchors`: places per conversation and step that the loss is taken at. `depth_weights` None =
        exp(-(k - 1) / gamma). `draft_vocab_size` None = the whole vocabulary. `init`: "target" begins with the
        target's last layer and final norm, "random" does not.
        """

        name: str = "mtp"
        block_size: int = 3
        share_depths: bool = False
        order: str = "embedding_first"
        feedback: str = "before_norm"
        block: str = "qwen3"
        num_anchors: int = 64
        depth_weights: tuple[float, ...] | None = None
        draft_vocab_size: int | None = None
        init: str = "target"
        loss: LossWeights = field(default_factory=LossWeights)
        target_config: dict[str, Any] | None = None

        def __post_init__(self) -> None:
            for name in ("block_size", "num_anchors", "draft_vocab_size"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise ValueError(f"{name}: got {value}; accepted: 1 or more")
            for name, accepted in CHOICES.items():
                if getattr(self, name) not in accepted:
                    raise ValueError(f"{name}: got '{getattr(self, name)}'; accepted: {', '.join(accepted)}")
            weights = self.depth_weights
            if weights is not None and (len(weights) != self.block_size or min(weights) < 0 or max(weights) == 0):
                raise ValueError(
                    f"depth_weights: got {list(weights)}; accepted: one of 0 or more for each of {self.block_size} "
                    "depths, not all 0"
                )
            if self.block == "qwen3" and self.target_config is not None:
                raise ValueError("target_config: got one with block 'qwen3'; accepted: null, it belongs to 'target'")

    def __init__(self, config: Config, spec: TargetSpec, *, vocab: DraftVocab | None = None) -> None:
        super().__init__()
        check_vocab(config.draft_vocab_size, spec, vocab)
        if config.block == "target" and config.target_config is None:
            raise ConfigError("drafter.block: 'target' needs the target's config, which `create` fills in")
        self.config, self.spec = config, spec
        self._distill = Distillation(config.loss, vocab)
        self.kind: BlockKind = OwnBlock(spec) if config.target_config is None else TargetBlock(config.target_config)
        num_modules = 1 if config.share_depths else config.block_size
        self.depths = nn.ModuleList([MtpDepth(spec, self.kind.new(), order=config.order) for _ in range(num_modules)])
        self.vocab = vocab

    @classmethod
    def complete(cls, config: Config, target: "FrozenTarget") -> Config:
        """Fills in the target's own config where blocks are of its class."""
        if config.block == "qwen3":
            return config
        own = plain_config(target)
        if config.target_config not in (None, own):
            raise ConfigError("drafter.target_config: it is not this target's; accepted: null, it is filled in")
        if config.init == "target":
            norm_gain(target)
        return replace(config, target_config=own)

    @classmethod
    def create(cls, config: Config, spec: TargetSpec, start: "Start") -> "MtpDrafter":
        """Counts the draft vocabulary in the training text and starts from the target as `config` says."""
        config = cls.complete(config, start.target)
        drafter = cls(config, spec, vocab=new_vocab(config.draft_vocab_size, spec, start))
        if config.init == "target":
            drafter.init_from_target(start.target)
        return drafter

    @property
    def needs(self) -> Needs:
        """The last state."""
        return Needs(last=True, last_input=True)

    @property
    def block_size(self) -> int:
        """One draft a depth."""
        return self.config.block_size

    @property
    def modules_in_order(self) -> list[MtpDepth]:
        """The depths' modules; one where they share it."""
        return cast(list[MtpDepth], list(self.depths))

    def depth(self, k: int) -> MtpDepth:
        """The module of depth `k`, from 0."""
        return self.modules_in_order[0 if self.config.share_depths else k]

    def fed_back(self, k: int, state: Tensor) -> Tensor:
        """What depth `k` + 1 reads of the block's output at depth `k`, in the dtype of the output."""
        if self.config.feedback == "before_norm":
            return state
        return self.depth(k).final_layernorm(state, dtype=state.dtype)

    def session(self, target: "FrozenTarget", batch_size: int) -> "MtpSession":
        """A decoding session in the dtype of the target."""
        from drafters.heads.mtp_session import MtpSession

        return MtpSession(self, target.head, batch_size)

    def loss(self, batch: Batch, target_head: "TargetHead") -> Losses:
        """Distillation of every depth after sampled anchors; products in the autocast dtype, float32 outside of it."""
        device = batch.last_BTD.device
        anchors = with_a_row(sample_anchors(batch, num_anchors=self.config.num_anchors, block_size=self.block_size))
        dtype, weights = compute_dtype(device), self.config.depth_weights
        with torch.autocast(device.type, enabled=False):
            if len(anchors.rows_A) == 0:
                return no_anchors(self, device)
            hidden_AGD = self.states(batch, anchors, target_head, dtype)
            blocks = Blocks(hidden_AGD=hidden_AGD, weights_G=None if weights is None else torch.tensor(weights))
            return self._distill(batch, anchors, blocks, target_head, want_metrics=not self.training)

    def states(self, batch: Batch, anchors: Anchors, head: "TargetHead", dtype: torch.dtype) -> Tensor:
        """States [A, G, D] of the depths at index p - 1 of every anchor p > 0, after the final norm, in `dtype`."""
        state_BTD, hidden = batch.last_BTD.float(), []
        for k in range(self.block_size):
            depth = self.depth(k)
            # Tokens that are pulled in from the front stand behind every row that counts.
            embedded_BTD = head.embed(batch.tokens_BT.roll(-1 - k, dims=1))
            ready = self.kind.prepare(depth.block, dtype, training=True)
            output_BTD = self.kind.over(ready, depth.enter(embedded_BTD, state_BTD, dtype))
            picked_AD = output_BTD[anchors.rows_A, anchors.positions_A - 1]
            hidden.append(depth.final_layernorm(picked_AD, dtype=dtype))
            state_BTD = self.fed_back(k, output_BTD)
        return torch.stack(hidden, dim=1)

    @torch.no_grad()
    def begin_neutral(self, new: Collection[str]) -> None:
        """New depths begin as the deepest of the others."""
        fresh = [any(name.startswith(f"depths.{k}.") for name in new) for k in range(len(self.depths))]
        if not all(fresh):
            deepest = self.depths[len(fresh) - 1 - fresh[::-1].index(False)].state_dict()
            for depth, is_fresh in zip(self.depths, fresh, strict=True):
                if is_fresh:
                    depth.load_state_dict(deepest)

    @torch.no_grad()
    def init_from_target(self, target: "FrozenTarget") -> None:
        """Every depth starts as the target's last layer between its last state, passed through, and its final norm.

        Half of the projection passes the normed state, the other starts random and small. Warns and leaves the blocks
        random where our own layer cannot take the target's weights.
        """
        tensors, hidden = target.tensors(), self.spec.hidden_size
        prefix = f"model.layers.{self.spec.num_layers - 1}."
        reason = layer_mismatch(self.spec, tensors, [prefix]) if isinstance(self.kind, OwnBlock) else None
        if reason is not None:
            warnings.warn(f"drafter.init: 'target' is not possible: {reason}; the blocks start random", stacklevel=3)
        gain_D = None if isinstance(self.kind, OwnBlock) else norm_gain(target)
        for depth in self.modules_in_order:
            at = slice(hidden, None) if depth.embedding_first else slice(0, hidden)
            depth.input_proj.weight[:, at] = torch.eye(hidden)
            if isinstance(self.kind, TargetBlock):
                depth.block.load_state_dict(target.layer_tensors(self.kind.index))
            elif reason is None:
                copy_layer(cast(DraftLayer, depth.block), tensors, prefix)
            if reason is None:
                depth.final_layernorm.weight.copy_(tensors["model.norm.weight"] if gain_D is None else gain_D)
