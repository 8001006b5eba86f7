# The operations of a step, worked from its shapes, are those that torch counts, exactly; and the shapes that the GPU's
# script measures are those of the recipes.

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from drafters.training.flops import step_counter
from tests.bench.reference import reference_loss
from tests.door_world import ROOT
from tests.gpu.arithmetic import of_reference, of_step
from tests.gpu.shapes import SIZES, make_batch, make_drafter, make_head

CPU = torch.device("cpu")
TINY = SIZES["tiny"]


def counted(loss):
    """Operations of a loss and its backward pass by the op that did them."""
    with step_counter() as counter:
        loss().backward()
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


@pytest.fixture(params=[False, True], ids=["whole", "reduced"])
def case(request):
    torch.manual_seed(0)
    head = make_head(TINY, CPU)
    batch, drafter = make_batch(TINY, head, CPU), make_drafter(TINY, CPU, reduced=request.param)
    return head, batch, drafter


def test_our_step(case, monkeypatch):
    head, batch, drafter = case
    work = of_step(drafter, batch, dense_attention=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = counted(lambda: drafter.loss(batch, head).total)
    assert sum(found.values()) == work.total
    assert {name for name in found if "bmm" in name}
    assert sum(flops for name, flops in found.items() if "bmm" in name) == work.attention
    assert work.positions == int(drafter.loss(batch, head).count)
    # What a block sees is less than everything.
    assert 0.2 * work.attention < of_step(drafter, batch).attention < work.attention


def test_chunks_share_less(case, monkeypatch):
    """Rows of a state in two chunks are computed twice, and counted twice."""
    head, batch, drafter = case
    whole = of_step(drafter, batch).vocabulary
    drafter.config.loss.chunk = 5
    work = of_step(drafter, batch, dense_attention=True)
    assert work.vocabulary > whole
    with torch.autocast("cpu", torch.bfloat16):
        assert sum(counted(lambda: drafter.loss(batch, head).total).values()) == work.total


def test_the_references_step(case):
    head, batch, drafter = case
    work = of_reference(drafter, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = counted(lambda: reference_loss(drafter, batch, head)[0])
    attention = sum(flops for name, flops in found.items() if "attention" in name)
    assert sum(found.values()) - attention == work.total - work.attention
    # torch counts that a fused backward pass computes scores again: 7 products, where 6 are needed.
    assert attention * 6 == work.attention * 7


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b"])
def test_shapes_are_those_of_the_recipes(name):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [f"experiment=dspark_{name}"])
    drafter, size = OmegaConf.to_container(cfg.drafter, resolve=True), SIZES[name]
    same = ("num_layers", "block_size", "num_anchors")
    assert {key: drafter[key] for key in same} == {key: getattr(size, key) for key in same}
    assert drafter["sequential"]["rank"] == size.rank
    assert tuple(drafter["layer_ids"]) == size.layer_ids
    assert drafter["window"] is drafter["draft_vocab_size"] is None
    assert cfg.data.max_length == size.width
    with torch.device("meta"):
        built = make_drafter(size, torch.device("meta"), reduced=False).config
    loss = OmegaConf.to_container(cfg.loss)
    assert {key: loss[key] for key in ("ce", "l1", "kl", "confidence", "gamma", "chunk")} == {
        key: getattr(built.loss, key) for key in ("ce", "l1", "kl", "confidence", "gamma", "chunk")
    }
