# A target whose layers are split over processes: every process makes every pass, with its part of the weights. One of
# them leads: it runs the program, and says before each pass of states what the others have to pass through theirs.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from drafters.distributed import Ranks

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["follow", "leading"]


@contextmanager
def leading(target: "FrozenTarget", ranks: Ranks) -> Iterator[None]:
    """Within it, on the first rank, the `states` of `target` are made with the others, which `follow`."""
    if ranks.size == 1:
        yield
        return
    plain = target.states

    def states(tokens_BT: torch.Tensor, **given: Any) -> Any:
        ranks.share((tokens_BT.cpu(), given))
        return plain(tokens_BT, **given)

    target.states = states  # type: ignore[method-assign]
    try:
        yield
        ranks.share(None)  # of an error that leaves, Ranks tells them
    finally:
        target.states = plain  # type: ignore[method-assign]


def follow(target: "FrozenTarget", ranks: Ranks) -> None:
    """Make, on another rank, the passes that the first one asks for, until it is done."""
    nothing: Any = None
    while (asked := ranks.share(nothing)) is not None:
        tokens_BT, given = asked
        target.states(tokens_BT, **given)
