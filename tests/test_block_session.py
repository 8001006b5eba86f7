# Decoding sessions: what a session computes after ragged reading must be what training computed at the same place.

import pytest
import torch
from torch import Tensor

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import Draws, RowStreams, probs
from drafters.decoding.tree import chain_tree, static_tree
from drafters.heads.anchors import sample_anchors
from drafters.heads.block import BlockDrafter
from drafters.heads.sequential import teacher_forced
from drafters.types import Batch, Sampling
from tests.block_doubles import GATED, MARKOV, RNN, RUNNING, make_batch, make_drafter
from tests.tiny import tiny_target

GREEDY = Sampling()


def draws(sampling, num_rows, seed=0):
    """What the loop hands to a session of `num_rows` rows."""
    if sampling.temperature == 0:
        return Draws(sampling)
    return Draws(sampling, RowStreams(range(seed, seed + num_rows), torch.device("cpu")).round(4).draft_BS)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trained_states(drafter: BlockDrafter, target, batch: Batch, row: int, position: int) -> Tensor:
    """What training computes [G, D] for the block after `position`."""
    anchors = sample_anchors(batch, num_anchors=1000, block_size=drafter.block_size)
    states_AGD = drafter.states(batch, anchors, target.head, torch.float32)
    found = ((anchors.rows_A == row) & (anchors.positions_A == position)).nonzero()
    assert len(found) == 1
    return states_AGD[found[0, 0]]


def trained_logits(drafter: BlockDrafter, target, hidden_GD: Tensor, tokens: list[int]) -> Tensor:
    """Teacher-forced logits [G, V'] with these input tokens x_0 .. x_{G-1}."""
    head, support = drafter.markov_head, None if drafter.vocab is None else drafter.vocab.ids_V
    logits = target.head.logits(hidden_GD, support_V=support)
    if head is None:
        return logits
    embedded_GR = head.markov_w1(torch.tensor(tokens))
    return logits + teacher_forced(head, embedded_GR[None], hidden_GD[None])[0] @ head.markov_w2.weight.T


class Reader:
    """Feeds a session the conversations of a batch, some tokens a row at a time."""

    def __init__(self, drafter, target, batch: Batch) -> None:
        self.session = drafter.eval().session(target, len(batch.tokens_BT))
        self.batch, self.at, self.rows = batch, [0] * len(batch.tokens_BT), list(range(len(batch.tokens_BT)))

    def read(self, counts: list[int]) -> None:
        width = max(counts)
        index = torch.tensor(self.at)[:, None] + torch.arange(width)
        index, rows = index.clamp(max=self.batch.tokens_BT.shape[1] - 1), torch.tensor(self.rows)[:, None]
        self.at = [at + count for at, count in zip(self.at, counts, strict=True)]
        anchors = self.batch.tokens_BT[torch.tensor(self.rows), torch.tensor(self.at)]
        tokens, aux = self.batch.tokens_BT[rows, index], self.batch.aux_BTLD[rows, index]
        self.session.extend(tokens, torch.tensor(counts), anchors, aux, None)

    def join(self, other: "Reader") -> None:
        self.session.join(other.session)
        self.at, self.rows = self.at + other.at, self.rows + other.rows

    def keep(self, rows: list[int]) -> None:
        self.session.keep(torch.tensor(rows))
        self.at, self.rows = [self.at[r] for r in rows], [self.rows[r] for r in rows]


KINDS = [(kind, True) for kind in (MARKOV, GATED, RNN, RUNNING, None)] + [(MARKOV, False), (RNN, False), (None, False)]


@pytest.mark.parametrize(("window", "reduced"), [(3, True), (7, False), (None, True)])
@pytest.mark.parametrize(("sequential", "from_anchor"), KINDS)
def test_session_equals_training_after_ragged_reading(target, window, reduced, sequential, from_anchor):
    settings = {"window": window, "sequential": sequential, "sample_from_anchor": from_anchor}
    drafter = make_drafter(target, reduced=reduced, **settings)
    batch = make_batch(target, [60, 48, 55], prompt=1)
    reader = Reader(drafter, target, batch)
    steps = [[4, 9, 2], [1, 5, 3], [5, 1, 1], [2, 2, 14], [3, 5, 4], "keep", [1, 4], [5, 1], [5, 5], [2, 4], [5, 3]]
    steps += ["join", [3, 1, 4], [2, 2, 2]]
    for step in steps:
        if step == "keep":
            reader.keep([2, 0])
        elif step == "join":
            newcomer = Reader(drafter, target, batch)
            newcomer.read([17, 1, 1])
            newcomer.keep([0])
            reader.join(newcomer)
        else:
            reader.read(step)
        proposal = reader.session.propose(drafter.block_size, Draws(GREEDY))
        hidden = reader.session.hidden()
        for b, (row, at) in enumerate(zip(reader.rows, reader.at, strict=True)):
            want = trained_states(drafter, target, batch, row, at)
            torch.testing.assert_close(hidden[b], want, rtol=1e-4, atol=1e-4)
            drafted = proposal.tokens_BS[b].tolist()
            logits = trained_logits(drafter, target, want, [int(batch.tokens_BT[row, at]), *drafted[:-1]])
            best = logits.argmax(-1) if drafter.vocab is None else drafter.vocab.ids_V[logits.argmax(-1)]
            assert drafted == best.tolist()


def test_long_reading_keeps_the_buffers_small(target):
    window = 4
    drafter, batch = make_drafter(target, window=window), make_batch(target, [200], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([30])
    for _ in range(40):
        reader.read([4])
    assert reader.session.kv_LXBNSH.shape[4] <= 6 * window
    want = trained_states(drafter, target, batch, 0, reader.at[0])
    torch.testing.assert_close(reader.session.hidden()[0], want, rtol=1e-4, atol=1e-4)


def test_sampled_proposals_carry_the_distributions_they_were_drawn_from(target):
    drafter, batch = make_drafter(target), make_batch(target, [20, 20], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([6, 9])
    sampling = Sampling(temperature=0.8, top_k=9)
    proposal = reader.session.propose(4, draws(sampling, 2))
    assert torch.equal(proposal.support_V, drafter.vocab.ids_V)
    assert proposal.probs_BSV.shape == (2, 4, drafter.vocab.size)
    for b in range(2):
        anchor = int(batch.tokens_BT[b, reader.at[b]])
        hidden = trained_states(drafter, target, batch, b, reader.at[b])
        drafted = proposal.tokens_BS[b].tolist()
        logits = trained_logits(drafter, target, hidden, [anchor, *drafted[:-1]])
        torch.testing.assert_close(proposal.probs_BSV[b], probs(logits, sampling), rtol=1e-3, atol=1e-4)
        places = drafter.vocab.to_draft(proposal.tokens_BS[b])
        assert (proposal.probs_BSV[b].gather(1, places[:, None]) > 0).all()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
def test_a_shorter_draft_is_a_prefix_of_a_longer_one(target, sampling):
    drafter, batch = make_drafter(target), make_batch(target, [20], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8])
    whole = reader.session.propose(4, draws(sampling, 1))
    part = reader.session.propose(2, draws(sampling, 1))
    assert torch.equal(part.tokens_BS, whole.tokens_BS[:, :2])
    assert part.lengths_B.tolist() == [2]
    torch.testing.assert_close(part.signal("confidence"), whole.signal("confidence")[:, :2])


@pytest.mark.parametrize("confidence", [True, False])
def test_confidence_of_a_slot_does_not_see_its_token(target, confidence):
    """Draws that agree before k have the same confidence at k, whatever they drew there."""
    drafter, batch = make_drafter(target, confidence=confidence), make_batch(target, [20], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8])
    seen: dict[tuple[int, ...], tuple[float, set[int]]] = {}
    for seed in range(60):
        proposal = reader.session.propose(2, draws(Sampling(temperature=1.0), 1, seed=seed))
        tokens, sure = proposal.tokens_BS[0].tolist(), proposal.signal("confidence")[0].tolist()
        for k in range(2):
            value, drawn = seen.setdefault(tuple(tokens[:k]), (sure[k], set()))
            assert value == sure[k]
            assert 0.0 < sure[k] < 1.0
            drawn.add(tokens[k])
    assert len(seen[()][1]) > 3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, top_p=0.95)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sequential", [MARKOV, GATED, RNN, RUNNING, None])
def test_a_tree_of_one_branch_is_a_chain(target, sampling, sequential):
    drafter, batch = make_drafter(target, sequential=sequential), make_batch(target, [20, 30], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8, 13])
    chain, tree = reader.session.propose(4, draws(sampling, 2)), chain_tree(4)
    drafted = reader.session.propose_tree(tree, draws(sampling, 2))
    assert torch.equal(drafted.tokens_BS, chain.tokens_BS)
    assert drafted.parents_S == (-1, 0, 1, 2)
    if sampling != GREEDY:
        torch.testing.assert_close(drafted.probs_BSV, chain.probs_BSV)


@pytest.mark.parametrize("sequential", [MARKOV, GATED, RNN, RUNNING, None])
def test_slots_of_a_tree_are_the_best_after_their_own_path(target, sequential):
    drafter, batch = make_drafter(target, sequential=sequential), make_batch(target, [20, 30], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8, 13])
    tree = static_tree([3, 2, 2])
    drafted = reader.session.propose_tree(tree, draws(GREEDY, 2))
    for b in range(2):
        hidden, tokens = trained_states(drafter, target, batch, b, reader.at[b]), drafted.tokens_BS[b].tolist()
        for parent in range(-1, 9):
            path = [int(batch.tokens_BT[b, reader.at[b]])] + [
                tokens[s] for s in range(9) if tree.ancestors_SS[parent, s]
            ]
            path = path if parent >= 0 else path[:1]
            logits_V = trained_logits(drafter, target, hidden[: len(path)], path)[-1]
            children = tree.children(parent)
            best = drafter.vocab.ids_V[logits_V.topk(len(children)).indices]
            assert [tokens[child] for child in children] == best.tolist()


def test_real_decoding_is_the_targets_own(target):
    drafter = make_drafter(target).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 128, (n,), generator=generator) for n in (5, 11, 3)]
    config = DecodeConfig(max_new_tokens=24, stop_ids=(), batch_size=3)
    drafted, alone = decode(target, drafter, prompts, config), decode(target, None, prompts, config)
    assert [g.tokens for g in drafted] == [g.tokens for g in alone]


def test_bfloat16_session_stays_close():
    target, exact = tiny_target(), tiny_target()
    drafter, batch = make_drafter(exact), make_batch(exact, [20], prompt=1)
    reader = Reader(drafter, exact, batch)
    reader.read([8])
    target.head = type(target.head)(
        target.spec, embedding_VD=target.head.embedding_VD.bfloat16(), lm_head_VD=target.head.lm_head_VD.bfloat16()
    )
    rough = Reader(drafter, target, batch)
    rough.read([8])
    hidden, want = rough.session.hidden(), reader.session.hidden()
    assert hidden.dtype == torch.bfloat16
    assert (hidden.float() - want).norm() < 0.05 * want.norm()
