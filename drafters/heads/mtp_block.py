# The transformer block of a multi-token-prediction depth, of two kinds behind one contract: our own draft layer, or the
# target's own decoder layer, which is what an engine of that family can serve. The second knows no family either: the
# target's decoder without its layers runs ours, so that masks and rotary embedding are what that family makes of them.

import copy
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from drafters.errors import ConfigError
from drafters.heads.causal import CachedPass, causal_attention, own_cache
from drafters.heads.layers import DraftLayer, LayerWeights, rope_table
from drafters.kv_cache import TargetCache
from drafters.spec import TargetSpec

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["BlockKind", "OwnBlock", "TargetBlock", "plain_config"]


def plain_config(target: "FrozenTarget") -> dict[str, Any]:
    """The target's config as `TargetBlock` takes it and as JSON keeps it, without the folder that it lay in."""
    plain: dict[str, Any] = json.loads(json.dumps(target.model.config.get_text_config().to_dict()))
    return {**plain, "_name_or_path": ""}


class BlockKind(ABC):
    """How blocks of one kind are made and run. `ready` is what `prepare` gave; what goes in and out is float32."""

    @abstractmethod
    def new(self) -> nn.Module:
        """A block to train, random."""

    @abstractmethod
    def prepare(self, block: nn.Module, dtype: torch.dtype, *, training: bool) -> Any:
        """A block's weights, ready to compute in `dtype`; differentiable when `training`."""

    @abstractmethod
    def over(self, ready: Any, x_BTD: Tensor) -> Tensor:
        """Causal states [B, T, D] of whole right-padded rows."""

    @abstractmethod
    def step(self, ready: Any, x_BSD: Tensor, cache: TargetCache, positions_BS: Tensor, lengths_B: Tensor) -> Tensor:
        """States of new slots (`lengths_B` valid a row) after those in `cache`, to which their keys and values go."""

    @abstractmethod
    def new_cache(self, batch_size: int, device: torch.device) -> TargetCache:
        """An empty cache of one block."""


class OwnBlock(BlockKind):
    """`DraftLayer`, of the Qwen3 shape."""

    def __init__(self, spec: TargetSpec) -> None:
        self.spec = spec
        self.inv_freq = torch.tensor(spec.rope_inv_freq)

    def new(self) -> nn.Module:
        """A draft layer."""
        layer = DraftLayer(self.spec)
        for linear in (m for m in layer.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)
        return layer

    def prepare(self, block: nn.Module, dtype: torch.dtype, *, training: bool) -> LayerWeights:
        """Cast and joined weights."""
        return cast(DraftLayer, block).weights(dtype)

    def over(self, ready: LayerWeights, x_BTD: Tensor) -> Tensor:
        """Our own attention, without a mask of T by T."""
        num_rows, width = x_BTD.shape[:2]
        positions_M = torch.arange(width, device=x_BTD.device).repeat(num_rows)
        heads = self._project(ready, x_BTD, positions_M)
        attended = causal_attention(*(part.unflatten(0, (num_rows, width)) for part in heads))
        return ready.finish(x_BTD.flatten(0, 1), attended.flatten(0, 1)).view(x_BTD.shape)

    def step(
        self, ready: LayerWeights, x_BSD: Tensor, cache: TargetCache, positions_BS: Tensor, lengths_B: Tensor
    ) -> Tensor:
        """As `over`, on the keys and values that the cache holds."""
        run = CachedPass(cache, x_BSD.shape[1], lengths_B)
        heads = self._project(ready, x_BSD, positions_BS.flatten())
        attended = run.attend(0, *(part.unflatten(0, x_BSD.shape[:2]) for part in heads))
        return ready.finish(x_BSD.flatten(0, 1), attended.flatten(0, 1)).view(x_BSD.shape)

    def new_cache(self, batch_size: int, device: torch.device) -> TargetCache:
        """Without a window."""
        return own_cache(batch_size, device)

    def _project(self, ready: LayerWeights, x_BSD: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = rope_table(positions_M, self.inv_freq.to(x_BSD.device))
        return ready.project(x_BSD.flatten(0, 1), cos, sin)


class TargetBlock(BlockKind):
    """The target's own decoder layer: the last one, or the last with full attention where a target mixes kinds.

    `config` is the target's, as a dictionary. Raises ConfigError for a target that this cannot be done with.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        try:
            self.config = AutoConfig.for_model(**config)
            with torch.device("meta"):
                self.shell: Any = AutoModel.from_config(self.config)
        except ValueError as error:
            raise ConfigError(
                f"drafter.block: 'target' is not possible for '{config['model_type']}', which transformers does not "
                "know by itself; accepted: qwen3"
            ) from error
        parts = dict(self.shell.named_children())
        if not {"layers", "rotary_emb"} <= parts.keys():
            raise ConfigError(
                f"drafter.block: 'target' is not possible for {type(self.shell).__name__}, which has no `layers` or no "
                "`rotary_emb`; accepted: qwen3"
            )
        types = getattr(self.config, "layer_types", None)
        kinds = types or ["full_attention"] * len(self.shell.layers)
        if "full_attention" not in kinds:
            raise ConfigError("drafter.block: 'target' needs a layer with full attention; accepted: qwen3")
        self.index = len(kinds) - 1 - kinds[::-1].index("full_attention")
        self.layer_class = type(self.shell.layers[self.index])
        self.shell.rotary_emb = type(self.shell.rotary_emb)(config=self.config)
        self.shell.norm = nn.Identity()
        self.shell.embed_tokens = nn.Identity()
        self.shell.layers = nn.ModuleList()
        if types:
            # The decoder looks its mask up by the number of the layer, and ours is the first.
            self.shell.config = copy.deepcopy(self.config)
            self.shell.config.layer_types = ["full_attention", *types[1:]]
        names = inspect.signature(self.shell.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def new(self) -> nn.Module:
        """A layer as the family makes it, with the family's own random start."""
        layer = self.layer_class(self.config, self.index)
        for module in layer.modules():
            self.shell._init_weights(module)
            if "layer_idx" in vars(module):
                module.layer_idx = 0
        return cast(nn.Module, layer)

    def prepare(self, block: nn.Module, dtype: torch.dtype, *, training: bool) -> tuple[nn.Module, torch.dtype]:
        """The module itself in training, where autocast casts; a copy in `dtype` in decoding."""
        if training:
            return block, dtype
        block = copy.deepcopy(block)
        for parameter in block.parameters():  # not buffers: routers keep their biases in float32
            parameter.data = parameter.data.to(dtype)
        return block, dtype

    def over(self, ready: tuple[nn.Module, torch.dtype], x_BTD: Tensor) -> Tensor:
        """The family's own forward pass."""
        block, dtype = ready
        with torch.autocast(x_BTD.device.type, dtype, enabled=dtype == torch.bfloat16):
            return self._run(block, x_BTD, use_cache=False).float()

    def step(
        self,
        ready: tuple[nn.Module, torch.dtype],
        x_BSD: Tensor,
        cache: TargetCache,
        positions_BS: Tensor,
        lengths_B: Tensor,
    ) -> Tensor:
        """As `over`, on the keys and values that the cache holds."""
        block, dtype = ready
        mask = cache.append(lengths_B, x_BSD.shape[1])
        inputs = {"attention_mask": mask, "position_ids": positions_BS, self.cache_name: cache.hf}
        return self._run(block, x_BSD.to(dtype), use_cache=True, **inputs).float()

    def new_cache(self, batch_size: int, device: torch.device) -> TargetCache:
        """With a window where the family has one."""
        windows = (getattr(self.config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return TargetCache(batch_size=batch_size, sliding=any(windows), device=device)

    def _run(self, block: nn.Module, x_BSD: Tensor, **inputs: Any) -> Tensor:
        self.shell.rotary_emb.to(x_BSD.device)
        # Without dropout: equal batches must give equal losses.
        self.shell.layers = nn.ModuleList([block.eval()])
        # Some families scale what enters their decoder; the block reads `x_BSD` as it is.
        as_is = block.register_forward_pre_hook(lambda module, args: (x_BSD, *args[1:]))
        try:
            states_BSD: Tensor = self.shell(inputs_embeds=x_BSD, **inputs).last_hidden_state
        finally:
            as_is.remove()
            self.shell.layers = nn.ModuleList()
        return states_BSD
