# EAGLE-3: the unrolled training against a dense twin, causality by perturbation, the loss, the start, and sessions,
# which must compute what training computed at the same place.

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from drafters.decoding.sampling import Draws, probs
from drafters.decoding.tree import chain_tree, static_tree
from drafters.errors import DataError
from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.aux_states import aux_of
from drafters.heads.eagle3 import Eagle3Drafter
from drafters.losses import LossWeights
from drafters.types import Sampling
from drafters.vocab import DraftVocab
from tests.block_doubles import LAYER_IDS, batch_of, make_batch
from tests.test_block_session import GREEDY, Reader, draws
from tests.tiny import tiny_target

STEPS = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_eagle(target, *, seed=0, reduced=True, **settings):
    """A random drafter whose every part acts."""
    torch.manual_seed(seed)
    num_full = target.spec.vocab_size
    vocab = DraftVocab(torch.arange(0, num_full, 2), num_full=num_full) if reduced else None
    defaults = dict(layer_ids=LAYER_IDS, block_size=STEPS, num_anchors=8, loss=LossWeights(ce=0.2, chunk=16))
    config = Eagle3Drafter.Config(**{**defaults, **settings}, draft_vocab_size=vocab.size if vocab else None)
    drafter = Eagle3Drafter(config, target.spec, vocab=vocab)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    return drafter


def states_of(drafter, target, batch):
    """Anchors behind a first position, and their states [A, G, D]."""
    anchors = sample_anchors(batch, num_anchors=drafter.config.num_anchors, block_size=drafter.block_size)
    assert bool((anchors.positions_A > 0).all())
    return anchors, drafter.states(batch, anchors, target.head, torch.float32)


def naive_states(drafter, target, tokens_T, aux_TLD):
    """States [T, G, D] of every row and step of one conversation: a dense mask over all of them, torch's own attention.
    Rows that a step has no token for get token 0."""
    spec, layer, length = drafter.spec, drafter.midlayer, len(tokens_T)

    def norm(x, module):
        return F.rms_norm(x, (x.shape[-1],), module.weight, spec.rms_norm_eps)

    def heads(x_TC, positions_T=None):
        x_NTH = x_TC.unflatten(-1, (-1, spec.head_dim)).transpose(0, 1)
        if positions_T is None:
            return x_NTH
        angles = positions_T[:, None] * torch.tensor(spec.rope_inv_freq)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x_NTH.chunk(2, -1)
        return x_NTH * cos + torch.cat([-second, first], -1) * sin

    rows_T = torch.arange(length)
    state_TD = drafter.fc(torch.cat(list(aux_TLD.unbind(1)), -1))
    keys, values, outputs = [], [], []
    for step in range(drafter.block_size):
        read_T = torch.tensor([int(tokens_T[t]) if t < length else 0 for t in range(1 + step, 1 + step + length)])
        normed_TD = norm(state_TD, layer.hidden_norm)
        x = torch.cat([norm(target.embed(read_T).float(), layer.input_layernorm), normed_TD], -1)
        attn = layer.self_attn
        keys.append(heads(attn.k_proj(x), rows_T + step))
        values.append(heads(attn.v_proj(x)))
        mask = torch.cat([rows_T[:, None] >= rows_T, *[torch.eye(length, dtype=torch.bool)] * step], 1)
        groups = spec.num_heads // spec.num_kv_heads
        k, v = (torch.cat(part, 1).repeat_interleave(groups, 0) for part in (keys, values))
        out = F.scaled_dot_product_attention(heads(attn.q_proj(x), rows_T + step), k, v, attn_mask=mask)
        residual = normed_TD if drafter.config.norm_before_residual else state_TD
        state_TD = residual + attn.o_proj(out.transpose(0, 1).flatten(1))
        y = norm(state_TD, layer.post_attention_layernorm)
        state_TD = state_TD + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        outputs.append(norm(state_TD, drafter.norm))
    return torch.stack(outputs, 1)


def naive_rows(drafter, target, batch):
    """`naive_states` of each conversation of a batch, without its padding."""
    return [
        naive_states(drafter, target, batch.tokens_BT[row, :length], batch.aux_BTLD[row, :length])
        for row, length in enumerate(batch.lengths_B.tolist())
    ]


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_unrolled_steps_equal_the_dense_twin(target, norm_before_residual):
    drafter = make_eagle(target, norm_before_residual=norm_before_residual)
    batch = make_batch(target, [20, 9, 14], prompt=1)
    anchors, states_AGD = states_of(drafter, target, batch)
    rows = naive_rows(drafter, target, batch)
    naive = torch.stack([rows[row][p - 1] for row, p in zip(anchors.rows_A, anchors.positions_A, strict=True)])
    known_AG = anchors.positions_A[:, None] + torch.arange(STEPS) < batch.lengths_B[anchors.rows_A][:, None]
    assert 0.7 < known_AG.float().mean() < 1.0
    torch.testing.assert_close(states_AGD[known_AG], naive[known_AG], rtol=1e-4, atol=1e-4)
    probe = torch.randn(states_AGD.shape, generator=torch.Generator().manual_seed(0)) * known_AG[..., None]
    parameters = {n: p for n, p in drafter.named_parameters() if not n.startswith("lm_head")}
    got = torch.autograd.grad((states_AGD * probe).sum(), list(parameters.values()))
    want = torch.autograd.grad((naive * probe).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, got, want, strict=True):
        scale = float(other.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * scale, msg=name)


def test_states_before_the_anchor_act_on_every_step_and_no_others(target):
    """Change one conversation position at a time."""
    drafter, batch = make_eagle(target, num_anchors=100), make_batch(target, [12, 8], prompt=1)
    anchors, before = states_of(drafter, target, batch)
    for row, length in enumerate(batch.lengths_B.tolist()):
        for position in range(length):
            aux_BTLD = batch.aux_BTLD.clone()
            aux_BTLD[row, position] += 1.0
            _, after = states_of(drafter, target, replace(batch, aux_BTLD=aux_BTLD))
            changed_AG = (after - before).abs().amax(2) > 1e-6
            sees_A = (anchors.rows_A == row) & (position < anchors.positions_A)
            assert torch.equal(changed_AG, sees_A[:, None].expand_as(changed_AG)), f"row {row}, position {position}"


def test_step_s_depends_on_tokens_up_to_its_own_input_only(target):
    """With the target's states as they are: token q is read by row q - 1, or by the step that it is the input of."""
    drafter, batch = make_eagle(target, num_anchors=100), make_batch(target, [13], prompt=1)
    anchors, before = states_of(drafter, target, batch)
    inputs_AG = anchors.positions_A[:, None] + torch.arange(STEPS)
    known_AG = inputs_AG < 13
    for position in range(13):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[0, position] = (tokens_BT[0, position] + 7) % target.spec.vocab_size
        _, after = states_of(drafter, target, replace(batch, tokens_BT=tokens_BT))
        changed_AG = (after - before).abs().amax(2) > 1e-6
        sees_AG = (position <= inputs_AG) & (position > 0)
        assert torch.equal(changed_AG & known_AG, sees_AG & known_AG), f"position {position}"


def test_anchors_do_not_see_one_another(target):
    batch = make_batch(target, [16, 11], prompt=1)
    anchors, every = states_of(make_eagle(target, num_anchors=100), target, batch)
    chosen, alone = states_of(make_eagle(target, num_anchors=3), target, batch)
    assert len(chosen.rows_A) == 6
    for row, position, states in zip(chosen.rows_A, chosen.positions_A, alone, strict=True):
        match = (anchors.rows_A == row) & (anchors.positions_A == position)
        torch.testing.assert_close(states, every[match][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduced", [True, False])
def test_loss_equals_the_naive_twin(target, reduced):
    weights = LossWeights(ce=0.2, l1=0.9, kl=0.4, gamma=3.0, chunk=7)
    drafter = make_eagle(target, reduced=reduced, loss=weights, num_anchors=100).eval()
    batch = make_batch(target, [15, 10], prompt=2)
    losses = drafter.loss(batch, target.head)
    ids = torch.arange(target.spec.vocab_size) if drafter.vocab is None else drafter.vocab.ids_V
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, states_TGD in enumerate(naive_rows(drafter, target, batch)):
        length = int(batch.lengths_B[row])
        for p in range(2, length - 1):
            for k in range(1, min(STEPS, length - 1 - p) + 1):
                p_t = target.head.logits(batch.last_BTD[row, p + k - 1]).double().softmax(-1)
                log_p = drafter.lm_head(states_TGD[p - 1, k - 1]).double().log_softmax(-1)
                p_d = torch.zeros_like(p_t).index_add(0, ids, log_p.exp())
                q = p_t[ids] / p_t[ids].sum()
                label = (ids == batch.tokens_BT[row, p + k]).nonzero()
                ce = -log_p[label[0, 0]] if len(label) else 0.0
                kl, l1 = (q * (q.log() - log_p)).sum(), (p_t - p_d).abs().sum()
                total = total + torch.exp(torch.tensor(-(k - 1) / 3.0)) * (0.2 * ce + 0.9 * l1 + 0.4 * kl)
                count += 1
    torch.testing.assert_close(losses.total.double(), total, rtol=1e-5, atol=1e-4)
    assert losses.count == count
    parameters = dict(drafter.named_parameters())
    got = torch.autograd.grad(losses.total, list(parameters.values()))
    want = torch.autograd.grad(total, list(parameters.values()))
    for name, one, other in zip(parameters, got, want, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=1e-3 * scale, msg=name)


def test_padding_and_company_change_nothing(target):
    drafter, lengths = make_eagle(target, num_anchors=100), [15, 10]
    both = make_batch(target, lengths)
    parts = []
    for row, length in enumerate(lengths):
        tokens, mask = both.tokens_BT[row : row + 1, :length], both.loss_mask_BT[row : row + 1, :length]
        parts.append(batch_of(target, tokens, torch.tensor([length]), mask, seed=0))
    wide = [F.pad(part, (0, 6)) for part in (both.tokens_BT, both.loss_mask_BT)]
    padded = batch_of(target, wide[0], both.lengths_B, wide[1], seed=0)
    together = drafter.loss(both, target.head)
    torch.testing.assert_close(together.total, sum(drafter.loss(part, target.head).total for part in parts))
    torch.testing.assert_close(together.total, drafter.loss(padded, target.head).total)


def test_anchors_at_the_first_position_are_left_out(target):
    drafter, batch = make_eagle(target, num_anchors=100), make_batch(target, [6], prompt=0)
    later = batch.loss_mask_BT.clone()
    later[0, 0] = False
    assert drafter.loss(batch, target.head).total == drafter.loss(replace(batch, loss_mask_BT=later), target.head).total
    losses = drafter.loss(make_batch(target, [2], prompt=0), target.head)
    losses.total.backward()
    assert losses.total == 0
    assert losses.count == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_bfloat16_products_train_float32_parameters(target):
    drafter, batch = make_eagle(target), make_batch(target, [15, 10])
    exact = drafter.loss(batch, target.head)
    exact_grads = torch.autograd.grad(exact.total, list(drafter.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        rough = drafter.loss(batch, target.head)
    rough.total.backward()
    torch.testing.assert_close(rough.total, exact.total, rtol=0.02, atol=0.0)
    for (name, parameter), want in zip(drafter.named_parameters(), exact_grads, strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert (parameter.grad - want).norm() < 0.1 * want.norm(), name


def test_it_starts_as_the_targets_last_layer(target):
    """The last fused state is the last layer's input, so step 0 gives the target's own last state, and its logits."""
    drafter, batch = make_eagle(target), make_batch(target, [12, 9], prompt=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter.init_from_target(target.model.state_dict(), target.head)
    anchors, states_AGD = states_of(drafter, target, batch)
    want_AD = batch.last_BTD[anchors.rows_A, anchors.positions_A - 1]
    torch.testing.assert_close(states_AGD[:, 0], want_AD, rtol=1e-4, atol=1e-4)
    logits = target.head.logits(want_AD, support_V=drafter.vocab.ids_V)
    torch.testing.assert_close(drafter.lm_head(states_AGD[:, 0]), logits, rtol=1e-4, atol=1e-4)


def test_head_norms_of_the_target_go_into_the_projections(target):
    drafter, tensors = make_eagle(target), dict(target.model.state_dict())
    prefix, gains_H = f"model.layers.{target.spec.num_layers - 1}.", torch.linspace(1.0, 3.0, target.spec.head_dim)
    for name in ("q_norm", "k_norm"):
        tensors[f"{prefix}self_attn.{name}.weight"] = gains_H
    drafter.init_from_target(tensors, target.head)
    generator = torch.Generator().manual_seed(0)
    normed_MD = torch.randn(4000, target.spec.hidden_size, generator=generator) * drafter.midlayer.hidden_norm.weight
    for projection in (drafter.midlayer.self_attn.q_proj, drafter.midlayer.self_attn.k_proj):
        assert not projection.weight[:, : target.spec.hidden_size].any()
        heads = projection(torch.cat([torch.ones_like(normed_MD), normed_MD], 1)).unflatten(1, (-1, len(gains_H)))
        over_gain = (heads / gains_H).square().mean().sqrt()
        torch.testing.assert_close(float(over_gain.detach()), 1.0, rtol=0.05, atol=0.0)


def test_a_foreign_layer_is_refused_with_a_warning(target):
    drafter, tensors = make_eagle(target), dict(target.model.state_dict())
    before = drafter.midlayer.self_attn.q_proj.weight.clone()
    tensors[f"model.layers.{target.spec.num_layers - 1}.self_attn.q_proj.bias"] = torch.zeros(1)
    with pytest.warns(UserWarning, match=r"drafter.init: 'target' is not possible.*q_proj.bias"):
        drafter.init_from_target(tensors, target.head)
    assert torch.equal(drafter.midlayer.self_attn.q_proj.weight, before)
    assert torch.equal(drafter.lm_head.weight, target.head.rows(drafter.vocab.ids_V))


@pytest.mark.parametrize("setting", [{"block_size": 0}, {"init": "zero"}, {"layer_ids": ()}, {"draft_vocab_size": 0}])
def test_wrong_settings_are_named(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Eagle3Drafter.Config(**{"layer_ids": (0,), **setting})


def test_layers_are_picked_from_a_batch_by_their_ids(target):
    batch = make_batch(target, [7])
    assert aux_of(batch, LAYER_IDS) is batch.aux_BTLD
    assert torch.equal(aux_of(batch, LAYER_IDS[1:]), batch.aux_BTLD[:, :, 1:])
    with pytest.raises(DataError, match=r"layers \[1\]"):
        aux_of(batch, (0, 1))


def trained_logits(drafter, target, batch, place, tokens):
    """Logits [G, V'] of training after the anchor at `place` (row, position), with these input tokens."""
    row, position = place
    tokens_AG = torch.tensor([tokens + [0] * (STEPS - len(tokens))])
    nothing = torch.zeros_like(tokens_AG)
    anchors = Anchors(
        rows_A=torch.tensor([row]),
        positions_A=torch.tensor([position]),
        tokens_AG=tokens_AG,
        labels_AG=nothing,
        counted_AG=nothing.bool(),
        states_AG=nothing,
    )
    return drafter.lm_head(drafter.states(batch, anchors, target.head, torch.float32)[0, : len(tokens)]).detach()


def places(reader):
    """(row, position) of each session row's anchor, and the anchor."""
    for row, at in zip(reader.rows, reader.at, strict=True):
        yield (row, at), int(reader.batch.tokens_BT[row, at])


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_session_equals_training_after_ragged_reading(target, reduced, norm_before_residual):
    drafter = make_eagle(target, reduced=reduced, norm_before_residual=norm_before_residual)
    batch = make_batch(target, [60, 48, 55], prompt=1)
    reader = Reader(drafter, target, batch)
    sampling = Sampling(temperature=1.0)
    steps = [[4, 9, 1], [1, 5, 3], [5, 1, 1], [2, 2, 14], [3, 5, 4], "keep", [1, 4], [5, 1], [5, 5], [2, 4], [5, 3]]
    steps += ["join", [3, 1, 4], [2, 2, 2]]
    for number, step in enumerate(steps):
        if step == "keep":
            reader.keep([2, 0])
        elif step == "join":
            newcomer = Reader(drafter, target, batch)
            newcomer.read([17, 1, 1])
            newcomer.keep([0])
            reader.join(newcomer)
        else:
            reader.read(step)
        proposal = reader.session.propose(STEPS, draws(sampling, len(reader.rows), seed=number))
        for b, (place, anchor) in enumerate(places(reader)):
            drafted = proposal.tokens_BS[b].tolist()
            want = probs(trained_logits(drafter, target, batch, place, [anchor, *drafted[:-1]]), sampling)
            torch.testing.assert_close(proposal.probs_BSV[b], want, rtol=1e-3, atol=1e-4)
    assert reader.session.cache.num_slots < 1.5 * max(reader.at)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
def test_proposing_leaves_no_trace(target, sampling):
    """A shorter draft is a prefix of a longer one, whatever was proposed before; rows do not depend on one another."""
    drafter, batch = make_eagle(target), make_batch(target, [20, 30], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8, 13])
    whole = reader.session.propose(STEPS, draws(sampling, 2))
    part = reader.session.propose(2, draws(sampling, 2))
    again = reader.session.propose(STEPS + 3, draws(sampling, 2))
    assert torch.equal(part.tokens_BS, whole.tokens_BS[:, :2])
    assert torch.equal(again.tokens_BS, whole.tokens_BS)
    reader.keep([0])
    alone = reader.session.propose(STEPS, draws(sampling, 1))
    assert torch.equal(alone.tokens_BS, whole.tokens_BS[:1])
    torch.testing.assert_close(alone.likeliest_BS, whole.likeliest_BS[:1])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, top_p=0.95)], ids=["greedy", "sampled"])
def test_a_tree_of_one_branch_is_a_chain(target, sampling):
    drafter, batch = make_eagle(target), make_batch(target, [20, 30], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8, 13])
    chain = reader.session.propose(STEPS, draws(sampling, 2))
    drafted = reader.session.propose_tree(chain_tree(STEPS), draws(sampling, 2))
    assert torch.equal(drafted.tokens_BS, chain.tokens_BS)
    if sampling != GREEDY:
        torch.testing.assert_close(drafted.probs_BSV, chain.probs_BSV)


def test_slots_of_a_tree_are_the_best_after_their_own_path(target):
    drafter, batch = make_eagle(target), make_batch(target, [20, 30], prompt=1)
    reader = Reader(drafter, target, batch)
    reader.read([8, 13])
    tree = static_tree([3, 2, 2])
    drafted = reader.session.propose_tree(tree, Draws(GREEDY))
    for b, (place, anchor) in enumerate(places(reader)):
        tokens = drafted.tokens_BS[b].tolist()
        for parent in [-1, *range(9)]:
            path = [] if parent < 0 else [tokens[s] for s in range(9) if tree.ancestors_SS[parent, s]]
            children = tree.children(parent)
            logits_V = trained_logits(drafter, target, batch, place, [anchor, *path])[-1]
            best = drafter.vocab.ids_V[logits_V.topk(len(children)).indices]
            assert [tokens[child] for child in children] == best.tolist()
