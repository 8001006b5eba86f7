# How a block drafter is built, started, stored and refused.

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from drafters.config import build_config, typed
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.heads.block import BlockDrafter
from drafters.heads.block_init import bigram_factors
from drafters.losses import LossWeights
from drafters.vocab import DraftVocab
from tests.block_doubles import LAYER_IDS, MARKOV, make_batch, make_drafter
from tests.tiny import tiny_llama, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


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
    want = last / last.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(fused, want, rtol=1e-3, atol=1e-3)
    # Queries after the norm are about as long as the target's own.
    layer, x = drafter.layers[0], fused
    raw = layer.self_attn.q_proj(x).unflatten(-1, (-1, target.spec.head_dim))
    normed = layer.self_attn.q_norm(raw, dtype=torch.float32)
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


@pytest.mark.parametrize("rank", [3, 40])
def test_bigram_factors_raise_what_follows(rank):
    pairs = torch.tensor([[5, 8]] * 50 + [[6, 9]] * 50 + [[7, 8]] * 25 + [[7, 9]] * 25)
    vocab = DraftVocab(torch.tensor([1, 8, 9, 11]), num_full=12)
    first, second = bigram_factors(pairs, vocab=vocab, vocab_size=12, rank=rank)
    assert (first.shape, second.shape) == ((12, rank), (4, rank))
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
    want |= {f"{name}.weight" for name in ("fc", "hidden_norm", "norm")} | {"vocab.d2t"}
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
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "vocab.d2t"}
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
    conf = Path(__file__).parents[1] / "conf"
    nodes = {
        name: OmegaConf.load(conf / path)
        for name, path in (("drafter", "drafter/markov.yaml"), ("loss", "loss/ce.yaml"))
    }
    node = OmegaConf.merge({"target": {"layer_ids": [0, 2]}}, nodes).drafter
    cls, config = build_config(node, key="drafter")
    target = tiny_target()
    assert cls is BlockDrafter
    with pytest.raises(ConfigError, match="8192"):
        cls(config, target.spec, vocab=None)
    assert set(node) - {"_target_"} == {f.name for f in fields(BlockDrafter.Config)}
    assert set(node.loss) == {f.name for f in fields(LossWeights)}
