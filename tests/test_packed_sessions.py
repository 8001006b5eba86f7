# Packed drafters keep to the contract that every drafter keeps to, at their own precision: the contract's own tests, on
# packed drafters; sessions against the same drafter with products by definition; and, where training's code computes
# from a block too, sessions against the loss.

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from drafters.checkpoint import load_drafter
from drafters.errors import CheckpointError
from drafters.heads.base import size_of
from drafters.packed.products import Int4Matrix, Int8Matrix
from export import pack
from tests import test_contract_decoding as contract
from tests.contract_cases import TRAINED, Reading, node_of, shaken, taught, tiny_world
from tests.packed_doubles import folder_of, naive, packed, packed_weights, wide_world, written
from tests.session_cases import CE_ALONE, check_session

pytestmark = pytest.mark.usefixtures("one_thread")
every = pytest.mark.parametrize("name", TRAINED)
world = contract.world


@cache
def packed_taught(name):
    drafter, losses = taught(name)
    return packed(drafter, tiny_world().target), losses


@pytest.fixture
def on_blocks(monkeypatch, request):
    """The contract's tests, given packed drafters."""
    its_world = contract.small_world() if "law" in request.node.name else tiny_world()

    def packed_shaken(drafter, **how):
        return packed(shaken(drafter, **how), its_world.target)

    monkeypatch.setattr(contract, "shaken", packed_shaken)
    monkeypatch.setattr(contract, "taught", packed_taught)


@every
@pytest.mark.usefixtures("on_blocks")
@pytest.mark.parametrize(
    "held",
    [
        contract.test_proposals_are_what_they_say,
        contract.test_a_second_proposal_is_the_first_and_a_shorter_one_its_beginning,
        contract.test_confidence_of_a_slot_does_not_know_its_draft,
        contract.test_greedy_text_is_the_targets_own,
    ],
)
def test_the_contract_of_decoding(world, name, held):
    held(world, name)


@every
@pytest.mark.usefixtures("on_blocks")
@pytest.mark.parametrize("sampling", [contract.Sampling(), contract.PLAIN], ids=["greedy", "sampled"])
def test_a_row_is_the_same_in_any_batch(world, name, sampling):
    contract.test_a_row_is_the_same_in_any_batch(world, name, sampling)


@pytest.mark.usefixtures("on_blocks")
@pytest.mark.parametrize("name", ["eagle3", "gated", "markov"])
def test_sampled_text_follows_the_targets_law(name):
    contract.test_sampled_text_follows_the_targets_law(name)


@every
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_sessions_compute_what_products_by_definition_give(name, quant):
    world = wide_world()
    changes = {"adapter": {"size": 32}} if name == "exit" else {}
    drafter = shaken(world.drafter(name, **changes))
    quick, slow = (packed(drafter, world.target, quant=quant) for _ in range(2))
    naive(slow)
    prompts = [example.tokens_T[:20] for example in world.examples[:3]]
    fast, defined = (Reading(one, world.target, prompts) for one in (quick, slow))
    uniforms_BS = fast.uniforms(drafter.block_size)
    found, wanted = (one.propose(drafter.block_size, uniforms_BS) for one in (fast, defined))
    difference = (found.probs_BSV[:, 0] - wanted.probs_BSV[:, 0]).abs().sum(-1)
    assert float(difference.max()) < 1e-3, "twice the total variation of the first draft"


@every
def test_sessions_on_blocks_compute_what_training_computes(name, monkeypatch):
    """Where only the layers' projections are packed, the loss runs on them too."""
    monkeypatch.setattr(pack, "_OWN", ())
    world = tiny_world()
    size = {"draft_vocab_size": None} if "draft_vocab_size" in node_of(name) else {}
    drafter = shaken(world.drafter(name, num_anchors=1, loss=CE_ALONE, **size))
    check_session(packed(drafter, world.target, output_rows=False), world)


def test_every_family_keeps_what_is_read_at_a_draft_in_low_precision():
    world = wide_world()
    for name, wanted in {
        "markov": {"layers.0.self_attn.k_proj.weight", "fc.weight", "markov_head.markov_w1.weight", "output_rows"},
        "eagle3": {"midlayer.mlp.down_proj.weight", "fc.weight", "lm_head.weight"},
        "medusa": {"heads.0.blocks.0.linear.weight", "heads.1.lm_head.weight"},
        "mtp": {"depths.0.block.mlp.up_proj.weight", "depths.0.input_proj.weight", "output_rows"},
        "exit": {"adapter.gate_proj.weight", "output_rows"},
    }.items():
        changes = {"adapter": {"size": 32}} if name == "exit" else {}
        held = packed_weights(packed(world.drafter(name, **changes), world.target, quant="int4"))
        assert wanted <= held.keys(), name
        kinds = {type(piece.matrix) for weight in held.values() for piece in weight.pieces}
        assert kinds <= {Int8Matrix, Int4Matrix}
        assert (Int4Matrix in kinds) == (name != "medusa")


def test_what_is_multiplied_with_the_same_input_is_one_matrix():
    world = wide_world()
    weights = packed_weights(packed(world.drafter("markov"), world.target))
    prefix = "layers.1.self_attn."
    joined = [weights[f"{prefix}{kind}_proj.weight"].pieces[0] for kind in "qkv"]
    assert len({id(piece.matrix) for piece in joined}) == 1
    assert [piece.start for piece in joined] == [0, 32, 48]
    assert (
        weights["layers.1.mlp.gate_proj.weight"].pieces[0].matrix
        is weights["layers.1.mlp.up_proj.weight"].pieces[0].matrix
    )


def test_nothing_of_the_block_is_copied(tmp_path):
    world = wide_world()
    folder = written(world.drafter("markov"), world.target, tmp_path, quant="int4")
    drafter = load_drafter(folder)
    start = drafter.norm.weight.untyped_storage().data_ptr()
    size = (folder / "model.safetensors").stat().st_size
    arrays = [array for w in packed_weights(drafter).values() for p in w.pieces for array in p.matrix.arrays()]
    plain = [p for p in drafter.parameters() if type(p) is torch.nn.Parameter]
    assert len(arrays) > 10
    assert len(plain) > 5
    for tensor in (*arrays, *plain):
        assert start <= tensor.data_ptr() < start + size


def test_it_says_what_it_holds():
    world = wide_world()
    drafter = world.drafter("markov")
    numbers, size = size_of(drafter)
    held, fewer = size_of(packed(drafter, world.target, output_rows=False))
    assert held == numbers
    assert fewer < 0.4 * size


def test_a_fine_tune_drafts_through_its_own_rows(tmp_path):
    world = wide_world()
    drafter = shaken(world.drafter("markov"))
    folder = written(drafter, world.target, tmp_path)
    assert load_drafter(folder, spec=world.target.spec).output_rows is not None
    other = replace(world.target.spec, weights_hash="another")
    assert load_drafter(folder, spec=other, allow_other_target=True).output_rows is None
    with pytest.raises(CheckpointError, match="allow_other_target"):
        load_drafter(folder, spec=other)


def test_rows_of_a_scaled_head_bring_their_scale(tmp_path):
    world = wide_world()
    drafter = shaken(world.drafter("parallel"))
    held = packed(drafter, world.target).output_rows.as_floats()
    rows = world.target.head.rows(drafter.vocab.ids_V)
    assert float((held - rows).norm() / rows.norm()) < 0.01
    scaled = replace(world.target.spec, logit_scale=0.25)
    monkey = world.drafter("parallel")
    monkey.spec = scaled
    out = tmp_path / "scaled"
    out.mkdir()
    from drafters.heads.output import DraftOutput
    from export.target_rows import head_rows

    given = head_rows(folder_of(world.target, tmp_path / "target"), scaled, ids_V=drafter.vocab.ids_V)
    output = DraftOutput(world.target.head, drafter.vocab, given)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(output(x), x @ rows.T * 0.25)


@pytest.mark.parametrize("damage", ["flip", "cut", "name", "shape"])
def test_a_damaged_folder_is_refused_by_name(tmp_path, damage):
    world = wide_world()
    folder = written(world.drafter("markov"), world.target, tmp_path)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    said = {
        "flip": "layers.0.self_attn.q_proj.weight.*bytes are damaged",
        "cut": "cut short",
        "name": "layers.2.input_layernorm.weight is missing there",
        "shape": "fc.weight is .* there, BlockDrafter has",
    }[damage]
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        weight = packed_weights(load_drafter(folder))["layers.0.self_attn.q_proj.weight"].pieces[0].matrix
        block = load_drafter(folder).norm.weight
        del block
        needle = bytes(weight.values_NK[0].view(torch.uint8).tolist())
        raw[raw.index(needle) + 3] ^= 1
        path.write_bytes(raw)
    elif damage == "cut":
        path.write_bytes(raw[:-9])
    else:
        config["drafter"] |= {"num_layers": 3} if damage == "name" else {"layer_ids": [0, 2]}
        del config["checksum"]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        load_drafter(folder)
