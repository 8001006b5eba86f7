# The decode loop, one for every drafter and for the autoregressive baseline (which drafts nothing): propose -> verify
# -> roll the target's cache back -> show the drafter what stood. Rows of a batch advance by different counts and leave
# when they end. The same shortcuts serve both sides, so that a speed-up is measured against the same code.

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor

from drafters.decoding.sampling import check_sampling, sample
from drafters.decoding.verify import empty_proposal, verify_chain
from drafters.errors import ConfigError, DataError
from drafters.heads.base import Drafter, Session
from drafters.types import Needs, Proposal, Sampling, StepOutput

if TYPE_CHECKING:
    from drafters.kv_cache import TargetCache
    from drafters.target import FrozenTarget

__all__ = ["DecodeConfig", "Generation", "OnRound", "Round", "RoundCost", "RunTimings", "decode"]


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. `length` is the number of drafts a round: None = the drafter's block size, 0 = none, a tuple is
    cycled round by round (how costs are profiled). `stop_ids` None = the target's end-of-sequence ids."""

    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    length: int | tuple[int, ...] | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    batch_size: int = 1


class Round(NamedTuple):
    """One round of one row. `gained` tokens entered the text: `accepted` + 1, or fewer when a stop token or the token
    limit cut the row. `full`: the whole draft and the bonus token would have fitted under the limit, and no stop token
    cut it. Only full rounds count for acceptance."""

    proposed: int
    accepted: int
    gained: int
    full: bool


class RoundCost(NamedTuple):
    """Seconds of one round of `rows` rows that asked for `length` drafts. Draft: propose and extend. Verify: the
    target's pass. Overhead: everything else in the loop."""

    rows: int
    length: int
    draft_s: float
    verify_s: float
    overhead_s: float


@dataclass
class RunTimings:
    """Where the seconds of one or more `decode` calls went. Prefill (the prompts' pass, the drafter's reading of the
    prompt, and the first token) stands apart from the rounds."""

    prefill_s: float = 0.0
    rounds: list[RoundCost] = field(default_factory=list)

    @property
    def draft_s(self) -> float:
        return sum(cost.draft_s for cost in self.rounds)

    @property
    def verify_s(self) -> float:
        return sum(cost.verify_s for cost in self.rounds)

    @property
    def overhead_s(self) -> float:
        return sum(cost.overhead_s for cost in self.rounds)

    @property
    def decode_s(self) -> float:
        """All seconds after prefill."""
        return self.draft_s + self.verify_s + self.overhead_s

    @property
    def steps(self) -> int:
        """Target passes after prefill."""
        return len(self.rounds)


@dataclass
class Generation:
    """New tokens of prompt number `prompt`, the stop token included. The first token comes from prefill and belongs
    to no round. `finish_reason`: "stop" or "length"."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""


OnRound = Callable[[int, Round, list[int]], None]


def decode(
    target: "FrozenTarget",
    drafter: Drafter | None,
    prompts: Sequence[Tensor],
    config: DecodeConfig,
    *,
    on_round: OnRound | None = None,
    timings: RunTimings | None = None,
) -> list[Generation]:
    """Continue each prompt (int64 ids [T], at least one). `drafter` None decodes one token a pass.

    At temperature 0 the tokens are the target's own greedy ones (exactly in float32); above, their law is the
    target's. `on_round(prompt, round, new_tokens)` is called for every row of every round. Times are added to
    `timings`. Raises ConfigError and DataError for settings out of range and for prompts that do not fit.
    """
    lengths = _lengths(drafter, config)
    drafter = drafter if max(lengths) > 0 else None
    _check(target, prompts, config)
    done: list[Generation] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), config.batch_size):
            batch = _Batch(target, drafter, config, timings if timings is not None else RunTimings())
            batch.prefill({start + i: p for i, p in enumerate(prompts[start : start + config.batch_size])})
            while batch.live:
                batch.round(lengths[batch.num_rounds % len(lengths)], on_round)
            done += batch.done
    return sorted(done, key=lambda generation: generation.prompt)


def _lengths(drafter: Drafter | None, config: DecodeConfig) -> tuple[int, ...]:
    if drafter is None:
        return (0,)
    asked = drafter.block_size if config.length is None else config.length
    lengths = asked if isinstance(asked, tuple) else (asked,)
    for length in lengths:
        if not 0 <= length <= drafter.block_size:
            raise ConfigError(f"length: got {length}; accepted: 0 to {drafter.block_size}, the drafter's block size")
    return lengths


def _check(target: "FrozenTarget", prompts: Sequence[Tensor], config: DecodeConfig) -> None:
    check_sampling(config.sampling)
    for name, value in (("max_new_tokens", config.max_new_tokens), ("batch_size", config.batch_size)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}; accepted: 1 or more")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(f"prompt {i}: it has no tokens; give at least one")
        if len(prompt) + config.max_new_tokens > target.spec.max_position:
            raise DataError(
                f"prompt {i}: {len(prompt)} tokens and max_new_tokens={config.max_new_tokens} pass the target's "
                f"{target.spec.max_position} positions; shorten the prompt or lower max_new_tokens"
            )


class _Clock:
    """Seconds between laps; waits for the device, so that work is charged to the part that asked for it."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.device(device).type == "cuda"
        self._last = time.perf_counter()

    def lap(self) -> float:
        if self._wait:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


class _Batch:
    """Rows that are decoded together. Row b of every tensor belongs to `live[b]`."""

    def __init__(
        self, target: "FrozenTarget", drafter: Drafter | None, config: DecodeConfig, timings: RunTimings
    ) -> None:
        self.target, self.drafter, self.config, self.timings = target, drafter, config, timings
        self.needs = drafter.needs if drafter is not None else Needs()
        stop_ids = target.spec.eos_ids if config.stop_ids is None else config.stop_ids
        self.stop_ids = frozenset(stop_ids)
        self.clock = _Clock(target.device)
        self.live: list[Generation] = []
        self.done: list[Generation] = []
        self.num_rounds = 0
        self.session: Session | None = None
        self.cache: TargetCache
        self.generator: Generator
        self.anchor_B: Tensor
        self.seen_B: Tensor

    def prefill(self, prompts: dict[int, Tensor]) -> None:
        """Run the prompts, draw each row's first token, and let the drafter read."""
        self.clock.lap()
        device = self.target.device
        first = min(prompts)
        self.generator = Generator(device).manual_seed(self.config.seed * 1_000_003 + first)
        tokens_BT = torch.nn.utils.rnn.pad_sequence([p.to(device) for p in prompts.values()], batch_first=True)
        self.seen_B = torch.tensor([len(p) for p in prompts.values()], device=device)
        self.cache = self.target.new_cache(len(prompts))
        out = self.target.step(tokens_BT, self.cache, lengths_B=self.seen_B, needs=self.needs, logits="last")
        self.anchor_B = sample(out.logits_BSV[:, 0], self.config.sampling, self.generator)
        self.live = [Generation(prompt) for prompt in prompts]
        if self.drafter is not None:
            self.session = self.drafter.session(self.target, len(prompts))
            self.session.extend(tokens_BT, self.seen_B, self.anchor_B, out.aux_BSLD, out.last_BSD)
        for row, token in zip(self.live, self.anchor_B.tolist(), strict=True):
            self._append(row, [token])
        self._drop_finished()
        self.timings.prefill_s += self.clock.lap()

    def round(self, asked: int, on_round: OnRound | None) -> None:
        """Draft up to `asked` tokens a row, verify them in one target pass, and advance every row."""
        rows = len(self.live)
        left = self.config.max_new_tokens - min(len(row.tokens) for row in self.live)
        # The pass adds a token itself, so more than `left` - 1 drafts could never enter the text.
        length = min(asked, left - 1)
        self.clock.lap()
        proposal = self._propose(length)
        draft_s = self.clock.lap()
        tokens_BS = torch.cat([self.anchor_B[:, None], proposal.tokens_BS], 1) if length else self.anchor_B[:, None]
        proposed = proposal.lengths_B.tolist()
        ragged = min(proposed) < tokens_BS.shape[1] - 1
        lengths_B = 1 + proposal.lengths_B if ragged else None
        overhead_s = self.clock.lap()
        out = self.target.step(tokens_BS, self.cache, lengths_B=lengths_B, needs=self.needs, logits="all")
        verify_s = self.clock.lap()
        accepted_B, self.anchor_B = verify_chain(proposal, out.logits_BSV, self.config.sampling, self.generator)
        kept_B = accepted_B + 1
        self.seen_B = self.seen_B + kept_B
        if length:
            self.cache.rollback(self.seen_B)
        self._record(proposed, accepted_B, tokens_BS, asked, on_round)
        overhead_s += self.clock.lap()
        self._extend(tokens_BS, kept_B, out)
        draft_s += self.clock.lap()
        self._drop_finished()
        overhead_s += self.clock.lap()
        self.timings.rounds.append(RoundCost(rows, length, draft_s, verify_s, overhead_s))
        self.num_rounds += 1

    def _propose(self, length: int) -> Proposal:
        if self.session is None or length == 0:
            return empty_proposal(len(self.live), self.target.device)
        return self.session.propose(length, self.config.sampling, self.generator)

    def _record(
        self, proposed: list[int], accepted_B: Tensor, tokens_BS: Tensor, asked: int, on_round: OnRound | None
    ) -> None:
        """Write the round into each row's text and history."""
        for b, (accepted, drafted, bonus) in enumerate(
            zip(accepted_B.tolist(), tokens_BS.tolist(), self.anchor_B.tolist(), strict=True)
        ):
            row = self.live[b]
            # Before the outcome is known: whether this round would fit must not depend on how it went.
            fits = asked < self.config.max_new_tokens - len(row.tokens)
            tokens = [*drafted[1 : 1 + accepted], bonus]
            gained = self._append(row, tokens)
            row.rounds.append(Round(proposed[b], accepted, gained, fits and gained == len(tokens)))
            if on_round is not None:
                on_round(row.prompt, row.rounds[-1], tokens[:gained])

    def _append(self, row: Generation, tokens: list[int]) -> int:
        """Add tokens up to the first stop token or the limit; how many entered."""
        for count, token in enumerate(tokens, start=1):
            row.tokens.append(token)
            if token in self.stop_ids:
                row.finish_reason = "stop"
                return count
            if len(row.tokens) == self.config.max_new_tokens:
                row.finish_reason = "length"
                return count
        return len(tokens)

    def _extend(self, tokens_BS: Tensor, kept_B: Tensor, out: StepOutput) -> None:
        """Show the drafter the tokens that stood, with their states. A batch about to end needs no reading."""
        if self.session is None or all(row.finish_reason for row in self.live):
            return
        width = int(kept_B.max())
        aux_BSLD = None if out.aux_BSLD is None else out.aux_BSLD[:, :width]
        last_BSD = None if out.last_BSD is None else out.last_BSD[:, :width]
        self.session.extend(tokens_BS[:, :width], kept_B, self.anchor_B, aux_BSLD, last_BSD)

    def _drop_finished(self) -> None:
        """Let finished rows leave the batch, the target's cache and the drafter's session."""
        going = [b for b, row in enumerate(self.live) if not row.finish_reason]
        if len(going) == len(self.live):
            return
        self.done += [row for row in self.live if row.finish_reason]
        self.live = [self.live[b] for b in going]
        if not going:
            return
        rows = torch.tensor(going, device=self.target.device)
        self.anchor_B, self.seen_B = self.anchor_B[rows], self.seen_B[rows]
        self.cache.keep(rows)
        if self.session is not None:
            self.session.keep(rows)
