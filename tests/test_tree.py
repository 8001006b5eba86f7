# Tree shapes against definitions written out by hand, the choice of a tree against all trees there are, and growth of
# a tree's tokens against one path at a time.

import math
import random

import pytest
import torch

from drafters.decoding.records import Round
from drafters.decoding.sampling import Draws, draw, penalised, probs
from drafters.decoding.tree import (
    Tree,
    ancestors,
    chain_tree,
    choose_tree,
    expected_length,
    paths,
    probe_tree,
    rank_acceptances,
    static_tree,
)
from drafters.errors import ConfigError
from drafters.heads.tree_growth import grow
from drafters.types import Sampling

BUSHY = Tree(parents=(-1, -1, 0, 0, 1, 2, -1, 5), ranks=(0, 1, 0, 1, 0, 0, 2, 0))
NAN = math.nan


def naive_path(tree, slot):
    return [] if slot < 0 else [*naive_path(tree, tree.parents[slot]), slot]


@pytest.mark.parametrize("tree", [BUSHY, chain_tree(4), static_tree([3, 2, 1]), probe_tree(3, 2), Tree((), ())])
def test_shape_queries_equal_the_naive_twin(tree):
    for slot in range(tree.size):
        path = naive_path(tree, slot)
        assert tree.ancestors_SS[slot].nonzero()[:, 0].tolist() == path
        assert tree.depths[slot] == len(path) <= tree.max_depth
        assert [s for s in paths(tree.parents)[slot + 1].tolist() if s >= 0] == path
        assert tree.children(slot) == tuple(s for s in range(tree.size) if tree.parents[s] == slot)
        assert tree.children(tree.parents[slot])[tree.ranks[slot]] == slot
    assert paths(tree.parents).shape == (1 + tree.size, tree.max_depth)
    assert Tree.of(tree.parents) == tree
    assert ancestors(tree.parents) is tree.ancestors_SS


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((-1, 1), (0, 0), r"slot 1 has parent 1; accepted: -1 \(the anchor\) to 0"),
        ((-2,), (0,), "slot 0 has parent -2"),
        ((-1, -1), (0, 0), "slot 1 has rank 0; accepted: 1, as the next child of -1"),
        ((-1, -1), (1, 0), "slot 0 has rank 1"),
        ((-1, 0), (0,), "2 parents and 1 ranks"),
    ],
)
def test_what_is_no_tree_is_refused(parents, ranks, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents, ranks)


def test_ready_made_shapes():
    assert chain_tree(3) == Tree((-1, 0, 1), (0, 0, 0))
    assert chain_tree(0).size == 0
    assert static_tree([2, 1, 2]).parents == (-1, -1, 0, 1, 2, 2, 3, 3)
    assert static_tree((1, 1, 1)) == chain_tree(3)
    assert static_tree([4, 63]).size == 256
    assert probe_tree(3, 2) == Tree((-1, -1, 0, 0, 2, 2), (0, 1) * 3)
    assert probe_tree(1, 4).parents == (-1,) * 4


@pytest.mark.parametrize("spec", [[], [0], [2, -1], [2, 1.0], [True], "321", 3, None, [["2"]]])
def test_what_names_no_static_tree_is_refused(spec):
    with pytest.raises(ConfigError, match=r"tree: got .*; accepted: a list .* such as \[3, 2, 1\]"):
        static_tree(spec)


@pytest.mark.parametrize("spec", [[257], [16, 16], [2] * 30, [10**9, 10**9]])
def test_trees_of_more_than_256_slots_are_refused(spec):
    with pytest.raises(ConfigError, match=r"makes \d+ slots; accepted: .* at most 256 slots"):
        static_tree(spec)


# --- measured acceptances


def walk(tree, acceptances, rng):
    """Accepted slots of one round under independence."""
    slots, at = [], -1
    while True:
        u, depth = rng.random(), len(slots)
        for child in tree.children(at):
            u -= acceptances[depth][tree.ranks[child]]
            if u < 0:
                slots.append(child)
                break
        else:
            return tuple(slots)
        at = slots[-1]


def round_of(slots, *, proposed, full=True):
    return Round(proposed=proposed, accepted=len(slots), gained=len(slots) + 1, full=full, context=9, slots=slots)


def test_expected_length_is_the_mean_of_walks():
    acceptances, rng = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.7, 0.1, 0.1], [0.9, 0.1, 0.0]], random.Random(0)
    lengths = [1 + len(walk(BUSHY, acceptances, rng)) for _ in range(20_000)]
    assert expected_length(BUSHY, acceptances) == pytest.approx(sum(lengths) / len(lengths), abs=0.03)
    assert expected_length(chain_tree(2), [[0.5], [0.4]]) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert expected_length(Tree((), ()), []) == 1.0


def test_acceptances_are_counted_by_hand():
    tree = Tree.of((-1, -1, 0, 0, 1))
    rounds = [
        round_of((0, 3), proposed=5),
        round_of((1,), proposed=5),
        round_of((0,), proposed=3),  # slot 3 was not drafted
        round_of((), proposed=5),
        round_of((0, 2), proposed=5, full=False),
        round_of((), proposed=0),
    ]
    # Depth 1: slots 2 (of slot 0: two tries) and 4 (of slot 1: one) have rank 0; slot 3 had one try.
    assert rank_acceptances(rounds, tree) == [[2 / 4, 1 / 4], [0 / 3, 1 / 1]]


def test_what_was_never_tried_is_nan():
    measured = rank_acceptances([round_of((), proposed=4)], probe_tree(2, 2))
    assert measured[0] == [0.0, 0.0]
    assert all(map(math.isnan, measured[1]))


def test_a_probe_finds_the_acceptances():
    acceptances, rng, tree = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.7, 0.1, 0.1]], random.Random(1), probe_tree(3, 3)
    rounds = [round_of(walk(tree, acceptances, rng), proposed=tree.size) for _ in range(20_000)]
    for measured, true in zip(rank_acceptances(rounds, tree), acceptances, strict=True):
        assert measured == pytest.approx(true, abs=0.02)


# --- the choice


def all_trees(num_nodes, depth, width):
    """Every tree of `num_nodes` slots within depth and width, each at least once."""
    found = {()}
    for _ in range(num_nodes):
        grown = set()
        for parents in found:
            for parent in range(-1, len(parents)):
                tree = Tree.of((*parents, parent))
                if tree.max_depth <= depth and max(tree.ranks) < width:
                    grown.add(tree.parents)
        found = grown
    return [Tree.of(parents) for parents in found]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("falling", [True, False])
def test_the_chosen_tree_is_the_best_of_all(seed, falling):
    rng = random.Random(seed)
    acceptances = [[rng.random() / 3 for _ in range(3)] for _ in range(3)]
    if falling:
        acceptances = [sorted(row, reverse=True) for row in acceptances]
    for num_nodes in range(1, 7):
        best = max(expected_length(tree, acceptances) for tree in all_trees(num_nodes, 3, 3))
        chosen = choose_tree(acceptances, num_nodes)
        assert chosen.size == num_nodes
        assert expected_length(chosen, acceptances) == pytest.approx(best)


def greedy_value(acceptances, num_nodes):
    """Expected length of the likeliest slots one by one."""
    everything = static_tree([len(row) for row in acceptances])
    chances = []
    for parent, rank, depth in zip(everything.parents, everything.ranks, everything.depths, strict=True):
        chances.append((1.0 if parent < 0 else chances[parent]) * acceptances[depth - 1][rank])
    return 1 + sum(sorted(chances, reverse=True)[:num_nodes])


def test_where_acceptances_fall_with_rank_the_likeliest_slots_are_chosen():
    acceptances = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.15], [0.7, 0.1, 0.05], [0.4, 0.3, 0.2]]
    for num_nodes in (1, 5, 17, 40, 100):
        chosen = choose_tree(acceptances, num_nodes)
        assert expected_length(chosen, acceptances) == pytest.approx(greedy_value(acceptances, num_nodes))


def test_what_was_not_measured_is_not_used():
    acceptances = [[0.5, 0.3, NAN], [0.5, NAN, 0.4], [NAN, 0.9, 0.9]]
    assert choose_tree(acceptances, 4) == Tree.of((-1, -1, 0, 1))
    with pytest.raises(ConfigError, match="tree: got 5 slots; accepted: 1 to 4, all that the measured acceptances"):
        choose_tree(acceptances, 5)
    with pytest.raises(ConfigError, match="tree: got 0 slots; accepted: 1 to 256"):
        choose_tree(acceptances, 0)


def test_a_chain_is_chosen_where_only_first_ranks_stand():
    assert choose_tree([[0.9, 0.01]] * 5, 5) == chain_tree(5)
    assert choose_tree([[0.3, 0.29, 0.28, 0.27]] * 5, 4) == Tree.of((-1,) * 4)


# --- growth

V = 11


class Toy:
    """Logits after a path depend on every token of it, through a state that is carried from parent to child."""

    def __init__(self, rows, size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(4, V, size, generator=generator) * 2
        self.state = torch.zeros(rows, 1, size)

    def level(self, depth, origins_P, tokens_BP):
        self.state = 0.5 * self.state[:, origins_P] + self.table[depth][tokens_BP]
        return self.state

    def after(self, tokens):
        state = torch.zeros(self.table.shape[2])
        for depth, token in enumerate(tokens):
            state = 0.5 * state + self.table[depth][token]
        return state


def naive_child(toy, draws, row, path, taken, support):
    """(token, law it was drawn from) of one child. `path` from the anchor; `taken`: its earlier siblings and
    itself, each with the uniform of its slot."""
    logits = toy.after(path)
    if draws.seen_BV is not None:
        seen = draws.seen_BV[row].clone()
        seen[path[1:]] = True
        logits = penalised(logits, seen if support is None else seen[support], draws.sampling)
    ids = torch.arange(V) if support is None else support
    if draws.uniforms_BS is None:
        return int(ids[logits.argsort(descending=True)[len(taken) - 1]]), None
    law = probs(logits, draws.sampling)
    left = law.clone()
    for token, _ in taken[:-1]:
        left[ids == token] = 0
    return int(ids[draw(left[None], taken[-1][1][None])[0]]), law


@pytest.mark.parametrize("support", [None, torch.tensor([7, 2, 9, 4, 0])])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8), Sampling(temperature=1.0, top_k=3, repetition_penalty=1.8)]
)
def test_growth_equals_one_path_at_a_time(sampling, support):
    rows, generator = 20, torch.Generator().manual_seed(4)
    anchor_B = torch.randint(V, (rows,), generator=generator)
    seen_BV = torch.rand(rows, V, generator=generator) < 0.3 if sampling.repetition_penalty != 1 else None
    uniforms_BS = None
    if sampling.temperature:
        uniforms_BS = torch.rand(rows, BUSHY.size, generator=generator, dtype=torch.float64)
    draws = Draws(sampling, uniforms_BS, seen_BV)
    toy = Toy(rows, V if support is None else len(support))
    proposal = grow(BUSHY, draws, toy.level, anchor_B=anchor_B, support_V=support)
    assert proposal.parents_S == BUSHY.parents
    assert proposal.lengths_B.tolist() == [BUSHY.size] * rows
    assert (proposal.probs_BSV is None) == (sampling.temperature == 0)
    for b in range(rows):
        for slot in range(BUSHY.size):
            path = [int(anchor_B[b]), *proposal.tokens_BS[b, naive_path(BUSHY, BUSHY.parents[slot])].tolist()]
            siblings = BUSHY.children(BUSHY.parents[slot])[: BUSHY.ranks[slot] + 1]
            taken = [
                (int(proposal.tokens_BS[b, s]), None if uniforms_BS is None else uniforms_BS[b, s]) for s in siblings
            ]
            token, law = naive_child(toy, draws, b, path, taken, support)
            assert int(proposal.tokens_BS[b, slot]) == token
            if law is not None:
                torch.testing.assert_close(proposal.probs_BSV[b, slot], law)


def test_a_chain_is_drafted_as_slot_after_slot():
    rows, generator = 50, torch.Generator().manual_seed(5)
    anchor_B = torch.randint(V, (rows,), generator=generator)
    uniforms_BS = torch.rand(rows, 3, generator=generator, dtype=torch.float64)
    sampling = Sampling(temperature=1.0)
    grown = grow(chain_tree(3), Draws(sampling, uniforms_BS), Toy(rows, V).level, anchor_B=anchor_B)
    toy, draws, token_B = Toy(rows, V), Draws(sampling, uniforms_BS), anchor_B
    for depth in range(3):
        token_B, dist_BV = draws.draft(toy.level(depth, torch.tensor([0]), token_B[:, None])[:, 0])
        assert torch.equal(grown.tokens_BS[:, depth], token_B)
        torch.testing.assert_close(grown.probs_BSV[:, depth], dist_BV)


def test_no_draft_is_left_where_the_law_is_used_up():
    """Top-k 2 leaves two tokens for three children: the third has probability zero, whatever its token."""
    draws = Draws(Sampling(temperature=1.0, top_k=2), torch.rand(30, 3, dtype=torch.float64))
    anchor_B = torch.zeros(30, dtype=torch.int64)
    proposal = grow(Tree.of((-1,) * 3), draws, Toy(30, V).level, anchor_B=anchor_B)
    assert ((proposal.probs_BSV[:, 0] > 0).sum(1) == 2).all()
    assert (proposal.tokens_BS[:, 0] != proposal.tokens_BS[:, 1]).all()
    drafted = proposal.probs_BSV[:, 0].scatter(1, proposal.tokens_BS[:, :2], 0.0)
    assert (drafted.gather(1, proposal.tokens_BS[:, 2:]) == 0).all()
