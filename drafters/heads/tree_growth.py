# Filling a tree with tokens, for any head that gives logits after a path: level by level, the children of a slot are
# its most probable tokens (temperature 0) or draws without replacement. A head only says what logits follow the slots
# of one level.

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.decoding.sampling import Draws, draw, penalised, probs
from drafters.decoding.tree import Tree, paths
from drafters.errors import ConfigError
from drafters.types import Proposal

__all__ = ["LevelLogits", "grow"]

# (depth, origins_P, tokens_BP) -> logits [B, P, V'] after the P slots of this depth that have children (0 = the anchor
# alone), which hold `tokens_BP`. Slot p's parent was number `origins_P[p]` among the slots of the call before (0 at
# first): a head with a state picks its states by it. Calls come depth by depth.
LevelLogits = Callable[[int, Tensor, Tensor], Tensor]


def grow(
    tree: Tree, draws: Draws, level_logits: LevelLogits, *, anchor_B: Tensor, support_V: Tensor | None = None
) -> Proposal:
    """Draft the tokens of `tree` after each row's anchor; logits are over `support_V` (ids), or the whole vocabulary.

    At temperature 0 the children of a slot are its most probable tokens, in order; a slot can have no more children
    than the draft vocabulary has tokens. Above, child number r is drawn from the slot's distribution without its first
    r children, by `draws.uniforms_BS[:, child]`; where nothing is left its probability is zero, and it cannot stand.
    With a repetition penalty, the tokens on the way to a slot count as seen.
    """
    tokens_BS = anchor_B.new_zeros(len(anchor_B), tree.size)
    dists: list[Tensor] = [torch.empty(0)] * tree.size
    level, origins = [-1], [0]
    for depth in range(tree.max_depth):
        held_BP = anchor_B[:, None] if depth == 0 else tokens_BS[:, level]
        logits_BPV = level_logits(depth, torch.tensor(origins, device=anchor_B.device), held_BP)
        for place, parent in enumerate(level):
            logits_BV = _penalised(logits_BPV[:, place], draws, tokens_BS, _path(tree, parent), support_V)
            children = tree.children(parent)
            if draws.uniforms_BS is None:
                if len(children) > logits_BV.shape[1]:
                    raise ConfigError(
                        f"tree: a slot has {len(children)} children, but the draft vocabulary has {logits_BV.shape[1]} "
                        "tokens; accepted: as many at most"
                    )
                places_BC = logits_BV.topk(len(children), dim=1).indices
            else:
                dist_BV = probs(logits_BV, draws.sampling)
                places_BC = _distinct(dist_BV, draws.uniforms_BS[:, list(children)])
                for child in children:
                    dists[child] = dist_BV
            tokens_BS[:, list(children)] = places_BC if support_V is None else support_V[places_BC]
        known = {parent: place for place, parent in enumerate(level)}
        level = [slot for parent in level for slot in tree.children(parent) if tree.children(slot)]
        origins = [known[tree.parents[slot]] for slot in level]
    return Proposal(
        tokens_BS=tokens_BS,
        lengths_B=torch.full_like(anchor_B, tree.size),
        parents_S=tree.parents,
        probs_BSV=torch.stack(dists, dim=1) if draws.uniforms_BS is not None and tree.size else None,
        support_V=support_V,
    )


def _path(tree: Tree, slot: int) -> list[int]:
    return [other for other in paths(tree.parents)[slot + 1].tolist() if other >= 0]


def _penalised(logits_BV: Tensor, draws: Draws, tokens_BS: Tensor, path: list[int], support_V: Tensor | None) -> Tensor:
    if draws.seen_BV is None:
        return logits_BV
    seen_BV = draws.seen_BV.scatter(1, tokens_BS[:, path], True)
    return penalised(logits_BV, seen_BV if support_V is None else seen_BV[:, support_V], draws.sampling)


def _distinct(dist_BV: Tensor, uniforms_BC: Tensor) -> Tensor:
    """C draws without replacement of each row."""
    left_BV, places = dist_BV.clone(), []
    for uniforms_B in uniforms_BC.unbind(1):
        places.append(draw(left_BV, uniforms_B))
        left_BV.scatter_(1, places[-1][:, None], 0.0)
    return torch.stack(places, dim=1)
