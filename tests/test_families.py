# No family needs code: twelve tiny random ones, and a multimodal one, pass the self-check behind the same wrapper. Then
# what the check is for: models that lie to the wrapper are refused, and the message says where.

import math

import pytest
import torch
import transformers

from drafters.errors import ConfigError
from drafters.target import FrozenTarget
from drafters.types import Needs
from tests.tiny import SIZES, tiny_llama

WINDOW = 6
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"sliding_window": WINDOW}
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
# Class name of the config, class name of the model, settings beside SIZES.
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 16, **MOE}),
    "mistral": ("MistralConfig", "MistralForCausalLM", SLIDING),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "final_logit_softcapping": 3.0, **SLIDING}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 16, **SLIDING, **ALTERNATE}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"head_dim": 16, **MOE, **SLIDING, **ALTERNATE}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GRANITE),
}
WINDOWED = ["mistral", "gemma2", "gemma3", "gpt_oss"]


def family_model(name):
    config_name, model_name, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **settings})
    return sharpened(getattr(transformers, model_name)(config).eval().float())


def sharpened(model):
    """Larger weights in the layers, so that greedy tokens vary and a wrong state shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(8.0)
            elif "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator))
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, FrozenTarget.from_model(family_model(request.param), mask_token_id=3)


def prompts(*lengths):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 128, (length,), generator=generator) for length in lengths]


def test_captured_layers_and_head_are_the_models_own(family):
    name, target = family
    tokens_BT = torch.stack(prompts(11, 11))
    with torch.inference_mode():
        out = target.model(tokens_BT, output_hidden_states=True, use_cache=False)
    states = target.states(tokens_BT, needs=Needs(layer_ids=(0, 2), last=True))
    torch.testing.assert_close(states.aux_BTLD[:, :, 0], out.hidden_states[1])
    torch.testing.assert_close(states.aux_BTLD[:, :, 1], out.hidden_states[3])
    torch.testing.assert_close(states.last_BTD, out.hidden_states[-1])
    torch.testing.assert_close(target.head.logits(states.last_BTD), out.logits)
    torch.testing.assert_close(target.embed(tokens_BT), out.hidden_states[0])
    support_V = torch.tensor([5, 3, 100])
    torch.testing.assert_close(target.head.logits(states.last_BTD, support_V=support_V), out.logits[..., support_V])
    assert out.logits.std() > 0.05, f"{name}: too flat to tell"


def test_numbers_of_the_family(family):
    name, target = family
    spec, tied = target.spec, FAMILIES[name][2].get("tie_word_embeddings", name.startswith("gemma"))
    assert spec.tied_head == tied
    assert (target.head.lm_head_VD.data_ptr() == target.head.embedding_VD.data_ptr()) == tied
    expected_embed = {"gemma2": math.sqrt(32), "gemma3": math.sqrt(32), "granite": 12.0}.get(name, 1.0)
    assert spec.embed_scale == pytest.approx(expected_embed, rel=1e-7)
    assert spec.logit_scale == (1 / 8 if name == "granite" else 1.0)
    assert spec.logit_softcap == (3.0 if name == "gemma2" else None)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.num_kv_heads) == (4, 32, 128, 2)
    assert spec.head_dim == FAMILIES[name][2].get("head_dim", 8)
    assert len(spec.rope_inv_freq) == spec.head_dim // 2
    assert spec.eos_ids == (2,)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def greedy(target, prompt, num_tokens):
    out = target.model.generate(
        prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=num_tokens,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def speculate(target, rows, num_tokens):
    """Greedy tokens by verifying drafts of three, of which row b has b, b+1, ... mod 4 right ones in turn."""
    truth = [greedy(target, row, num_tokens) for row in rows]
    made = [[] for _ in rows]
    lengths_B = torch.tensor([len(row) for row in rows])
    cache = target.new_cache(len(rows))
    padded_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    out = target.step(padded_BT, cache, lengths_B=lengths_B, logits="last")
    for row, token in zip(made, out.logits_BSV[:, 0].argmax(-1).tolist(), strict=True):
        row.append(token)
    for turn in range(num_tokens):
        right = [(b + turn) % 4 for b in range(len(rows))]
        drafts = [[*truth[b][len(made[b]) :], 0, 0, 0][:3] for b in range(len(rows))]
        drafts = [[t if k < right[b] else (t + 1) % 128 for k, t in enumerate(d)] for b, d in enumerate(drafts)]
        tokens_BS = torch.tensor([[made[b][-1], *drafts[b]] for b in range(len(rows))])
        chosen_BS = target.step(tokens_BS, cache).logits_BSV.argmax(-1).tolist()
        for b, chosen in enumerate(chosen_BS):
            accepted = next((k for k in range(3) if drafts[b][k] != chosen[k]), 3)
            made[b] += chosen[: accepted + 1]
            lengths_B[b] += accepted + 1
        cache.rollback(lengths_B)
        if min(map(len, made)) >= num_tokens:
            break
    return [row[:num_tokens] for row in made], truth


def test_ragged_decoding_with_rollback_gives_the_tokens_of_generate(family):
    name, target = family
    made, truth = speculate(target, prompts(13, 1, 7), num_tokens=20)
    assert made == truth
    assert len({token for row in truth for token in row}) > 8, f"{name}: the same token again proves nothing"


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_count_positions_not_slots(name, monkeypatch):
    """The twin of the test above: without compaction, holes push tokens out of the window, and it must fail."""
    target = FrozenTarget.from_model(family_model(name), mask_token_id=3)
    monkeypatch.setattr(target, "_sliding", False)
    made, truth = speculate(target, prompts(13, 1, 7), num_tokens=20)
    assert made != truth


def test_a_window_longer_than_the_sequence_changes_nothing():
    base = sharpened(tiny_llama())
    config = transformers.MistralConfig(**{**SIZES, "sliding_window": 64})
    windowed = transformers.MistralForCausalLM(config).eval()
    windowed.load_state_dict(base.state_dict())
    rows = prompts(9, 4)
    assert speculate(FrozenTarget.from_model(windowed), rows, 8) == speculate(FrozenTarget.from_model(base), rows, 8)


def test_a_multimodal_model_serves_its_text_part():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**SIZES, "head_dim": 16, **SLIDING, **ALTERNATE},
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        image_token_index=127,
    )
    torch.manual_seed(0)
    target = FrozenTarget.from_model(sharpened(transformers.Gemma3ForConditionalGeneration(config).eval().float()))
    assert target.spec.embed_scale == pytest.approx(math.sqrt(32))
    made, truth = speculate(target, [row % 120 for row in prompts(9, 2)], num_tokens=10)
    assert made == truth


def test_bfloat16_passes_with_the_scale_that_the_model_uses():
    target = FrozenTarget.from_model(family_model("gemma2").bfloat16())
    assert target.spec.dtype == "bfloat16"
    assert target.spec.embed_scale == float(torch.tensor(math.sqrt(32)).bfloat16())


def bend(model, bent):
    """Put `bent(output)` in place of what the model's whole forward returns."""
    straight = model.forward

    def forward(*args, **kwargs):
        out = straight(*args, **kwargs)
        out.logits = bent(out.logits)
        return out

    model.forward = forward
    return model


def test_a_constant_logit_scale_is_measured():
    target = FrozenTarget.from_model(bend(tiny_llama(), lambda logits: logits * 1.7))
    assert target.spec.logit_scale == pytest.approx(1.7)


@pytest.mark.parametrize(
    "bent", [lambda z: z.clamp(-0.1, 0.1), lambda z: z + torch.arange(128) / 50, lambda z: z * math.nan]
)
def test_logits_that_are_not_the_heads_are_refused(bent):
    with pytest.raises(ConfigError, match=r"self-check failed: head\(last\) and the model's own logits differ"):
        FrozenTarget.from_model(bend(tiny_llama(), bent))


def test_a_capture_that_is_off_by_one_is_refused(monkeypatch):
    hook = FrozenTarget._hook
    monkeypatch.setattr(FrozenTarget, "_hook", lambda self, index: hook(self, index + 1))
    with pytest.raises(ConfigError, match=r"self-check failed: captured layer 0 is not hidden_states\[1\]"):
        FrozenTarget.from_model(tiny_llama())


def test_a_last_layer_that_is_another_is_refused(monkeypatch):
    hook = FrozenTarget._hook
    monkeypatch.setattr(FrozenTarget, "_hook", lambda self, index: self._last_hook(index))
    monkeypatch.setattr(
        FrozenTarget, "_last_hook", lambda self, i: (lambda m, x, y: hook(self, i)(m, x, x[0] if i == 3 else y)),
        raising=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"the normed last layer and hidden_states\[-1\] differ"):
        FrozenTarget.from_model(tiny_llama())


def test_an_embedding_that_the_head_does_not_know_is_refused():
    model = tiny_llama()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output + 0.1)
    with pytest.raises(ConfigError, match=r"self-check failed: embed\(tokens\) and hidden_states\[0\] differ"):
        FrozenTarget.from_model(model)


def test_a_batch_that_leaks_between_rows_is_refused():
    model = tiny_llama()

    def leak(module, inputs, output):
        return output + 0.2 * output.mean(dim=(0, 1), keepdim=True)

    model.model.layers[1].register_forward_hook(leak)
    with pytest.raises(ConfigError, match="a row in a padded batch and the same row alone differ"):
        FrozenTarget.from_model(model)


def test_a_model_that_ignores_positions_is_refused():
    model = tiny_llama()
    straight = model.model.rotary_emb.forward

    def from_zero(x, position_ids):
        return straight(x, torch.arange(x.shape[1])[None].expand(x.shape[0], -1))

    model.model.rotary_emb.forward = from_zero
    with pytest.raises(ConfigError, match="ragged cached decoding after a rollback and one uncached pass differ"):
        FrozenTarget.from_model(sharpened(model))


def test_what_is_no_causal_lm_is_refused():
    with pytest.raises(ConfigError, match="is not a causal LM with decoder layers"):
        FrozenTarget.from_model(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)))
    model = tiny_llama()
    model.lm_head = torch.nn.Linear(32, 128)
    with pytest.raises(ConfigError, match="has a biased output head"):
        FrozenTarget.from_model(model)
    model = tiny_llama()
    model.config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(ConfigError, match="has linear_attention layers, whose state cannot be rolled back"):
        FrozenTarget.from_model(model)
    with pytest.raises(ConfigError, match=r"target.mask_token: id 128 is not in the vocabulary; accepted: 0..127"):
        FrozenTarget.from_model(tiny_llama(), mask_token_id=128)
