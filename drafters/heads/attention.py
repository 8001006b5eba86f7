# Attention of blocks to shared context and to themselves, under one softmax. It is computed a few heads at a time,
# forward and backward, so that float scores stay in the cache, and only the weights are kept, in the dtype of products;
# plain autograd makes ten passes over all scores, and keeps four copies of them.

from typing import Any

import torch
from torch import Tensor

__all__ = ["attend"]

# Scores that are alive at once in float.
SCORES = 2**20


def attend(
    query_XNRH: Tensor, context: tuple[Tensor, Tensor], allowed_XYS: Tensor | None, block: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention of blocks to shared context and to themselves, one softmax over both. Returns [X, N, R, H].

    X groups of Y blocks each share S context positions: `context` holds keys and values [X, N, S, H], `allowed_XYS`
    (None = all) says what each block of the group may see, `block` holds [X, N, Y, G, H]. The R = Y * r query rows
    of key/value head n are ordered by block; they are already scaled. Softmax in float32 or wider.
    """
    num_groups, num_heads, num_queries, head_dim = query_XNRH.shape
    query = query_XNRH.reshape(num_groups * num_heads, num_queries, head_dim)
    tensors = (query, *(t.flatten(0, 1) for t in (*context, *block)))
    hidden = None
    if allowed_XYS is not None:
        wide = _wide(query)
        hidden = torch.zeros_like(allowed_XYS, dtype=wide).masked_fill_(~allowed_XYS, float("-inf"))
        hidden = hidden[:, None].expand(-1, num_heads, -1, -1)  # [X, N, Y, S]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out: Tensor = _Attend.apply(hidden, *tensors)
    else:
        out = _attend(hidden, *tensors)[0]
    return out.view(query_XNRH.shape)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _parts(query: Tensor, num_scores: int) -> list[slice]:
    """Slices of the heads: on a CPU as many at once as stay in its cache."""
    num_heads, num_queries = query.shape[:2]
    step = num_heads if query.device.type != "cpu" else max(1, SCORES // (num_queries * num_scores))
    return [slice(first, first + step) for first in range(0, num_heads, step)]


def _of_blocks(x: Tensor, num_blocks: int) -> Tensor:
    """[heads, Y * r, ...] by block: [heads * Y, r, ...]."""
    return x.reshape(len(x) * num_blocks, -1, x.shape[-1])


def _attend(
    hidden: Tensor | None, query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [heads, R, H] and the weights of context [heads, R, S] and block [heads, R, G]; query [heads, R, H],
    context [heads, S, H], block [heads, Y, G, H]."""
    num_seen, (num_blocks, num_own) = keys.shape[1], own_keys.shape[1:3]
    out = torch.empty_like(query)
    kept = query.new_empty(*query.shape[:2], num_seen), query.new_empty(*query.shape[:2], num_own)
    for part in _parts(query, num_seen + num_own):
        q = query[part]
        scores = q.new_empty(*q.shape[:2], num_seen + num_own, dtype=_wide(q))
        scores[..., :num_seen] = torch.bmm(q, keys[part].transpose(1, 2))
        own = torch.bmm(_of_blocks(q, num_blocks), own_keys[part].flatten(0, 1).transpose(1, 2))
        scores[..., num_seen:] = own.view(*q.shape[:2], num_own)
        if hidden is not None:
            seen = scores[..., :num_seen].unflatten(1, (num_blocks, -1))
            seen += hidden.flatten(0, 1)[part][:, :, None]
        weights = torch.softmax(scores, -1)
        kept[0][part], kept[1][part] = weights[..., :num_seen], weights[..., num_seen:]
        own = torch.bmm(_of_blocks(kept[1][part], num_blocks), own_values[part].flatten(0, 1))
        out[part] = torch.baddbmm(own.view(q.shape), kept[0][part], values[part])
    return out, *kept


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor | None, *tensors: Tensor) -> Tensor:
        out, *weights = _attend(hidden, *tensors)
        ctx.save_for_backward(*tensors, *weights, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, seen, own, out = ctx.saved_tensors
        num_blocks, given = own_keys.shape[1], (query, keys, values, own_keys, own_values)
        found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given]
        for part in _parts(query, seen.shape[2] + own.shape[2]):
            grad, q = grads[0][part].contiguous(), query[part]
            along = (grad.to(_wide(q)) * out[part]).sum(-1, keepdim=True)
            d_seen = _scores_grad(torch.bmm(grad, values[part].transpose(1, 2)), seen[part], along)
            grad_blocks, q_blocks = _of_blocks(grad, num_blocks), _of_blocks(q, num_blocks)
            d_own = torch.bmm(grad_blocks, own_values[part].flatten(0, 1).transpose(1, 2))
            d_own = _of_blocks(_scores_grad(d_own.view(own[part].shape), own[part], along), num_blocks)
            from_own = torch.bmm(d_own, own_keys[part].flatten(0, 1)).view(q.shape)
            found[0][part] = torch.baddbmm(from_own, d_seen, keys[part])
            found[1][part] = torch.bmm(d_seen.transpose(1, 2), q)
            found[2][part] = torch.bmm(seen[part].transpose(1, 2), grad)
            found[3][part] = torch.bmm(d_own.transpose(1, 2), q_blocks).view(own_keys[part].shape)
            weights = _of_blocks(own[part], num_blocks)
            found[4][part] = torch.bmm(weights.transpose(1, 2), grad_blocks).view(own_values[part].shape)
        return None, *found


def _scores_grad(on_weights: Tensor, weights: Tensor, along: Tensor) -> Tensor:
    """Of the scores under the softmax: weights * (on_weights - their mean), in the dtype of products."""
    return on_weights.to(along.dtype).sub_(along).mul_(weights).to(weights.dtype)
