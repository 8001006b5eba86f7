# A small model of the target's vocabulary drafts token by token (Leviathan 2211.17192, Chen 2302.01318): the baseline
# of every draft head. It runs behind the same `FrozenTarget` as the target, so its logits are made in the
# same way, and the target that drafts for itself has all of its drafts accepted.

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.errors import CheckpointError, ConfigError
from drafters.heads.base import Drafter, Session, size_of
from drafters.heads.chain import draft_chain
from drafters.types import Needs, Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.spec import TargetSpec
    from drafters.target import FrozenTarget

__all__ = ["DraftModel", "DraftModelSession", "check_vocabulary"]


class DraftModel(Drafter):
    """Drafts with a causal LM of its own, or, for `weights` None, with the target. The model is no part of the module:
    it is loaded, to the target's device, when the first session asks for it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`weights`, `sha256` and `dtype` as of a target; `weights` None = the target itself, `dtype` None = its."""

        name: str = "draft_model"
        weights: str | None = None
        sha256: str | None = None
        dtype: str | None = None
        block_size: int = 5

        def __post_init__(self) -> None:
            if self.block_size < 1:
                raise ValueError(f"block_size: got {self.block_size}; accepted: 1 or more")
            if self.dtype is not None:
                from drafters.target import DTYPES

                if self.dtype not in DTYPES:
                    raise ValueError(f"dtype: got '{self.dtype}'; accepted: {', '.join(DTYPES)}, or null")

    def __init__(self, config: Config, spec: "TargetSpec") -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self._loaded: FrozenTarget | None = None
        for name in ("sha256", "dtype"):
            if config.weights is None and getattr(config, name) is not None:
                warnings.warn(
                    f"baselines.draft_model.{name} is ignored: weights is null, the target drafts", stacklevel=2
                )

    @property
    def needs(self) -> Needs:
        """No states of the target."""
        return Needs()

    @property
    def block_size(self) -> int:
        """The most tokens of a draft."""
        return self.config.block_size

    def size(self, target: "FrozenTarget") -> tuple[int, int]:
        """Parameters and bytes of the draft model; none where the target drafts for itself."""
        model = self.model(target)
        return (0, 0) if model is target else size_of(model.model)

    def identity(self, target: "FrozenTarget") -> dict[str, Any]:
        """The hash of the draft model's weights."""
        return {"weights_hash": self.model(target).spec.weights_hash}

    def model(self, target: "FrozenTarget") -> "FrozenTarget":
        """What drafts for `target`. Raises ConfigError or CheckpointError, naming the weights, when it cannot be loaded
        or has another vocabulary."""
        config = self.config
        if config.weights is None:
            return target
        if self._loaded is None or self._loaded.device != target.device:
            self._loaded = _load(config, target)
        return self._loaded

    def session(self, target: "FrozenTarget", batch_size: int) -> "DraftModelSession":
        """Rows with a key/value cache of the draft model."""
        return DraftModelSession(self.model(target), target.spec.vocab_size, batch_size)


def _load(config: DraftModel.Config, target: "FrozenTarget") -> "FrozenTarget":
    from drafters.target import FrozenTarget

    assert config.weights is not None
    dtype = config.dtype or target.spec.dtype
    try:
        # It has no use for a mask token: any id will do.
        model = FrozenTarget.load(config.weights, sha256=config.sha256, dtype=dtype, mask_token=0, device=target.device)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"baselines.draft_model.weights: '{config.weights}' cannot draft: {error}") from error
    check_vocabulary(model, target)
    if model.spec.max_position < target.spec.max_position:
        warnings.warn(
            f"baselines.draft_model.weights: '{config.weights}' knows {model.spec.max_position} positions, the target "
            f"{target.spec.max_position}; on longer texts few of its drafts will be accepted",
            stacklevel=2,
        )
    return model


def check_vocabulary(model: "FrozenTarget", target: "FrozenTarget") -> None:
    """Raises ConfigError unless the tokenizers of both give the same tokens the same ids. Output layers of different
    sizes are well: what no token uses is padding."""
    name = f"baselines.draft_model.weights: '{model.spec.name}'"
    if target.tokenizer is None or model.tokenizer is None:
        raise ConfigError(
            f"{name}: both it and the target need a tokenizer, to compare their vocabularies; give weights with one"
        )
    own, wanted = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if own == wanted:
        return
    differing = sorted(
        (token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token)),
        key=lambda token: (wanted.get(token, len(wanted)), own.get(token, len(own))),
    )
    ids = ((token, own.get(token, "absent"), wanted.get(token, "absent")) for token in differing[:3])
    shown = ", ".join(f"{token!r} is {got}, the target's {right}" for token, got, right in ids)
    raise ConfigError(
        f"{name} has another vocabulary than the target ({len(own)} and {len(wanted)} tokens, {len(differing)} differ: "
        f"{shown}); accepted: a model whose tokenizer gives every token the target's id, usually one of its family"
    )


class DraftModelSession(Session):
    """Row b has read `context_B[b]` tokens; `text_BT` holds them, the anchor and the drafts after it. The cache holds a
    prefix of that, so that no token is run twice: drafts that were fed and stood stay in it, and the last draft, which
    no draft follows, waits for the next anchor."""

    def __init__(self, model: "FrozenTarget", vocab_size: int, batch_size: int) -> None:
        self.model, self.device = model, model.device
        self.num_ids = min(vocab_size, model.spec.vocab_size)
        self.support_V = None if self.num_ids == vocab_size else torch.arange(self.num_ids, device=self.device)
        self.cache = model.new_cache(batch_size)
        self.context_B = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.text_BT = torch.zeros(batch_size, 0, dtype=torch.int64, device=self.device)
        self.drafted = False

    @torch.inference_mode()
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Drop what did not stand from the cache, and read the prompt; what comes later waits for the next proposal."""
        tokens_BT, lengths_B = tokens_BT.to(self.device), lengths_B.to(self.device)
        width = tokens_BT.shape[1]
        self._make_room(width + 1)
        offset_T = torch.arange(width + 1, device=self.device)
        slots_BT = self.context_B[:, None] + offset_T
        valid_BT = offset_T[:-1] < lengths_B[:, None]
        known_BT = (self.text_BT.gather(1, slots_BT[:, :-1]) == tokens_BT) & valid_BT
        self.cache.rollback(self.context_B + known_BT.long().cumprod(1).sum(1))
        new_BT = torch.cat([tokens_BT, tokens_BT[:, :1]], 1)
        new_BT.scatter_(1, lengths_B[:, None], anchor_B.to(self.device)[:, None])
        self.text_BT.scatter_(1, slots_BT, new_BT)
        self.context_B = self.context_B + lengths_B
        if self.cache.num_slots == 0:
            self._read(self.context_B, logits="none")
        self.drafted = False

    @torch.inference_mode()
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """One pass a draft; the first also reads what waited. `confidence_BS` is the probability of the most
        probable token of each slot."""
        self._make_room(length + 1)
        if self.drafted:
            self.cache.rollback(self.context_B)
        self.drafted = True

        def next_logits(k: int, token_B: Tensor) -> Tensor:
            self.text_BT.scatter_(1, (self.context_B + k)[:, None], token_B[:, None])
            return self._read(self.context_B + k + 1, logits="last")[:, 0, : self.num_ids]

        anchor_B = self.text_BT.gather(1, self.context_B[:, None])[:, 0]
        proposal = draft_chain(length, draws, next_logits, anchor_B=anchor_B, support_V=self.support_V)
        # The last draft stays in the text as well: where it stands it need not be written again.
        self.text_BT.scatter_(1, (self.context_B + length)[:, None], proposal.tokens_BS[:, -1:])
        return proposal

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        rows = rows.to(self.device)
        self.cache.keep(rows)
        self.context_B, self.text_BT = self.context_B[rows], self.text_BT[rows]

    def join(self, other: "DraftModelSession") -> None:
        """Take in the rows of `other`."""
        width = max(self.text_BT.shape[1], other.text_BT.shape[1])
        self.text_BT, other_BT = (F.pad(t, (0, width - t.shape[1])) for t in (self.text_BT, other.text_BT))
        self.cache.join(other.cache)
        self.context_B = torch.cat([self.context_B, other.context_B])
        self.text_BT = torch.cat([self.text_BT, other_BT])

    def _make_room(self, added: int) -> None:
        """A text buffer with room for `added` tokens after every context."""
        capacity, needed = self.text_BT.shape[1], int(self.context_B.max()) + added
        if needed > capacity:
            self.text_BT = F.pad(self.text_BT, (0, max(needed, 2 * capacity) - capacity))

    def _read(self, ends_B: Tensor, *, logits: Literal["last", "none"]) -> Tensor:
        """Run the tokens of each row between the cache's end and `ends_B`; the logits [B, 1, V] after the last."""
        counts_B = ends_B - self.cache.lengths_B
        width = int(counts_B.max())
        slots_BS = self.cache.lengths_B[:, None] + torch.arange(width, device=self.device)
        tokens_BS = self.text_BT.gather(1, slots_BS.clamp(max=self.text_BT.shape[1] - 1))
        # A model with fewer padding ids than the target cannot embed them all; to no text do they mean anything.
        tokens_BS = tokens_BS.clamp(max=self.model.spec.vocab_size - 1)
        lengths_B = None if width == 1 or len(counts_B) == 1 else counts_B
        return self.model.step(tokens_BS, self.cache, lengths_B=lengths_B, logits=logits).logits_BSV
