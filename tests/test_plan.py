# The planner: bytes on disk are those that a capture writes, memory counted on small drafters is that of the full one,
# and a plan needs no weights, refuses what a capture would, and says where its rate comes from.

import json
import re

import pytest
import torch

from data import capture as door
from data.plan import MachineConfig, plan_capture
from drafters.cache import HiddenCache
from drafters.codecs import CODECS
from drafters.config import build_config
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.planning import LiveBytes, Rates, activation_bytes, loss_bytes, stored_bytes
from drafters.states import predicts
from drafters.types import Example
from tests.cache_cases import CONFIG, captured, examples
from tests.door_world import settings
from tests.tiny import tiny_spec, tiny_target


def long_examples(length):
    mask = torch.arange(length) >= 8
    tokens = torch.randint(128, (length,), generator=torch.Generator().manual_seed(0))
    return [Example(id=f"x{i}", source="s", tokens_T=tokens, loss_mask_T=mask) for i in range(2)]


def plan_settings(world, *overrides, drafter="markov"):
    return settings(
        "capture",
        *(f"target.weights={world}/target", "target.name=tiny", "target.sha256=null", "target.mask_token=0"),
        *("target.layer_ids=[0,2]", "target.dtype=float32", "device=cpu", f"cache.root={world}/planned"),
        *("source=jsonl", f"source.path={world}/chats.jsonl", "data.validation=0.2"),
        *(("drafter.draft_vocab_size=64", "drafter.block_size=3") if drafter == "markov" else ()),
        *(f"drafter={drafter}", "plan=true", *overrides),
    )


def test_bytes_on_disk_are_those_of_a_cache_but_for_headers(tmp_path):
    from dataclasses import replace

    data, target = examples(), tiny_target()
    num_tokens = sum(len(one.tokens_T) for one in data)
    for last in ("all", "supervised"):
        for name, codec in CODECS.items():
            made = captured(target, tmp_path / f"{name}-{last}", config=replace(CONFIG, codec=name, last=last))
            assert isinstance(made, HiddenCache)
            headers = 0
            for shard in made.shards:
                with (made.folder.path / shard.name).open("rb") as file:
                    headers += 8 + int.from_bytes(file.read(8), "little")
                    file.seek(0)
            offsets = sum(8 * (shard.num_samples + 1) for shard in made.shards)
            num_last = num_tokens if last == "all" else sum(int(predicts(one.loss_mask_T).sum()) for one in data)
            planned = stored_bytes(
                codec,
                hidden_size=target.spec.hidden_size,
                num_layers=len(made.layer_ids),
                num_tokens=num_tokens,
                num_last=num_last,
            )
            assert planned + headers + offsets == sum(shard.num_bytes for shard in made.shards)


def test_live_bytes_count_what_is_alive_at_once():
    known = torch.zeros(100)
    with LiveBytes([known]) as live:
        a = torch.zeros(1000)
        known[:10].add_(1)
        a.view(10, 100)
        del a
        b = torch.zeros(500)
        assert live.now == b.nbytes == 2000
    assert live.peak == 4000


@pytest.mark.parametrize("name", ["markov", "eagle3", "medusa", "mtp", "exit"])
def test_memory_counted_on_small_copies_is_that_of_the_full_drafter(name):
    spec = tiny_spec(hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=5)
    layers = "target.layer_ids=[0,1,2,3,4]"
    node = settings("capture", f"drafter={name}", layers, "drafter.draft_vocab_size=64").drafter
    kind = build_config(node, key="drafter")
    batch = long_examples(80)
    full = loss_bytes(kind, spec, batch)
    assert full > 5e5
    assert activation_bytes(kind, spec, batch) == pytest.approx(full, rel=0.1)


def test_a_plan_needs_no_weights_and_shows_what_fits(world, tmp_path, capsys):
    (tmp_path / "target").mkdir()
    for file in (world / "target").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "target" / file.name).write_bytes(file.read_bytes())
    given = [f"target.weights={tmp_path}/target", "machine.rate=50", "machine.ranks=4", "machine.memory_gb=0.000001"]
    plan_capture(plan_settings(world, *given, "cache.layer_ids=[2]", "cache.codec=int8"))
    said = capsys.readouterr().out
    assert "Plan for tiny: 4 layers, hidden 32, vocabulary" in said
    assert "each of 4 processes: about" in said
    assert "at 50 tokens/s a process\n  machine.rate" in said
    assert "markov reads layers [0] too: 'cache.layer_ids=[0, 2]'" in said
    assert "training DOES NOT FIT" in said
    assert not (world / "planned").exists()


def test_the_rate_of_a_capture_serves_the_next_plan(world, capsys, monkeypatch):
    plan_capture(plan_settings(world))
    assert "estimated, an upper bound" in capsys.readouterr().out
    monkeypatch.setattr(door, "RATED_TOKENS", 1)
    door.run(plan_settings(world, "cache.batch_tokens=64"))
    (name,) = json.loads((world / "planned" / "rates.json").read_text())
    assert name.startswith("tiny (4x32, ")
    plan_capture(plan_settings(world))
    assert "measured by an earlier capture on this machine" in capsys.readouterr().out
    plan_capture(plan_settings(world, "target.name=other"))
    assert "estimated, an upper bound" in capsys.readouterr().out


def test_a_damaged_file_of_rates_is_no_rate(tmp_path):
    (tmp_path / "rates.json").write_text("[1")
    assert Rates(tmp_path).read() == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("target.layer_ids=[0,9]", "cache.layer_ids: layer 9 is out of range"),
        ("cache.codec=zip", "cache.codec: got 'zip'; accepted"),
        ("drafter.draft_vocab_size=100000", "draft_vocab_size"),
        ("machine.ranks=0", "machine.ranks: got 0; accepted: a number above 0"),
        ("machine.rate=nan", "machine.rate: got nan; accepted: a number above 0, or null"),
        ("machine.disk_gb=inf", "machine.disk_gb: got inf; accepted: a number above 0, or null"),
        ("target.weights=null", "target.weights: got None; accepted: a hub id"),
        ("target.dtype=null", "target.dtype: got 'None'; accepted"),
        ("machine.rate=-1", "machine.rate: got -1.0; accepted: a number above 0, or null"),
        ("+target.speed=1", "target.speed: unknown setting"),
        ("target.dtype=int3", "target.dtype: got 'int3'"),
    ],
)
def test_a_wrong_setting_of_a_plan_is_one_error(world, override, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan_capture(plan_settings(world, override))


@pytest.mark.parametrize("config", ["[1, 2]", '{"model_type": "llama", "hidden_size": "big"}', '{"model_type": "lla'])
def test_a_damaged_config_is_one_error(world, tmp_path, config):
    for file in (world / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=rf"target.weights: cannot load the tokenizer of {tmp_path}: \S"):
        plan_capture(plan_settings(world, f"target.weights={tmp_path}"))


def test_a_plan_says_where_states_would_go(world, capsys):
    plan_capture(plan_settings(world, "cache.root=memory://states"))
    assert "what is free at memory://states: not known" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"cache.root: got .*chats.jsonl/deep', but .*chats.jsonl is a file"):
        plan_capture(plan_settings(world, f"cache.root={world}/chats.jsonl/deep"))


def test_a_drafter_without_weights_is_not_trained(world, capsys):
    plan_capture(plan_settings(world, drafter="ngram"))
    said = capsys.readouterr().out
    assert said.rstrip().endswith("ngram has nothing to train, and needs no cache")
    assert "with the target" not in said


def test_machine_settings_are_those_of_the_yaml():
    assert set(settings("capture").machine) == set(MachineConfig.__dataclass_fields__)
