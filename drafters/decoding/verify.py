# Which drafts stand, and which token the target adds. Chains only: greedy by comparison with the argmax, sampled by
# rejection sampling (Leviathan 2211.17192, Chen 2302.01318), so that the output law is exactly the target's.

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.decoding.sampling import Uniforms, draw, probs, sample
from drafters.types import Proposal, Sampling

__all__ = ["Verdict", "draft_probs", "empty_proposal", "seen_after", "verify_chain"]


class Verdict(NamedTuple):
    """`accepted_B`: drafts kept, from the left. `next_B`: the target's own token after them: the bonus token where
    every draft stood, else the draw from the residual (at temperature 0 the argmax)."""

    accepted_B: Tensor
    next_B: Tensor


def empty_proposal(batch_size: int, device: torch.device) -> Proposal:
    """A proposal of no drafts: plain autoregressive decoding is the same loop with this."""
    return Proposal(
        tokens_BS=torch.zeros(batch_size, 0, dtype=torch.int64, device=device),
        lengths_B=torch.zeros(batch_size, dtype=torch.int64, device=device),
    )


def seen_after(seen_BV: Tensor, proposal: Proposal) -> Tensor:
    """[B, S + 1, V] (bool): the tokens that a row's text holds after the anchor, `seen_BV`, and after each draft, with
    the drafts before it. What the repetition penalty acts on."""
    parents = proposal.parents_S or tuple(range(-1, proposal.tokens_BS.shape[1] - 1))
    seen = [seen_BV]
    for slot, parent in enumerate(parents):
        seen.append(seen[parent + 1].scatter(1, proposal.tokens_BS[:, slot, None], True))
    return torch.stack(seen, 1)


def verify_chain(
    proposal: Proposal, logits_BSV: Tensor, sampling: Sampling, uniforms: Uniforms | None = None
) -> Verdict:
    """Accept a prefix of each row's drafts and draw the token after it.

    `logits_BSV` [B, S + 1, V] are the target's (penalised ones) after the anchor and after each draft; slots beyond a
    row's length are ignored; `uniforms` None needs temperature 0. Draft x is accepted with probability
    min(1, p(x) / q(x)); at the first rejection the next token comes from max(p - q, 0), normalised. `probs_BSV` None
    means a point: q is one-hot at the draft, which must then not depend on chance. Temperature 0 reads the argmax
    alone, so no distribution over V is built.
    """
    if proposal.parents_S is not None:
        raise ValueError("verify_chain got a tree: parents_S must be None")
    if uniforms is None or sampling.temperature == 0:
        assert sampling.temperature == 0
        best_BS = logits_BSV.argmax(-1)
        if proposal.tokens_BS.shape[1] == 0:
            return Verdict(proposal.lengths_B, best_BS[:, 0])
        accepted_B = _prefix(proposal, best_BS[:, :-1] == proposal.tokens_BS)
        return Verdict(accepted_B, best_BS.gather(1, accepted_B[:, None]).squeeze(1))
    length = proposal.tokens_BS.shape[1]
    if length == 0:
        return Verdict(proposal.lengths_B, sample(logits_BSV[:, 0], sampling, uniforms.last_B))
    p_BSV = probs(logits_BSV, sampling)
    rows_B = torch.arange(p_BSV.shape[0], device=p_BSV.device)
    p_BS = p_BSV[:, :-1].gather(2, proposal.tokens_BS[..., None]).squeeze(2)
    u_BS = uniforms.accept_BS[:, :length]
    accepted_B = _prefix(proposal, u_BS * draft_probs(proposal, p_BSV.shape[-1]) < p_BS)
    next_BV = p_BSV[rows_B, accepted_B]
    rejected = (accepted_B < proposal.lengths_B).nonzero().squeeze(1)
    if rejected.numel():
        next_BV[rejected] = _residual(next_BV[rejected], proposal, rejected, accepted_B[rejected])
    return Verdict(accepted_B, draw(next_BV, uniforms.last_B))


def _prefix(proposal: Proposal, stands_BS: Tensor) -> Tensor:
    """How many drafts of each row stand before the first that does not, within its length."""
    slots_S = torch.arange(stands_BS.shape[1], device=stands_BS.device)
    valid_BS = slots_S < proposal.lengths_B[:, None]
    return (stands_BS & valid_BS).long().cumprod(1).sum(1)


def draft_probs(proposal: Proposal, vocab_size: int) -> Tensor:
    """q [B, S] of each drafted token, in the distribution that `proposal.probs_BSV` holds for its slot."""
    if proposal.probs_BSV is None:
        return torch.ones_like(proposal.tokens_BS, dtype=torch.float32)
    ids_BS = proposal.tokens_BS
    if proposal.support_V is not None:
        place_V = torch.zeros(vocab_size, dtype=torch.int64, device=ids_BS.device)
        place_V[proposal.support_V] = torch.arange(len(proposal.support_V), device=ids_BS.device)
        ids_BS = place_V[ids_BS]
    return proposal.probs_BSV.gather(2, ids_BS[..., None]).squeeze(2)


def _residual(p_NV: Tensor, proposal: Proposal, rows_N: Tensor, slots_N: Tensor) -> Tensor:
    """max(p - q, 0), normalised, at slot `slots_N` of rows `rows_N`; p itself where rounding leaves nothing."""
    if proposal.probs_BSV is None:
        rest_NV = p_NV.scatter(1, proposal.tokens_BS[rows_N, slots_N][:, None], 0.0)
    elif proposal.support_V is None:
        rest_NV = (p_NV - proposal.probs_BSV[rows_N, slots_N]).clamp_(min=0)
    else:
        rest_NV = p_NV.index_add(1, proposal.support_V, -proposal.probs_BSV[rows_N, slots_N]).clamp_(min=0)
    mass_N1 = rest_NV.sum(-1, keepdim=True)
    return torch.where(mass_N1 > 0, rest_NV / mass_N1.clamp(min=torch.finfo(torch.float32).tiny), p_NV)
