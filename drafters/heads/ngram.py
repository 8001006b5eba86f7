# Prompt look-up decoding (Saxena 2023): what followed the last few tokens where they stood before is drafted again. No
# model and no training; a baseline for everything else, and hard to beat where an answer repeats its prompt. Each row
# has an index of its n-grams that grows with its text, so that nothing is scanned.

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.heads.base import Drafter, Session
from drafters.types import Needs, Proposal

if TYPE_CHECKING:
    from drafters.decoding.sampling import Draws
    from drafters.spec import TargetSpec
    from drafters.target import FrozenTarget

__all__ = ["NgramDrafter", "NgramSession"]


class NgramDrafter(Drafter):
    """Looks the newest tokens up in the text (prompt and answer) and drafts what followed them the last time."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`max_ngram`, `min_ngram`: how many of the newest tokens are looked up, most first."""

        name: str = "ngram"
        max_ngram: int = 3
        min_ngram: int = 1
        block_size: int = 10

        def __post_init__(self) -> None:
            for name in ("min_ngram", "block_size"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}: got {getattr(self, name)}; accepted: 1 or more")
            if self.max_ngram < self.min_ngram:
                raise ValueError(f"max_ngram: got {self.max_ngram}; accepted: {self.min_ngram} (min_ngram) or more")

    def __init__(self, config: Config, spec: "TargetSpec") -> None:
        super().__init__()
        self.config, self.spec = config, spec

    @property
    def needs(self) -> Needs:
        """Nothing of the target."""
        return Needs()

    @property
    def block_size(self) -> int:
        """The most tokens that are copied."""
        return self.config.block_size

    def session(self, target: "FrozenTarget", batch_size: int) -> "NgramSession":
        """Empty texts."""
        return NgramSession(self.config, batch_size, target.device)


class NgramSession(Session):
    """Rows of text with their n-grams, on the host."""

    def __init__(self, config: NgramDrafter.Config, batch_size: int, device: torch.device) -> None:
        self.device = device
        self.rows = [_Text(config) for _ in range(batch_size)]

    def extend(
        self, tokens_BT: Tensor, lengths_B: Tensor, anchor_B: Tensor, aux_BTLD: Tensor | None, last_BTD: Tensor | None
    ) -> None:
        """Append the tokens and index what is new."""
        columns = (tokens_BT.tolist(), lengths_B.tolist(), anchor_B.tolist())
        for row, tokens, length, anchor in zip(self.rows, *columns, strict=True):
            row.extend(tokens[:length], anchor)

    def propose(self, length: int, draws: "Draws") -> Proposal:
        """Copies, as points: they do not depend on chance. Rows that find nothing draft nothing."""
        drafts = [row.look_up(length) for row in self.rows]
        width = max(map(len, drafts))
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        return Proposal(
            tokens_BS=torch.tensor(padded, dtype=torch.int64, device=self.device).view(len(drafts), width),
            lengths_B=torch.tensor([len(draft) for draft in drafts], device=self.device),
        )

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows."""
        self.rows = [self.rows[row] for row in rows.tolist()]

    def join(self, other: "NgramSession") -> None:
        """Take in the rows of `other`."""
        self.rows += other.rows


class _Text:
    """The tokens of one row, the anchor last, and where each n-gram that has a successor ended last."""

    def __init__(self, config: NgramDrafter.Config) -> None:
        self.sizes = range(config.min_ngram, config.max_ngram + 1)
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int], anchor: int) -> None:
        """Append `tokens`, which begin with the anchor of the call before, and the new anchor."""
        indexed = max(len(self.tokens), 1)
        del self.tokens[-1:]
        self.tokens += [*tokens, anchor]
        for size in self.sizes:
            for end in range(max(indexed, size), len(self.tokens)):
                self.ends[tuple(self.tokens[end - size : end])] = end

    def look_up(self, length: int) -> list[int]:
        """Up to `length` tokens that followed the longest known suffix; empty where none is known."""
        for size in reversed(self.sizes):
            end = self.ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                return self.tokens[end : end + length]
        return []
