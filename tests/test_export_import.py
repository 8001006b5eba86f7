# Published drafts become ours: folders built here by the names and the configs of those who publish, read into settings
# and tensors; round trips to the bit; everything that our classes cannot be is named.

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from drafters.checkpoint import load_drafter, save_drafter
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.block import BlockDrafter
from export import to_hf, to_speculators
from export.importing import drafter_of, import_draft
from export.source import open_source
from tests.contract_cases import Reading
from tests.published_doubles import BlockEngine, Eagle3Engine, drafter_of_family, saved_target, source_of, stored
from tests.published_folders import (
    BACKBONE,
    DEEPSPEC,
    EAGLE3,
    LLAMA,
    MARKOV,
    QWEN3,
    SPECFORGE,
    Z_LAB,
    dspark_tensors,
    eagle3_shapes,
    eagle3_tensors,
    envelope,
    published,
    qwen3_layers,
    random_tensors,
)

PROMPT = torch.tensor([9, 40, 77, 5, 100, 61, 20])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(folder):
    return saved_target(folder)


def taken(folder, target, **options):
    node, tensors = import_draft(folder, spec=target.spec, **options)
    return node, tensors, drafter_of(node, tensors, spec=target.spec)


def anchor_and_drafts(drafter, target, length):
    reading = Reading(drafter, target, [PROMPT])
    return int(reading.session.anchor_B[0]), reading.propose(length).tokens_BS[0].tolist()


def test_a_dspark_of_deepspec_with_its_frozen_copies(target, folder, tmp_path):
    copies = {"embed_tokens.weight": target.head.embedding_VD, "lm_head.weight": target.head.lm_head_VD}
    copies = {name: tensor.bfloat16() for name, tensor in copies.items()}
    out = published(tmp_path / "out", DEEPSPEC, dspark_tensors(**copies))
    node, _, drafter = taken(out, target, target_folder=folder)
    expected = {"name": "markov", "layer_ids": [0, 2], "num_layers": 2, "block_size": 4, "sample_from_anchor": True}
    assert {key: node[key] for key in expected} == expected
    assert (node["window"], node["draft_vocab_size"], node["confidence"]) == (None, None, True)
    assert isinstance(drafter, BlockDrafter)
    (out / "model.safetensors").unlink()
    published(out, {**DEEPSPEC, "sample_from_anchor": True, "rope_parameters": {"rope_theta": 1e4}}, dspark_tensors())
    anchor, drafts = anchor_and_drafts(drafter, target, 4)
    engine = BlockEngine(out, target)
    engine.tensors = {name: tensor.float() for name, tensor in engine.tensors.items()}
    assert engine.draft(PROMPT, anchor)[0] == drafts


def test_a_dflash_of_z_lab(target, tmp_path):
    out = published(tmp_path / "out", Z_LAB, random_tensors({**BACKBONE, **qwen3_layers()}))
    node, _, drafter = taken(out, target)
    assert (node["name"], node["sequential"], node["confidence"]) == ("parallel", None, False)
    assert (node["block_size"], node["sample_from_anchor"]) == (
        4,
        False,
    )  # five slots, of which the anchor's drafts none
    assert drafter.num_slots == 5


def test_a_dspark_of_specforge_with_everything_nested(target, tmp_path):
    out = published(tmp_path / "out", SPECFORGE, random_tensors({**BACKBONE, **qwen3_layers(), **MARKOV}))
    node, _, _ = taken(out, target)
    assert (node["name"], node["block_size"], node["sample_from_anchor"]) == ("markov", 4, True)
    assert node["sequential"]["rank"] == 6


@pytest.mark.parametrize(
    ("config", "given", "layer_ids"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, [0, 1, 2]),  # vLLM: indices into the hidden states
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, {}, [0, 1, 3]),  # SGLang: outputs
        ({}, {"layer_ids": [0, 2, 3]}, [0, 2, 3]),
    ],
)
def test_an_eagle3_of_specforge(config, given, layer_ids, target, tmp_path):
    out = published(tmp_path / "out", {**EAGLE3, **config}, eagle3_tensors())
    node, tensors, drafter = taken(out, target, given=given)
    assert node["layer_ids"] == layer_ids
    assert (node["norm_before_residual"], node["draft_vocab_size"]) == (False, 64)
    assert drafter.vocab.ids_V.tolist() == list(range(1, 128, 2))
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)


@pytest.mark.parametrize("before", [False, True])
def test_an_eagle3_of_speculators_drafts_alike(before, target, tmp_path):
    keys = dict(draft_vocab_size=64, norm_before_residual=before, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    layers = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in eagle3_tensors("layers.0").items()}
    out = published(tmp_path / "out", envelope("eagle3", layers, **keys), tensors)
    node, _, drafter = taken(out, target)
    assert (node["layer_ids"], node["block_size"], node["norm_before_residual"]) == ([0, 1, 3], 5, before)
    # hidden_states[4] of four layers is after the final norm; ours takes the layer's own output.
    node["layer_ids"] = [0, 1, 2]
    drafter = drafter_of(node, import_draft(out, spec=target.spec)[1], spec=target.spec)
    engine = Eagle3Engine(out, target, layer="layers.0")
    engine.config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    anchor, drafts = anchor_and_drafts(drafter, target, 4)
    assert engine.draft(PROMPT, anchor, 4)[0] == drafts


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_drafts_of_speculators(kind, target, tmp_path):
    layers = {**QWEN3, "layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "use_sliding_window": True}
    keys = dict(block_size=5, mask_token_id=3, aux_hidden_state_layer_ids=[1, 3], sample_from_anchor=False)
    keys |= dict(sliding_window_non_causal=True, draft_vocab_size=128)
    shapes = {**BACKBONE, **qwen3_layers()}
    if kind == "dspark":
        keys |= dict(markov_rank=6, markov_head_type="vanilla")
        shapes |= MARKOV
    node, _, _ = taken(published(tmp_path / "out", envelope(kind, layers, **keys), random_tensors(shapes)), target)
    assert (node["layer_ids"], node["block_size"], node["window"]) == ([0, 2], 4, 7)
    assert node["name"] == ("markov" if kind == "dspark" else "parallel")


def test_a_window_of_a_flat_config_counts_the_position_that_looks(target, tmp_path):
    config = {**Z_LAB, "layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "is_causal": False}
    out = published(tmp_path / "out", config, random_tensors({**BACKBONE, **qwen3_layers()}))
    assert taken(out, target)[0]["window"] == 6
    config = {**Z_LAB, "layer_types": None}
    config["dflash_config"] = {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 9}
    assert taken(published(out, config, random_tensors({**BACKBONE, **qwen3_layers()})), target)[0]["window"] == 8


def test_other_spellings_of_names_and_shards(target, tmp_path):
    spelt = {}
    for name, tensor in dspark_tensors().items():
        for ours, theirs in {
            "markov_head.": "",
            "confidence_head.proj": "confidence_proj",
            "hidden_norm": "context_norm",
        }.items():
            name = name.replace(ours, theirs)
        spelt[f"model.{name}"] = tensor
    out = tmp_path / "out"
    published(out, DEEPSPEC, {})
    (out / "model.safetensors").unlink()
    halves = [dict(list(spelt.items())[::2]), dict(list(spelt.items())[1::2])]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, tensors in zip(files, halves, strict=True):
        save_file(tensors, out / file)
    weights = {name: file for file, tensors in zip(files, halves, strict=True) for name in tensors}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    _, tensors = import_draft(out, spec=target.spec)
    expected = {name: tensor.float() for name, tensor in dspark_tensors().items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_a_confidence_head_that_does_not_read_the_markov_embedding_reads_it_with_zeros(target, tmp_path):
    narrow = dspark_tensors()
    narrow["confidence_head.proj.weight"] = narrow["confidence_head.proj.weight"][:, :32]
    config = {**DEEPSPEC, "confidence_head_with_markov": False}
    _, tensors, _ = taken(published(tmp_path / "out", config, narrow), target)
    weight = tensors["confidence_head.proj.weight"]
    assert torch.equal(weight[:, :32], narrow["confidence_head.proj.weight"].float())
    assert weight.shape == (1, 38)
    assert not weight[:, 32:].any()


def test_ids_in_another_order_are_put_in_the_targets(target, tmp_path):
    tensors = eagle3_tensors()
    turned = torch.arange(127, 0, -2)
    tensors["d2t"] = turned - torch.arange(64)
    config = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    _, ours, drafter = taken(published(tmp_path / "out", config, tensors), target)
    assert torch.equal(ours["lm_head.weight"], tensors["lm_head.weight"].float().flip(0))
    assert torch.equal(drafter.vocab.ids_V, turned.flip(0))


def test_an_eagle3_that_shares_the_targets_head_gets_its_rows(target, folder, tmp_path):
    tensors = random_tensors(eagle3_shapes())
    del tensors["lm_head.weight"]
    config = {**EAGLE3, "draft_vocab_size": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    out = published(tmp_path / "out", config, tensors)
    _, ours, _ = taken(out, target, target_folder=folder)
    assert torch.equal(ours["lm_head.weight"], target.head.lm_head_VD)
    with pytest.raises(ConfigError, match="target: its folder is needed"):
        import_draft(out, spec=target.spec)


def test_ids_of_a_whole_vocabulary_are_none(target, tmp_path):
    tensors = random_tensors({**eagle3_shapes(), "lm_head.weight": (128, 32)})
    tensors |= {"d2t": torch.zeros(128, dtype=torch.int64), "t2d": torch.ones(128, dtype=torch.bool)}
    config = {**EAGLE3, "draft_vocab_size": 128, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    node, ours, _ = taken(published(tmp_path / "out", config, tensors), target)
    assert node["draft_vocab_size"] is None
    assert "vocab.d2t" not in ours


def test_heads_of_the_first_medusa(target, tmp_path):
    shapes = {
        f"{head}.0.linear.{part}": (32, 32) if part == "weight" else (32,)
        for head in range(2)
        for part in ("weight", "bias")
    }
    shapes |= {f"{head}.1.weight": (128, 32) for head in range(2)}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target", "version": "2"}
    node, tensors, drafter = taken(published(tmp_path / "out", config, random_tensors(shapes)), target)
    assert (node["block_size"], node["num_layers"], node["own_projection"]) == (2, 1, True)
    assert torch.equal(tensors["heads.1.lm_head.weight"], random_tensors(shapes)["1.1.weight"].float())
    assert len(anchor_and_drafts(drafter, target, 2)[1]) == 2


CASES = [
    ("parallel", False),
    ("parallel", True),
    ("markov", False),
    ("markov", True),
    ("eagle3", False),
    ("eagle3", True),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("to", [to_hf, to_speculators], ids=["hf", "speculators"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_export_and_import_are_inverse_to_the_bit(case, to, dtype, target, folder, tmp_path):
    family, reduced = case
    settings = {} if family == "eagle3" else {"window": 9}
    source = source_of(drafter_of_family(family, target, reduced=reduced, **settings), target_folder=folder)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    options = to.Options(dtype=dtype)
    to.write(source, "none", tmp_path / "first", options=options)
    _, tensors, drafter = taken(tmp_path / "first", target, target_folder=folder)
    for name, tensor in source.tensors.items():
        rounded = tensor.bfloat16().float() if dtype == "bf16" and tensor.is_floating_point() else tensor
        assert torch.equal(tensors[name], rounded), name
    save_drafter(drafter, tmp_path / "drafter", spec=target.spec, provenance={"imported": True})
    again = replace(open_source(tmp_path / "drafter"), target_folder=folder)
    to.write(again, "none", tmp_path / "second", options=options)
    first, second = stored(tmp_path / "first"), stored(tmp_path / "second")
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(tensor, second[1][name]) for name, tensor in first[1].items())


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_a_quantized_draft_is_read_as_floats(quant, target, folder, tmp_path):
    source = source_of(drafter_of_family("markov", target, reduced=True), target_folder=folder)
    (tmp_path / "out").mkdir()
    to_hf.write(source, quant, tmp_path / "out")
    _, tensors, drafter = taken(tmp_path / "out", target, target_folder=folder)
    name = "layers.0.self_attn.q_proj.weight"
    assert not torch.equal(tensors[name], source.tensors[name])
    assert (tensors[name] - source.tensors[name]).norm() < 0.12 * source.tensors[name].norm()
    assert len(anchor_and_drafts(drafter, target, 4)[1]) == 4


def test_an_imported_drafter_loads_and_drafts_as_before(target, folder, tmp_path):
    source = source_of(drafter_of_family("markov", target, reduced=True, window=8), target_folder=folder)
    (tmp_path / "out").mkdir()
    to_hf.write(source, "none", tmp_path / "out", options=to_hf.Options(dtype="f32"))
    _, _, drafter = taken(tmp_path / "out", target, target_folder=folder)
    save_drafter(drafter, tmp_path / "drafter", spec=target.spec)
    loaded = load_drafter(tmp_path / "drafter", spec=target.spec)
    assert anchor_and_drafts(loaded, target, 4) == anchor_and_drafts(source.drafter, target, 4)


def test_what_is_given_stands_for_what_a_config_says(target, tmp_path):
    out = published(tmp_path / "out", {**DEEPSPEC, "target_layer_ids": None}, dspark_tensors())
    node, _ = import_draft(out, spec=target.spec, given={"layer_ids": [1, 2], "block_size": 3})
    assert (node["layer_ids"], node["block_size"]) == ([1, 2], 3)
    with pytest.raises(ConfigError, match=r"^given\.rank: unknown setting; accepted: layer_ids"):
        import_draft(out, spec=target.spec, given={"rank": 3})


def test_each_reader_refuses_the_other_kind_of_folder(target, folder, tmp_path):
    source = source_of(drafter_of_family("markov", target, reduced=False), target_folder=folder)
    for to, other in ((to_hf, to_speculators), (to_speculators, to_hf)):
        out = tmp_path / to.__name__
        out.mkdir()
        to.write(source, "none", out)
        with pytest.raises(CheckpointError, match=r"has (an|no) envelope"):
            other.read(out, spec=target.spec)
