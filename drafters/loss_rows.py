# The elementwise part of a distillation loss: from raw products of some rows to their sums, and back to the gradients
# of the products. Two ways with the same numbers: a few rows at a time in scratch that stays in a CPU's cache, and all
# rows of a chunk at once, which torch.compile fuses into three passes and a GPU wants anyway.

from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.loss_chunks import scratch_rows
from drafters.vocab_products import Chunk, VocabProducts, Workspace

__all__ = ["AtOnce", "Gradient", "InParts", "Rows", "Sums", "TargetRows", "Want"]

# A log-sum-exp is told by a probability no smaller than this.
CLEAR = 1e-30
# Below this a mass counts as this much, so that quotients stay finite.
TINY = 1e-20


class Want(NamedTuple):
    """What is read of the rows: 1 - TV, what its gradient takes, the cross-entropy to q, and the draft's argmax."""

    accept: bool
    below: bool
    kl: bool
    best: bool


class TargetRows(NamedTuple):
    """The target's side of a chunk: row u is a distinct target state, `inverse_N` says which one row n has.

    `q_UV` over V' in parts, or its raw products and their log-sum-exp; the mass m inside V' (None = 1); sum q log q;
    the argmax over the whole vocabulary, where known.
    """

    inverse_N: Tensor
    mass_U: Tensor | None
    negentropy_U: Tensor
    q_UV: Tensor | None = None
    chunk: Chunk | None = None
    lse_U: Tensor | None = None
    argmax_U: Tensor | None = None


class Sums(NamedTuple):
    """Of each row: the label in V', log-sum-exp, the label's logit, sum min(p, p_t), sum p [p < p_t], sum q z, and the
    argmax of p."""

    labels_N: Tensor
    lse_N: Tensor
    label_N: Tensor
    accept_N: Tensor | None
    below_N: Tensor | None
    cross_N: Tensor | None
    best_N: Tensor | None


class Gradient(NamedTuple):
    """d total / d z_v = on_p p + on_below p [p < p_t] + on_q q - on_label [v is the label], each [N] or None = 0."""

    on_p: Tensor
    on_below: Tensor | None
    on_q: Tensor | None
    on_label: Tensor | None


class Rows(Protocol):
    """A way to compute: `num_rows` at once; `target_buffer` is where the target's products lie."""

    num_rows: int
    target_buffer: str

    def target(self, chunk: Chunk, inverse_N: Tensor, *, reduced: bool, want: Want) -> TargetRows:
        """What rows of the target's products say. Their offset is their log-sum-exp over the whole vocabulary, so a
        `reduced` one sums up to the mass."""

    def sums(self, chunk: Chunk, target: TargetRows, part: slice, labels_N: Tensor, want: Want) -> Sums:
        """Of the draft rows `part` of a chunk with labels of V'."""

    def write(self, chunk: Chunk, target: TargetRows, part: slice, sums: Sums, given: Gradient) -> None:
        """Replace the raw products of the rows by the gradients; `sums` are the last that were asked for."""


class InParts:
    """As many rows at a time as the device likes; nothing is compiled."""

    target_buffer = "raw"  # they are not read again

    def __init__(self, products: VocabProducts, workspace: Workspace, *, chunk: int, like: Tensor) -> None:
        num_vocab = len(products.weight_VK)
        self.products = products
        self.num_rows = min(chunk, scratch_rows(like.device, num_vocab))
        names = ("logits", "p", "q", "work")
        self.scratch = [workspace.buffer(name, self.num_rows, num_vocab, like=like) for name in names]
        self.workspace, self.like = workspace, like

    def target(self, chunk: Chunk, inverse_N: Tensor, *, reduced: bool, want: Want) -> TargetRows:
        q_UV = self.workspace.buffer("shared q", *chunk.raw_NV.shape, like=self.like)
        inside_U = q_UV.new_empty(len(q_UV))
        negentropy_U = torch.zeros_like(inside_U)
        for start in range(0, len(inside_U), self.num_rows):
            part = slice(start, min(start + self.num_rows, len(inside_U)))
            logits, work = (self.scratch[i][: part.stop - start] for i in (0, 3))
            self.products.read(chunk, part, logits)
            q = torch.softmax(logits, -1, out=q_UV[part])
            if reduced or want.kl:
                inside_U[part] = _log_sum_exp(logits, q)
            if want.kl:
                negentropy_U[part] = torch.mul(q, logits, out=work).sum(-1) - inside_U[part]
        return TargetRows(inverse_N, _mass(inside_U) if reduced else None, negentropy_U, q_UV=q_UV)

    def sums(self, chunk: Chunk, target: TargetRows, part: slice, labels_N: Tensor, want: Want) -> Sums:
        logits, p, q, work = (scratch[: part.stop - part.start] for scratch in self.scratch)
        shared_N, label = target.inverse_N[part], labels_N[:, None]
        assert target.q_UV is not None
        torch.index_select(target.q_UV, 0, shared_N, out=q)
        self.products.read(chunk, part, logits)
        torch.softmax(logits, -1, out=p)
        label_N, likely_N = logits.gather(1, label)[:, 0], p.gather(1, label)[:, 0]
        clear = not p.is_cuda and bool(likely_N.min() > CLEAR)  # a GPU would have to be waited for
        lse_N = label_N - likely_N.log() if clear else _log_sum_exp(logits, p)
        cross_N = torch.mul(q, logits, out=work).sum(-1) if want.kl else None
        if target.mass_U is not None:
            q.mul_(target.mass_U[shared_N, None])
        accept_N = below_N = None
        if want.accept:
            accept_N = torch.minimum(p, q, out=work).sum(-1)
        if want.below:
            below_N = torch.lt(p, q, out=work).mul_(p).sum(-1)
        return Sums(labels_N, lse_N, label_N, accept_N, below_N, cross_N, p.argmax(-1) if want.best else None)

    def write(self, chunk: Chunk, target: TargetRows, part: slice, sums: Sums, given: Gradient) -> None:
        _, p, q, work = (scratch[: part.stop - part.start] for scratch in self.scratch)
        if given.on_below is not None:
            work.mul_(given.on_below[:, None]).addcmul_(p, given.on_p[:, None])
        else:
            torch.mul(p, given.on_p[:, None], out=work)
        if given.on_q is not None:
            mass_U, shared_N = target.mass_U, target.inverse_N[part]
            on_pt = given.on_q if mass_U is None else given.on_q / mass_U[shared_N]  # q holds p_t
            work.addcmul_(q, on_pt[:, None])
        if given.on_label is not None:
            work.scatter_add_(1, sums.labels_N[:, None], -given.on_label[:, None])
        self.products.write(chunk, part, work)


def _mass(log_U: Tensor) -> Tensor:
    return log_U.exp().clamp(TINY, 1.0)


def _log_sum_exp(logits: Tensor, softmax: Tensor) -> Tensor:
    """The softmax kernel does not return it, its largest entry tells."""
    return logits.amax(-1) - softmax.amax(-1).log()


class AtOnce:
    """All rows of a chunk in one go, in float32 or wider; `compiled` fuses the passes."""

    target_buffer = "raw of the target"

    def __init__(self, products: VocabProducts, *, chunk: int, compiled: bool) -> None:
        self.products, self.num_rows, self.compiled = products, chunk, compiled
        self.cap = products.cap

    def _call(self, function: Any, num_rows: int) -> Any:
        # One row alone would be compiled anew.
        return _compiled(function) if self.compiled and num_rows > 1 else function

    def target(self, chunk: Chunk, inverse_N: Tensor, *, reduced: bool, want: Want) -> TargetRows:
        lse_U, negentropy_U = self._call(_target_sums, len(chunk.raw_NV))(chunk.raw_NV, self.cap, want.kl)
        mass_U = None
        if reduced:
            mass_U = _mass(lse_U if chunk.offset_N is None else lse_U - chunk.offset_N)
        return TargetRows(inverse_N, mass_U, negentropy_U, chunk=chunk, lse_U=lse_U)

    def sums(self, chunk: Chunk, target: TargetRows, part: slice, labels_N: Tensor, want: Want) -> Sums:
        assert target.chunk is not None
        cap = None if chunk.own else self.cap
        theirs = (target.chunk.raw_NV, target.lse_U, target.mass_U, target.inverse_N, self.cap)
        call = self._call(_draft_sums, min(len(labels_N), len(target.chunk.raw_NV)))
        lse_N, accept_N, below_N, cross_N = call(chunk.raw_NV, chunk.bias_NV, cap, theirs, want)
        label = labels_N[:, None]
        bias = None if chunk.bias_NV is None else chunk.bias_NV.gather(1, label)
        label_N = _logits(chunk.raw_NV.gather(1, label), bias, cap)[:, 0]
        best_N = _logits(chunk.raw_NV, chunk.bias_NV, cap).argmax(-1) if want.best else None
        return Sums(labels_N, lse_N, label_N, accept_N, below_N, cross_N, best_N)

    def write(self, chunk: Chunk, target: TargetRows, part: slice, sums: Sums, given: Gradient) -> None:
        assert target.chunk is not None
        cap = None if chunk.own else self.cap
        theirs = (target.chunk.raw_NV, target.lse_U, target.mass_U, target.inverse_N, self.cap)
        call = self._call(_draft_gradient, min(len(sums.lse_N), len(target.chunk.raw_NV)))
        labels_N = sums.labels_N.int()
        call(chunk.raw_NV, chunk.bias_NV, cap, theirs, (sums.lse_N, labels_N), tuple(given))


Theirs = tuple[Tensor, Tensor, Tensor | None, Tensor, float | None]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _logits(raw: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
    logits = _wide(raw)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits if bias is None else logits + _wide(bias)


def _target_sums(raw_UV: Tensor, cap: float | None, kl: bool) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and sum q log q."""
    logits = _logits(raw_UV, None, cap)
    lse_U = logits.logsumexp(-1)
    if not kl:
        return lse_U, torch.zeros_like(lse_U)
    return lse_U, ((logits - lse_U[:, None]).exp() * logits).sum(-1) - lse_U


def _target_probs(theirs: Theirs) -> tuple[Tensor, Tensor]:
    """q and p_t of each draft row."""
    raw_UV, lse_U, mass_U, inverse_N, cap = theirs
    q = (_logits(raw_UV[inverse_N], None, cap) - lse_U[inverse_N, None]).exp()
    return q, q if mass_U is None else q * mass_U[inverse_N, None]


def _draft_sums(
    raw_NV: Tensor, bias_NV: Tensor | None, cap: float | None, theirs: Theirs, want: Want
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log-sum-exp, sum min(p, p_t), sum p [p < p_t], sum q z."""
    logits = _logits(raw_NV, bias_NV, cap)
    lse_N = logits.logsumexp(-1)
    if not (want.accept or want.kl):
        return lse_N, None, None, None
    q, p_t = _target_probs(theirs)
    p = (logits - lse_N[:, None]).exp()
    accept_N = torch.minimum(p, p_t).sum(-1) if want.accept else None
    below_N = torch.where(p < p_t, p, 0.0).sum(-1) if want.below else None
    return lse_N, accept_N, below_N, (q * logits).sum(-1) if want.kl else None


def _draft_gradient(
    raw_NV: Tensor,
    bias_NV: Tensor | None,
    cap: float | None,
    theirs: Theirs,
    rows: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Writes the gradient into the raw products, and into those of the bias; `rows` are log-sum-exp and label."""
    (on_p, on_below, on_q, on_label), (lse_N, labels_N) = given, rows
    p = (_logits(raw_NV, bias_NV, cap) - lse_N[:, None]).exp()
    gradient = p * on_p[:, None]
    if on_below is not None or on_q is not None:
        q, p_t = _target_probs(theirs)
        if on_below is not None:
            gradient = gradient + torch.where(p < p_t, p * on_below[:, None], 0.0)
        if on_q is not None:
            gradient = gradient + q * on_q[:, None]
    if on_label is not None:
        columns = torch.arange(raw_NV.shape[1], dtype=labels_N.dtype, device=raw_NV.device)
        gradient = gradient - torch.where(columns == labels_N[:, None], on_label[:, None], 0.0)
    if bias_NV is not None:
        bias_NV.copy_(gradient)
    if cap is not None:
        capped = torch.tanh(_wide(raw_NV) / cap)
        gradient = gradient * (1.0 - capped * capped)
    raw_NV.copy_(gradient)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
