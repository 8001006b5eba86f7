# How a step is computed, which changes nothing but rounding: what is kept for the backward pass, and what is compiled.

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Computing", "computed_as", "computing"]


@dataclass(frozen=True, kw_only=True)
class Computing:
    """`recompute`: activations of draft layers are not kept for the backward pass; `compile`: torch.compile fuses the
    elementwise work of their dense ends, `compile_loss` that of the loss; `at_once`: the loss takes all rows of a
    chunk at once on a CPU too."""

    recompute: bool = False
    compile: bool = False
    compile_loss: bool = False
    at_once: bool = False


_computing: ContextVar[Computing] = ContextVar("computing", default=Computing())  # noqa: B039  (frozen)


@contextmanager
def computed_as(how: Computing) -> Iterator[None]:
    """Within it, steps are computed so."""
    token = _computing.set(how)
    try:
        yield
    finally:
        _computing.reset(token)


def computing() -> Computing:
    """How steps are computed here."""
    return _computing.get()
