# The rows that are decoded together, and one round of them: propose -> verify -> roll the target's cache back -> show
# the drafter what stood. Row b of every tensor belongs to `live[b]`; what a row gets does not depend on its companions,
# but for how many of its drafts a policy lets through.

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from drafters.decoding.records import Generation, Round, RoundCost, RunTimings
from drafters.decoding.sampling import Draws, RowStreams, Uniforms, penalised, sample
from drafters.decoding.tree import Tree
from drafters.decoding.verify import empty_proposal, seen_after, verify_chain
from drafters.decoding.verify_tree import verify_tree
from drafters.heads.base import Drafter, Session
from drafters.scheduling.schedulers import Outcome
from drafters.types import SIGNALS, Needs, Proposal, StepOutput

if TYPE_CHECKING:
    from drafters.decoding.loop import DecodeConfig
    from drafters.kv_cache import TargetCache
    from drafters.target import FrozenTarget

__all__ = ["LiveBatch", "OnRound"]

MAX_UNREAD = 64  # rounds without drafts after which the drafter reads them all

# prompt number, its round, the tokens that entered the text, the tokens that were drafted
OnRound = Callable[[int, Round, list[int], list[int]], None]


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


class _Kept(NamedTuple):
    """What a pass left standing: `accepted_B` drafts, the token after them, and, of a tree, the accepted slots by
    depth, padded with -1. `counted_B` drafts were accepted; they are more where a round may not advance that far."""

    accepted_B: Tensor
    next_B: Tensor
    path_BD: Tensor | None
    counted_B: Tensor


class _Unread(NamedTuple):
    """What the target verified in one round without drafts, a token a row, that the drafter was not shown yet."""

    tokens_B1: Tensor
    aux_B1LD: Tensor | None
    last_B1D: Tensor | None

    def of_rows(self, index: Tensor) -> "_Unread":
        aux, last = (None if x is None else x[index] for x in (self.aux_B1LD, self.last_B1D))
        return _Unread(self.tokens_B1[index], aux, last)


class _Rows(NamedTuple):
    """The state of rows between rounds. `context_B`: tokens of the text, the anchor included."""

    cache: "TargetCache"
    session: Session | None
    anchor_B: Tensor
    context_B: Tensor
    streams: RowStreams | None
    seen_BV: Tensor | None


class LiveBatch:
    """Decodes up to `config.batch_size` rows at a time; `live` are in work, `done` have ended. No round drafts more
    than `num_slots` tokens a row."""

    def __init__(
        self,
        target: "FrozenTarget",
        drafter: Drafter | None,
        config: "DecodeConfig",
        *,
        num_slots: int,
        timings: RunTimings,
    ) -> None:
        self.target, self.drafter, self.config, self.timings = target, drafter, config, timings
        self.sampling = config.sampling
        self.needs = drafter.needs if drafter is not None else Needs()
        self.stop_ids = frozenset(target.spec.eos_ids if config.stop_ids is None else config.stop_ids)
        self.num_slots = num_slots
        self.policy = None if drafter is None else config.policy
        self.schedule = None if self.policy is None else self.policy.begin(num_slots)
        self.clock = _Clock(target.device)
        self.live: list[Generation] = []
        self.done: list[Generation] = []
        self.rows: _Rows | None = None
        self.unread: list[_Unread] = []

    def admit(self, prompts: Sequence[tuple[int, Tensor, int]]) -> None:
        """Run new prompts (number, ids [T], seed), draw each row's first token, let the drafter read, and go on with
        those that have not ended."""
        self.clock.lap()
        new = self._prefill([tokens for _, tokens, _ in prompts], [seed for _, _, seed in prompts])
        rows = [Generation(number) for number, _, _ in prompts]
        for row, token in zip(rows, new.anchor_B.tolist(), strict=True):
            self._append(row, [token])
        self.done += [row for row in rows if row.finish_reason]
        going = [b for b, row in enumerate(rows) if not row.finish_reason]
        if going:
            new = new if len(going) == len(rows) else self._keep(new, going)
            self._read()
            self.rows = new if self.rows is None else self._join(self.rows, new)
            self.live += [rows[b] for b in going]
        self.timings.prefill_s += self.clock.lap()

    def _prefill(self, prompts: Sequence[Tensor], seeds: Sequence[int]) -> _Rows:
        device, sampling = self.target.device, self.sampling
        tokens_BT = torch.nn.utils.rnn.pad_sequence([p.to(device) for p in prompts], batch_first=True)
        lengths_B = torch.tensor([len(p) for p in prompts], device=device)
        cache = self.target.new_cache(len(prompts))
        ragged_B = None if len(prompts) == 1 else lengths_B
        out = self.target.step(tokens_BT, cache, lengths_B=ragged_B, needs=self.needs, logits="last")
        streams = RowStreams(seeds, device) if sampling.temperature > 0 else None
        seen_BV = None
        if sampling.repetition_penalty != 1:
            seen_BV = torch.zeros(len(prompts), out.logits_BSV.shape[2], dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                seen_BV[row, prompt.to(device)] = True
        logits_BV = penalised(out.logits_BSV[:, 0], seen_BV, sampling)
        anchor_B = sample(logits_BV, sampling, None if streams is None else streams.numbers(1)[:, 0])
        if seen_BV is not None:
            seen_BV.scatter_(1, anchor_B[:, None], True)
        session = None
        if self.drafter is not None:
            session = self.drafter.session(self.target, len(prompts))
            session.share(cache)
            session.extend(tokens_BT, lengths_B, anchor_B, out.aux_BSLD, out.last_BSD)
        return _Rows(cache, session, anchor_B, lengths_B + 1, streams, seen_BV)

    def round(self, shape: int | Tree, on_round: OnRound | None) -> None:
        """Draft a chain of up to `shape` tokens a row, or a tree, verify it in one target pass, and advance rows."""
        assert self.rows is not None
        rows = self.rows
        self.clock.lap()
        uniforms = None if rows.streams is None else rows.streams.round(self.num_slots)
        # The pass adds a token itself, so of a chain more than `left` - 1 drafts could never enter the text.
        left = [self.config.max_new_tokens - len(row.tokens) for row in self.live]
        asked = min(shape, max(left) - 1) if isinstance(shape, int) else shape.size if max(left) > 1 else 0
        proposal = self._propose(shape, asked, left, uniforms)
        draft_s = self.clock.lap()
        proposal = self._schedule(proposal)
        proposed = proposal.lengths_B.tolist()
        length = proposal.tokens_BS.shape[1]
        tokens_BS = torch.cat([rows.anchor_B[:, None], proposal.tokens_BS], 1) if length else rows.anchor_B[:, None]
        lengths_B = 1 + proposal.lengths_B if min(proposed) < length else None
        overhead_s = self.clock.lap()
        out = self.target.step(
            tokens_BS, rows.cache, lengths_B=lengths_B, parents_S=proposal.parents_S, needs=self.needs, logits="all"
        )
        verify_s = self.clock.lap()
        kept = self._verify(proposal, out.logits_BSV, uniforms)
        context_B = rows.context_B + kept.accepted_B + 1
        self._roll_back(kept, context_B, length)
        self._record(proposal, kept, tokens_BS, shape, on_round)
        if self.schedule is not None:
            self.schedule.observe(Outcome(drafted=asked, proposed_R=proposal.lengths_B, accepted_R=kept.counted_B))
        overhead_s += self.clock.lap()
        self.rows = rows._replace(anchor_B=kept.next_B, context_B=context_B)
        if asked:
            self._extend(tokens_BS, kept, out)
        else:
            self._put_off(_Unread(tokens_BS, out.aux_BSLD, out.last_BSD))
        draft_s += self.clock.lap()
        num_rows = len(self.live)
        self._drop_finished()
        overhead_s += self.clock.lap()
        self.timings.rounds.append(RoundCost(num_rows, asked, draft_s, verify_s, overhead_s))

    def _propose(self, shape: int | Tree, asked: int, left: list[int], uniforms: Uniforms | None) -> Proposal:
        assert self.rows is not None
        if self.rows.session is None or asked == 0:
            return empty_proposal(len(self.live), self.target.device)
        self._read()
        draws = Draws(self.sampling, None if uniforms is None else uniforms.draft_BS, self.rows.seen_BV)
        room_B = torch.tensor(left, device=self.target.device) - 1
        if isinstance(shape, Tree):
            # A row without room drafts nothing, as it would alone.
            proposal = self.rows.session.propose_tree(shape, draws)
            return replace(proposal, lengths_B=torch.where(room_B > 0, proposal.lengths_B, 0))
        proposal = self.rows.session.propose(asked, draws)
        if min(left) <= asked:
            proposal = proposal.cut(torch.minimum(proposal.lengths_B, room_B))
        return proposal.cut(proposal.lengths_B)

    def _schedule(self, proposal: Proposal) -> Proposal:
        """What of the proposal goes to the target; all of it without a policy."""
        if self.schedule is None or self.policy is None or not proposal.tokens_BS.shape[1]:
            return proposal
        lengths_B = self.schedule.lengths(self.policy.survival(proposal))
        return proposal.cut(torch.minimum(lengths_B, proposal.lengths_B))

    def _verify(self, proposal: Proposal, logits_BSV: Tensor, uniforms: Uniforms | None) -> _Kept:
        assert self.rows is not None
        seen_BV = self.rows.seen_BV
        if seen_BV is not None:
            seen_BSV = seen_after(seen_BV, proposal)
            logits_BSV = penalised(logits_BSV, seen_BSV, self.sampling)
        if proposal.parents_S is None:
            accepted_B, next_B = verify_chain(proposal, logits_BSV, self.sampling, uniforms)
            kept = self._held_back(proposal, accepted_B, next_B)
        else:
            accepted_B, next_B, path_BD = verify_tree(proposal, logits_BSV, self.sampling, uniforms)
            kept = _Kept(accepted_B, next_B, path_BD, accepted_B)
        if seen_BV is not None:
            places_B = kept.accepted_B if kept.path_BD is None else _last_slot(kept) + 1
            index_B11 = places_B[:, None, None].expand(-1, 1, seen_BV.shape[1])
            seen_BV |= seen_BSV.gather(1, index_B11)[:, 0]
            seen_BV.scatter_(1, kept.next_B[:, None], True)
        return kept

    def _held_back(self, proposal: Proposal, accepted_B: Tensor, next_B: Tensor) -> _Kept:
        """What of the accepted drafts stands when a round adds no more than `config.advance` tokens: the draft that
        comes after them is the next anchor."""
        width = proposal.tokens_BS.shape[1]
        if self.config.advance is None or not width:
            return _Kept(accepted_B, next_B, None, accepted_B)
        stands_B = accepted_B.clamp(max=self.config.advance - 1)
        after_B = proposal.tokens_BS.gather(1, stands_B.clamp(max=width - 1)[:, None])[:, 0]
        return _Kept(stands_B, torch.where(stands_B < accepted_B, after_B, next_B), None, accepted_B)

    def _roll_back(self, kept: _Kept, context_B: Tensor, length: int) -> None:
        assert self.rows is not None
        if kept.path_BD is not None:
            # One more column takes the padding of -1.
            stands_BS = torch.zeros(len(self.live), length + 2, dtype=torch.bool, device=context_B.device)
            stands_BS.scatter_(1, torch.where(kept.path_BD < 0, length, kept.path_BD) + 1, True)
            stands_BS[:, 0] = True
            self.rows.cache.keep_path(stands_BS[:, :-1])
        elif length:
            self.rows.cache.rollback(context_B - 1)

    def _record(
        self, proposal: Proposal, kept: _Kept, tokens_BS: Tensor, shape: int | Tree, on_round: OnRound | None
    ) -> None:
        """Write the round into each row's text and history."""
        assert self.rows is not None
        proposed = proposal.lengths_B.tolist()
        said = [proposal.signal(name).tolist() for name in SIGNALS] if self.config.record_confidence else []
        paths = None if kept.path_BD is None else kept.path_BD.tolist()
        columns = (kept.accepted_B, tokens_BS, kept.next_B, self.rows.context_B, kept.counted_B)
        deepest = shape if isinstance(shape, int) else shape.max_depth
        for b, (stands, fed, added, context, accepted) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            row, slots = self.live[b], () if paths is None else tuple(paths[b][:accepted])
            # Before the outcome is known: whether this round would fit must not depend on how it went.
            fits = deepest < self.config.max_new_tokens - len(row.tokens)
            stood = fed[1 : 1 + stands] if paths is None else [fed[1 + slot] for slot in slots]
            tokens = [*stood, added]
            gained = self._append(row, tokens)
            ends = accepted > stands and not self.stop_ids.isdisjoint(fed[1 : 1 + accepted])
            full = fits and gained == len(tokens) and not ends
            signals = (tuple(one[b][: proposed[b]]) for one in said)
            row.rounds.append(Round(proposed[b], accepted, gained, full, context, slots, *signals))
            if on_round is not None:
                on_round(row.prompt, row.rounds[-1], tokens[:gained], fed[1 : 1 + proposed[b]])

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

    def _extend(self, tokens_BS: Tensor, kept: _Kept, out: StepOutput) -> None:
        """Show the drafter the tokens that stood, with their states. A batch about to end needs no reading."""
        assert self.rows is not None
        if self.rows.session is None or all(row.finish_reason for row in self.live):
            return
        width = int(kept.accepted_B.max()) + 1
        states = [tokens_BS, out.aux_BSLD, out.last_BSD]
        if kept.path_BD is None:
            tokens, aux, last = (None if x is None else x[:, :width] for x in states)
        else:
            anchor_B1 = torch.zeros_like(kept.path_BD[:, :1])
            slots_BS = torch.cat([anchor_B1, kept.path_BD.clamp(min=-1) + 1], 1)[:, :width]
            rows_B1 = torch.arange(len(slots_BS), device=slots_BS.device)[:, None]
            tokens, aux, last = (None if x is None else x[rows_B1, slots_BS] for x in states)
        assert tokens is not None
        self.rows.session.extend(tokens, kept.accepted_B + 1, self.rows.anchor_B, aux, last)

    def _put_off(self, new: _Unread) -> None:
        """Keep what a round without drafts verified: reading many at once costs little more than reading one."""
        if self.rows is None or self.rows.session is None:
            return
        self.unread.append(new)
        if len(self.unread) == MAX_UNREAD:
            self._read()

    def _read(self) -> None:
        """Show the drafter what was put off."""
        if not self.unread or self.rows is None or self.rows.session is None:
            return
        tokens_BT = torch.cat([one.tokens_B1 for one in self.unread], 1)
        aux_BTLD = _joined([one.aux_B1LD for one in self.unread])
        last_BTD = _joined([one.last_B1D for one in self.unread])
        self.unread = []
        lengths_B = torch.full_like(self.rows.anchor_B, tokens_BT.shape[1])
        self.rows.session.extend(tokens_BT, lengths_B, self.rows.anchor_B, aux_BTLD, last_BTD)

    def _drop_finished(self) -> None:
        """Let finished rows leave the batch, the target's cache and the drafter's session."""
        going = [b for b, row in enumerate(self.live) if not row.finish_reason]
        if len(going) == len(self.live):
            return
        assert self.rows is not None
        self.done += [row for row in self.live if row.finish_reason]
        self.live = [self.live[b] for b in going]
        self.rows = self._keep(self.rows, going) if going else None
        index = torch.tensor(going, dtype=torch.int64, device=self.target.device)
        self.unread = [one.of_rows(index) for one in self.unread if going]

    def _keep(self, rows: _Rows, going: list[int]) -> _Rows:
        index = torch.tensor(going, device=self.target.device)
        rows.cache.keep(index)
        if rows.session is not None:
            rows.session.keep(index)
        if rows.streams is not None:
            rows.streams.keep(going)
        seen_BV = None if rows.seen_BV is None else rows.seen_BV[index]
        return rows._replace(anchor_B=rows.anchor_B[index], context_B=rows.context_B[index], seen_BV=seen_BV)

    def _join(self, rows: _Rows, new: _Rows) -> _Rows:
        rows.cache.join(new.cache)
        if rows.session is not None and new.session is not None:
            rows.session.join(new.session)
            rows.session.share(rows.cache)
        if rows.streams is not None and new.streams is not None:
            rows.streams.join(new.streams)
        seen_BV = None
        if rows.seen_BV is not None and new.seen_BV is not None:
            seen_BV = torch.cat([rows.seen_BV, new.seen_BV])
        return rows._replace(
            anchor_B=torch.cat([rows.anchor_B, new.anchor_B]),
            context_B=torch.cat([rows.context_B, new.context_B]),
            seen_BV=seen_BV,
        )


def _last_slot(kept: _Kept) -> Tensor:
    """The deepest accepted tree slot of each row, -1 where none is."""
    assert kept.path_BD is not None
    padded = torch.cat([torch.full_like(kept.path_BD[:, :1], -1), kept.path_BD], 1)
    return padded.gather(1, kept.accepted_B[:, None])[:, 0]


def _joined(states: Sequence[Tensor | None]) -> Tensor | None:
    """Along time; None where there are none."""
    there = [one for one in states if one is not None]
    return torch.cat(there, 1) if there else None
