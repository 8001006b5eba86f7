# Rows per second of the distillation loss with gradients, in bfloat16, against two plain ways to write it: whole
# [N, V'] tensors under autograd, and autograd chunk by chunk with checkpointing (the usual memory saver).
#   python -m tests.bench.loss_speed [threads] [rows] [draft vocabulary; 49152 = all]

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.loss_chunks import CPU_CHUNK
from drafters.losses import DistillInput, LossWeights, distill
from drafters.target import TargetHead
from drafters.vocab import DraftVocab
from drafters.vocab_products import Workspace

NUM_VOCAB, HIDDEN, RANK = 49152, 576, 64


def make_case(num_rows: int, *, num_draft: int) -> tuple[TargetHead, DistillInput]:
    """Random states of SmolLM2's size; rows share target states as blocks of 5 after dense anchors do."""
    torch.manual_seed(0)
    spec: Any = SimpleNamespace(logit_scale=1.0, logit_softcap=None)
    weight = torch.empty(NUM_VOCAB, HIDDEN, dtype=torch.bfloat16).normal_(std=0.1)
    head = TargetHead(spec, embedding_VD=weight, lm_head_VD=weight)
    target_MD = torch.randn(max(8, num_rows // 2), HIDDEN).bfloat16()
    rows_N = torch.randint(0, len(target_MD), (num_rows,)).sort().values
    ids_V = torch.randperm(NUM_VOCAB)[:num_draft].sort().values
    return head, DistillInput(
        hidden_ND=(target_MD[rows_N] + torch.randn(num_rows, HIDDEN).bfloat16()).requires_grad_(),
        target_MD=target_MD,
        target_rows_N=rows_N,
        labels_N=torch.randint(0, NUM_VOCAB, (num_rows,)),
        weights_N=torch.rand(num_rows),
        lse_M=torch.cat([head.logits(part).logsumexp(-1) for part in target_MD.split(64)]),
        bias_NR=torch.randn(num_rows, RANK).bfloat16().requires_grad_(),
        bias_weight_VR=(torch.randn(num_draft, RANK) * 0.01).requires_grad_(),
        vocab=DraftVocab(ids_V, num_full=NUM_VOCAB) if num_draft < NUM_VOCAB else None,
    )


def plain(inputs: DistillInput, weight_VD: Tensor, rows: slice, weights: LossWeights) -> Tensor:
    """0.3 KL + L1 of some rows by ordinary tensor code."""
    assert inputs.bias_NR is not None
    assert inputs.bias_weight_VR is not None
    assert inputs.lse_M is not None
    w, at = inputs.weights_N[rows], inputs.target_rows_N[rows]
    z_t = (inputs.target_MD[at] @ weight_VD.T).float()
    p_t, log_q = (z_t - inputs.lse_M[at, None]).exp(), z_t.log_softmax(-1)
    bias = inputs.bias_NR[rows] @ inputs.bias_weight_VR.bfloat16().T
    log_p = (inputs.hidden_ND[rows] @ weight_VD.T + bias).float().log_softmax(-1)
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    l1 = (log_p.exp() - p_t).abs().sum(-1) + 1 - p_t.sum(-1)
    return (w * (weights.kl * kl + weights.l1 * l1)).sum()


def naive(inputs: DistillInput, head: TargetHead, weights: LossWeights) -> float:
    """Everything at once."""
    weight_VD = head.rows(None if inputs.vocab is None else inputs.vocab.ids_V)
    return finish(plain(inputs, weight_VD, slice(None), weights), inputs)


def checkpointed(inputs: DistillInput, head: TargetHead, weights: LossWeights) -> float:
    """Autograd in chunks that are computed again in the backward pass."""
    weight_VD = head.rows(None if inputs.vocab is None else inputs.vocab.ids_V)
    total = torch.zeros(())
    chunk = weights.chunk or CPU_CHUNK
    for start in range(0, len(inputs.hidden_ND), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(plain, inputs, weight_VD, rows, weights, use_reentrant=False)
    return finish(total, inputs)


def chunked(inputs: DistillInput, head: TargetHead, weights: LossWeights, workspace: Workspace | None = None) -> float:
    """Ours."""
    return finish(distill(inputs, head, weights, workspace=workspace).total, inputs)


def finish(total: Tensor, inputs: DistillInput) -> float:
    """Backward; forget the gradients."""
    total.backward()
    for leaf in (inputs.hidden_ND, inputs.bias_NR, inputs.bias_weight_VR):
        assert leaf is not None
        leaf.grad = None
    return float(total.detach())


def main(threads: int = 1, num_rows: int = 640, num_draft: int = 8192) -> None:
    torch.set_num_threads(threads)
    head, inputs = make_case(num_rows, num_draft=num_draft)
    weights, small, workspace = LossWeights(), LossWeights(chunk=64), Workspace()
    ways: dict[str, Callable[[], float]] = {
        "chunked, gradients inside": lambda: chunked(inputs, head, weights, workspace),
        "checkpointed autograd": lambda: checkpointed(inputs, head, small),
        "naive autograd": lambda: naive(inputs, head, weights),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    totals = {}
    for _ in range(6):  # interleaved, since the machine may be shared
        for name, way in ways.items():
            start = time.perf_counter()
            totals[name] = way()
            seconds[name].append(time.perf_counter() - start)
    print(f"{num_rows} rows, draft vocabulary {num_draft}, {threads} threads")
    for name, found in seconds.items():
        print(f"{name:>28}: {num_rows / min(found):>8.0f} rows/s   loss {totals[name]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
