# Tree verification against a naive twin that reads one row and one child at a time from the same uniforms, and the law
# of what comes out against the target's distribution; planted bugs must break that law.

import pytest
import torch

import drafters.decoding.verify_tree as verify_tree_module
from drafters.decoding.sampling import Draws, Uniforms, draw, probs
from drafters.decoding.tree import Tree, chain_tree, static_tree
from drafters.decoding.verify import verify_chain
from drafters.decoding.verify_tree import verify_tree
from drafters.heads.tree_growth import grow
from drafters.types import Proposal, Sampling

V = 6
WIDE, DEEP, BUSHY = Tree.of((-1,) * 4), chain_tree(4), Tree.of((-1, -1, 0, 0, 1, 2, -1, 5))
ONE = Sampling(temperature=1.0)
SUPPORT = torch.tensor([4, 0, 5, 2])


def random_uniforms(batch, size, generator):
    numbers = torch.rand(batch, 2 * size + 1, generator=generator, dtype=torch.float64)
    return Uniforms(numbers[:, :size], numbers[:, size:-1], numbers[:, -1])


def drafted(tree, kind, q_NV, generator, num=None):
    """A proposal of `num` rows whose law after the anchor, and after every slot of depth d, is `q_NV[d]`, the same for
    every row; and the uniforms of its round. "points" are the likeliest tokens of it."""
    num = num or len(q_NV)
    support_V = SUPPORT if kind == "support" else None
    q_NV = q_NV if support_V is None else q_NV[:, : len(support_V)]
    uniforms = random_uniforms(num, tree.size, generator)

    def level(depth, origins_P, tokens_BP):
        return q_NV[depth].log().expand(*tokens_BP.shape, -1)

    draws = Draws(Sampling() if kind == "points" else ONE, None if kind == "points" else uniforms.draft_BS)
    anchor_B = torch.zeros(num, dtype=torch.int64)
    return grow(tree, draws, level, anchor_B=anchor_B, support_V=support_V), uniforms


def naive_verdict(proposal, logits_SV, b, accept_S):
    """(path, law of the next token) of row b at temperature 1, one child at a time."""
    path, law = [], torch.softmax(logits_SV[0], -1)
    while True:
        at = path[-1] if path else -1
        tried, stood = set(), None
        for slot, parent in enumerate(proposal.parents_S):
            if parent != at or slot >= int(proposal.lengths_B[b]):
                continue
            x, q = int(proposal.tokens_BS[b, slot]), torch.zeros(V)
            if proposal.probs_BSV is None:
                q[x] = 1
            else:
                ids = range(V) if proposal.support_V is None else proposal.support_V.tolist()
                for place, token in enumerate(ids):
                    q[token] = 0 if token in tried else proposal.probs_BSV[b, slot, place]
                q = q / q.sum() if q.sum() > 0 else q
            tried.add(x)
            if q[x] == 0:
                continue
            if accept_S[slot] * q[x] < law[x]:
                stood = slot
                break
            rest = (law - q).clamp(min=0)
            law = rest / rest.sum()
        if stood is None:
            return path, law
        path.append(stood)
        law = torch.softmax(logits_SV[stood + 1], -1)


@pytest.mark.parametrize("kind", ["dense", "support", "points"])
@pytest.mark.parametrize("tree", [WIDE, DEEP, BUSHY])
def test_sampled_verdict_equals_the_naive_twin(tree, kind):
    batch, generator = 400, torch.Generator().manual_seed(0)
    q_NV = torch.softmax(torch.randn(4, V, generator=generator), -1)
    proposal, uniforms = drafted(tree, kind, q_NV, generator, num=batch)
    lengths_B = torch.arange(batch) % (tree.size + 1)
    proposal = Proposal(**{**vars(proposal), "lengths_B": lengths_B})
    logits_BSV = torch.randn(batch, tree.size + 1, V, generator=generator) * 1.5
    verdict = verify_tree(proposal, logits_BSV, ONE, uniforms)
    twins = [naive_verdict(proposal, logits_BSV[b], b, uniforms.accept_BS[b]) for b in range(batch)]
    assert [[s for s in row if s >= 0] for row in verdict.path_BD.tolist()] == [path for path, _ in twins]
    assert verdict.accepted_B.tolist() == [len(path) for path, _ in twins]
    assert len(set(verdict.accepted_B.tolist())) >= min(tree.max_depth + 1, 3)
    assert torch.equal(verdict.next_B, draw(torch.stack([law for _, law in twins]), uniforms.last_B))


@pytest.mark.parametrize("tree", [WIDE, DEEP, BUSHY])
def test_greedy_verdict_equals_the_naive_twin(tree):
    batch, generator = 400, torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(3, (batch, tree.size), generator=generator)
    logits_BSV = torch.randn(batch, tree.size + 1, 3, generator=generator)
    lengths_B = torch.arange(batch) % (tree.size + 1)
    proposal = Proposal(tokens_BS=tokens_BS, lengths_B=lengths_B, parents_S=tree.parents)
    verdict = verify_tree(proposal, logits_BSV, Sampling())
    for b in range(batch):
        reachable = [[]]
        for slot in range(int(lengths_B[b])):
            before = [] if tree.parents[slot] < 0 else [tree.parents[slot]]
            path = next((p for p in reachable if p[-1:] == before), None)
            if path is not None and tokens_BS[b, slot] == logits_BSV[b, tree.parents[slot] + 1].argmax():
                reachable.append([*path, slot])
        best = max(reachable, key=len)
        assert [s for s in verdict.path_BD[b].tolist() if s >= 0] == best
        assert verdict.accepted_B[b] == len(best)
        assert verdict.next_B[b] == logits_BSV[b, (best[-1] if best else -1) + 1].argmax()
    assert set(verdict.accepted_B.tolist()) == set(range(tree.max_depth + 1))


@pytest.mark.parametrize("kind", ["dense", "support", "points"])
@pytest.mark.parametrize("sampling", [ONE, Sampling(), Sampling(temperature=0.7, top_k=3)])
def test_a_chain_is_verified_as_a_chain(sampling, kind):
    batch, generator = 500, torch.Generator().manual_seed(2)
    q_NV = torch.softmax(torch.randn(4, V, generator=generator), -1)
    proposal, uniforms = drafted(DEEP, kind, q_NV, generator, num=batch)
    proposal = Proposal(**{**vars(proposal), "lengths_B": torch.arange(batch) % 5})
    logits_BSV = torch.randn(batch, 5, V, generator=generator)
    chain = Proposal(**{**vars(proposal), "parents_S": None})
    expected = verify_chain(chain, logits_BSV, sampling, uniforms if sampling.temperature else None)
    got = verify_tree(proposal, logits_BSV, sampling, uniforms)
    assert torch.equal(got.accepted_B, expected.accepted_B)
    assert torch.equal(got.next_B, expected.next_B)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_drafted_is_a_plain_step(temperature):
    generator = torch.Generator().manual_seed(3)
    sampling, logits_BSV = Sampling(temperature=temperature), torch.randn(9, 1, V, generator=generator)
    uniforms = random_uniforms(9, 0, generator)
    proposal = Proposal(tokens_BS=torch.zeros(9, 0).long(), lengths_B=torch.zeros(9).long(), parents_S=())
    verdict = verify_tree(proposal, logits_BSV, sampling, uniforms)
    assert verdict.path_BD.shape == (9, 0)
    assert verdict.accepted_B.tolist() == [0] * 9
    assert torch.equal(verdict.next_B, draw(probs(logits_BSV[:, 0], sampling), uniforms.last_B))


def test_chains_are_refused():
    proposal = Proposal(tokens_BS=torch.zeros(1, 2).long(), lengths_B=torch.tensor([2]))
    with pytest.raises(ValueError, match="chain"):
        verify_tree(proposal, torch.zeros(1, 3, V), Sampling())


# --- the law of what comes out


def emitted(tree, kind, seed, num):
    """First two tokens [num, 2] of rounds at temperature 1 with random laws, and the target's law of them [V, V]. The
    target's law after a token depends on the token."""
    generator = torch.Generator().manual_seed(seed)
    p_V = torch.softmax(torch.randn(V, generator=generator) * 1.2, -1)
    p_VV = torch.softmax(torch.randn(V, V, generator=generator) * 1.2, -1)
    q_NV = torch.softmax(torch.randn(4, V, generator=generator) * 1.2, -1)
    proposal, uniforms = drafted(tree, kind, q_NV, generator, num=num)
    after_BSV = p_VV.log()[proposal.tokens_BS]
    verdict = verify_tree(proposal, torch.cat([p_V.log().expand(num, 1, V), after_BSV], 1), ONE, uniforms)
    path_BD = torch.nn.functional.pad(verdict.path_BD, (0, 2), value=-1)
    drafts = proposal.tokens_BS.gather(1, path_BD[:, :2].clamp(min=0))
    tokens = torch.where(path_BD[:, :2] >= 0, drafts, verdict.next_B[:, None])
    # A round that ended after one token is continued by the target itself.
    second = draw(p_VV[tokens[:, 0]], torch.rand(num, generator=generator, dtype=torch.float64))
    tokens[:, 1] = torch.where(verdict.accepted_B == 0, second, tokens[:, 1])
    return tokens, p_V[:, None] * p_VV


def chi_square(counts, expected):
    """p-value of counts against expected ones; cells that expect less than ten are one."""
    rare = expected < 10
    if rare.any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2).double(), statistic / 2))


def p_values(tree, kind, seed, num=40_000):
    """Of the first token alone, and of the first two."""
    tokens, law_VV = emitted(tree, kind, seed, num)
    counts_VV = torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V).view(V, V).double()
    return chi_square(counts_VV.sum(1), law_VV.sum(1) * num), chi_square(counts_VV, law_VV * num)


KINDS = ["dense", "support", "points"]
SHAPES = {"wide": WIDE, "deep": DEEP, "bushy": BUSHY, "full": static_tree([3, 2])}
NUM_SEEDS = 4
ALPHA = 1e-3 / (len(KINDS) * len(SHAPES) * NUM_SEEDS * 2)  # 1e-3 for the whole family of tests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_law_is_the_targets(shape, kind):
    for seed in range(NUM_SEEDS):
        assert min(p_values(SHAPES[shape], kind, seed)) > ALPHA, (shape, kind, seed)


def q_not_renormalised(monkeypatch):
    straight = verify_tree_module._draft_law

    def bent(proposal, rows_N, slot, earlier, vocab_size):
        law_NV = straight(proposal, rows_N, slot, [], vocab_size)
        return law_NV.scatter(1, proposal.tokens_BS[rows_N][:, earlier], 0.0)

    monkeypatch.setattr(verify_tree_module, "_draft_law", bent)


def residual_not_renormalised(monkeypatch):
    monkeypatch.setattr(verify_tree_module, "_residual", lambda p_NV, q_NV: (p_NV - q_NV).clamp(min=0))


def no_residual(monkeypatch):
    monkeypatch.setattr(verify_tree_module, "_residual", lambda p_NV, q_NV: p_NV)


def first_child_unverified(monkeypatch):
    straight = verify_tree_module._sampled

    def bent(proposal, logits_BSV, sampling, accept_BS):
        return straight(proposal, logits_BSV, sampling, accept_BS.clone().index_fill_(1, torch.tensor([0]), 0.0))

    monkeypatch.setattr(verify_tree_module, "_sampled", bent)


def sibling_order_ignored(monkeypatch):
    """Siblings tried the likeliest first instead of in the order of their draws."""
    straight = verify_tree_module._sampled

    def bent(proposal, logits_BSV, sampling, accept_BS):
        drawn_BS = proposal.probs_BSV.gather(2, proposal.tokens_BS[..., None])[..., 0]
        order_BS = drawn_BS.argsort(1, descending=True)
        tokens_BS = proposal.tokens_BS.gather(1, order_BS)
        bent_logits_BSV = torch.cat(
            [logits_BSV[:, :1], logits_BSV[torch.arange(len(order_BS))[:, None], order_BS + 1]], 1
        )
        swapped = Proposal(**{**vars(proposal), "tokens_BS": tokens_BS})
        stood_B, rest_BV = straight(swapped, bent_logits_BSV, sampling, accept_BS)
        back_B = order_BS.gather(1, stood_B.clamp(min=0)[:, None])[:, 0]
        return torch.where(stood_B < 0, stood_B, back_B), rest_BV

    monkeypatch.setattr(verify_tree_module, "_sampled", bent)


@pytest.mark.parametrize(
    "bug",
    [
        q_not_renormalised,
        residual_not_renormalised,
        no_residual,
        first_child_unverified,
        sibling_order_ignored,
    ],
)
def test_planted_bugs_break_the_law(bug, monkeypatch):
    bug(monkeypatch)
    assert min(p_values(WIDE, "dense", 0)) < ALPHA


def acceptance_by_enumeration(p_V, q_V, width):
    """Probability that one of `width` draws without replacement stands, over all orders of draws."""

    def rejected(p_V, q_V, left):
        if left == 0:
            return 1.0
        q_V = q_V / q_V.sum()
        rest_V = (p_V - q_V).clamp(min=0)
        rest_V = rest_V / rest_V.sum()
        total = 0.0
        for x in range(len(q_V)):
            if q_V[x] > p_V[x]:
                without_V = q_V.clone()
                without_V[x] = 0
                total += float(q_V[x] - p_V[x]) * rejected(rest_V, without_V, left - 1)
        return total

    return 1 - rejected(p_V.double(), q_V.double(), width)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_the_acceptance_is_the_analytic_one(width):
    generator, num = torch.Generator().manual_seed(6), 40_000
    p_V, q_V = torch.softmax(torch.randn(2, V, generator=generator) * 1.2, -1)
    tree = Tree.of((-1,) * width)
    proposal, uniforms = drafted(tree, "dense", q_V[None], generator, num=num)
    logits_BSV = p_V.log().expand(num, width + 1, V)
    rate = float(verify_tree(proposal, logits_BSV, ONE, uniforms).accepted_B.double().mean())
    expected = acceptance_by_enumeration(p_V, q_V, width)
    assert rate == pytest.approx(expected, abs=3.3 * (expected * (1 - expected) / num) ** 0.5)
    if width == 1:
        assert expected == pytest.approx(1 - 0.5 * float((p_V - q_V).abs().sum()), abs=1e-6)


def test_equal_laws_always_accept():
    generator = torch.Generator().manual_seed(7)
    q_NV = torch.softmax(torch.randn(4, V, generator=generator), -1)
    proposal, uniforms = drafted(DEEP, "dense", q_NV, generator, num=300)
    logits_BSV = torch.cat([q_NV, q_NV[:1]]).log().expand(300, 5, V)
    assert (verify_tree(proposal, logits_BSV, ONE, uniforms).accepted_B == 4).all()
