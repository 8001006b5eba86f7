# Speculative decoding changes nothing but the speed. Above temperature 0: chi-square tests of whole texts against the
# target's law, for chains, trees and batches that prompts enter and leave, under every setting of sampling; alpha 1e-3.
# The target is sharpened and the drafter a perturbed copy, so that every accepted count occurs. Planted bugs fail the
# same tests. At temperature 0 in float32: the tokens of transformers, for tiny models of eleven families.

from functools import cache

import pytest
import torch

from drafters.decoding import batch, verify, verify_tree
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import draw, probs
from drafters.decoding.tree import Tree, chain_tree, static_tree
from drafters.decoding.verify import Verdict, verify_chain
from drafters.decoding.verify_tree import TreeVerdict
from drafters.heads.ngram import NgramDrafter
from drafters.kv_cache import TargetCache
from drafters.target import FrozenTarget
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter
from tests.laws import (
    ALPHA,
    GAMMA,
    PointDrafter,
    chi_square_p,
    law_of,
    power_against,
    sample_texts,
    small_pair,
)
from tests.test_families import family_model, prompts

NUM = 3000
PLAIN = Sampling(temperature=1.0)
TOP_K = Sampling(temperature=1.0, top_k=3)
TOP_P = Sampling(temperature=1.5, top_p=0.9)
MIN_P = Sampling(temperature=1.5, min_p=0.1)
PENALTY = Sampling(temperature=1.2, repetition_penalty=2.0)
ALL = Sampling(temperature=1.5, top_k=4, top_p=0.95, min_p=0.05, repetition_penalty=1.2)

WIDE, DEEP, BUSHY = static_tree([4]), chain_tree(3), static_tree([3, 2, 1])
UNEVEN = Tree.of((-1, -1, 0, 1, 1, 2, 2, -1, 4))

small = cache(small_pair)
law = cache(lambda noisy, sampling: law_of(small()[noisy], sampling))


def drafter_of(kind):
    copy = small()[1]
    match kind:
        case "none":
            return None
        case "points":
            return PointDrafter(copy, block_size=GAMMA)
        case "ngram":
            return NgramDrafter(NgramDrafter.Config(block_size=GAMMA), copy.spec)
    support = torch.tensor([4, 0, 2]) if kind == "support" else None
    return CopyDrafter(copy, block_size=GAMMA, support=support, ragged=kind == "ragged")


def p_value(kind, tree, sampling, *, batch_size=2000):
    """Of NUM texts, and the accepted counts."""
    counts, accepted = sample_texts(
        small()[0], drafter_of(kind), sampling=sampling, num=NUM, batch_size=batch_size, tree=tree
    )
    return chi_square_p(counts, law(False, sampling)), accepted


def assert_lossless(kind, tree, sampling, **where):
    p, accepted = p_value(kind, tree, sampling, **where)
    assert p > ALPHA, f"the texts do not follow the target: p = {p:.2g}"
    deepest = 0 if kind == "none" else GAMMA if tree is None else tree.max_depth
    assert accepted == set(range(deepest + 1))


@pytest.mark.parametrize("sampling", [PLAIN, TOP_K, TOP_P, MIN_P, PENALTY, ALL])
def test_the_laws_are_laws_and_the_test_has_power(sampling):
    """A quarter of the texts from the drafter would be found."""
    true, drafts = law(False, sampling), law(True, sampling)
    torch.testing.assert_close(true.sum(1), torch.ones(2).double(), rtol=0, atol=1e-5)
    assert power_against(true, 0.75 * true + 0.25 * drafts, NUM) > 0.99


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("none", ALL),
        ("dense", PLAIN),
        ("dense", TOP_P),
        ("support", PLAIN),
        ("support", ALL),
        ("ragged", PLAIN),
        ("points", TOP_K),
        ("ngram", PLAIN),
        ("dense", MIN_P),
        ("dense", PENALTY),
        ("ngram", PENALTY),
    ],
)
def test_chains_are_lossless(kind, sampling):
    assert_lossless(kind, None, sampling)


@pytest.mark.parametrize(
    ("kind", "tree", "sampling"),
    [
        ("dense", WIDE, PLAIN),
        ("dense", DEEP, PLAIN),
        ("dense", BUSHY, PLAIN),
        ("dense", UNEVEN, TOP_P),
        ("dense", WIDE, Sampling(temperature=1.0, top_k=2)),  # more children than the draft's law has tokens
        ("support", BUSHY, PLAIN),  # all three that it can draft
        ("support", UNEVEN, ALL),
        ("ragged", UNEVEN, PLAIN),
        ("points", BUSHY, TOP_K),
        ("dense", UNEVEN, MIN_P),
        ("dense", BUSHY, PENALTY),
    ],
)
def test_trees_are_lossless(kind, tree, sampling):
    assert_lossless(kind, tree, sampling)


@pytest.mark.parametrize(("kind", "tree"), [("ragged", None), ("dense", UNEVEN)])
def test_batches_that_prompts_enter_and_leave_are_lossless(kind, tree):
    assert_lossless(kind, tree, PENALTY, batch_size=250)


# Planted bugs. Each takes `monkeypatch` and the target; the same test must fail for chains and for trees.


def first_draft_unverified(patch, target):
    def chain(proposal, logits_BSV, sampling, uniforms):
        verdict = verify_chain(proposal, logits_BSV, sampling, uniforms)
        lied_B = (verdict.accepted_B == 0) & (proposal.lengths_B > 0)
        bonus_B = draw(probs(logits_BSV[:, min(1, logits_BSV.shape[1] - 1)], sampling), uniforms.last_B)
        return Verdict(verdict.accepted_B + lied_B, torch.where(lied_B, bonus_B, verdict.next_B))

    def tree(proposal, logits_BSV, sampling, uniforms):
        verdict = verify_tree.verify_tree(proposal, logits_BSV, sampling, uniforms)
        lied_B = verdict.path_BD[:, 0] != 0
        bonus_B = draw(probs(logits_BSV[:, 1], sampling), uniforms.last_B)
        path_BD = torch.where(lied_B[:, None], torch.tensor([0, -1, -1]), verdict.path_BD)
        return TreeVerdict((path_BD >= 0).sum(1), torch.where(lied_B, bonus_B, verdict.next_B), path_BD)

    patch.setattr(batch, "verify_chain", chain)
    patch.setattr(batch, "verify_tree", tree)


def residual_not_normalised(patch, target):
    """max(p - q, 0) read as if it summed to one: at the end the missing mass falls on the last token, and a tree's next
    child is measured against too little."""

    def chain(p_NV, proposal, rows_N, slots_N):
        rest_NV = (p_NV - proposal.probs_BSV[rows_N, slots_N]).clamp(min=0)
        rest_NV[:, -1] += 1 - rest_NV.sum(-1)
        return rest_NV

    patch.setattr(verify, "_residual", chain)
    patch.setattr(verify_tree, "_residual", lambda p_NV, q_NV: (p_NV - q_NV).clamp(min=0))


def residual_is_the_target(patch, target):
    patch.setattr(verify, "_residual", lambda p_NV, proposal, rows_N, slots_N: p_NV)
    patch.setattr(verify_tree, "_residual", lambda p_NV, q_NV: p_NV)


def stale_slot(patch, target):
    """What undoes a pass leaves one rejected slot a row."""

    def leave_one(kept_BS):
        rejected_BS = ~kept_BS
        return kept_BS | (rejected_BS & (rejected_BS.cumsum(1) == 1))

    class Sloppy(TargetCache):
        def rollback(self, lengths_B):
            super().rollback(torch.minimum(lengths_B + 1, self.lengths_B))

        def keep_path(self, kept_BS):
            super().keep_path(leave_one(kept_BS))

    use_cache(patch, target, Sloppy)


def join_off_by_one(patch, target):
    """Rows that join stand one slot too far left."""

    class Misaligned(TargetCache):
        def join(self, other):
            mine = len(self.lengths_B)
            super().join(other)
            for layer in self.hf.layers:
                for states in (layer.keys, layer.values):
                    states[mine:] = states[mine:].roll(-1, 2)

    use_cache(patch, target, Misaligned)


def keep_forgets_lengths(patch, target):
    class Forgetful(TargetCache):
        def keep(self, rows):
            lengths_B = self.lengths_B
            super().keep(rows)
            self.lengths_B = lengths_B[: len(rows)]

    use_cache(patch, target, Forgetful)


def use_cache(patch, target, kind):
    """Let the target alone, not the drafter, decode with this cache."""

    def new_cache(batch_size):
        return kind(batch_size=batch_size, sliding=False, device=target.device)

    patch.setattr(target, "new_cache", new_cache)


def penalty_forgets_drafts(patch, target):
    def before(seen_BV, proposal):
        return seen_BV[:, None].expand(-1, 1 + proposal.tokens_BS.shape[1], -1)

    patch.setattr(batch, "seen_after", before)


def siblings_drawn_as_if_first(patch, target):
    law = verify_tree._draft_law
    patch.setattr(
        verify_tree, "_draft_law", lambda proposal, rows_N, slot, earlier, size: law(proposal, rows_N, slot, [], size)
    )


BUGS = [
    (first_draft_unverified, PLAIN),
    (residual_not_normalised, PLAIN),
    (residual_is_the_target, PLAIN),
    (stale_slot, PLAIN),
    (join_off_by_one, PLAIN),
    (keep_forgets_lengths, PLAIN),
    (penalty_forgets_drafts, PENALTY),
]


@pytest.mark.parametrize(("bug", "sampling"), BUGS)
@pytest.mark.parametrize("tree", [None, BUSHY], ids=["chain", "tree"])
def test_planted_bugs_are_found(bug, tree, sampling, monkeypatch):
    bug(monkeypatch, small()[0])
    p, _ = p_value("dense", tree, sampling)
    assert p < ALPHA, f"{bug.__name__} went unnoticed: p = {p:.2g}"


def test_siblings_drawn_as_if_first_are_found(monkeypatch):
    siblings_drawn_as_if_first(monkeypatch, small()[0])
    assert p_value("dense", BUSHY, PLAIN)[0] < ALPHA


# Temperature 0: exact in float32.

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "olmo2", "glm4", "granite"]
TREE = Tree.of((-1, -1, 0, 0, 1, 2, 5))


def perturbed(model):
    """Wrong about some tokens, as drafters are."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    return FrozenTarget.from_model(model, mask_token_id=3)


def generate(target, prompt, num_tokens, **settings):
    out = target.model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=num_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, **settings,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name):
    target = FrozenTarget.from_model(family_model(name), mask_token_id=3)
    drafter = CopyDrafter(perturbed(family_model(name)), block_size=4)
    rows = prompts(13, 1, 7, 4, 9)
    truth = [generate(target, row, 16) for row in rows]
    for tree in (None, TREE):
        for batch_size in (1, 3):
            config = DecodeConfig(max_new_tokens=16, tree=tree, batch_size=batch_size, stop_ids=())
            drafted = decode(target, drafter, rows, config)
            assert [row.tokens for row in drafted] == truth, (tree, batch_size)
            accepted = [r.accepted for row in drafted for r in row.rounds if r.full]
            assert min(accepted) == 0
            assert max(accepted) > 2
