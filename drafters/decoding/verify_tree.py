# Which path of a draft tree stands, and which token the target adds. Greedy: the path of the target's argmax. Sampled:
# the children of a slot are tried in turn, each against what the ones before it left of the target's distribution, so
# that the output law is exactly the target's.

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.decoding.sampling import Uniforms, draw, probs
from drafters.decoding.tree import ancestors, paths
from drafters.types import Proposal, Sampling

__all__ = ["TreeVerdict", "verify_tree"]


class TreeVerdict(NamedTuple):
    """`accepted_B`: drafts kept. `next_B`: the target's own token after them. `path_BD`: the accepted slots by depth,
    then -1."""

    accepted_B: Tensor
    next_B: Tensor
    path_BD: Tensor


def verify_tree(
    proposal: Proposal, logits_BSV: Tensor, sampling: Sampling, uniforms: Uniforms | None = None
) -> TreeVerdict:
    """Accept a path from the anchor down in each row, and draw the token after it.

    `logits_BSV` [B, 1 + S, V] are the target's (penalised) after the anchor and after each tree slot; a row's slots
    beyond its length are ignored. Above temperature 0: multi-candidate residual sampling without replacement (SpecInfer
    2305.09781; recursive rejection sampling, 2402.14160). Child x stands with probability min(1, p(x) / q(x)); if not,
    p becomes max(p - q, 0), normalised, and q loses x and is normalised, for the next child. The token after the last
    slot that stood is drawn from what is left of p. A child with q(x) = 0 never stands and changes nothing.
    `probs_BSV` None means points: q is one-hot at each child, which must then not depend on chance. Slot s is accepted
    by `uniforms.accept_BS[:, s]`; `last_B` draws the token. Temperature 0 needs no uniforms.
    """
    if proposal.parents_S is None:
        raise ValueError("verify_tree got a chain: parents_S must not be None")
    if sampling.temperature == 0:
        return _greedy(proposal, logits_BSV)
    assert uniforms is not None, "above temperature 0, verification needs random numbers"
    stood_B, rest_BV = _sampled(proposal, logits_BSV, sampling, uniforms.accept_BS)
    return _verdict(proposal, stood_B, draw(rest_BV, uniforms.last_B))


def _verdict(proposal: Proposal, stood_B: Tensor, next_B: Tensor) -> TreeVerdict:
    """`stood_B`: the last slot that stood, -1 for the anchor."""
    assert proposal.parents_S is not None
    path_BD = paths(proposal.parents_S).to(stood_B.device)[stood_B + 1]
    return TreeVerdict((path_BD >= 0).sum(1), next_B, path_BD)


def _greedy(proposal: Proposal, logits_BSV: Tensor) -> TreeVerdict:
    """The deepest slot of which every ancestor, and itself, is the argmax after its parent."""
    assert proposal.parents_S is not None
    best_BS, device = logits_BSV.argmax(-1), logits_BSV.device
    if not proposal.parents_S:
        return _verdict(proposal, torch.full_like(proposal.lengths_B, -1), best_BS[:, 0])
    table_SS = ancestors(proposal.parents_S).to(device)
    slots_S = torch.arange(len(proposal.parents_S), device=device)
    parents_S = torch.tensor(proposal.parents_S, device=device)
    right_BS = (proposal.tokens_BS == best_BS[:, parents_S + 1]) & (slots_S < proposal.lengths_B[:, None])
    stands_BS = (right_BS[:, None] | ~table_SS).all(2)
    depth_B, stood_B = (stands_BS * table_SS.sum(1)).max(1)
    stood_B = torch.where(depth_B > 0, stood_B, -1)
    return _verdict(proposal, stood_B, best_BS.gather(1, stood_B[:, None] + 1).squeeze(1))


def _sampled(proposal: Proposal, logits_BSV: Tensor, sampling: Sampling, accept_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The last slot that stood [B] (-1 = the anchor), and what is left of the target's distribution after it [B, V]."""
    assert proposal.parents_S is not None
    stood_B = torch.full_like(proposal.lengths_B, -1)
    rest_BV = probs(logits_BSV[:, 0], sampling)
    # Parents come before children and siblings in their order, so one walk over the slots tries them all in turn.
    for slot, parent in enumerate(proposal.parents_S):
        rows_N = ((stood_B == parent) & (slot < proposal.lengths_B)).nonzero()[:, 0]
        if not len(rows_N):
            continue
        earlier = [other for other in range(slot) if proposal.parents_S[other] == parent]
        q_NV = _draft_law(proposal, rows_N, slot, earlier, rest_BV.shape[1])
        p_NV, tokens_N = rest_BV[rows_N], proposal.tokens_BS[rows_N, slot]
        p_N, q_N = (law_NV.gather(1, tokens_N[:, None]).squeeze(1) for law_NV in (p_NV, q_NV))
        stands_N = (accept_BS[rows_N, slot] * q_N < p_N) & (q_N > 0)
        taken_N, left_N = rows_N[stands_N], (~stands_N & (q_N > 0)).nonzero()[:, 0]
        rest_BV[rows_N[left_N]] = _residual(p_NV[left_N], q_NV[left_N])
        stood_B[taken_N] = slot
        rest_BV[taken_N] = probs(logits_BSV[taken_N, slot + 1], sampling)
    return stood_B, rest_BV


def _draft_law(proposal: Proposal, rows_N: Tensor, slot: int, earlier: list[int], vocab_size: int) -> Tensor:
    """The law [N, V] that `slot` was drawn from: without its `earlier` siblings, normalised; zeros where nothing is
    left."""
    tokens_NS = proposal.tokens_BS[rows_N]
    law_NV = torch.zeros(len(rows_N), vocab_size, device=rows_N.device)
    if proposal.probs_BSV is None:
        return law_NV.scatter_(1, tokens_NS[:, [slot]], 1.0)
    drawn_NV = proposal.probs_BSV[rows_N, slot]
    if proposal.support_V is None:
        law_NV = drawn_NV.float()
    else:
        law_NV[:, proposal.support_V] = drawn_NV.float()
    law_NV = law_NV.scatter(1, tokens_NS[:, earlier], 0.0)
    return _normalised(law_NV)


def _residual(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """max(p - q, 0), normalised; p itself where rounding leaves nothing."""
    rest_NV = (p_NV - q_NV).clamp_(min=0)
    return torch.where(rest_NV.sum(-1, keepdim=True) > 0, _normalised(rest_NV), p_NV)


def _normalised(weights_NV: Tensor) -> Tensor:
    return weights_NV / weights_NV.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
