# The decode loop on real (tiny) models: exact at temperature 0, and at temperature 1 a chi-square test of whole
# sequences against the target's law. The target is sharpened and the drafter a perturbed copy, so that every accepted
# count occurs. Planted bugs must fail the same test.

import itertools
import math

import pytest
import torch

from drafters.decoding import loop
from drafters.decoding.loop import DecodeConfig, RunTimings, decode
from drafters.decoding.sampling import draw, probs
from drafters.decoding.verify import Verdict, verify_chain
from drafters.errors import ConfigError, DataError
from drafters.types import Needs, Sampling
from tests.copy_drafter import CopyDrafter, sharp_target

GAMMA = 4


def prompts_of(lengths, vocab_size=128):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


@pytest.fixture(scope="module")
def target():
    return sharp_target(vocab_size=128, scale=30)


@pytest.fixture(scope="module")
def copy():
    return sharp_target(vocab_size=128, scale=30, noise=0.3)


def generate(target, prompt, num_tokens, eos=None):
    out = target.model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
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
    assert [tuple(r) for r in row.rounds] == [(4, 4, 5, True), (2, 2, 3, False)]


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
        on_round=lambda prompt, r, tokens: seen.append((prompt, r, tokens)),
        timings=timings,
    )
    assert row.tokens == generate(target, prompts_of([6])[0], 30)
    assert [cost.length for cost in timings.rounds][:-2] == list(itertools.islice(itertools.cycle((1, 0, 3)), 100))[
        : timings.steps - 2
    ]
    assert [r for _, r, _ in seen] == row.rounds
    assert [row.tokens[0], *(t for _, _, tokens in seen for t in tokens)] == row.tokens
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
        (DecodeConfig(sampling=Sampling(temperature=-1)), 4, ConfigError, "sampling.temperature"),
        (DecodeConfig(max_new_tokens=8), 0, DataError, "prompt 0"),
        (DecodeConfig(max_new_tokens=500), 40, DataError, "positions"),
    ],
)
def test_bad_input_is_named(target, copy, config, prompt, error, key):
    with pytest.raises(error, match=key):
        decode(target, CopyDrafter(copy, block_size=GAMMA), prompts_of([prompt]), config)


# Chi-square at temperature 1. Vocabulary 5, sequences of 5 tokens (one of prefill, then one round of gamma = 3 with its
# bonus token, or more rounds), so 3,125 outcomes; those expected fewer than 5 times are pooled. N = 20,000 sequences,
# alpha = 1e-3. Power: above 0.99 (asserted) when a tenth of the sequences comes from the drafter instead of the
# target, which is 5 % of total variation.
N, ALPHA, NUM_TOKENS, SMALL_V, SMALL_GAMMA = 20_000, 1e-3, 5, 5, 3
PROMPT = torch.tensor([1, 3, 0, 4])


@pytest.fixture(scope="module")
def small():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return [sharp_target(vocab_size=SMALL_V, scale=12, noise=noise, **sizes) for noise in (0.0, 0.8)]


def law_of(target):
    """Probability of every sequence of NUM_TOKENS tokens after PROMPT, by enumeration, in float64."""
    sequences = torch.tensor(list(itertools.product(range(SMALL_V), repeat=NUM_TOKENS)))
    rows = torch.cat([PROMPT.expand(len(sequences), -1), sequences], 1)
    last = target.states(rows, needs=Needs(last=True)).last_BTD[:, len(PROMPT) - 1 : -1]
    log_p = torch.log_softmax(target.head.logits(last).double(), -1)
    return log_p.gather(2, sequences[..., None]).squeeze(2).sum(1).exp()


def pooled(values, expected):
    """Cells expected at least 5 times, and one cell for all others."""
    big = expected >= 5
    return torch.cat([values[big], values[~big].sum()[None]])


def chi_square_p(counts, law):
    """(p-value, degrees of freedom) of observed counts under a law."""
    expected = law * counts.sum()
    observed, wanted = pooled(counts.double(), expected), pooled(expected, expected)
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2)), freedom


def power_against(law, other):
    """Power of the test when `other` is true: normal approximation of the non-central chi-square."""
    expected = law * N
    wanted, actual = pooled(expected, expected), pooled(other * N, expected)
    freedom, shift = len(wanted) - 1, float(((actual - wanted) ** 2 / wanted).sum())
    critical = freedom + 3.09 * math.sqrt(2 * freedom) + 3.09**2 * 2 / 3  # Cornish-Fisher, alpha = 1e-3
    z = (critical - freedom - shift) / math.sqrt(2 * (freedom + 2 * shift))
    return 0.5 * math.erfc(z / math.sqrt(2))


def sample_counts(small, *, ragged=False, support=None, drafted=True):
    """How often each sequence came out of N rows, and which accepted counts occurred."""
    target, copy = small
    drafter = CopyDrafter(copy, block_size=SMALL_GAMMA, ragged=ragged, support=support) if drafted else None
    config = DecodeConfig(
        max_new_tokens=NUM_TOKENS, sampling=Sampling(temperature=1.0), seed=11, stop_ids=(), batch_size=2000
    )
    rows = decode(target, drafter, [PROMPT] * N, config)
    tokens = torch.tensor([row.tokens for row in rows])
    cells = (tokens * SMALL_V ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    accepted = {r.accepted for row in rows for r in row.rounds if r.full}
    return torch.bincount(cells, minlength=SMALL_V**NUM_TOKENS), accepted


@pytest.mark.parametrize("kind", ["full", "support", "ragged", "none"])
def test_chi_square_of_sampled_sequences(small, kind):
    law, draft_law = law_of(small[0]), law_of(small[1])
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert power_against(law, 0.9 * law + 0.1 * draft_law) > 0.99
    support = torch.tensor([4, 0, 2]) if kind == "support" else None
    counts, accepted = sample_counts(small, ragged=kind == "ragged", support=support, drafted=kind != "none")
    assert accepted == (set(range(SMALL_GAMMA + 1)) if kind != "none" else {0})
    p_value, freedom = chi_square_p(counts, law)
    assert freedom > 30
    assert p_value > ALPHA, f"sampled sequences do not follow the target: p = {p_value:.2g}"


def first_draft_unverified(proposal, logits_BSV, sampling, generator):
    verdict = verify_chain(proposal, logits_BSV, sampling, generator)
    lied_B = (verdict.accepted_B == 0) & (proposal.lengths_B > 0)
    bonus_B = draw(probs(logits_BSV[:, min(1, logits_BSV.shape[1] - 1)], sampling), generator)
    return Verdict(verdict.accepted_B + lied_B, torch.where(lied_B, bonus_B, verdict.next_B))


def residual_not_normalised(proposal, logits_BSV, sampling, generator):
    """max(p - q, 0) read as if it summed to one: the missing mass falls on the last token."""
    p_BSV = probs(logits_BSV, sampling)
    verdict = verify_chain(proposal, logits_BSV, sampling, generator)
    next_B = verdict.next_B.clone()
    for b in (verdict.accepted_B < proposal.lengths_B).nonzero()[:, 0].tolist():
        k = verdict.accepted_B[b]
        rest_V = (p_BSV[b, k] - proposal.probs_BSV[b, k]).clamp(min=0)
        u = torch.rand((), generator=generator)
        next_B[b] = torch.searchsorted(rest_V.cumsum(0), u).clamp(max=SMALL_V - 1)
    return Verdict(verdict.accepted_B, next_B)


def residual_is_the_target(proposal, logits_BSV, sampling, generator):
    """Draws from p instead of max(p - q, 0) after a rejection."""
    verdict = verify_chain(proposal, logits_BSV, sampling, generator)
    p_BV = probs(logits_BSV, sampling)[torch.arange(len(verdict.accepted_B)), verdict.accepted_B]
    return Verdict(verdict.accepted_B, draw(p_BV, generator))


@pytest.mark.parametrize("bug", [first_draft_unverified, residual_not_normalised, residual_is_the_target])
def test_chi_square_catches_planted_bugs(small, bug, monkeypatch):
    monkeypatch.setattr(loop, "verify_chain", bug)
    counts, _ = sample_counts(small)
    p_value, _ = chi_square_p(counts, law_of(small[0]))
    assert p_value < ALPHA, f"{bug.__name__} went unnoticed: p = {p_value:.2g}"


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
