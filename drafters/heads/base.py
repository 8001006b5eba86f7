# The contract every drafter meets. Heads are final: nothing inherits an implementation from another head; shared
# parts are functions and small modules. A drafter that cannot be trained implements `session` alone.

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from drafters.heads.draft_vocab import stored_vocab
from drafters.types import Batch, Losses, Needs, Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.decoding.tree import Tree
    from drafters.heads.start import Start
    from drafters.kv_cache import TargetCache
    from drafters.spec import TargetSpec
    from drafters.target import FrozenTarget, TargetHead

__all__ = ["Drafter", "Session", "size_of"]


def size_of(module: nn.Module) -> tuple[int, int]:
    """The number of a module's parameters, and their bytes."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)


class Session(ABC):
    """One batch of rows being decoded. Rows advance by different counts; row b of every argument is row b here."""

    def share(self, cache: "TargetCache") -> None:  # noqa: B027  (most drafters have no use for it)
        """The target's own key/value cache of these rows, before the first `extend` and after every `join`. Between two
        passes of the target it ends before the anchors. A drafter that reads it leaves it as it found it."""

    @abstractmethod
    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Take in what the target just verified.

        `tokens_BT` are tokens whose target states now exist, right-padded, `lengths_B` valid ones a row, continuing
        where the last call ended (the first call brings the prompt); `aux_BTLD` and `last_BTD` are their states, as
        `Drafter.needs` asks. `anchor_B` is each row's newest token: chosen by the target, not yet seen by it.
        """

    @abstractmethod
    def propose(self, length: int, draws: "Draws") -> Proposal:
        """Draft up to `length` tokens after each row's anchor, drawn by `draws`, slot after slot."""

    def propose_tree(self, tree: "Tree", draws: "Draws") -> Proposal:
        """Draft the tokens of `tree` after each row's anchor. Drafters whose `drafts_trees` is True implement it."""
        raise NotImplementedError(f"{type(self).__name__} drafts no trees")

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Go on with `rows` (int64 indices into the present rows, in the new order); the others are dropped."""

    @abstractmethod
    def join(self, other: Self) -> None:
        """Take in the rows of another session of the same drafter, behind one's own; `other` is not used again."""


class Drafter(nn.Module, ABC):
    """A draft head on a frozen target. Subclasses carry a nested keyword-only dataclass `Config` (with a `name`) and
    are built as `Cls(config, spec)`: all sizes come from the target's `spec`. One that needs more than that to begin
    (the training text, the target's weights) overrides `create`."""

    Config: type
    config: Any
    # Of a packed drafter: its copy of the target's output rows over the draft vocabulary, logit scale included.
    output_rows: nn.Parameter | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.register_parameter("output_rows", None)

    @classmethod
    def trains(cls, config: Any) -> bool:
        """Whether a drafter of this config has something to train."""
        return cls.loss is not Drafter.loss

    @classmethod
    def complete(cls, config: Any, target: "FrozenTarget") -> Any:
        """`config` with what only `target` can tell; `create` does this by itself, a run that goes on needs it first.
        Raises ConfigError where the target's modules do not serve."""
        return config

    @classmethod
    def create(cls, config: Any, spec: "TargetSpec", start: "Start") -> Self:
        """A new drafter to train; `start` offers what it may begin from."""
        return cls(config, spec)

    @classmethod
    def from_tensors(cls, config: Any, spec: "TargetSpec", tensors: Mapping[str, Tensor]) -> Self:
        """A drafter of the shape of stored `tensors`, which the caller loads into it. Where `config` has a
        `draft_vocab_size`, the constructor takes a `vocab`. Raises CheckpointError when that is not what they hold."""
        if not hasattr(config, "draft_vocab_size"):
            return cls(config, spec)
        return cls(config, spec, vocab=stored_vocab(config.draft_vocab_size, spec, tensors))

    def begin_neutral(self, new: Collection[str]) -> None:
        """Let the parts whose parameters are `new` change nothing at first, where that is possible: the others were
        trained without them."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """The target states that `loss` and `session` read."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """The longest draft that one `propose` can give."""

    @property
    def drafts_trees(self) -> bool:
        """Whether its sessions implement `propose_tree`."""
        return False

    def size(self, target: "FrozenTarget") -> tuple[int, int]:
        """How many parameters it adds to `target`, and their bytes."""
        return size_of(self)

    def identity(self, target: "FrozenTarget") -> dict[str, Any]:
        """What tells it from another one of the same settings; a model of its own gives the hash of its weights."""
        return {}

    def loss(self, batch: Batch, target_head: "TargetHead") -> Losses:
        """Distillation loss of one batch, as sums. Drafters without training do not implement it."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to train")

    @abstractmethod
    def session(self, target: "FrozenTarget", batch_size: int) -> Session:
        """A new decoding session of `batch_size` rows."""
