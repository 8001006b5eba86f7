# Teacher-forced figures of block drafters, as (sum, count) pairs that add up over batches and ranks.

import torch
from torch import Tensor

from drafters.heads.anchors import Anchors

__all__ = ["block_metrics"]

Pair = tuple[Tensor, Tensor]


def block_metrics(
    anchors: Anchors, *, accept_N: Tensor | None, agree_N: Tensor | None, confidence_N: Tensor | None
) -> dict[str, Pair]:
    """Metrics of the counted slots, N in the order of `anchors.counted_AG`; those of missing inputs are left out.

    `acceptance` per position is conditional: of the blocks whose drafts before k were accepted (with probability
    1 - TV each), the share where draft k was. `accepted_length` is 1 + sum_k prod_{i<=k} a_i, bonus included, over
    full blocks. `agreement` per position is the share of equal argmaxes, whatever came before; the `_greedy` ones
    are those of the probabilistic kind with agreement in place of acceptance. `confidence_bias` is the mean of
    confidence minus acceptance.
    """
    metrics: dict[str, Pair] = {}
    counted_AG = anchors.counted_AG
    if accept_N is not None:
        metrics |= _lengths(_spread(accept_N, counted_AG), counted_AG, suffix="")
        if confidence_N is not None:
            count = torch.tensor(float(len(accept_N)), device=accept_N.device)
            metrics["confidence_bias"] = ((confidence_N - accept_N).sum(), count)
    if agree_N is not None:
        agree_AG = _spread(agree_N.float(), counted_AG)
        metrics |= _lengths(agree_AG, counted_AG, suffix="_greedy")
        metrics["agreement"] = (agree_AG.sum(0), counted_AG.float().sum(0))
    return metrics


def _spread(values_N: Tensor, counted_AG: Tensor) -> Tensor:
    return values_N.new_zeros(counted_AG.shape).masked_scatter_(counted_AG, values_N)


def _lengths(rate_AG: Tensor, counted_AG: Tensor, *, suffix: str) -> dict[str, Pair]:
    survived_AG = rate_AG.cumprod(1)
    reached_AG = torch.cat([torch.ones_like(rate_AG[:, :1]), survived_AG[:, :-1]], dim=1) * counted_AG
    full_A = counted_AG.all(1)
    length = ((1.0 + survived_AG.sum(1)) * full_A).sum()
    return {
        f"acceptance{suffix}": (survived_AG.sum(0), reached_AG.sum(0)),
        f"accepted_length{suffix}": (length, full_A.float().sum()),
    }
