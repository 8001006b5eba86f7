# A target whose layers are split over processes: every process makes every pass, with its part of the weights. One of
# them leads: it runs the program, and says before each pass of states what the others have to pass through theirs.

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from drafters.distributed import TIMEOUT, Ranks

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["follow", "leading", "split_ranks"]


@contextmanager
def split_ranks(tp_plan: str | None) -> Iterator[Ranks]:
    """The processes of torchrun that share a target; one alone without a plan, or without torchrun."""
    if tp_plan is None or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Ranks()
        return
    # The parts of a layer are exchanged on the GPUs; what is said about them, on the CPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        with Ranks.from_environment() as ranks:
            yield ranks
    finally:
        dist.destroy_process_group()


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
    finally:
        target.states = plain  # type: ignore[method-assign]
        ranks.share(None)


def follow(target: "FrozenTarget", ranks: Ranks) -> None:
    """Make, on another rank, the passes that the first one asks for, until it is done."""
    asked: Any
    while (asked := ranks.share(None)) is not None:
        tokens_BT, given = asked
        target.states(tokens_BT, **given)
