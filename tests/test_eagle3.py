# EAGLE-3 against a naive twin that unrolls one anchor at a time, in value and gradient; its options and its start.

import pytest
import torch
import torch.nn.functional as F

from drafters.heads.anchors import sample_anchors, with_a_row
from drafters.heads.eagle3 import Eagle3Drafter
from drafters.vocab import DraftVocab
from tests.block_doubles import LAYER_IDS, make_batch
from tests.contract_cases import tiny_world
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_eagle3(target, *, reduced=True, **settings):
    torch.manual_seed(0)
    num_full = target.spec.vocab_size
    vocab = DraftVocab(torch.arange(0, num_full, 2), num_full=num_full) if reduced else None
    config = Eagle3Drafter.Config(
        **{"layer_ids": LAYER_IDS, "block_size": 4, **settings}, draft_vocab_size=vocab.size if vocab else None
    )
    drafter = Eagle3Drafter(config, target.spec, vocab=vocab)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.2)
    return drafter.eval()


def naive_steps(drafter, target, tokens_T, aux_TLD, anchor):
    """States [G, D] after the final norm: rows up to anchor - 1 read true states, then one row a step."""
    spec, layer, attn = drafter.spec, drafter.midlayer, drafter.midlayer.self_attn
    groups = spec.num_heads // spec.num_kv_heads

    def norm(x_D, module):
        return F.rms_norm(x_D, x_D.shape, module.weight, module.eps)

    def heads(x_C, position, rotated):
        x_NH = x_C.view(-1, spec.head_dim)
        if not rotated:
            return x_NH
        angles = position * torch.tensor(spec.rope_inv_freq)
        first, second = x_NH.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def entered(token, state_D):
        normed_D = norm(state_D, layer.hidden_norm)
        both = torch.cat([norm(target.embed(token).float(), layer.input_layernorm), normed_D])
        return both, normed_D if layer.norm_before_residual else state_D

    keys, values = [], []

    def read(both, position):
        keys.append(heads(attn.k_proj(both), position, True).repeat_interleave(groups, 0))
        values.append(heads(attn.v_proj(both), position, False).repeat_interleave(groups, 0))

    fused_TD = drafter.fc(aux_TLD.flatten(1))
    for row in range(anchor - 1):
        read(entered(tokens_T[row + 1], fused_TD[row])[0], row)
    state_D, outputs = fused_TD[anchor - 1], []
    for step in range(drafter.block_size):
        both, residual_D = entered(tokens_T[anchor + step], state_D)
        read(both, anchor - 1 + step)
        query_NH = heads(attn.q_proj(both), anchor - 1 + step, True)
        scores_NS = torch.stack([(query_NH * key).sum(-1) for key in keys], -1) * spec.head_dim**-0.5
        out_NH = sum(w[:, None] * value for w, value in zip(scores_NS.softmax(-1).unbind(-1), values, strict=True))
        state_D = residual_D + attn.o_proj(out_NH.flatten())
        y_D = norm(state_D, layer.post_attention_layernorm)
        state_D = state_D + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y_D)) * layer.mlp.up_proj(y_D))
        outputs.append(norm(state_D, drafter.norm))
    return torch.stack(outputs)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_unrolled_steps_equal_the_naive_twin(target, norm_before_residual):
    drafter = make_eagle3(target, norm_before_residual=norm_before_residual)
    batch = make_batch(target, [17, 8, 12])
    anchors = with_a_row(sample_anchors(batch, num_anchors=5, block_size=drafter.block_size))
    states_AGD = drafter.states(batch, anchors, target.head, torch.float32)
    naive = []
    for row, position in zip(anchors.rows_A.tolist(), anchors.positions_A.tolist(), strict=True):
        tokens_T = F.pad(batch.tokens_BT[row], (0, drafter.block_size))
        naive.append(naive_steps(drafter, target, tokens_T, batch.aux_BTLD[row], position))
    known = anchors.counted_AG
    got, want = states_AGD[known], torch.stack(naive)[known]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    probe = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    trained = {name: p for name, p in drafter.named_parameters() if name != "lm_head.weight"}
    pairs = (torch.autograd.grad((states * probe).sum(), list(trained.values())) for states in (got, want))
    for name, one, other in zip(trained, *pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()), msg=name)
        assert other.abs().max() > 0, name


@pytest.mark.parametrize("reduced", [True, False])
def test_it_has_an_output_projection_of_its_own(target, reduced):
    drafter, batch = make_eagle3(target, reduced=reduced), make_batch(target, [17])
    drafter.loss(batch, target.head).total.backward()
    assert drafter.lm_head.weight.shape == (64 if reduced else 128, target.spec.hidden_size)
    assert drafter.lm_head.weight.grad.abs().max() > 0


def test_it_starts_as_the_target_s_last_layer_over_the_last_fused_state():
    world = tiny_world()
    drafter = world.drafter("eagle3")
    tensors, hidden = world.target.model.state_dict(), world.target.spec.hidden_size
    layer, prefix = drafter.midlayer, "model.layers.5."
    assert torch.equal(drafter.fc.weight[:, -hidden:], torch.eye(hidden))
    assert not drafter.fc.weight[:, :-hidden].any()
    assert torch.equal(layer.mlp.up_proj.weight, tensors[prefix + "mlp.up_proj.weight"])
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer.self_attn.get_parameter(f"{name}.weight")
        assert not weight[:, :hidden].any()
        assert torch.equal(weight[:, hidden:], tensors[f"{prefix}self_attn.{name}.weight"])
    assert torch.equal(drafter.norm.weight, tensors["model.norm.weight"])
    assert torch.equal(drafter.lm_head.weight, world.target.head.rows(drafter.vocab.ids_V))


def test_a_random_start_is_random():
    drafter = tiny_world().drafter("eagle3", init="random")
    assert 0.01 < float(drafter.fc.weight.detach().std()) < 0.03


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_ids": ()}, "layer_ids: empty"),
        ({"layer_ids": (0,), "block_size": 0}, "block_size: got 0; accepted: 1 or more"),
        ({"layer_ids": (0,), "init": "zero"}, "init: got 'zero'; accepted: target, random"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Drafter.Config(**settings)
