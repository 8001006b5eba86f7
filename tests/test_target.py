# The target's numbers, its head and its cache. Decoding on many families is in test_families.py.

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from drafters.errors import CheckpointError, ConfigError
from drafters.kv_cache import GrowingLayer, TargetCache
from drafters.spec import TargetSpec, check_layer_ids
from drafters.target import FrozenTarget, TargetHead, mask_id
from drafters.target_probe import rope_numbers
from drafters.types import Needs
from tests.tiny import SIZES, tiny_llama, tiny_spec, tiny_target
from tests.tiny_chat import tiny_tokenizer

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64


def rotary_of(model, positions, **kwargs):
    x = torch.zeros(1, len(positions), 8)
    cos, sin = model.get_decoder().rotary_emb(x, torch.tensor(positions)[None], **kwargs)
    return cos[0], sin[0]


def assert_rotates_like(spec, model, **kwargs):
    positions = [0, 1, 5, 100, 400]
    angles = torch.tensor(positions)[:, None].float() * torch.tensor(spec.rope_inv_freq)
    angles = torch.cat([angles, angles], -1)
    cos, sin = rotary_of(model, positions, **kwargs)
    torch.testing.assert_close(angles.cos(), cos, atol=1e-4, rtol=0)
    torch.testing.assert_close(angles.sin(), sin, atol=1e-4, rtol=0)


# --- spec


def test_spec_survives_json():
    spec = replace(tiny_spec(), rope_scaling=dict(LLAMA3), eos_ids=(2, 7), logit_softcap=30.0)
    again = TargetSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.rope_inv_freq == spec.rope_inv_freq


@pytest.mark.parametrize("change", [{"new_field": 1}, {"num_layers": None}])
def test_spec_of_another_version_is_refused(change):
    values = {**tiny_spec().to_dict(), **change}
    values = {k: v for k, v in values.items() if v is not None or k != "num_layers"}
    with pytest.raises(CheckpointError, match=f"fields \\['{next(iter(change))}'\\] are unknown or missing"):
        TargetSpec.from_dict(values)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 4), r"target.layer_ids: layer 4 is out of range; the target has layers 0\.\.3"),
        ((-1, 2), "layer -1 is out of range"),
        ((2, 1), r"got \[2, 1\]; the ids must be distinct and ascending"),
        ((1, 1), "distinct and ascending"),
    ],
)
def test_wrong_layer_ids_are_named(ids, message):
    with pytest.raises(ConfigError, match=message):
        check_layer_ids(ids, tiny_spec())
    check_layer_ids((0, 3), tiny_spec())


def test_states_outside_the_target_are_refused_and_nothing_sticks():
    target = tiny_target()
    tokens_BT = torch.arange(5)[None]
    with pytest.raises(ConfigError, match="layer 9 is out of range"):
        target.states(tokens_BT, needs=Needs(layer_ids=(0, 9)))
    assert target.states(tokens_BT, needs=Needs()).aux_BTLD is None


def test_aux_states_come_in_the_order_asked_for():
    target = tiny_target()
    tokens_BT = torch.arange(5)[None]
    forth = target.states(tokens_BT, needs=Needs(layer_ids=(1, 3))).aux_BTLD
    back = target.states(tokens_BT, needs=Needs(layer_ids=(3, 1))).aux_BTLD
    assert torch.equal(forth, back.flip(2))
    assert not torch.equal(forth, back)


# --- rope, in both spellings of transformers


def llama(**settings):
    sizes = {**SIZES, "rope_parameters": None, **settings}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


SPELLINGS = {
    "default": {},
    "theta": {"rope_theta": 500.0},
    "flat": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "old llama3": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "new llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "old type": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_frequencies_rotate_like_the_target(spelling):
    model = llama(**{k: dict(v) if isinstance(v, dict) else v for k, v in SPELLINGS[spelling].items()})
    spec = FrozenTarget.from_model(model).spec
    assert_rotates_like(spec, model)
    assert spec.rope_theta == (10000.0 if spelling == "default" else 500.0)
    kinds = {"old llama3": "llama3", "new llama3": "llama3", "old type": "linear", "linear": "linear"}
    assert (spec.rope_scaling or {}).get("rope_type") == kinds.get(spelling)


def test_a_config_in_the_old_spelling_counts_as_one_in_the_new():
    """Configs of code outside transformers keep `rope_theta` and `rope_scaling` as they were written."""
    old = SimpleNamespace(rope_theta=500.0, rope_scaling=dict(LLAMA3), max_position_embeddings=512)
    new = SimpleNamespace(rope_parameters={**LLAMA3, "rope_theta": 500.0}, max_position_embeddings=512)
    assert rope_numbers(old, head_dim=16) == rope_numbers(new, head_dim=16)
    theta, inv_freq, scaling = rope_numbers(old, head_dim=16)
    assert (theta, scaling) == (500.0, LLAMA3)
    assert inv_freq[-1] < 500.0 ** (-14 / 16) / 7
    plain = SimpleNamespace(rope_theta=500.0, rope_scaling=None)
    assert rope_numbers(plain, head_dim=4) == (500.0, (1.0, 500.0**-0.5), None)


def test_of_nested_parameters_full_attention_counts():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        rope_parameters={"sliding_attention": sliding, "full_attention": full},
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    spec = FrozenTarget.from_model(model).spec
    assert spec.rope_theta == 1e6
    assert spec.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert_rotates_like(spec, model, layer_type="full_attention")


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},  # scales cos and sin too
        {"rope_type": "dynamic", "factor": 4.0},  # depends on the length
        {"rope_type": "default", "partial_rotary_factor": 0.5},  # half of the head does not turn
        {"rope_type": "unheard_of"},
    ],
)
def test_what_is_more_than_other_frequencies_is_not_taken_over(parameters):
    config = SimpleNamespace(rope_parameters={**parameters, "rope_theta": 100.0}, max_position_embeddings=512)
    assert rope_numbers(config, head_dim=4) == (100.0, (1.0, 0.1), None)


# --- head


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_tied_on_another_device(tied):
    head = tiny_target(tie_word_embeddings=tied).head
    for one in (head, head.to("cpu")):
        assert (one.embedding_VD.data_ptr() == one.lm_head_VD.data_ptr()) == tied
    assert not head.lm_head_VD.requires_grad


def test_head_logits_carry_gradient_to_hidden_states_only():
    spec = replace(tiny_spec(), logit_scale=0.5, logit_softcap=2.0, embed_scale=3.0)
    weight = torch.randn(128, 32)
    head = TargetHead(spec, embedding_VD=weight, lm_head_VD=weight)
    hidden = torch.randn(3, 32, requires_grad=True)
    naive = 2.0 * torch.tanh(0.5 * (hidden @ weight.T) / 2.0)
    torch.testing.assert_close(head.logits(hidden), naive)
    (expected,) = torch.autograd.grad(naive.sum(), hidden)
    (got,) = torch.autograd.grad(head.logits(hidden).sum(), hidden)
    torch.testing.assert_close(got, expected)
    assert torch.equal(head.embed(torch.tensor([7])), 3.0 * weight[[7]])


# --- mask token, hashes


def test_mask_token_by_name_id_or_default():
    tokenizer = tiny_tokenizer("chatml")
    size = len(tokenizer)
    named = tokenizer.convert_tokens_to_ids("<|channel|>")
    assert mask_id("<|channel|>", tokenizer, size) == named
    assert mask_id(5, tokenizer, size) == 5
    assert mask_id(None, tokenizer, size) == tokenizer.eos_token_id
    tokenizer.pad_token = "<unk>"
    assert mask_id(None, tokenizer, size) == tokenizer.unk_token_id


@pytest.mark.parametrize("bad", ["<|nowhere|>", 5000, -1, "<|channel|>"])
def test_a_mask_token_outside_the_vocabulary_is_refused(bad):
    # The last one is in the tokenizer, but has no row in the target's embedding.
    size = 4 if bad == "<|channel|>" else 400
    with pytest.raises(ConfigError, match=rf"target.mask_token: .*{re.escape(str(bad))}'? is not in the vocabulary"):
        mask_id(bad, tiny_tokenizer("chatml"), size)


def test_no_mask_token_at_all_is_refused():
    bare = SimpleNamespace(mask_token_id=None, pad_token_id=None, eos_token_id=None)
    with pytest.raises(ConfigError, match=r"target.mask_token: missing"):
        mask_id(None, bare, 128)


def test_hashes_tell_weights_and_templates_apart():
    one, other = tiny_target(seed=0).spec, tiny_target(seed=1).spec
    assert tiny_target(seed=0).spec == one
    assert one.weights_hash != other.weights_hash
    chat = tiny_target(vocab_size=512, tokenizer=tiny_tokenizer("chatml")).spec
    assert chat.template_hash != tiny_target(vocab_size=512, tokenizer=tiny_tokenizer("llama3")).spec.template_hash


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"target.dtype: got 'int3'; accepted: bfloat16, float16, float32"):
        FrozenTarget.load("nowhere/nothing", dtype="int3")


# --- cache


def naive_logits(target, tokens):
    with torch.inference_mode():
        return target.model(torch.tensor([tokens]), use_cache=False).logits[0]


def test_holes_compaction_and_keep_change_no_logits(monkeypatch):
    compactions = []
    compact = TargetCache.compact
    monkeypatch.setattr(TargetCache, "compact", lambda cache: compactions.append(cache.num_slots) or compact(cache))
    target = tiny_target()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in (4, 1, 3)]
    cache = target.new_cache(3)
    padded_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    out = target.step(padded_BT, cache, lengths_B=torch.tensor([4, 1, 3]), logits="last")
    for b, row in enumerate(rows):
        torch.testing.assert_close(out.logits_BSV[b, 0], naive_logits(target, row)[-1])
    assert not cache.dense
    lengths = [4, 1, 3]
    for turn in range(20):
        draft_BS = torch.randint(3, 128, (len(rows), 5), generator=generator)
        valid_B = torch.tensor([5, 4, 3, 2, 5])[turn % 3 : turn % 3 + len(rows)]
        step = target.step(draft_BS, cache, lengths_B=valid_B, needs=Needs(layer_ids=(1,), last=True))
        for b, row in enumerate(rows):
            now = row + draft_BS[b, : valid_B[b]].tolist()
            torch.testing.assert_close(step.logits_BSV[b, : valid_B[b]], naive_logits(target, now)[len(row) :])
        states = target.states(torch.tensor([rows[0] + draft_BS[0].tolist()]), needs=Needs(layer_ids=(1,), last=True))
        ends = len(rows[0]), len(rows[0]) + int(valid_B[0])
        torch.testing.assert_close(step.aux_BSLD[0, : valid_B[0]], states.aux_BTLD[0, slice(*ends)])
        torch.testing.assert_close(step.last_BSD[0, : valid_B[0]], states.last_BTD[0, slice(*ends)])
        accepted = [min(int(valid_B[b]), 1 + (3 * b + turn) % 5) for b in range(len(rows))]
        rows = [row + draft_BS[b, : accepted[b]].tolist() for b, row in enumerate(rows)]
        lengths = [n + a for n, a in zip(lengths, accepted, strict=True)]
        cache.rollback(torch.tensor(lengths))
        assert cache.lengths_B.tolist() == cache.valid_BS.sum(1).tolist() == lengths
        if turn == 15:
            cache.keep(torch.tensor([2, 0]))
            rows, lengths = [rows[2], rows[0]], [lengths[2], lengths[0]]
            assert cache.lengths_B.tolist() == lengths
    assert compactions
    cache.compact()
    assert cache.num_slots == max(lengths)
    last = target.step(torch.tensor([[9], [9]]), cache)
    for b, row in enumerate(rows):
        torch.testing.assert_close(last.logits_BSV[b, 0], naive_logits(target, [*row, 9])[-1])


def test_logits_asked_for():
    target = tiny_target()
    tokens_BS = torch.tensor([[3, 4, 5], [6, 7, 0]])
    lengths_B = torch.tensor([3, 2])
    every = target.step(tokens_BS, target.new_cache(2), lengths_B=lengths_B).logits_BSV
    last = target.step(tokens_BS, target.new_cache(2), lengths_B=lengths_B, logits="last").logits_BSV
    none = target.step(tokens_BS, target.new_cache(2), lengths_B=lengths_B, logits="none").logits_BSV
    torch.testing.assert_close(last, torch.stack([every[0, 2:], every[1, 1:2]]))
    assert none.shape == (2, 0, 128)


def test_rollback_to_nothing_starts_anew():
    target = tiny_target()
    cache = target.new_cache(2)
    target.step(torch.tensor([[3, 4, 5], [6, 7, 8]]), cache)
    cache.rollback(torch.tensor([0, 0]))
    assert cache.num_slots == 0
    again = target.step(torch.tensor([[9, 10], [11, 12]]), cache).logits_BSV
    torch.testing.assert_close(again[1], naive_logits(target, [11, 12]))


def test_rows_that_agree_need_no_mask():
    target = tiny_target()
    cache = target.new_cache(2)
    target.step(torch.tensor([[3, 4, 5], [6, 7, 8]]), cache)
    cache.rollback(torch.tensor([2, 2]))
    assert cache.append(None, 4) is None
    assert cache.num_slots == 6


def test_growing_layer_equals_concatenation_and_seldom_copies():
    layer, naive = GrowingLayer(), torch.zeros(2, 3, 0, 4)
    buffers = set()
    for step in range(60):
        new = torch.randn(2, 3, 1 + step % 3, 4)
        naive = torch.cat([naive, new], 2)
        keys, values = layer.update(new, -new)
        assert torch.equal(keys, naive)
        assert torch.equal(values, -naive)
        buffers.add(keys.data_ptr())
        if step % 7 == 6:
            naive = naive[:, :, :-2]
            layer.crop_to(naive.shape[2])
    assert len(buffers) <= 6
    order_BS = torch.tensor([[4, 2], [0, 1]])
    layer.take(order_BS)
    assert torch.equal(layer.keys, torch.stack([naive[0][:, [4, 2]], naive[1][:, [0, 1]]]))
    layer.select(torch.tensor([1]))
    assert torch.equal(layer.values, -naive[1:, :, :2])
    assert layer.get_seq_length() == 2


def test_the_target_is_frozen():
    target = tiny_target()
    assert not isinstance(target, torch.nn.Module)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    before = tiny_llama().state_dict()
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])
