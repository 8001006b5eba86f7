# Distillation losses from hidden states: vocabulary-wide tensors exist for one chunk of rows at a time, and gradients
# are taken inside that chunk. This loop decides how fast a drafter trains; what looks odd saves a pass over memory.
# With p_d over the draft vocabulary V' and the target's true p_t, of mass m inside V' and q = p_t / m there:
#   accept = sum_V' min(p_d, p_t)      l1 = |p_d - p_t|_1 = 2 (1 - accept)      lk = -log accept
#   ce = -log p_d(label)               kl = sum_V' q log(q / p_d)

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from drafters.computing import computing
from drafters.loss_chunks import chunk_rows
from drafters.loss_rows import AtOnce, Gradient, InParts, Rows, TargetRows, Want
from drafters.vocab import DraftVocab
from drafters.vocab_products import Chunk, Workspace, logits_in_parts

if TYPE_CHECKING:
    from drafters.target import TargetHead

__all__ = ["DistillInput", "DistillOutput", "LossWeights", "distill", "position_weights"]

# Elements of a chunk's [rows, V'] from which on compiling its elementwise part pays.
WORTH_COMPILING = 2**20
# Below this an acceptance counts as this much, so that logarithms and quotients stay finite.
TINY = 1e-20
TERMS = ("ce", "l1", "kl", "lk")


# Not frozen: OmegaConf does not merge into a frozen dataclass inside another.
@dataclass(kw_only=True)
class LossWeights:
    """Weights of the terms; a term of weight 0 is not computed. `gamma` None means equal position weights.

    `first`: weights of these terms at the beginning, which move in a straight line to the ones above over the first
    `first_share` of the training. `chunk` is the number of rows whose vocabulary-wide products are alive at once; None
    leaves it to the device.
    """

    ce: float = 0.0
    l1: float = 1.0
    kl: float = 0.3
    lk: float = 0.0
    confidence: float = 1.0
    gamma: float | None = 4.0
    chunk: int | None = None
    first: dict[str, float] | None = None
    first_share: float = 0.5

    def __post_init__(self) -> None:
        first = self.first or {}
        if unknown := sorted(first.keys() - {*TERMS, "confidence"}):
            raise ValueError(f"first: unknown term '{unknown[0]}'; accepted: {', '.join(TERMS)}, confidence")
        last = {name: getattr(self, name) for name in (*TERMS, "confidence")}
        for name, weight in [*last.items(), *((f"first.{name}", weight) for name, weight in first.items())]:
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name}: got {weight}; accepted: 0 (off) or more, finite")
        for when, weights in (("", last), (" where `first` begins", {**last, **first})):
            if not any(weights[name] for name in TERMS):
                raise ValueError(f"{', '.join(TERMS)}: all 0{when}; at least one of them trains the draft logits")
        if not 0 < self.first_share <= 1:
            raise ValueError(f"first_share: got {self.first_share}; accepted: above 0, at most 1 (the whole training)")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"gamma: got {self.gamma}; accepted: above 0, or null for equal weights")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}; accepted: 1 or more, or null (as the device likes)")

    def at(self, progress: float) -> "LossWeights":
        """The weights when `progress` (0 to 1) of the training is done, without a schedule."""
        if not self.first:
            return self
        done = min(1.0, progress / self.first_share)
        moved = {name: (1 - done) * begin + done * getattr(self, name) for name, begin in self.first.items()}
        return replace(self, first=None, **moved)


def position_weights(num_positions: int, gamma: float | None) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for k = 1..G, float32 [G]; ones when gamma is None."""
    steps_G = torch.arange(num_positions, dtype=torch.float32)
    return torch.ones(num_positions) if gamma is None else torch.exp(-steps_G / gamma)


@dataclass(kw_only=True)
class DistillInput:
    """N draft rows and the target states they are compared with.

    `hidden_ND` after the drafter's final norm; `bias_NR` times `bias_weight_VR` (W_2) is added to the logits. A drafter
    with an output projection of its own gives that as `bias_weight_VR`, its states as `bias_NR`, and no `hidden_ND`.
    `target_MD` are target states after the final norm and `target_rows_N` says which belongs to row n (rows share
    them: neighbours with equal rows cost one target product). `lse_M` is the target's log-sum-exp over its whole
    vocabulary; without it a reduced vocabulary needs the full product. `labels_N` are token ids; `weights_N` scale
    each row. `vocab` None means the whole vocabulary.
    """

    hidden_ND: Tensor | None
    target_MD: Tensor
    target_rows_N: Tensor
    labels_N: Tensor
    weights_N: Tensor
    lse_M: Tensor | None = None
    bias_NR: Tensor | None = None
    bias_weight_VR: Tensor | None = None
    vocab: DraftVocab | None = None


@dataclass(kw_only=True)
class DistillOutput:
    """`total` carries the gradient; `terms` are detached sums over rows, times row weights but not term weights.

    `accept_N` = 1 - TV against the true p_t, and `agree_N` (with metrics only) whether the draft's argmax is the
    target's argmax over its whole vocabulary; None where not computed.
    """

    total: Tensor
    terms: dict[str, Tensor]
    accept_N: Tensor | None
    agree_N: Tensor | None


def distill(
    inputs: DistillInput,
    head: "TargetHead",
    weights: LossWeights,
    *,
    want_accept: bool = False,
    want_metrics: bool = False,
    workspace: Workspace | None = None,
) -> DistillOutput:
    """Weighted sum over rows of the loss terms. Differentiable in `hidden_ND`, `bias_NR` and `bias_weight_VR`.

    Products run in the dtype of `hidden_ND`; softmax and sums in float32 (float64 for float64 input). A `workspace`
    that is passed again spares gathering the vocabulary rows and allocating scratch.
    Sources: LK 2602.23881; l1 and the acceptance label 2607.05147.
    """
    given = (inputs.hidden_ND, inputs.bias_NR, inputs.bias_weight_VR)
    want_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    with torch.no_grad():
        wants = _Wants(want_grad, want_accept or want_metrics, want_metrics)
        work = _Pass(inputs, head, weights, wants, Workspace() if workspace is None else workspace)
    total = _Distill.apply(*given, work)
    return DistillOutput(total=total, terms=work.terms, accept_N=work.accept_N, agree_N=work.agree_N)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        work: _Pass = given[-1]
        total = work.run()
        ctx.save_for_backward(*work.grads)
        work.grads = []
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        scale = outputs[0]
        return (*(None if g is None else g * scale.to(g.dtype) for g in ctx.saved_tensors), None)


class _Wants(NamedTuple):
    grad: bool
    accept: bool
    metrics: bool


class _Pass:
    """One pass over the rows: sums, per-row results, and gradients, chunk by chunk."""

    def __init__(
        self, inputs: DistillInput, head: "TargetHead", weights: LossWeights, wants: _Wants, workspace: Workspace
    ) -> None:
        self.inputs, self.head, self.weights = inputs, head, weights
        self.wants = wants._replace(accept=wants.accept or weights.l1 > 0 or weights.lk > 0)
        self.hidden_ND, self.bias_NR = inputs.hidden_ND, inputs.bias_NR
        rows = self.bias_NR if self.hidden_ND is None else self.hidden_ND
        assert rows is not None, "neither states nor a factor"
        self.num_rows, self.product_dtype = len(rows), rows.dtype
        self.dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self.support_V = None if inputs.vocab is None else inputs.vocab.ids_V
        self.labels_N = inputs.labels_N if inputs.vocab is None else inputs.vocab.to_draft(inputs.labels_N)
        self.weights_N = inputs.weights_N.to(self.dtype)
        biased = inputs.hidden_ND is not None and inputs.bias_NR is not None
        self.products = workspace.products(head, self.support_V, self.product_dtype, biased=biased)
        self.products.set_bias(inputs.bias_weight_VR)
        new, num_vocab = self.weights_N.new_empty, len(self.products.weight_VK)
        self.chunk = max(1, min(self.num_rows, weights.chunk or chunk_rows(rows.device, num_vocab)))
        self.rows = self._way(workspace)
        self.terms = {name: new(()).zero_() for name in TERMS if getattr(weights, name) > 0}
        self.accept_N = new(self.num_rows) if self.wants.accept else None
        self.agree_N = torch.zeros_like(self.labels_N, dtype=torch.bool) if wants.metrics else None
        below = wants.grad and not self.terms.keys().isdisjoint(("l1", "lk"))
        self.want = Want(self.accept_N is not None, below, "kl" in self.terms, wants.metrics)
        given = (inputs.hidden_ND, inputs.bias_NR, inputs.bias_weight_VR)
        self.grads = [None if t is None or not wants.grad else torch.zeros_like(t) for t in given]

    def run(self) -> Tensor:
        """The loss; fills `terms`, `accept_N`, `agree_N` and `grads`."""
        for first in range(0, self.num_rows, self.chunk):
            self._chunk(slice(first, min(first + self.chunk, self.num_rows)))
        total = self.weights_N.new_zeros(())
        for name, term in self.terms.items():
            total += getattr(self.weights, name) * term
        return total

    def _way(self, workspace: Workspace) -> Rows:
        """All rows of a chunk at once where that is compiled, else as many as the device likes."""
        compiled = computing().compile_loss and self.chunk * len(self.products.weight_VK) >= WORTH_COMPILING
        if compiled or computing().at_once:
            return AtOnce(self.products, chunk=self.chunk, compiled=compiled)
        return InParts(self.products, workspace, chunk=self.chunk, like=self.weights_N)

    def _chunk(self, rows: slice) -> None:
        target_rows_N, lse_M = self.inputs.target_rows_N[rows], self.inputs.lse_M
        target = self._target(target_rows_N)
        bias_NR = None if self.bias_NR is None else self.bias_NR[rows]
        # Any offset leaves the softmax as it is; the target's log-sum-exp brings the logits near zero.
        offset_N = None if lse_M is None else lse_M[target_rows_N].to(self.dtype)
        hidden_ND = None if self.hidden_ND is None else self.hidden_ND[rows]
        chunk = self.products.multiply(hidden_ND, bias_NR=bias_NR, offset_N=offset_N)
        num_rows = rows.stop - rows.start
        for start in range(0, num_rows, self.rows.num_rows):
            self._part(chunk, target, slice(start, min(start + self.rows.num_rows, num_rows)), first=rows.start)
        if not self.wants.grad:
            return
        gradients = self.products.backward(chunk, bias_NR)
        for whole, gradient, at in zip(self.grads, gradients, (rows, rows, slice(None)), strict=True):
            if whole is not None and gradient is not None:
                whole[at] += gradient

    def _target(self, target_rows_N: Tensor) -> TargetRows:
        rows_U, inverse_N = torch.unique(target_rows_N, return_inverse=True)
        states_UD = self.inputs.target_MD[rows_U].to(self.product_dtype)
        lse_U = None if self.inputs.lse_M is None else self.inputs.lse_M[rows_U].to(self.dtype)
        argmax_U, reduced = None, self.support_V is not None
        if self.wants.metrics or (self.wants.accept and reduced and lse_U is None):
            argmax_U, whole_U = self._whole_vocabulary(states_UD)
            lse_U = whole_U if lse_U is None else lse_U  # the given one is not of products rounded to bfloat16
        chunk = self.products.multiply(states_UD, offset_N=lse_U, buffer=self.rows.target_buffer)
        found = self.rows.target(chunk, inverse_N, reduced=reduced and lse_U is not None, want=self.want)
        return found._replace(argmax_U=argmax_U)

    def _whole_vocabulary(self, states_UD: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax and log-sum-exp [U] over the target's whole vocabulary."""
        parts = logits_in_parts(self.head, states_UD, dtype=states_UD.dtype)
        argmax, lse = zip(*((logits.argmax(-1), logits.logsumexp(-1)) for logits in parts), strict=True)
        return torch.cat(argmax), torch.cat(lse)

    def _part(self, chunk: Chunk, target: TargetRows, part: slice, *, first: int) -> None:
        """Terms of some rows, and the gradients of their logits."""
        at = slice(first + part.start, first + part.stop)
        w, weights = self.weights_N[at], self.weights
        counted = w * (self.labels_N[at] >= 0)
        sums = self.rows.sums(chunk, target, part, self.labels_N[at].clamp(min=0), self.want)
        on_p, on_q, on_label, on_below = torch.zeros_like(w), None, None, None
        if "ce" in self.terms:
            self.terms["ce"] += (counted * (sums.lse_N - sums.label_N)).sum()
            on_label = weights.ce * counted
            on_p += on_label
        if sums.cross_N is not None:
            cross_N = sums.lse_N - sums.cross_N
            self.terms["kl"] += (w * (target.negentropy_U[target.inverse_N[part]] + cross_N)).sum()
            on_p += weights.kl * w
            on_q = -weights.kl * w
        if self.accept_N is not None and sums.accept_N is not None:
            self.accept_N[at] = sums.accept_N
            on_below = self._acceptance_terms(sums.accept_N, w)
            if on_below is not None and sums.below_N is not None:
                # d accept / d z = p (1[p < pt] - sum p 1[p < pt])
                on_p -= on_below * sums.below_N
        if self.agree_N is not None and target.argmax_U is not None and sums.best_N is not None:
            best_N = sums.best_N if self.support_V is None else self.support_V[sums.best_N]
            self.agree_N[at] = best_N == target.argmax_U[target.inverse_N[part]]
        if self.wants.grad:
            self.rows.write(chunk, target, part, sums, Gradient(on_p, on_below, on_q, on_label))

    def _acceptance_terms(self, accept: Tensor, w: Tensor) -> Tensor | None:
        """Adds l1 and lk; returns their derivative with respect to `accept`, None when both are off."""
        derivative = None
        if "l1" in self.terms:
            self.terms["l1"] += (w * (1.0 - accept)).sum() * 2.0
            derivative = -2.0 * self.weights.l1 * w
        if "lk" in self.terms:
            safe = accept.clamp(min=TINY)
            self.terms["lk"] -= (w * safe.log()).sum()
            lk = -self.weights.lk * w / safe
            derivative = lk if derivative is None else derivative + lk
        return derivative
