# The chunked loss against a naive float64 twin: values and gradients of every term, reduced and full vocabulary.

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.computing import Computing, computed_as
from drafters.losses import DistillInput, LossWeights, distill, position_weights
from drafters.spec import TargetSpec
from drafters.target import TargetHead
from drafters.vocab import DraftVocab
from tests.tiny import tiny_spec

VOCAB, HIDDEN, RANK, NUM_STATES, NUM_ROWS = 61, 16, 5, 11, 23


@pytest.fixture(params=["in parts", "at once"], autouse=True)
def way(request):
    """Both ways to compute the elementwise part."""
    with computed_as(Computing(at_once=request.param == "at once")):
        yield request.param


@pytest.fixture(scope="module")
def spec() -> TargetSpec:
    return replace(tiny_spec(), vocab_size=VOCAB, hidden_size=HIDDEN)


def make_head(spec: TargetSpec, *, scale: float = 1.0, cap: float | None = None, dtype=torch.float64) -> TargetHead:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return TargetHead(replace(spec, logit_scale=scale, logit_softcap=cap), embedding_VD=weight, lm_head_VD=weight)


def own_logits(inputs: DistillInput, ids: Tensor, head: TargetHead) -> Tensor:
    """Draft logits over `ids`: the target's projection of the states, or one of the drafter's own, and the bias."""
    z = 0.0 if inputs.hidden_ND is None else full_logits(inputs.hidden_ND, head)[:, ids]
    return z if inputs.bias_NR is None else z + inputs.bias_NR @ inputs.bias_weight_VR.T


def full_logits(states: Tensor, head: TargetHead) -> Tensor:
    raw = head.spec.logit_scale * states @ head.lm_head_VD.to(states.dtype).T
    cap = head.spec.logit_softcap
    return raw if cap is None else cap * torch.tanh(raw / cap)


def make_inputs(head: TargetHead, *, reduced: bool, bias: bool = True, seed: int = 0) -> DistillInput:
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    vocab = DraftVocab(torch.arange(3, VOCAB, 3), num_full=VOCAB) if reduced else None
    num_draft = VOCAB if vocab is None else vocab.size
    target_MD = randn(NUM_STATES, HIDDEN)
    rows_N = torch.randint(0, NUM_STATES, (NUM_ROWS,), generator=generator).sort().values
    weights_N = torch.rand(NUM_ROWS, generator=generator)
    weights_N[4] = 0.0
    return DistillInput(
        hidden_ND=(target_MD[rows_N] + 0.5 * randn(NUM_ROWS, HIDDEN)).requires_grad_(),
        target_MD=target_MD,
        target_rows_N=rows_N,
        labels_N=torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator),
        weights_N=weights_N,
        lse_M=full_logits(target_MD, head).logsumexp(-1),
        bias_NR=randn(NUM_ROWS, RANK).requires_grad_() if bias else None,
        bias_weight_VR=(0.5 * randn(num_draft, RANK)).requires_grad_() if bias else None,
        vocab=vocab,
    )


def naive(
    inputs: DistillInput, head: TargetHead, weights: LossWeights
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Whole [N, V] tensors in float64; total, terms, acceptance and agreement."""
    full_NV = full_logits(inputs.target_MD, head)[inputs.target_rows_N]
    p_full = full_NV.softmax(-1)
    ids = torch.arange(VOCAB) if inputs.vocab is None else inputs.vocab.ids_V
    z = own_logits(inputs, ids, head)
    log_p = z.log_softmax(-1)
    p = torch.zeros_like(p_full).index_add(1, ids, log_p.exp())
    q = p_full[:, ids] / p_full[:, ids].sum(-1, keepdim=True)
    w = inputs.weights_N.double()
    accept = torch.minimum(p, p_full).sum(-1)
    ce = torch.zeros(NUM_ROWS, dtype=torch.float64)
    for n, label in enumerate(inputs.labels_N.tolist()):
        if label in ids.tolist():
            ce[n] = -log_p[n, ids.tolist().index(label)]
    rows = {
        "ce": ce,
        "l1": (p - p_full).abs().sum(-1),
        "kl": (q * (q.log() - log_p)).sum(-1),
        "lk": -accept.log(),
    }
    terms = {name: (w * row).sum() for name, row in rows.items()}
    total = sum(getattr(weights, name) * term for name, term in terms.items())
    return total, terms, accept, ids[z.argmax(-1)] == full_NV.argmax(-1)


def leaves(inputs: DistillInput) -> list[Tensor]:
    return [t for t in (inputs.hidden_ND, inputs.bias_NR, inputs.bias_weight_VR) if t is not None]


TERM_SETS = [
    dict(ce=1.0, l1=0.0, kl=0.0),
    dict(ce=0.0, l1=1.0, kl=0.0),
    dict(ce=0.0, l1=0.0, kl=1.0),
    dict(ce=0.0, l1=0.0, kl=0.0, lk=1.0),
    dict(ce=0.3, l1=0.7, kl=0.5, lk=0.2),
]


@pytest.mark.parametrize("terms", TERM_SETS)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.7, None), (0.7, 3.0)])
def test_an_output_projection_of_its_own_equals_the_naive_twin(spec, terms, reduced, scale, cap):
    """The target's scale and softcap are not the drafter's."""
    head = make_head(spec, scale=scale, cap=cap)
    given = make_inputs(head, reduced=reduced)
    num_draft = VOCAB if given.vocab is None else given.vocab.size
    generator = torch.Generator().manual_seed(4)
    weight_VD = torch.randn(num_draft, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    inputs = replace(given, hidden_ND=None, bias_NR=given.hidden_ND, bias_weight_VR=weight_VD)
    weights = LossWeights(**terms, chunk=7)
    out = distill(inputs, head, weights, want_metrics=True)
    total, naive_terms, accept, agree = naive(inputs, head, weights)
    torch.testing.assert_close(out.total, total)
    torch.testing.assert_close(out.accept_N, accept)
    assert torch.equal(out.agree_N, agree)
    for name, term in out.terms.items():
        torch.testing.assert_close(term, naive_terms[name])
    for one, other in zip(
        torch.autograd.grad(2.5 * out.total, leaves(inputs)),
        torch.autograd.grad(2.5 * total, leaves(inputs)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("terms", TERM_SETS)
@pytest.mark.parametrize(("reduced", "bias"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.7, None), (0.7, 3.0)])
def test_terms_and_gradients_equal_the_naive_twin(spec, terms, reduced, bias, scale, cap):
    head = make_head(spec, scale=scale, cap=cap)
    weights = LossWeights(**terms, chunk=7)
    inputs = make_inputs(head, reduced=reduced, bias=bias)
    out = distill(inputs, head, weights, want_metrics=True)
    grads = torch.autograd.grad(2.5 * out.total, leaves(inputs))
    total, naive_terms, accept, agree = naive(inputs, head, weights)
    naive_grads = torch.autograd.grad(2.5 * total, leaves(inputs))
    torch.testing.assert_close(out.total, total)
    for name in out.terms:
        torch.testing.assert_close(out.terms[name], naive_terms[name])
    assert set(out.terms) == {name for name, weight in terms.items() if weight > 0}
    torch.testing.assert_close(out.accept_N, accept.detach())
    assert torch.equal(out.agree_N, agree)
    for got, want in zip(grads, naive_grads, strict=True):
        torch.testing.assert_close(got, want)
        assert want.abs().max() > 1e-4


@pytest.mark.parametrize("cap", [None, 3.0])
def test_without_log_sum_exp_the_full_product_gives_it(spec, cap):
    head = make_head(spec, cap=cap)
    weights = LossWeights(ce=0.5, l1=1.0, kl=0.5)
    inputs = make_inputs(head, reduced=True)
    with_lse = distill(inputs, head, weights)
    without = distill(replace(inputs, lse_M=None), head, weights)
    torch.testing.assert_close(without.total, with_lse.total)
    torch.testing.assert_close(without.accept_N, with_lse.accept_N)


@pytest.mark.parametrize("reduced", [False, True])
def test_chunk_size_changes_nothing(spec, reduced):
    head = make_head(spec)
    inputs = make_inputs(head, reduced=reduced)
    results = []
    for chunk in (1, 5, NUM_ROWS, 1000):
        out = distill(inputs, head, LossWeights(ce=0.5, l1=1.0, kl=0.5, chunk=chunk))
        results.append((out.total, *torch.autograd.grad(out.total, leaves(inputs))))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduced", [False, True])
def test_bfloat16_products_stay_close(spec, reduced):
    head, head16 = make_head(spec), make_head(spec, dtype=torch.bfloat16)
    exact = make_inputs(head, reduced=reduced)
    # Logits far from zero, as large targets have: the offset must keep them precise.
    rough = replace(
        exact,
        hidden_ND=exact.hidden_ND.detach().bfloat16().requires_grad_(),
        target_MD=exact.target_MD.bfloat16(),
        lse_M=exact.lse_M.float(),
        bias_NR=exact.bias_NR.detach().bfloat16().requires_grad_(),
        bias_weight_VR=exact.bias_weight_VR.detach().float().requires_grad_(),
    )
    weights = LossWeights(ce=0.5, l1=1.0, kl=0.5, chunk=8)
    want = naive(exact, head, weights)
    got = distill(rough, head16, weights)
    torch.testing.assert_close(got.total.double(), want[0], rtol=0.02, atol=0.0)
    assert (got.accept_N.double() - want[2]).abs().max() < 0.03
    got_grads = torch.autograd.grad(got.total, leaves(rough))
    assert [g.dtype for g in got_grads] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for g, w in zip(got_grads, torch.autograd.grad(want[0], leaves(exact)), strict=True):
        assert (g.double() - w).norm() < 0.05 * w.norm()


@pytest.mark.parametrize("reduced", [False, True])
def test_metrics_change_no_other_number(spec, reduced):
    """The argmax needs the whole vocabulary, whose products are rounded: the given log-sum-exp stays."""
    head, head16 = make_head(spec), make_head(spec, dtype=torch.bfloat16)
    exact = make_inputs(head, reduced=reduced, bias=False)
    inputs = replace(
        exact,
        hidden_ND=exact.hidden_ND.detach().bfloat16().requires_grad_(),
        target_MD=exact.target_MD.bfloat16(),
        lse_M=exact.lse_M.float(),
    )
    weights = LossWeights(ce=0.5, l1=1.0, kl=0.5, chunk=8)
    alone, measured = distill(inputs, head16, weights), distill(inputs, head16, weights, want_metrics=True)
    assert torch.equal(measured.accept_N, alone.accept_N)
    assert torch.equal(measured.total, alone.total)
    (mine,), (other,) = (torch.autograd.grad(one.total, inputs.hidden_ND) for one in (alone, measured))
    assert torch.equal(mine, other)


def test_gradient_check_by_differences(spec):
    head = make_head(spec)
    base = make_inputs(head, reduced=True)

    def loss(hidden, bias, weight):
        inputs = replace(base, hidden_ND=hidden, bias_NR=bias, bias_weight_VR=weight)
        return distill(inputs, head, LossWeights(ce=0.4, l1=0.0, kl=0.6, lk=0.3)).total

    assert torch.autograd.gradcheck(loss, leaves(base))


def test_labels_outside_the_draft_vocabulary_do_not_count_for_ce(spec):
    head = make_head(spec)
    inputs = make_inputs(head, reduced=True)
    outside = replace(inputs, labels_N=torch.ones_like(inputs.labels_N))
    out = distill(outside, head, LossWeights(ce=1.0, l1=0.0, kl=0.0))
    assert out.total == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(out.total, leaves(outside)))


def test_mass_outside_the_draft_vocabulary_is_missed(spec):
    """A drafter equal to the target on V' cannot be accepted more often than the target's mass on V'."""
    head = make_head(spec)
    inputs = make_inputs(head, reduced=True, bias=False)
    same = replace(inputs, hidden_ND=inputs.target_MD[inputs.target_rows_N].requires_grad_())
    out = distill(same, head, LossWeights(l1=1.0))
    p_full = full_logits(inputs.target_MD, head).softmax(-1)
    mass = p_full[:, inputs.vocab.ids_V].sum(-1)[inputs.target_rows_N]
    torch.testing.assert_close(out.accept_N, mass)
    assert mass.max() < 0.99


def test_extreme_logits_stay_finite(spec):
    head = make_head(spec, dtype=torch.float32)
    inputs = make_inputs(head, reduced=True)
    hidden = (inputs.hidden_ND.detach().float() * 200.0).requires_grad_()
    rough = replace(
        inputs,
        hidden_ND=hidden,
        target_MD=inputs.target_MD.float() * -200.0,
        lse_M=full_logits(inputs.target_MD.float() * -200.0, head).logsumexp(-1),
        bias_NR=None,
        bias_weight_VR=None,
    )
    out = distill(rough, head, LossWeights(ce=1.0, l1=1.0, kl=1.0, lk=1.0))
    assert torch.isfinite(out.total)
    assert torch.isfinite(torch.autograd.grad(out.total, hidden)[0]).all()


def test_no_rows_give_zero(spec):
    head = make_head(spec)
    inputs = make_inputs(head, reduced=True)
    none = slice(0, 0)
    empty = replace(
        inputs,
        hidden_ND=inputs.hidden_ND[none],
        target_rows_N=inputs.target_rows_N[none],
        labels_N=inputs.labels_N[none],
        weights_N=inputs.weights_N[none],
        bias_NR=inputs.bias_NR[none],
    )
    out = distill(empty, head, LossWeights(), want_metrics=True)
    assert out.total == 0
    assert len(out.accept_N) == 0


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERM_SETS)
@pytest.mark.parametrize(("reduced", "cap"), [(False, None), (True, None), (False, 3.0), (True, 3.0)])
def test_compiled_it_is_the_same(spec, monkeypatch, terms, reduced, cap):
    monkeypatch.setattr("drafters.losses.WORTH_COMPILING", 0)
    head = make_head(spec, cap=cap)
    inputs = make_inputs(head, reduced=reduced)
    leaves = (inputs.hidden_ND, inputs.bias_NR, inputs.bias_weight_VR)

    def learned(how: Computing) -> list[Tensor]:
        with computed_as(how):
            found = distill(inputs, head, LossWeights(**terms, chunk=8), want_accept=True)
        return [found.total, found.accept_N, *torch.autograd.grad(found.total, leaves)]

    for plain, compiled in zip(learned(Computing()), learned(Computing(compile_loss=True)), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-9, atol=1e-9)


def test_position_weights():
    torch.testing.assert_close(position_weights(3, 4.0), torch.tensor([1.0, 0.7788008, 0.6065307]))
    assert torch.equal(position_weights(3, None), torch.ones(3))


@pytest.mark.parametrize("bad", [dict(ce=-1.0), dict(l1=0.0, kl=0.0), dict(gamma=0.0), dict(chunk=0)])
def test_bad_weights_are_refused(bad):
    with pytest.raises(ValueError, match=r"got|all 0"):
        LossWeights(**bad)
