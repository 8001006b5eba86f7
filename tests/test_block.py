# The block drafter: its backbone against a naive twin, causality by perturbation, anchors and labels by hand, the loss.

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.heads.anchors import Anchors, sample_anchors
from drafters.heads.block import BlockDrafter
from drafters.heads.layers import norm_rope, rms_norm, rope_table
from drafters.heads.masks import BlockLayout, block_attention, flex_block_attention
from drafters.losses import LossWeights
from drafters.types import Batch
from tests.block_doubles import batch_of, make_batch, make_drafter, naive_states
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def states_of(drafter: BlockDrafter, target, batch: Batch) -> tuple[Anchors, Tensor]:
    anchors = sample_anchors(batch, num_anchors=drafter.config.num_anchors, block_size=drafter.block_size)
    return anchors, drafter.states(batch, anchors, target.head, torch.float32)


WINDOWS = [1, 5, 100, None]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("from_anchor", [True, False])
def test_backbone_equals_the_naive_twin(target, window, from_anchor):
    drafter = make_drafter(target, window=window, sample_from_anchor=from_anchor)
    batch = make_batch(target, [20, 9, 14])
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


@pytest.mark.parametrize(
    ("window", "from_anchor"), [*((window, True) for window in WINDOWS), (5, False), (None, False)]
)
def test_a_block_depends_on_the_context_before_its_anchor_only(target, window, from_anchor):
    """Change one conversation position at a time: a block changes if and only if it may see that position."""
    drafter = make_drafter(target, window=window, num_anchors=100, sample_from_anchor=from_anchor)
    batch = make_batch(target, [12, 8])
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


@pytest.mark.parametrize(("window", "from_anchor"), [(5, True), (None, True), (5, False)])
def test_no_token_after_the_anchor_changes_a_block(target, window, from_anchor):
    """New tokens from some position on, with the target's states of the new text: blocks anchored before stay."""
    drafter = make_drafter(target, window=window, num_anchors=100, sample_from_anchor=from_anchor)
    batch = make_batch(target, [14])
    anchors, before = states_of(drafter, target, batch)
    for start in range(1, 14):
        tokens_BT = batch.tokens_BT.clone()
        tokens_BT[:, start:] = (tokens_BT[:, start:] + 7) % target.spec.vocab_size
        other = batch_of(target, tokens_BT, batch.lengths_B, batch.loss_mask_BT, seed=batch.seeds[0])
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
        seeds=(3, 4),
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
        anchors = sample_anchors(replace(by_hand(), seeds=(seed, seed + 100)), num_anchors=2, block_size=3)
        drawn = list(zip(anchors.rows_A.tolist(), anchors.positions_A.tolist(), strict=True))
        assert len(drawn) == len(set(drawn)) == 3
        assert drawn == sorted(drawn)
        seen |= set(drawn)
    assert seen == {(0, 2), (0, 3), (0, 7), (1, 1)}
    again = [sample_anchors(replace(by_hand(), seeds=(5, 6)), num_anchors=2, block_size=3) for _ in range(2)]
    assert torch.equal(again[0].positions_A, again[1].positions_A)


@pytest.mark.parametrize(
    "settings",
    [{}, {"window": None}, {"sequential": None}, {"confidence": False}, {"sample_from_anchor": False}],
)
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
        *("confidence_bins", "acceptance_bins"),
    }
    for name, pair in in_training.metrics.items():
        torch.testing.assert_close(pair, in_validation.metrics[name])


def test_padding_and_company_change_nothing(target):
    """The same conversations alone, together and with more padding give the same sum."""
    drafter = make_drafter(target, num_anchors=4)
    lengths = [15, 10]
    both, wide = make_batch(target, lengths), make_batch(target, lengths, width=15)
    parts = []
    for row, length in enumerate(lengths):
        tokens = both.tokens_BT[row : row + 1, :length]
        mask = both.loss_mask_BT[row : row + 1, :length]
        parts.append(batch_of(target, tokens, torch.tensor([length]), mask, seed=row))
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


@pytest.mark.parametrize("rotated", [True, False])
def test_norm_and_rotation_by_hand_equal_autograd(rotated):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64).requires_grad_()
    gain = torch.rand(3, 8, generator=generator, dtype=torch.float64).requires_grad_()
    table = rope_table(torch.tensor([0, 3, 4, 9, 2]), torch.tensor([1.0, 0.5, 0.1, 0.02], dtype=torch.float64))

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        return norm_rope(x, gain, table, 1e-3) if rotated else rms_norm(x, gain, 1e-3, dtype=torch.float64)

    def twin(x: Tensor, gain: Tensor) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain
        if not rotated:
            return normed
        turned = torch.view_as_complex(torch.stack(normed.chunk(2, -1), -1)) * torch.complex(*table)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    torch.testing.assert_close(ours(x, gain), twin(x, gain))
    assert torch.autograd.gradcheck(ours, (x, gain))
