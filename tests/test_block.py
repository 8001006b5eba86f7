# The block drafter: its backbone against a naive twin, causality by perturbation, anchors and labels by hand, the loss.

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from drafters.config import build_config, typed
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.block import BlockDrafter
from drafters.heads.block_init import bigram_factors
from drafters.heads.masks import BlockLayout, block_attention, flex_block_attention
from drafters.losses import LossWeights
from drafters.types import Batch
from drafters.vocab import DraftVocab
from tests.block_doubles import LAYER_IDS, MARKOV, batch_of, make_batch, make_drafter, naive_states
from tests.tiny import tiny_llama, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def states_of(drafter: BlockDrafter, target, batch: Batch) -> tuple[Anchors, Tensor]:
    anchors = sample_anchors(batch, num_anchors=drafter.config.num_anchors, block_size=drafter.block_size)
    return anchors, drafter.states(batch, anchors, target.head, torch.float32)


WINDOWS = [1, 5, 100, None]


@pytest.mark.parametrize("window", WINDOWS)
def test_backbone_equals_the_naive_twin(target, window):
    drafter, batch = make_drafter(target, window=window), make_batch(target, [20, 9, 14])
    anchors, states_AGD = states_of(drafter, target, batch)
    naive = [
        naive_states(drafter, target, batch.aux_BTLD[row, : batch.lengths_B[row]], int(batch.tokens_BT[row, p]), int(p))
        for row, p in zip(anchors.rows_A, anchors.positions_A, strict=True)
    ]
    torch.testing.assert_close(states_AGD, torch.stack(naive), rtol=1e-4, atol=1e-4)
    probe = torch.randn(states_AGD.shape, generator=torch.Generator().manual_seed(0))
    parameters = [p for n, p in drafter.named_parameters() if not n.startswith(("markov", "confidence"))]
    got = torch.autograd.grad((states_AGD * probe).sum(), parameters)
    want = torch.autograd.grad((torch.stack(naive) * probe).sum(), parameters)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
        assert other.abs().max() > 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_block_depends_on_the_context_before_its_anchor_only(target, window):
    """Change one conversation position at a time: a block changes if and only if it may see that position."""
    drafter, batch = make_drafter(target, window=window, num_anchors=100), make_batch(target, [12, 8])
    anchors, before = states_of(drafter, target, batch)
    for row, length in enumerate(batch.lengths_B.tolist()):
        for position in range(length):
            aux_BTLD = batch.aux_BTLD.clone()
            aux_BTLD[row, position] += 1.0
            _, after = states_of(drafter, target, replace(batch, aux_BTLD=aux_BTLD))
            changed_A = (after - before).abs().amax((1, 2)) > 1e-6
            sees_A = (anchors.rows_A == row) & (position < anchors.positions_A)
            if window is not None:
                sees_A &= position >= anchors.positions_A - window
            assert torch.equal(changed_A, sees_A), f"row {row}, position {position}"


@pytest.mark.parametrize("window", [5, None])
def test_no_token_after_the_anchor_changes_a_block(target, window):
    """New tokens from some position on, with the target's states of the new text: blocks anchored before stay."""
    drafter, batch = make_drafter(target, window=window, num_anchors=100), make_batch(target, [14])
    anchors, before = states_of(drafter, target, batch)
    for start in range(1, 14):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[:, start:] = (tokens_BT[:, start:] + 7) % target.spec.vocab_size
        other = batch_of(target, tokens_BT, batch.lengths_B, batch.loss_mask_BT, seed=batch.seed)
        _, after = states_of(drafter, target, other)
        changed_A = (after - before).abs().amax((1, 2)) > 1e-6
        assert torch.equal(changed_A, anchors.positions_A >= start)


@pytest.mark.parametrize("window", [5, None])
def test_blocks_do_not_see_one_another(target, window):
    """A block's states are the same whichever other anchors are drawn."""
    drafter, batch = make_drafter(target, window=window, num_anchors=100), make_batch(target, [16, 11])
    anchors, every = states_of(drafter, target, batch)
    few = make_drafter(target, window=window, num_anchors=3)
    chosen, alone = states_of(few, target, batch)
    assert len(chosen.rows_A) == 6
    for row, position, states in zip(chosen.rows_A, chosen.positions_A, alone, strict=True):
        match = (anchors.rows_A == row) & (anchors.positions_A == position)
        torch.testing.assert_close(states, every[match][0], rtol=1e-5, atol=1e-5)


def test_logits_at_k_depend_on_block_tokens_before_k_only(target):
    """The loss of slot k moves with x_{k-1} through the Markov head, and never with x_k or later inputs."""
    drafter = make_drafter(target)
    anchors, hidden_AGD = states_of(drafter, target, make_batch(target, [14]))
    head = drafter.markov_head

    def logits(tokens_AG: Tensor) -> Tensor:
        return head.step(None, head.markov_w1(tokens_AG), hidden_AGD)[1] @ head.markov_w2.weight.T

    before = logits(anchors.tokens_AG)
    for k in range(drafter.block_size):
        tokens_AG = anchors.tokens_AG.clone()
        tokens_AG[:, k] = (tokens_AG[:, k] + 5) % target.spec.vocab_size
        changed_G = (logits(tokens_AG) - before).abs().amax((0, 2)) > 0
        # tokens_AG[:, k] is x_k, the input of slot k + 1 (slots count from 1).
        assert changed_G.tolist() == [slot == k for slot in range(drafter.block_size)]


def by_hand() -> Batch:
    """Two turns and padding: supervised are tokens 2-4 and 7-8 of the first row, 1-2 of the second."""
    mask_BT = torch.zeros(2, 9, dtype=torch.bool)
    mask_BT[0, [2, 3, 4, 7, 8]] = True
    mask_BT[1, [1, 2]] = True
    return Batch(
        tokens_BT=torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21, 22, 0, 0, 0, 0, 0, 0]]),
        lengths_B=torch.tensor([9, 3]),
        loss_mask_BT=mask_BT,
        aux_BTLD=None,
        last_BTD=torch.zeros(2, 9, 1),
        lse_BT=torch.zeros(2, 9),
        layer_ids=(),
        seed=3,
    )


def test_anchors_and_labels_by_hand():
    anchors = sample_anchors(by_hand(), num_anchors=10, block_size=3)
    found = dict(zip(zip(anchors.rows_A.tolist(), anchors.positions_A.tolist(), strict=True), range(10), strict=False))
    assert set(found) == {(0, 2), (0, 3), (0, 7), (1, 1)}
    rows = {
        (0, 2): ([12, 13, 14], [13, 14, 15], [True, True, False], [2, 3, 4]),
        (0, 3): ([13, 14, 15], [14, 15, 16], [True, False, False], [3, 4, 5]),
        (0, 7): ([17, 18, 18], [18, 18, 18], [True, False, False], [7, 7, 7]),
        (1, 1): ([21, 22, 0], [22, 0, 0], [True, False, False], [10, 11, 12]),
    }
    for key, (tokens, labels, counted, states) in rows.items():
        a = found[key]
        assert anchors.counted_AG[a].tolist() == counted
        valid = anchors.counted_AG[a]
        assert anchors.tokens_AG[a][valid].tolist() == torch.tensor(tokens)[valid].tolist()
        assert anchors.labels_AG[a][valid].tolist() == torch.tensor(labels)[valid].tolist()
        assert anchors.states_AG[a][valid].tolist() == torch.tensor(states)[valid].tolist()


def test_every_valid_anchor_can_be_drawn_and_none_twice():
    seen = set()
    for seed in range(60):
        anchors = sample_anchors(replace(by_hand(), seed=seed), num_anchors=2, block_size=3)
        drawn = list(zip(anchors.rows_A.tolist(), anchors.positions_A.tolist(), strict=True))
        assert len(drawn) == len(set(drawn)) == 3
        assert drawn == sorted(drawn)
        seen |= set(drawn)
    assert seen == {(0, 2), (0, 3), (0, 7), (1, 1)}
    again = [sample_anchors(replace(by_hand(), seed=5), num_anchors=2, block_size=3) for _ in range(2)]
    assert torch.equal(again[0].positions_A, again[1].positions_A)


@pytest.mark.parametrize("settings", [{}, {"window": None}, {"sequential": None}, {"confidence": False}])
@pytest.mark.parametrize("reduced", [True, False])
def test_loss_equals_the_naive_twin(target, settings, reduced):
    weights = LossWeights(ce=0.2, l1=0.9, kl=0.4, lk=0.1, gamma=3.0, chunk=7)
    drafter = make_drafter(target, reduced=reduced, loss=weights, **settings).eval()
    batch = make_batch(target, [15, 10])
    losses = drafter.loss(batch, target.head)
    anchors, _ = states_of(drafter, target, batch)
    ids = torch.arange(target.spec.vocab_size) if drafter.vocab is None else drafter.vocab.ids_V
    total, count, lengths, greedy = torch.zeros((), dtype=torch.float64), 0, [], []
    for a, (row, p) in enumerate(zip(anchors.rows_A.tolist(), anchors.positions_A.tolist(), strict=True)):
        tokens, length = batch.tokens_BT[row], int(batch.lengths_B[row])
        hidden = naive_states(drafter, target, batch.aux_BTLD[row, :length], int(tokens[p]), p)
        survived, agreed, alive, together = [], [], 1.0, 1.0
        for k in range(1, drafter.block_size + 1):
            if not bool(anchors.counted_AG[a, k - 1]):
                break
            full = target.head.logits(batch.last_BTD[row, p + k - 1]).double()
            z = (target.head.lm_head_VD[ids] @ hidden[k - 1]).double()
            inputs = hidden[k - 1]
            if drafter.markov_head is not None:
                embedded = drafter.markov_head.markov_w1(tokens[p + k - 1])
                z = z + (drafter.markov_head.markov_w2.weight @ embedded).double()
                inputs = torch.cat([inputs, embedded])
            p_t, log_p = full.softmax(-1), z.log_softmax(-1)
            p_d = torch.zeros_like(p_t).index_add(0, ids, log_p.exp())
            q = p_t[ids] / p_t[ids].sum()
            accept = torch.minimum(p_t, p_d).sum()
            w = torch.exp(torch.tensor(-(k - 1) / 3.0))
            label = (ids == tokens[p + k]).nonzero()
            ce = -log_p[label[0, 0]] if len(label) else 0.0
            kl, l1 = (q * (q.log() - log_p)).sum(), (p_t - p_d).abs().sum()
            total = total + w * (0.2 * ce + 0.9 * l1 + 0.4 * kl - 0.1 * accept.log())
            if drafter.confidence_head is not None:
                c = drafter.confidence_head.proj(inputs).sigmoid()[0].double()
                total = total - w * (accept.detach() * c.log() + (1 - accept.detach()) * (1 - c).log())
            alive, together = alive * float(accept.detach()), together * float(ids[z.argmax()] == full.argmax())
            survived.append(alive)
            agreed.append(together)
            count += 1
        if len(survived) == drafter.block_size:
            lengths.append(1 + sum(survived))
            greedy.append(1 + sum(agreed))
    torch.testing.assert_close(losses.total.double(), total, rtol=1e-5, atol=1e-4)
    assert losses.count == count
    for name, want in (("accepted_length", lengths), ("accepted_length_greedy", greedy)):
        found_sum, found_count = losses.metrics[name]
        assert found_count == len(want) > 0
        torch.testing.assert_close(float(found_sum), float(sum(want)), rtol=1e-4, atol=1e-4)
    parameters = dict(drafter.named_parameters())
    got = torch.autograd.grad(losses.total, list(parameters.values()))
    want_grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    for name, one, other in zip(parameters, got, want_grads, strict=True):
        assert other is not None, name
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=1e-3 * scale, msg=name)


def test_metrics_in_training_are_those_of_validation(target):
    drafter, batch = make_drafter(target), make_batch(target, [15, 10])
    in_training, in_validation = drafter.train().loss(batch, target.head), drafter.eval().loss(batch, target.head)
    torch.testing.assert_close(in_training.total, in_validation.total)
    assert set(in_training.metrics) == {"acceptance", "accepted_length", "confidence_bias"}
    assert set(in_validation.metrics) - set(in_training.metrics) == {
        "acceptance_greedy",
        "accepted_length_greedy",
        "agreement",
    }
    for name, pair in in_training.metrics.items():
        torch.testing.assert_close(pair, in_validation.metrics[name])


def test_padding_and_company_change_nothing(target):
    """The same conversations alone, together and with more padding give the same sum."""
    drafter = make_drafter(target, num_anchors=100)
    lengths = [15, 10]
    both, wide = make_batch(target, lengths), make_batch(target, lengths, width=15)
    parts = []
    for row, length in enumerate(lengths):
        tokens = both.tokens_BT[row : row + 1, :length]
        mask = both.loss_mask_BT[row : row + 1, :length]
        parts.append(batch_of(target, tokens, torch.tensor([length]), mask, seed=0))
    padded = torch.nn.functional.pad(wide.tokens_BT, (0, 6))
    mask = torch.nn.functional.pad(wide.loss_mask_BT, (0, 6))
    padded_batch = batch_of(target, padded, wide.lengths_B, mask, seed=0)
    together = drafter.loss(both, target.head)
    torch.testing.assert_close(together.total, sum(drafter.loss(part, target.head).total for part in parts))
    torch.testing.assert_close(together.total, drafter.loss(padded_batch, target.head).total)


def test_no_anchor_gives_zero_with_gradients(target):
    drafter = make_drafter(target)
    batch = make_batch(target, [6])
    losses = drafter.loss(replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT)), target.head)
    losses.total.backward()
    assert losses.total == 0
    assert losses.count == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_bfloat16_products_train_float32_parameters(target):
    drafter, batch = make_drafter(target), make_batch(target, [15, 10])
    exact = drafter.loss(batch, target.head)
    exact_grads = torch.autograd.grad(exact.total, list(drafter.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        rough = drafter.loss(batch, target.head)
    rough.total.backward()
    torch.testing.assert_close(rough.total, exact.total, rtol=0.02, atol=0.0)
    for (name, parameter), want in zip(drafter.named_parameters(), exact_grads, strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert (parameter.grad - want).norm() < 0.1 * want.norm(), name


def test_a_few_steps_lower_the_loss(target):
    drafter, batch = make_drafter(target, num_anchors=100), make_batch(target, [20, 16])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    totals = []
    for _ in range(12):
        loss = drafter.loss(batch, target.head).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals.append(float(loss.detach()))
    assert totals[-1] < 0.9 * totals[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [3, None])
def test_flex_attention_is_the_same_function(window):
    generator = torch.Generator().manual_seed(0)
    layout = BlockLayout(
        rows_A=torch.tensor([0, 0, 1]),
        positions_A=torch.tensor([2, 6, 4]),
        num_rows=2,
        num_context=7,
        block_size=3,
        window=window,
    )
    query = torch.randn(9, 4, 8, generator=generator)
    context = tuple(torch.randn(14, 2, 8, generator=generator) for _ in range(2))
    block = tuple(torch.randn(9, 2, 8, generator=generator) for _ in range(2))
    with torch.no_grad():
        got = flex_block_attention(query, context, block, layout)
        torch.testing.assert_close(got, block_attention(query, context, block, layout))


def names_of_hf(model) -> dict[str, Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("with_sample", [True, False])
def test_start_from_the_target_copies_its_layers(with_sample):
    model = tiny_llama()
    target = tiny_target()
    drafter = make_drafter(target, layer_ids=(0, 2), init="target")
    tensors, batch = names_of_hf(model), make_batch(target, [12])
    batch = replace(batch, layer_ids=(0, 2))
    drafter.init_from_target(tensors, batch if with_sample else None)
    for i, layer in enumerate(drafter.layers):
        prefix = f"model.layers.{2 + i}."
        assert torch.equal(layer.mlp.up_proj.weight, tensors[prefix + "mlp.up_proj.weight"])
        assert torch.equal(layer.self_attn.q_proj.weight, tensors[prefix + "self_attn.q_proj.weight"])
    assert torch.equal(drafter.norm.weight, tensors["model.norm.weight"])
    aux_TLD = batch.aux_BTLD[0]
    fused = drafter.context_states(aux_TLD, drafter.fc.weight)
    last = aux_TLD[:, -1]
    torch.testing.assert_close(fused, last / last.square().mean(-1, keepdim=True).add(1e-6).sqrt(), rtol=1e-3, atol=1e-3)
    # Queries after the norm are about as long as the target's own.
    layer, x = drafter.layers[0], fused
    raw = layer.self_attn.q_proj(x).unflatten(-1, (-1, target.spec.head_dim))
    normed = layer.self_attn.q_norm(raw)
    ratio = float((normed.norm() / raw.norm()).detach())
    assert abs(ratio - 1.0) < (1e-3 if with_sample else 0.3)


@pytest.mark.parametrize("damage", ["rename", "shape", "foreign"])
def test_start_from_a_strange_target_warns_and_stays_random(damage):
    tensors = names_of_hf(tiny_llama())
    if damage == "rename":
        tensors["model.layers.3.self_attn.qkv_proj.weight"] = tensors.pop("model.layers.3.self_attn.q_proj.weight")
    elif damage == "shape":
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 3)
    else:
        tensors["model.layers.2.self_attn.q_proj.bias"] = torch.zeros(3)
    drafter = make_drafter(tiny_target())
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    with pytest.warns(UserWarning, match="drafter.init: 'target' is not possible"):
        drafter.init_from_target(tensors)
    assert all(torch.equal(before[name], p) for name, p in drafter.named_parameters())


def test_bigram_factors_raise_what_follows():
    pairs = torch.tensor([[5, 8]] * 50 + [[6, 9]] * 50 + [[7, 8]] * 25 + [[7, 9]] * 25)
    vocab = DraftVocab(torch.tensor([1, 8, 9, 11]), num_full=12)
    first, second = bigram_factors(pairs, vocab=vocab, vocab_size=12, rank=3)
    bias = first @ second.T
    assert bias.shape == (12, 4)
    assert bias[5, 1] > 0.5
    assert bias[6, 2] > 0.5
    assert bias[5, 2].abs() < 0.1
    assert bias[7].abs().max() < 0.1


def test_state_dict_names_are_those_of_engines(target):
    names = set(make_drafter(target).state_dict())
    layer = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    want = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    want |= {f"{name}.weight" for name in ("fc", "hidden_norm", "norm")} | {"d2t", "t2d"}
    want |= {f"markov_head.markov_{w}.weight" for w in ("w1", "w2")}
    assert names == want | {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_stored_vocabulary_wins(target):
    drafter = make_drafter(target)
    other = DraftVocab(torch.arange(1, target.spec.vocab_size, 2), num_full=target.spec.vocab_size)
    loaded = BlockDrafter(drafter.config, target.spec, vocab=other)
    loaded.load_state_dict(drafter.state_dict())
    assert torch.equal(loaded.vocab.to_draft(torch.tensor([2, 3])), torch.tensor([1, -1]))
    again = BlockDrafter.from_tensors(drafter.config, target.spec, drafter.state_dict())
    again.load_state_dict(drafter.state_dict())
    batch = make_batch(target, [12])
    torch.testing.assert_close(again.loss(batch, target.head).total, drafter.loss(batch, target.head).total)
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "d2t"}
    with pytest.raises(CheckpointError, match="d2t: missing"):
        BlockDrafter.from_tensors(drafter.config, target.spec, tensors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_ids": (0, 9)}, "layer 9 is out of range"),
        ({"layer_ids": ()}, "layer_ids: empty"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"init": "copy"}, "init: got 'copy'"),
        ({"sequential": {"_target_": "drafters.heads.sequential.MarkovHead", "rank": 0}}, "rank: got 0"),
        ({"sequential": {"_target_": "drafters.heads.sequential.Nope"}}, "no 'Nope'"),
        ({"draft_vocab_size": 7}, "draft vocabulary of None"),
    ],
)
def test_bad_settings_are_refused(target, settings, message):
    node = {"layer_ids": list(LAYER_IDS), "sequential": MARKOV, **settings}
    with pytest.raises(ConfigError, match=message):
        BlockDrafter(typed(BlockDrafter.Config, node, key="drafter"), target.spec)


def test_missing_states_are_named(target):
    drafter, batch = make_drafter(target), make_batch(target, [10])
    with pytest.raises(DataError, match=r"layers \[2\]"):
        drafter.loss(replace(batch, layer_ids=(0, 1)), target.head)


def test_the_shipped_settings_build():
    node = OmegaConf.load(Path(__file__).parents[1] / "conf" / "drafter" / "markov.yaml")
    node = OmegaConf.merge({"target": {"layer_ids": [0, 2]}}, {"drafter": node}).drafter
    cls, config = build_config(node, key="drafter")
    target = tiny_target()
    assert cls is BlockDrafter
    with pytest.raises(ConfigError, match="8192"):
        cls(config, target.spec, vocab=None)
    assert set(node) - {"_target_"} == {f.name for f in fields(BlockDrafter.Config)}
    assert set(node.loss) == {f.name for f in fields(LossWeights)}
