# Chain verification against a naive twin that reads one row and one draft at a time from the same uniforms, and its
# output law against the target's distribution.

import pytest
import torch

from drafters.decoding.sampling import RowStreams, draw, probs
from drafters.decoding.verify import empty_proposal, seen_after, verify_chain
from drafters.types import Proposal, Sampling

V = 7


def uniforms(batch, length, seed=3):
    return RowStreams(range(seed * 10_000, seed * 10_000 + batch), torch.device("cpu")).round(length)


def naive_verdict(proposal, logits_SV, b, u_S):
    """(accepted, law of the next token) of row b at temperature 1 with dense q, one draft at a time."""
    p_SV = torch.softmax(logits_SV, -1)
    for k in range(int(proposal.lengths_B[b])):
        x = int(proposal.tokens_BS[b, k])
        q_V = torch.zeros(V)
        if proposal.probs_BSV is None:
            q_V[x] = 1
        else:
            support = range(V) if proposal.support_V is None else proposal.support_V.tolist()
            for place, token in enumerate(support):
                q_V[token] = proposal.probs_BSV[b, k, place]
        if u_S[k] >= p_SV[k, x] / q_V[x]:
            rest = (p_SV[k] - q_V).clamp(min=0)
            return k, rest / rest.sum()
    return int(proposal.lengths_B[b]), p_SV[int(proposal.lengths_B[b])]


def make_proposal(kind, batch, length, generator):
    support = torch.tensor([5, 0, 3, 1]) if kind == "support" else None
    size = V if support is None else len(support)
    q_BSV = torch.softmax(torch.randn(batch, length, size, generator=generator) * 1.5, -1)
    u_N = torch.rand(batch * length, generator=generator, dtype=torch.float64)
    tokens = draw(q_BSV.view(-1, size), u_N).view(batch, length)
    return Proposal(
        tokens_BS=tokens if support is None else support[tokens],
        lengths_B=torch.arange(batch) % (length + 1),
        probs_BSV=None if kind == "point" else q_BSV,
        support_V=support,
    )


@pytest.mark.parametrize("kind", ["dense", "support", "point"])
def test_sampled_verdict_equals_the_naive_twin(kind):
    batch, length = 1000, 3
    generator = torch.Generator().manual_seed(0)
    proposal = make_proposal(kind, batch, length, generator)
    logits = torch.randn(batch, length + 1, V, generator=generator) * 1.5
    u = uniforms(batch, length)
    verdict = verify_chain(proposal, logits, Sampling(temperature=1.0), u)
    pairs = [naive_verdict(proposal, logits[b], b, u.accept_BS[b]) for b in range(batch)]
    assert verdict.accepted_B.tolist() == [accepted for accepted, _ in pairs]
    assert set(verdict.accepted_B.tolist()) == set(range(length + 1))
    expected = draw(torch.stack([law for _, law in pairs]), u.last_B)
    assert torch.equal(verdict.next_B, expected)


def test_greedy_verdict_compares_with_the_argmax_within_each_length():
    logits = torch.zeros(4, 4, V)
    for slot, token in enumerate([2, 4, 6, 1]):
        logits[:, slot, token] = 1.0
    tokens = torch.tensor([[2, 4, 6], [2, 5, 6], [3, 4, 6], [2, 4, 6]])
    proposal = Proposal(tokens_BS=tokens, lengths_B=torch.tensor([3, 3, 3, 1]))
    verdict = verify_chain(proposal, logits, Sampling())
    assert verdict.accepted_B.tolist() == [3, 1, 0, 1]
    assert verdict.next_B.tolist() == [1, 4, 2, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_drafted_is_a_plain_step(temperature):
    logits = torch.randn(5, 1, V, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=temperature)
    u = uniforms(5, 0)
    verdict = verify_chain(empty_proposal(5, logits.device), logits, sampling, u)
    assert verdict.accepted_B.tolist() == [0] * 5
    assert torch.equal(verdict.next_B, draw(probs(logits[:, 0], sampling), u.last_B))


def test_equal_distributions_accept_everything():
    logits = torch.randn(200, 4, V, generator=torch.Generator().manual_seed(0))
    q = torch.softmax(logits[:, :3], -1)
    tokens = draw(q.reshape(-1, V), torch.rand(600, dtype=torch.float64)).view(200, 3)
    proposal = Proposal(tokens_BS=tokens, lengths_B=torch.full((200,), 3), probs_BSV=q)
    verdict = verify_chain(proposal, logits, Sampling(temperature=1.0), uniforms(200, 3))
    assert (verdict.accepted_B == 3).all()


def test_settings_shape_both_distributions():
    """With top-k 1 the target is a point, whatever the temperature: the draft stands exactly where it is that point."""
    logits = torch.randn(50, 2, V, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(50)[:, None] % V
    q = torch.nn.functional.one_hot(tokens, V).float()
    proposal = Proposal(tokens_BS=tokens, lengths_B=torch.ones(50, dtype=torch.int64), probs_BSV=q)
    verdict = verify_chain(proposal, logits, Sampling(temperature=0.7, top_k=1), uniforms(50, 1))
    best = logits.argmax(-1)
    assert torch.equal(verdict.accepted_B, (tokens[:, 0] == best[:, 0]).long())
    assert torch.equal(verdict.next_B, best.gather(1, verdict.accepted_B[:, None])[:, 0])


def test_trees_are_refused():
    proposal = Proposal(tokens_BS=torch.zeros(1, 2).long(), lengths_B=torch.tensor([2]), parents_S=(-1, -1))
    with pytest.raises(ValueError, match="tree"):
        verify_chain(proposal, torch.zeros(1, 3, V), Sampling())


def test_what_the_text_holds_after_each_draft():
    seen = torch.zeros(2, V, dtype=torch.bool)
    seen[:, 0] = True
    tokens = torch.tensor([[2, 4, 2], [5, 5, 1]])
    chain = Proposal(tokens_BS=tokens, lengths_B=torch.tensor([3, 3]))
    held = [[set(row.nonzero()[:, 0].tolist()) for row in rows] for rows in seen_after(seen, chain)]
    assert held == [[{0}, {0, 2}, {0, 2, 4}, {0, 2, 4}], [{0}, {0, 5}, {0, 5}, {0, 1, 5}]]
    tree = Proposal(tokens_BS=tokens, lengths_B=torch.tensor([3, 3]), parents_S=(-1, -1, 0))
    held = [[set(row.nonzero()[:, 0].tolist()) for row in rows] for rows in seen_after(seen, tree)]
    assert held == [[{0}, {0, 2}, {0, 4}, {0, 2}], [{0}, {0, 5}, {0, 5}, {0, 1, 5}]]
    assert seen.sum() == 2


def test_a_cut_proposal_has_no_slot_that_no_row_uses():
    proposal = make_proposal("dense", 4, 3, torch.Generator().manual_seed(0))
    short = proposal.cut(torch.tensor([1, 2, 0, 1]))
    assert torch.equal(short.tokens_BS, proposal.tokens_BS[:, :2])
    assert torch.equal(short.probs_BSV, proposal.probs_BSV[:, :2])
    assert proposal.cut(torch.zeros(4, dtype=torch.int64)).tokens_BS.shape == (4, 0)
