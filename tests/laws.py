# The law of short sampled texts, by enumeration, and a chi-square test of decoded texts against it. Vocabulary of 5,
# texts of 5 tokens after each of two prompts: 3,125 outcomes a prompt, of which those expected fewer than 5 times are
# pooled. Five tokens are one of prefill and a full round of three drafts with its bonus token, or more rounds.

import itertools
import math

import torch

from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import Draws, penalised, probs
from drafters.types import Needs, Sampling
from tests.copy_drafter import CopyDrafter, CopySession, sharp_target

SMALL_V, NUM_TOKENS, GAMMA = 5, 5, 3
ALPHA = 1e-3
# Of different lengths, so that rows of a batch have holes before them; the first invites look-ups.
PROMPTS = [torch.tensor(ids) for ids in ([3, 0, 0, 3, 0, 0], [3])]


def small_pair():
    """A sharpened target, and a perturbed copy of it."""
    return [small_target(noise=noise) for noise in (0.0, 0.8)]


def small_target(*, num_layers=2, noise=0.0):
    """One whose tokens depend on what stands where before them."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": num_layers}
    special = {"bos_token_id": None, "eos_token_id": None}
    target = sharp_target(vocab_size=SMALL_V, scale=24, noise=noise, **sizes, **special)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if "self_attn" in name:
                weight.mul_(36 if "q_proj" in name or "k_proj" in name else 6)
    return target


class PointDrafter(CopyDrafter):
    """Drafts the copy's most probable tokens whatever the temperature: points, without a distribution."""

    def session(self, target, batch_size):
        return PointSession(self, self._copy, batch_size)


class PointSession(CopySession):
    def propose(self, length, draws):
        return super().propose(length, Draws(Sampling()))

    def propose_tree(self, tree, draws):
        return super().propose_tree(tree, Draws(Sampling()))


def law_of(target, sampling):
    """[P, V ** NUM_TOKENS], float64: the probability of every text after each prompt."""
    texts = torch.tensor(list(itertools.product(range(SMALL_V), repeat=NUM_TOKENS)))
    laws = []
    for prompt in PROMPTS:
        rows = torch.cat([prompt.expand(len(texts), -1), texts], 1)
        last = target.states(rows, needs=Needs(last=True)).last_BTD[:, len(prompt) - 1 : -1]
        seen = torch.nn.functional.one_hot(rows, SMALL_V).cumsum(1)[:, len(prompt) - 1 : -1] > 0
        p = probs(penalised(target.head.logits(last), seen, sampling), sampling).double()
        laws.append(p.gather(2, texts[..., None]).squeeze(2).prod(1))
    return torch.stack(laws)


def sample_texts(target, drafter, *, num, **settings):
    """How often each text came after each prompt [P, V ** NUM_TOKENS], in `num` rows that take turns with the prompts,
    and which accepted counts occurred in full rounds."""
    config = DecodeConfig(max_new_tokens=NUM_TOKENS, seed=11, stop_ids=(), **settings)
    rows = decode(target, drafter, [PROMPTS[i % len(PROMPTS)] for i in range(num)], config)
    tokens = torch.tensor([row.tokens for row in rows])
    cells = (tokens * SMALL_V ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    counts = [torch.bincount(cells[i :: len(PROMPTS)], minlength=SMALL_V**NUM_TOKENS) for i in range(len(PROMPTS))]
    return torch.stack(counts), {r.accepted for row in rows for r in row.rounds if r.full}


def pooled(values, law, num):
    """Cells expected at least 5 times of `num`, and one cell for all others, with as many more as bring it to 5."""
    expected, order = (law * num).sort()
    pool = (expected < 5) | (expected.cumsum(0) - expected < 5)
    values = values.double()[order]
    return torch.cat([values[~pool], values[pool].sum()[None]])


def chi_square_p(counts, law):
    """p-value of counts [P, C] under laws [P, C]; 0 where something happened that cannot."""
    if counts[law == 0].sum() > 0:
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, expected in zip(counts, law, strict=True):
        num = int(observed.sum())
        seen, wanted = pooled(observed, expected, num), pooled(expected * num, expected, num)
        statistic, freedom = statistic + float(((seen - wanted) ** 2 / wanted).sum()), freedom + len(wanted) - 1
    assert freedom > 20, "too few outcomes to tell laws apart"
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def power_against(law, other, num):
    """Power of the test with `num` rows when `other` is true: normal approximation of the non-central chi-square."""
    if other[law == 0].sum() > 0:
        return 1.0
    num, freedom, shift = num // len(law), 0, 0.0
    for expected, true in zip(law, other, strict=True):
        wanted, actual = pooled(expected * num, expected, num), pooled(true * num, expected, num)
        freedom, shift = freedom + len(wanted) - 1, shift + float(((actual - wanted) ** 2 / wanted).sum())
    critical = freedom + 3.09 * math.sqrt(2 * freedom) + 3.09**2 * 2 / 3  # Cornish-Fisher, alpha = 1e-3
    z = (critical - freedom - shift) / math.sqrt(2 * (freedom + 2 * shift))
    return 0.5 * math.erfc(z / math.sqrt(2))
