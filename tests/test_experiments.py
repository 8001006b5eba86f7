# The recipes of published settings compose, have the published numbers, and build drafters of the published size on
# Qwen3's real sizes, without memory for weights. Each runs, shrunk, on a tiny target.

import re
from types import SimpleNamespace

import pytest
import torch

import train
from drafters.spec import TargetSpec
from drafters.training.fit import check_fits
from tests.door_world import ROOT, settings, train_overrides

FAMILIES = ("dspark", "dflash", "eagle3")
RECIPES = [(family, size) for family in FAMILIES for size in ("4b", "8b")]
VOCAB, LAYER_IDS = 151_936, (1, 9, 17, 25, 33)
# Hidden size, width of the MLP: config.json of Qwen/Qwen3-4B and Qwen/Qwen3-8B.
SIZES = {"4b": (2560, 9728), "8b": (4096, 12288)}
PAGE = (ROOT / "docs" / "clusters.md").read_text()
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def qwen3(size):
    """The numbers of a Qwen3 model."""
    hidden_size, intermediate_size = SIZES[size]
    return TargetSpec(
        hidden_size=hidden_size,
        num_layers=36,
        vocab_size=VOCAB,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=intermediate_size,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_inv_freq=tuple(1e6 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)),
        max_position=40_960,
        tied_head=size == "4b",
        logit_scale=1.0,
        logit_softcap=None,
        embed_scale=1.0,
        bos_id=None,
        eos_ids=(151_645, 151_643),
        mask_token_id=151_669,
        template_hash="",
        weights_hash="",
        dtype="bfloat16",
    )


def planned(family, size):
    return train.read_plan(settings("train", f"experiment={family}_qwen3_{size}"))


def num_weights(family, size):
    """Elements of a recipe's matrices."""
    drafter = check_fits(*planned(family, size).drafter, SimpleNamespace(spec=qwen3(size)))
    assert all(weight.is_meta for weight in drafter.parameters())
    return sum(weight.numel() for weight in drafter.parameters() if weight.ndim >= 2)


def published_weights(family, size):
    """The same, by hand from the papers' shapes; `eagle3` with its own output projection of 32,000 rows."""
    hidden, width = SIZES[size]
    inputs = 2 * hidden if family == "eagle3" else hidden
    attention = inputs * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * hidden
    layer = attention + 3 * hidden * width
    fused = len(LAYER_IDS) * hidden * hidden
    if family == "eagle3":
        return fused + layer + 32_000 * hidden
    markov = 2 * VOCAB * 256 + hidden + 256 if family == "dspark" else 0
    return fused + 5 * layer + markov


@pytest.mark.parametrize(("family", "size"), RECIPES)
def test_a_recipe_has_the_published_numbers(family, size):
    plan = planned(family, size)
    config = plan.drafter[1]
    assert plan.name == f"{family}-qwen3-{size}"
    assert (config.block_size, config.num_anchors, tuple(config.layer_ids)) == (7, 512, LAYER_IDS)
    assert plan.cache.layer_ids == LAYER_IDS
    assert (plan.optim.lr, plan.optim.weight_decay, plan.optim.schedule) == (6e-4, 0.0, "cosine")
    assert plan.optim.warmup_steps == int(0.04 * plan.optim.max_steps)
    assert (plan.data.max_length, plan.data.template_kwargs) == (4096, {"enable_thinking": False})
    trainer = settings("train", f"experiment={family}_qwen3_{size}").trainer
    assert plan.data.batch_size * trainer.accumulate_grad_batches == 512
    assert plan.optim.max_steps == round(10 * 1_300_000 / 512)
    weights = {"dspark": (0.1, 0.9, 0.0), "dflash": (1.0, 0.0, 0.0), "eagle3": (0.0, 0.0, 1.0)}[family]
    assert (config.loss.ce, config.loss.l1, config.loss.kl) == weights
    if family == "eagle3":
        assert torch.tensor(-1 / config.loss.gamma).exp().item() == pytest.approx(0.8, abs=1e-3)
    else:
        assert (config.num_layers, config.draft_vocab_size, config.window, config.loss.gamma) == (5, None, None, 4.0)


@pytest.mark.parametrize(("family", "size"), RECIPES)
def test_a_recipe_has_the_published_shapes(family, size):
    assert num_weights(family, size) == published_weights(family, size)


def test_sizes_are_those_of_the_model_pages():
    # Pages on the Hub round: naver-ai/DLoop-DFlash-Qwen3-4B says 0.5B; deepseek-ai/dspark_qwen3_4b_block7, which holds
    # the target's embedding and output projection as well, says 1B.
    assert f"{num_weights('dflash', '4b') / 1e9:.1f}" == "0.5"
    assert f"{(num_weights('dspark', '4b') + 2 * VOCAB * 2560) / 1e9:.0f}" == "1"


@pytest.mark.parametrize(("family", "size"), RECIPES)
def test_the_page_says_what_a_recipe_takes(family, size):
    numbers = r"([\d.]+) billion \| ([\d,]+) bytes \| (\d+) TB"
    (row,) = re.findall(rf"^\| `{family}_qwen3_{size}` \| {numbers}", PAGE, re.MULTILINE)
    weights, token, text = (float(one.replace(",", "")) for one in row)
    assert weights == round(num_weights(family, size) / 1e9, 2)
    assert token == (len(LAYER_IDS) + 1) * SIZES[size][0] * 2
    # The published size of Qwen3-4B's states gives the number of tokens.
    assert text == round(38 / SIZES["4b"][0] * SIZES[size][0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_runs_shrunk(world, one_thread, family):
    tiny = [one for one in train_overrides(world) if "sequential" not in one and "draft_vocab_size" not in one]
    tiny += [f"name={family}", "optim.max_steps=3", "data.batch_size=2", "trainer.accumulate_grad_batches=2"]
    tiny += ["data.max_length=64", "data.template_kwargs={}", "drafter.layer_ids=[0,2]"]
    tiny += ["drafter.draft_vocab_size=64"] if family == "eagle3" else []
    train.train(settings("train", f"experiment={family}_qwen3_4b", *tiny))
    assert (world / "outputs" / family / "report.json").is_file()
