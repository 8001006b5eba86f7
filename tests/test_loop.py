# The decode loop on real (tiny) models: rows, rounds, limits, stops; and rows that share a batch, enter and leave it,
# which must not change anything that a row gets. The target is sharpened and the drafter a perturbed copy, so that
# every accepted count occurs. What the tokens' law must be is tested in test_lossless.py.

import itertools
from dataclasses import replace

import pytest
import torch

from drafters.decoding.loop import DecodeConfig, Round, RunTimings, decode
from drafters.decoding.tree import Tree
from drafters.errors import ConfigError, DataError
from drafters.heads.ngram import NgramDrafter
from drafters.types import Needs, Sampling
from tests.copy_drafter import CopyDrafter, CopySession, sharp_target
from tests.tiny import tiny_target

GAMMA = 4
TREE = Tree.of((-1, -1, 0, 0, 1, 2, 5))
# Longer than all rows together that it meets, and of one token.
LENGTHS = [9, 3, 17, 1, 6, 150, 1, 40]


def prompts_of(lengths, vocab_size=128):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=128, scale=30)


@pytest.fixture(scope="module")
def copy():
    return sharp_target(vocab_size=128, scale=30, noise=0.3)


def generate(target, prompt, num_tokens, eos=None, **settings):
    out = target.model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "states", "support", "ragged"])
def test_greedy_rows_equal_plain_decoding_and_generate(target, copy, batch_size, kind):
    drafter = CopyDrafter(
        copy,
        block_size=GAMMA,
        support=torch.arange(127, -1, -2) if kind == "support" else None,
        ragged=kind == "ragged",
        needs=Needs(layer_ids=(0, 2), last=True) if kind == "states" else None,
    )
    prompts = prompts_of([9, 3, 17, 1, 6])
    config = DecodeConfig(max_new_tokens=40, batch_size=batch_size, stop_ids=())
    drafted = decode(target, drafter, prompts, config)
    plain = decode(target, None, prompts, config)
    assert [g.prompt for g in drafted] == list(range(5))
    for prompt, with_drafter, without in zip(prompts, drafted, plain, strict=True):
        assert with_drafter.tokens == without.tokens == generate(target, prompt, 40)
        assert with_drafter.finish_reason == "length"
        assert len(with_drafter.tokens) == 1 + sum(r.gained for r in with_drafter.rounds)
    counts = {r.accepted for g in drafted for r in g.rounds}
    assert counts >= ({0, 1, 2} if kind == "support" else set(range(GAMMA + 1)))
    assert sum(len(g.rounds) for g in drafted) < sum(len(g.rounds) for g in plain)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_stop_tokens_cut_a_row_inside_its_drafts(target, copy, batch_size):
    prompts = prompts_of([9, 3, 17, 1, 6])
    free = decode(target, None, prompts, DecodeConfig(max_new_tokens=40, stop_ids=()))
    stops = (free[0].tokens[11], free[2].tokens[20], free[4].tokens[0])
    config = DecodeConfig(max_new_tokens=40, batch_size=batch_size, stop_ids=stops)
    drafted = decode(target, CopyDrafter(copy, block_size=GAMMA), prompts, config)
    for prompt, row in zip(prompts, drafted, strict=True):
        assert row.tokens == generate(target, prompt, 40, eos=list(stops))
        assert row.finish_reason == ("stop" if row.tokens[-1] in stops else "length")
        assert not any(token in stops for token in row.tokens[:-1])
    assert drafted[4].tokens == [stops[2]]
    assert drafted[4].rounds == []
    cut = [r for g in drafted for r in g.rounds if r.gained <= r.accepted]
    assert cut, "no stop token fell inside accepted drafts: choose other stops"
    assert not any(r.full for r in cut)


def test_rounds_near_the_limit_are_short_and_not_full(target):
    twin = CopyDrafter(target, block_size=GAMMA)
    (row,) = decode(target, twin, prompts_of([5]), DecodeConfig(max_new_tokens=9, stop_ids=()))
    # 1 token of prefill, 5 of a full round, then 3 are left: 2 drafts and the target's token.
    assert row.rounds == [Round(4, 4, 5, True, 6), Round(2, 2, 3, False, 11)]


def test_the_context_of_a_round_is_the_text_before_it(target, copy):
    prompts = prompts_of([5, 12])
    for tree in (None, TREE):
        config = DecodeConfig(max_new_tokens=30, tree=tree, batch_size=2, stop_ids=())
        for prompt, row in zip(
            prompts, decode(target, CopyDrafter(copy, block_size=GAMMA), prompts, config), strict=True
        ):
            before = itertools.accumulate((r.gained for r in row.rounds), initial=len(prompt) + 1)
            assert [r.context for r in row.rounds] == list(before)[:-1]


def test_the_slots_of_a_tree_hold_the_tokens_that_stood(target, copy):
    seen = []
    config = DecodeConfig(max_new_tokens=60, tree=TREE, batch_size=2, stop_ids=())
    prompts = prompts_of([5, 12])
    decode(target, CopyDrafter(copy, block_size=GAMMA), prompts, config, on_round=lambda *args: seen.append(args))
    assert {r.accepted for _, r, _, _ in seen} == {0, 1, 2, 3, 4}
    assert any(r.slots and r.slots != tuple(range(r.accepted)) for _, r, _, _ in seen)
    for _, r, tokens, drafts in seen:
        assert len(drafts) == r.proposed
        assert r.proposed == TREE.size or (r.proposed == 0 and not r.full)
        assert len(r.slots) == r.accepted
        assert [TREE.parents[slot] for slot in r.slots] == [-1, *r.slots][: r.accepted]
        assert [drafts[slot] for slot in r.slots][: r.gained] == tokens[: r.accepted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_accepts_all_of_its_own_drafts(target, temperature):
    config = DecodeConfig(max_new_tokens=41, sampling=Sampling(temperature=temperature), batch_size=3, stop_ids=())
    rows = decode(target, CopyDrafter(target, block_size=GAMMA), prompts_of([4, 9, 2]), config)
    assert all(r.accepted == r.proposed == GAMMA for g in rows for r in g.rounds)


def test_lengths_cycle_and_timings_add_up(target, copy):
    timings = RunTimings()
    seen = []
    config = DecodeConfig(max_new_tokens=30, length=(1, 0, 3), stop_ids=())
    (row,) = decode(
        target,
        CopyDrafter(copy, block_size=GAMMA),
        prompts_of([6]),
        config,
        on_round=lambda *args: seen.append(args),
        timings=timings,
    )
    assert row.tokens == generate(target, prompts_of([6])[0], 30)
    assert [cost.length for cost in timings.rounds][:-2] == list(itertools.islice(itertools.cycle((1, 0, 3)), 100))[
        : timings.steps - 2
    ]
    assert [r for _, r, _, _ in seen] == row.rounds
    assert [row.tokens[0], *(t for _, _, tokens, _ in seen for t in tokens)] == row.tokens
    for _, r, tokens, drafts in seen:
        assert len(drafts) == r.proposed
        assert drafts[: r.accepted] == tokens[: r.accepted]
    assert timings.steps == len(row.rounds)
    assert timings.prefill_s > 0
    assert timings.decode_s == pytest.approx(timings.draft_s + timings.verify_s + timings.overhead_s)
    assert min(timings.draft_s, timings.verify_s, timings.overhead_s) > 0


def test_the_baseline_neither_drafts_nor_asks_for_states(target):
    timings = RunTimings()
    decode(target, None, prompts_of([6]), DecodeConfig(max_new_tokens=8, stop_ids=()), timings=timings)
    assert [cost.length for cost in timings.rounds] == [0] * 7


def test_seeds_repeat(target, copy):
    config = DecodeConfig(max_new_tokens=20, sampling=Sampling(temperature=1.5), stop_ids=())
    drafter = CopyDrafter(copy, block_size=GAMMA)
    first = decode(target, drafter, prompts_of([6, 4]), config)
    assert first == decode(target, drafter, prompts_of([6, 4]), config)
    other = DecodeConfig(max_new_tokens=20, sampling=Sampling(temperature=1.5), stop_ids=(), seed=1)
    assert first != decode(target, drafter, prompts_of([6, 4]), other)


@pytest.mark.parametrize(
    ("config", "prompt", "error", "key"),
    [
        (DecodeConfig(max_new_tokens=0), 4, ConfigError, "max_new_tokens"),
        (DecodeConfig(batch_size=0), 4, ConfigError, "batch_size"),
        (DecodeConfig(length=GAMMA + 1), 4, ConfigError, "length"),
        (DecodeConfig(tree=Tree.of(range(-1, GAMMA))), 4, ConfigError, "tree: it has 5 levels"),
        (DecodeConfig(sampling=Sampling(temperature=-1)), 4, ConfigError, "sampling.temperature"),
        (DecodeConfig(max_new_tokens=8), 0, DataError, "prompt 0"),
        (DecodeConfig(max_new_tokens=500), 40, DataError, "positions"),
    ],
)
def test_bad_input_is_named(target, copy, config, prompt, error, key):
    with pytest.raises(error, match=key):
        decode(target, CopyDrafter(copy, block_size=GAMMA), prompts_of([prompt]), config)


def test_a_drafter_without_trees_is_named(target):
    ngram = NgramDrafter(NgramDrafter.Config(), target.spec)
    with pytest.raises(ConfigError, match="tree: NgramDrafter drafts no trees"):
        decode(target, ngram, prompts_of([4]), DecodeConfig(tree=TREE))


def drafted_by(copy, **settings):
    return CopyDrafter(copy, block_size=GAMMA, **settings)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_row_is_the_same_in_any_batch(target, copy, tree, temperature, batch_size):
    """Tokens, rounds and what the target's states were asked for; some rows stop early, most at the limit."""
    prompts = prompts_of(LENGTHS)
    sampling = Sampling(temperature=temperature)
    config = DecodeConfig(max_new_tokens=30, sampling=sampling, tree=tree, stop_ids=())
    free = decode(target, drafted_by(copy), prompts, config)
    config = replace(config, stop_ids=(free[1].tokens[6], free[5].tokens[14], free[6].tokens[0]))
    drafter = drafted_by(copy, ragged=True, needs=Needs(layer_ids=(1,), last=True))
    alone = decode(target, drafter, prompts, config)
    together = decode(target, drafter, prompts, replace(config, batch_size=batch_size))
    assert together == alone
    assert {row.finish_reason for row in alone} == {"stop", "length"}
    assert len({len(row.rounds) for row in alone}) > 4, "rows that end together test nothing"
    assert {r.accepted for row in alone for r in row.rounds} == set(range(GAMMA + 1))
    if temperature == 0:
        plain = decode(target, None, prompts, replace(config, batch_size=batch_size))
        assert [row.tokens for row in plain] == [row.tokens for row in alone]


def test_plain_sampling_is_the_same_in_any_batch(target):
    prompts = prompts_of(LENGTHS)
    config = DecodeConfig(max_new_tokens=20, sampling=Sampling(temperature=1.0, top_p=0.9), stop_ids=())
    assert decode(target, None, prompts, config) == decode(target, None, prompts, replace(config, batch_size=3))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_numbers_choose_the_random_stream_of_a_prompt(target, copy, batch_size):
    """Decoded in another order, or some of them only, prompts get the same tokens under the same numbers."""
    prompts, order = prompts_of(LENGTHS), [6, 2, 5, 0]
    config = DecodeConfig(max_new_tokens=15, sampling=Sampling(temperature=1.5), stop_ids=(), batch_size=batch_size)
    every = decode(target, drafted_by(copy), prompts, config)
    some = decode(target, drafted_by(copy), [prompts[i] for i in order], replace(config, numbers=tuple(order)))
    assert [row.prompt for row in some] == [0, 1, 2, 3]
    assert [(row.tokens, row.rounds) for row in some] == [(every[i].tokens, every[i].rounds) for i in order]
    twins = decode(target, drafted_by(copy), [prompts[0]] * 3, replace(config, numbers=(4, 5, 4)))
    assert twins[0].tokens == twins[2].tokens != twins[1].tokens


class Watched(CopyDrafter):
    """Keeps the last session; notes how many rows are decoded together."""

    def session(self, target, batch_size):
        return WatchedSession(self, self._copy, batch_size)


class WatchedSession(CopySession):
    """Checks that each row's tokens come with the target's states of that row's own text."""

    def __init__(self, drafter, copy, batch_size):
        super().__init__(drafter, copy, batch_size)
        self.texts = [[] for _ in range(batch_size)]

    def extend(self, tokens_BT, lengths_B, anchor_B, aux_BTLD, last_BTD):
        super().extend(tokens_BT, lengths_B, anchor_B, aux_BTLD, last_BTD)
        for b, (text, length) in enumerate(zip(self.texts, lengths_B.tolist(), strict=True)):
            text += tokens_BT[b, :length].tolist()
            states = self.drafter.target.states(torch.tensor([text]), needs=self.drafter.needs)
            for mine, truth in ((aux_BTLD, states.aux_BTLD), (last_BTD, states.last_BTD)):
                torch.testing.assert_close(mine[b, :length], truth[0, -length:], rtol=1e-3, atol=1e-4)

    def propose(self, length, draws):
        self.drafter.rows.append(len(self.texts))
        return super().propose(length, draws)

    def propose_tree(self, tree, draws):
        self.drafter.rows.append(len(self.texts))
        return super().propose_tree(tree, draws)

    def keep(self, rows):
        super().keep(rows)
        self.texts = [self.texts[row] for row in rows.tolist()]

    def join(self, other):
        super().join(other)
        self.texts += other.texts


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_states_stay_with_their_row(target, copy, tree):
    drafter = Watched(copy, block_size=GAMMA, needs=Needs(layer_ids=(0, 2), last=True))
    drafter.target, drafter.rows = target, []
    stops = tuple(range(0, 128, 9))
    config = DecodeConfig(
        max_new_tokens=25, sampling=Sampling(temperature=1.0), tree=tree, stop_ids=stops, batch_size=3
    )
    rows = decode(target, drafter, prompts_of(LENGTHS * 2), config)
    assert len({len(row.tokens) for row in rows}) > 5
    assert max(drafter.rows) == 3
    assert drafter.rows.count(3) > len(drafter.rows) / 2, "places stood empty while prompts waited"


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_rejected_slots_do_not_stay(target, copy, tree, monkeypatch):
    """With a drafter that is always wrong and rows that come and go, the target's cache holds little more than the
    longest row that is in work."""
    stray = sharp_target(vocab_size=128, scale=30, noise=50, noise_seed=2)
    slots, step = [], target.step

    def watched(tokens_BS, cache, **settings):
        slots.append((cache.num_slots, int(cache.lengths_B.max()), len(cache.lengths_B)))
        return step(tokens_BS, cache, **settings)

    monkeypatch.setattr(target, "step", watched)
    lengths = [150, 3, 8, 1, 40, 2, 90, 5, 5]
    config = DecodeConfig(max_new_tokens=60, tree=tree, batch_size=3, stop_ids=(11, 23, 64))
    rows = decode(target, CopyDrafter(stray, block_size=GAMMA), prompts_of(lengths), config)
    accepted = [r.accepted for row in rows for r in row.rounds]
    assert sum(accepted) < len(accepted)
    assert max(num_rows for _, _, num_rows in slots) == 3
    for num_slots, longest, _ in slots:
        assert num_slots <= longest * 4 / 3 + 1 + GAMMA, (num_slots, longest)
    assert slots[-1][0] < 120, "the row of 150 tokens has left, its slots have not"


PENALISED = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7),
    Sampling(repetition_penalty=1.3, top_k=5, top_p=0.5, min_p=0.1),
]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", PENALISED)
def test_penalised_greedy_tokens_are_those_of_transformers(target, copy, tree, sampling):
    """Top-k, top-p and min-p leave the most probable token what it is."""
    prompts = prompts_of([9, 3, 17, 1])
    truth = [generate(target, prompt, 24, repetition_penalty=sampling.repetition_penalty) for prompt in prompts]
    unpenalised = [generate(target, prompt, 24) for prompt in prompts]
    assert truth != unpenalised
    for batch_size in (1, 3):
        config = DecodeConfig(max_new_tokens=24, sampling=sampling, tree=tree, batch_size=batch_size, stop_ids=())
        drafted = decode(target, drafted_by(copy), prompts, config)
        assert [row.tokens for row in drafted] == truth
        assert {r.accepted for row in drafted for r in row.rounds} == set(range(GAMMA + 1))
        assert [row.tokens for row in decode(target, None, prompts, config)] == truth


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_law_of_one_token_is_greedy_whatever_cuts_it(target, copy, tree):
    """Top-k, top-p and min-p that leave one token make sampling at any temperature greedy, drafts included."""
    prompts = prompts_of([9, 3, 17, 1, 6])
    greedy = decode(target, drafted_by(copy), prompts, DecodeConfig(max_new_tokens=25, stop_ids=()))
    for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        sampling = Sampling(temperature=1.7, **cut)
        config = DecodeConfig(max_new_tokens=25, sampling=sampling, tree=tree, batch_size=2, stop_ids=())
        rows = decode(target, drafted_by(copy), prompts, config)
        assert [row.tokens for row in rows] == [row.tokens for row in greedy]
        if tree is None:
            assert [row.rounds for row in rows] == [row.rounds for row in greedy]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_rows_may_fill_the_last_position(tree):
    """Drafts and padding reach past it; the tokens that stand do not."""
    target = tiny_target(max_position_embeddings=40)
    prompts = prompts_of([28, 1, 11])
    config = DecodeConfig(max_new_tokens=12, tree=tree, batch_size=2, stop_ids=())
    rows = decode(target, drafted_by(target), prompts, config)
    assert [row.tokens for row in rows] == [generate(target, prompt, 12) for prompt in prompts]
    with pytest.raises(DataError, match="prompt 0: 28 tokens"):
        decode(target, None, prompts, replace(config, max_new_tokens=13))


def test_a_stale_cache_row_is_caught(target, copy, monkeypatch):
    """A rollback that leaves one rejected draft in the cache breaks greedy equality."""
    prompts = prompts_of([9, 3, 17])
    config = DecodeConfig(max_new_tokens=40, stop_ids=())
    honest = [row.tokens for row in decode(target, None, prompts, config)]
    new_cache = target.new_cache

    def sloppy_cache(batch_size):
        cache = new_cache(batch_size)
        rollback = cache.rollback
        cache.rollback = lambda lengths_B: rollback(torch.minimum(lengths_B + 1, cache.lengths_B))
        return cache

    monkeypatch.setattr(target, "new_cache", sloppy_cache)
    assert honest != [row.tokens for row in decode(target, CopyDrafter(copy, block_size=GAMMA), prompts, config)]
