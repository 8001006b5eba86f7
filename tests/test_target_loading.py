# Targets that no single device holds: layers on the disk or on several devices, and weights split over processes. Their
# states, logits and drafts are those of the plain target, and neither a run nor a cache knows the difference.

from types import SimpleNamespace

import pytest
import torch

import train
from data import capture
from drafters.cache import CacheKey, HiddenCache
from drafters.door import load_target
from drafters.errors import ConfigError
from drafters.target_loading import Placement, head_is_tied
from drafters.tensor_parallel import follow, leading
from drafters.types import Needs
from tests.door_world import settings, train_overrides, write_rows
from tests.processes import torchrun
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

SPREAD = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.layers.3": "cpu",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
AWAY = {"model": "disk", "lm_head": "disk", "model.rotary_emb": "cpu"}
NEEDS = Needs(layer_ids=(0, 2, 3), last=True)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("target"), is_tied=request.param)


def make_folder(folder, *, is_tied):
    tokenizer = tiny_tokenizer("chatml")
    tiny_llama(vocab_size=len(tokenizer) + len(tokenizer) % 2, tie_word_embeddings=is_tied).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def node(folder, **more):
    return {"name": "tiny", "weights": str(folder), "dtype": "float32", "mask_token": 0, **more}


def spread(folder, device_map):
    return load_target(node(folder, device_map=device_map), device=None)


def tokens(target):
    return torch.randint(target.spec.vocab_size, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, SPREAD, AWAY, "auto"], ids=["cpu", "spread", "away", "auto"])
def test_a_spread_target_is_the_plain_one_to_the_bit(folder, device_map):
    plain, target = load_target(node(folder), device="cpu"), spread(folder, device_map)
    assert target.spec == plain.spec
    assert target.device == torch.device("cpu")
    tokens_BT = tokens(plain)
    got, wanted = (one.states(tokens_BT, needs=NEEDS) for one in (target, plain))
    assert torch.equal(got.aux_BTLD, wanted.aux_BTLD)
    assert torch.equal(got.last_BTD, wanted.last_BTD)
    assert torch.equal(target.embed(tokens_BT), plain.embed(tokens_BT))
    assert target.head.lm_head_VD.device.type == "cpu"
    is_shared = target.head.lm_head_VD.data_ptr() == target.head.embedding_VD.data_ptr()
    assert is_shared == plain.spec.tied_head == head_is_tied(target.model)
    outs = [one.step(tokens_BT, one.new_cache(2), needs=NEEDS) for one in (target, plain)]
    assert torch.equal(outs[0].logits_BSV, outs[1].logits_BSV)
    one, other = (each.new_cache(2) for each in (target, plain))
    for each, cache in ((target, one), (plain, other)):
        each.step(tokens_BT[:, :8], cache, logits="none")
        cache.rollback(torch.tensor([5, 3]))
    drafts = []
    for each, cache in ((target, one), (plain, other)):
        with cache.draft():
            drafts.append(each.first_layers(tokens_BT[:, 8:], cache, exit_layer=2))
    assert torch.equal(*drafts)


def test_every_weight_can_be_read_wherever_it_lies(folder):
    plain, target = load_target(node(folder), device="cpu"), spread(folder, AWAY)
    assert {p.device.type for p in target.model.parameters()} == {"meta"}
    wanted, got = plain.model.state_dict(), target.tensors()
    assert list(got) == list(wanted)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    with pytest.raises(KeyError):
        got["model.layers.0.nothing"]


def test_placement_is_no_part_of_a_cache_key(folder):
    keys = {
        CacheKey.of(target.spec, [], template_hash="t", max_length=8, codec="bf16").digest
        for target in (load_target(node(folder), device="cpu"), spread(folder, SPREAD))
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("placed", "device", "said"),
    [
        ({"device_map": "balanced"}, None, r"target.device_map: got 'balanced'; accepted: null, auto, or a device"),
        ({"device_map": {}}, None, r"target.device_map: got {}; accepted"),
        (
            {"device_map": {"lm_head": "meta"}},
            None,
            r"target.device_map.lm_head: got 'meta': it is no place",
        ),
        (
            {"device_map": {"lm_head": None}},
            None,
            r"target.device_map.lm_head: got None: it is no place",
        ),
        ({"device_map": {"lm_head": "tpu9"}}, None, r"target.device_map.lm_head: got 'tpu9': .*; accepted"),
        ({"device_map": {"lm_head": "cpu"}}, None, r"target.device_map: says no device for model.embed_tokens.weight"),
        (
            {"device_map": {"": "cpu", "model.layer.1": "disk"}},
            None,
            r"target.device_map.model.layer.1: no such module",
        ),
        ({"device_map": "auto"}, "cpu", r"device: got 'cpu', but target.device_map says where"),
        ({"tp_plan": "auto"}, None, r"target.tp_plan: got 'auto', which only python -m data.capture"),
    ],
)
def test_a_wrong_placement_is_one_error(folder, placed, device, said):
    with pytest.raises(ConfigError, match=said):
        load_target(node(folder, **placed), device=device)


def test_a_tensor_parallel_plan_needs_processes(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"target.tp_plan: got 'auto', but there is one process; start .*torchrun"):
        Placement("cpu", tp_plan="auto")
    with pytest.raises(ConfigError, match=r"target.tp_plan: got 'colwise'; accepted: null, auto"):
        Placement("cpu", tp_plan="colwise")
    with pytest.raises(ConfigError, match=r"target.tp_plan: given beside target.device_map"):
        Placement("cpu", tp_plan="auto", device_map="auto")


def test_the_process_that_leads_tells_each_pass_to_those_that_follow():
    class Told:
        size = 2

        def __init__(self):
            self.sent = []

        def share(self, value):
            self.sent.append(value)
            return value

    class Queue:
        def __init__(self, sent):
            self.sent = iter(sent)

        def share(self, value):
            return next(self.sent)

    made = []
    first, other = SimpleNamespace(states=lambda tokens: tokens + 1), SimpleNamespace(states=made.append)
    ranks = Told()
    with leading(first, ranks):
        assert first.states(torch.tensor([1])).tolist() == [2]
    assert first.states(torch.tensor([1])).tolist() == [2]
    assert [one is None for one in ranks.sent] == [False, True]
    follow(other, Queue(ranks.sent))
    assert [one.tolist() for one in made] == [[1]]


@pytest.mark.slow
def test_a_target_split_over_two_processes_captures_the_same_states(tmp_path):
    folder = make_folder(tmp_path, is_tied=True)
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Tool?"}, {"role": "assistant", "content": "The sky is blue. Be kind."}]
    write_rows(
        chats, [{"messages": [*turns[:1], {**turns[1], "content": f"{i} {turns[1]['content']}"}]} for i in range(6)]
    )
    given = [
        *(f"target.{name}={value}" for name, value in node(folder).items()),
        *("target.sha256=null", "target.layer_ids=[0,2]", "source=jsonl", f"source.path={chats}"),
        *("data.validation=0.2", "cache.codec=fp32", "cache.batch_tokens=64", "cache.tokens_per_shard=128"),
    ]
    split = torchrun("-m", "data.capture", *given, f"cache.root={tmp_path}/split", "target.tp_plan=auto")
    assert split.returncode == 0, split.stderr
    assert split.stdout.count("states of 6 conversations") == 1
    capture.run(settings("capture", *given, f"cache.root={tmp_path}/plain", "device=cpu"))
    (one,), (other,) = (list((tmp_path / name).glob("tiny-*")) for name in ("split", "plain"))
    assert one.name == other.name
    mine, others = HiddenCache.open(one), HiddenCache.open(other)
    assert mine.ids == others.ids
    for i in range(len(mine)):
        torch.testing.assert_close(mine[i].aux_TLD, others[i].aux_TLD, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine[i].lse_T, others[i].lse_T, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_error_of_the_process_that_leads_ends_all_with_one_message(tmp_path):
    folder = make_folder(tmp_path, is_tied=False)
    given = [f"target.{name}={value}" for name, value in node(folder).items()]
    done = torchrun(
        *("-m", "data.capture", *given, "target.sha256=null", "target.layer_ids=[0,9]", "target.tp_plan=auto"),
        *("source=samples", f"cache.root={tmp_path}/states"),
    )
    assert done.returncode != 0
    assert done.stderr.count("error: cache.layer_ids: layer 9 is out of range") == 1


@pytest.mark.slow
def test_train_takes_a_spread_target(world):
    """Its drafter begins with the target's own layers, one of which waits on the disk."""
    given = ["target.device_map={model: disk, model.rotary_emb: cpu, lm_head: disk}", "drafter=mtp", "device=null"]
    kept = [one for one in train_overrides(world) if not one.startswith("drafter.seq")]
    train.train(settings("train", *kept, *given, "optim.max_steps=2", "optim.warmup_steps=1", "name=spread"))
    assert (world / "outputs" / "spread" / "report.md").is_file()
