# MTP modules whose block is the target's own class of layer, on tiny random targets of the families that ship such
# modules. No family is named in the code: masks, rotary embedding, experts and latent attention are the family's own.

import copy

import pytest
import torch
import transformers

from drafters.checkpoint import drafter_of_checkpoint, load_drafter, save_drafter
from drafters.decoding.loop import DecodeConfig, decode
from drafters.errors import ConfigError
from drafters.heads.mtp import MtpDrafter
from drafters.heads.mtp_block import TargetBlock, plain_config
from drafters.losses import LossWeights
from drafters.target import FrozenTarget
from drafters.types import Sampling
from tests.block_doubles import make_batch
from tests.contract_cases import World, texts_of
from tests.mtp_doubles import make_mtp
from tests.session_cases import CE_ALONE, check_session
from tests.test_families import FAMILIES, family_model, sharpened
from tests.test_lossless import generate
from tests.tiny import SIZES, tiny_llama

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# Class of the config and of the model, settings beside SIZES, and of the drafter.
TARGETS = {
    "deepseek_v3": (
        *("DeepseekV3Config", "DeepseekV3ForCausalLM"),
        {**MOE, **LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        {},
    ),
    "glm4_moe": (
        *("Glm4MoeConfig", "Glm4MoeForCausalLM"),
        {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8, "use_qk_norm": True},
        {},
    ),
    "qwen3_next": (
        *("Qwen3NextConfig", "Qwen3NextForCausalLM"),
        {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        | {"shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 4},
        {"feedback": "after_norm"},
    ),
    "mimo": ("Qwen2Config", "Qwen2ForCausalLM", {}, {"order": "hidden_first", "share_depths": True}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 6}, {}),
}


def target_of(name):
    config_name, model_name, settings, _ = TARGETS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **settings})
    return FrozenTarget.from_model(sharpened(getattr(transformers, model_name)(config).eval().float()), mask_token_id=3)


@pytest.fixture(scope="module", params=TARGETS)
def family(request):
    """A target and its name."""
    return request.param, target_of(request.param)


def made(family, **settings):
    name, target = family
    return make_mtp(target, block="target", **TARGETS[name][3], **settings)


def world_of(target):
    prompts = [torch.randint(4, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 3, 6, 12)]
    return World(target, texts_of(target, prompts, sampling=Sampling(), num_tokens=24), draft_vocab=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_of_the_family_s_layer_learns(family, dtype):
    drafter, target = made(family).train(), family[1]
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        losses = drafter.loss(make_batch(target, [20, 9, 14]), target.head)
    losses.total.backward()
    own = {name for name, _ in target.decoder.layers[-1].named_parameters()}
    assert {name.removeprefix("depths.0.block.") for name, _ in drafter.named_parameters()} >= own
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_sessions_compute_what_training_computes(family):
    drafter = made(family, loss=LossWeights(**CE_ALONE), num_anchors=1, spread=0.1)
    check_session(drafter, world_of(family[1]))


def test_greedy_text_is_the_target_s_own(family):
    target = family[1]
    prompts = [torch.randint(4, 128, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 1, 6, 4)]
    config = DecodeConfig(max_new_tokens=14, batch_size=3, stop_ids=())
    rows = decode(target, made(family), prompts, config)
    assert [row.tokens for row in rows] == [generate(target, prompt, 14) for prompt in prompts]


def test_what_is_saved_is_loaded_to_the_bit(family, tmp_path):
    drafter, target = made(family), family[1]
    save_drafter(drafter, tmp_path / "drafter", spec=target.spec)
    loaded = load_drafter(tmp_path / "drafter", spec=target.spec)
    assert loaded.config == drafter.config
    mine, others = drafter.state_dict(), loaded.state_dict()
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[key], others[key]) for key in mine)
    assert not any("embed" in key or "lm_head" in key for key in mine)


def test_it_starts_as_the_target_s_layer(family):
    name, target = family
    world = world_of(target)
    drafter = MtpDrafter.create(MtpDrafter.Config(block="target", **TARGETS[name][3]), target.spec, world.start)
    layer = target.decoder.layers[-1].state_dict()
    for depth in drafter.modules_in_order:
        assert all(torch.equal(value, layer[key]) for key, value in depth.block.state_dict().items())
        state_BD = torch.randn(2, target.spec.hidden_size)
        normed_BD = depth.final_layernorm(state_BD, dtype=torch.float32)
        torch.testing.assert_close(normed_BD, target.final_norm(state_BD), rtol=1e-3, atol=1e-4)


def test_a_copy_trains_on_its_own(family):
    """Weight averaging copies drafters."""
    drafter = made(family)
    twin, batch = copy.deepcopy(drafter), make_batch(family[1], [20, 9])
    before = drafter.loss(batch, family[1].head).total
    torch.testing.assert_close(twin.loss(batch, family[1].head).total, before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(twin.loss(batch, family[1].head).total, before)
    assert torch.equal(drafter.loss(batch, family[1].head).total, before)


def test_the_last_layer_with_full_attention_is_taken():
    config = transformers.Qwen3NextConfig(**{**SIZES, **LINEAR, "num_experts": 4, "head_dim": 8}).to_dict()
    config["layer_types"] = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    assert TargetBlock(config).index == 2
    config["layer_types"] = ["linear_attention"] * 4
    with pytest.raises(
        ConfigError, match=r"drafter\.block: 'target' needs a layer with full attention; accepted: qwen3"
    ):
        TargetBlock(config)


def test_a_target_without_a_list_of_layers_is_refused():
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2).to_dict()
    with pytest.raises(ConfigError, match=r"drafter\.block: 'target' is not possible for GPT2Model"):
        TargetBlock(config)


@pytest.mark.parametrize("name", [*FAMILIES, *TARGETS])
def test_the_block_is_the_target_s_layer(name):
    """On what enters that layer it gives what leaves it, over whole rows and step by step. Some families, as Granite,
    scale what enters their decoder."""
    target = target_of(name) if name in TARGETS else FrozenTarget.from_model(family_model(name), mask_token_id=3)
    kind = TargetBlock(plain_config(target))
    block = kind.new()
    block.load_state_dict(target.decoder.layers[kind.index].state_dict())
    tokens_BT = torch.randint(3, 128, (2, 15), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), target.capture([kind.index - 1, kind.index]) as seen:
        target.model(tokens_BT, use_cache=False)
        x_BTD, expected_BTD = (seen[index] for index in (kind.index - 1, kind.index))
        got_BTD = kind.over(kind.prepare(block, torch.float32, training=True), x_BTD)
        torch.testing.assert_close(got_BTD, expected_BTD, rtol=1e-4, atol=1e-4)
        ready, cache = kind.prepare(block, torch.float32, training=False), kind.new_cache(2, target.device)
        at_B, rows_B1 = torch.zeros(2, dtype=torch.int64), torch.arange(2)[:, None]
        for counts in ([4, 7], [1, 3], [5, 1], [5, 4]):
            positions_BS = at_B[:, None] + torch.arange(max(counts))
            x_BSD = x_BTD[rows_B1, positions_BS.clamp(max=14)]
            got_BSD = kind.step(ready, x_BSD, cache, positions_BS, torch.tensor(counts))
            for b, (at, count) in enumerate(zip(at_B.tolist(), counts, strict=True)):
                torch.testing.assert_close(got_BSD[b, :count], expected_BTD[b, at : at + count], rtol=1e-4, atol=1e-4)
            at_B = at_B + torch.tensor(counts)


def test_dropout_of_the_target_is_off():
    model = tiny_llama(attention_dropout=0.5)
    target = FrozenTarget.from_model(model, mask_token_id=3)
    drafter, batch = make_mtp(target, block="target").train(), make_batch(target, [20, 9])
    assert torch.equal(drafter.loss(batch, target.head).total, drafter.loss(batch, target.head).total)


def test_sessions_keep_what_the_family_keeps_in_float32():
    """The biases of a router choose experts: rounded ones choose others."""
    kind = TargetBlock(plain_config(target_of("deepseek_v3")))
    block = kind.new()
    block.mlp.gate.e_score_correction_bias.uniform_()
    ready, _ = kind.prepare(block, torch.bfloat16, training=False)
    assert ready.mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(ready.mlp.gate.e_score_correction_bias, block.mlp.gate.e_score_correction_bias)
    assert {p.dtype for p in ready.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        x_BSD, cache = torch.randn(1, 3, SIZES["hidden_size"]), kind.new_cache(1, torch.device("cpu"))
        kind.step((ready, torch.bfloat16), x_BSD, cache, torch.arange(3)[None], torch.tensor([3]))


def test_a_run_goes_on_with_the_target_s_block(tmp_path):
    """A checkpoint is read with the settings of the run, in which the target's config is not filled in."""
    target = target_of("mimo")
    start, config = world_of(target).start, MtpDrafter.Config(block="target", block_size=2)
    drafter = MtpDrafter.create(config, target.spec, start)
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {f"drafter.{name}": value for name, value in drafter.state_dict().items()}}, path)
    found = drafter_of_checkpoint(path, MtpDrafter, MtpDrafter.complete(config, start.target), target.spec)
    assert found.config == drafter.config
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_a_family_that_transformers_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"drafter\.block: 'target' is not possible for 'theirs'"):
        TargetBlock({"model_type": "theirs"})
