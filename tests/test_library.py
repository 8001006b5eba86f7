# drafters as a library: the examples of docs/library.md run as they stand, training is train.py's to the bit, and what
# a program gets wrong is one error.

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir

import drafters
from data.prompts import trained_on
from data.sources import DataConfig, SourceConfig, load_conversations, load_splits
from drafters.config import build_config, to_plain
from drafters.door import load_target
from tests.door_world import ROOT, STEPS, contents, same_weights, train_overrides
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (ROOT / "docs" / "library.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n\n```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))


def overrides(world, *more):
    """Those of a run in this world, but for its source and its report."""
    kept = [one for one in train_overrides(world) if not one.startswith(("source", "report"))]
    return [*kept, *more]


def composed(world, *more):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("fit", overrides(world, *more))


def test_the_settings_are_those_of_the_door():
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        ours, door = to_plain(compose("fit")), to_plain(compose("train", ["report=none"]))
    assert ours == {name: value for name, value in door.items() if name not in ("source", "run")}


@pytest.fixture(scope="module")
def target(world):
    return load_target(to_plain(composed(world))["target"], device="cpu")


@pytest.fixture(scope="module")
def chats(world):
    return [json.loads(line) for line in (world / "chats.jsonl").read_text().splitlines()]


@pytest.fixture
def as_installed(monkeypatch):
    """`drafters.conf` where it is in a wheel, whatever is installed here."""
    conf = ROOT / "conf"
    spec = importlib.util.spec_from_file_location(
        "drafters.conf", conf / "__init__.py", submodule_search_locations=[str(conf)]
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "drafters.conf", module)


def test_the_page_s_examples_run(world, tmp_path, monkeypatch, capsys, as_installed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_bytes((world / "chats.jsonl").read_bytes())
    more = overrides(world, "outputs=outputs", "name=markov-smollm2", "cache.root=states")
    monkeypatch.setattr(hydra, "compose", lambda door, given: compose(door, [*given, *more]))
    monkeypatch.setattr("drafters.decoding.loop.DecodeConfig.max_new_tokens", 24)
    names = {}
    assert list(EXAMPLES) == ["library.py", "load.py", "decode.py"]
    assert len(EXAMPLES["library.py"].replace("\n\n", "\n").splitlines()) == 10
    exec(EXAMPLES["library.py"], names)
    said = capsys.readouterr().out
    assert float(re.search(r"accepted length (\d\.\d\d)", said)[1]) >= 1
    assert names["written"].texts[0] in said
    trained = names["drafter"].state_dict()
    exec(EXAMPLES["load.py"], names)
    loaded = names["drafter"].state_dict()
    assert loaded is not trained
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)
    exec(EXAMPLES["decode.py"], names)
    assert len(names["written"].generations) == 2
    assert len(re.findall(r"(?:stop|length) \d+ tokens in \d+ passes", capsys.readouterr().out)) == 2


def test_training_is_that_of_the_door_to_the_bit(world, first, target):
    found = list(load_conversations(SourceConfig(path=str(world / "chats.jsonl"))))
    settings = composed(world, "name=library")
    drafter = drafters.fit(settings, target, found)
    run = world / "outputs" / "library"
    assert same_weights(run, first)
    facts = [json.loads((one / "drafter" / "config.json").read_text()) for one in (run, first)]
    assert facts[0]["provenance"]["step"] == facts[1]["provenance"]["step"] <= STEPS
    assert facts[0]["drafter"] == facts[1]["drafter"]
    # What an evaluation will read: the same conversations, held out alike.
    kept = json.loads((run / ".hydra" / "settings.json").read_text())
    source = build_config(kept["source"], key="source")[1]
    assert list(load_conversations(source)) == found
    own = SourceConfig(path=str(world / "chats.jsonl"))
    train, held_out = load_splits(source, validation=0.2, seed=0)
    assert (train, held_out) == load_splits(own, validation=0.2, seed=0)
    (path,) = run.glob("conversations-*.jsonl")
    trained = trained_on(SourceConfig(path=str(path)), own=source, data=DataConfig(validation=0.2))
    assert trained == {one.messages for one in train}
    # The same call gives the same, and writes no weights; other conversations are refused, and nothing is lost.
    before = {name: one for name, one in contents(run).items() if "/logs/" not in name}
    again = drafters.fit(settings, target, found)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    weights = [name for name in before if name.endswith((".ckpt", ".safetensors", ".jsonl", "settings.json"))]
    assert len(weights) == 4
    with pytest.raises(drafters.CheckpointError, match=r"holds a run with other settings: source\.path was"):
        drafters.fit(settings, target, found[1:])
    after = contents(run)
    assert [name for name in weights if after[name] != before[name]] == []


SHORT = (
    "optim.max_steps=2",
    "optim.warmup_steps=1",
    "trainer.val_check_interval=2",
    "callbacks.probe_every_n_steps=null",
)


def test_a_model_in_memory_is_trained_for_without_a_cache(world, target, chats):
    model = target.model
    own = drafters.FrozenTarget.from_model(model, tokenizer=target.tokenizer, name="own")
    more = ("name=memory", "data=online", "target.weights=null", f"cache.root={world}/none", *SHORT)
    drafter = drafters.fit(composed(world, *more), own, [one["messages"] for one in chats])
    assert json.loads((world / "outputs/memory/drafter/config.json").read_text())["target"]["name"] == "own"
    assert not (world / "none").exists()
    written = drafters.generate(own, drafter, ["Tool 3?"], drafters.DecodeConfig(max_new_tokens=12))
    assert written.texts == drafters.generate(target, None, ["Tool 3?"], drafters.DecodeConfig(max_new_tokens=12)).texts


def test_a_run_begins_from_another(world, first, target, chats):
    more = (f"warm_start={first}", "drafter.num_layers=3", *SHORT)
    drafters.fit(composed(world, "name=warm", *more), target, chats)
    facts = [json.loads((world / "outputs" / name / "drafter/config.json").read_text()) for name in ("warm", "first")]
    assert facts[0]["provenance"]["warm_start"] == facts[1]["weights"]["sha256"]
    with pytest.raises(drafters.ConfigError, match=r"^warm_start: got 'nowhere'"):
        drafters.fit(composed(world, "name=warm2", "warm_start=nowhere", *SHORT), target, chats)


def test_the_text_is_the_target_s_own(world, first, target):
    drafter = drafters.load_drafter(first / "drafter", spec=target.spec)
    prompts = ["Tool 3?", [drafters.Message(role="system", content="Be brief."), {"role": "user", "content": "Grass?"}]]
    config = drafters.DecodeConfig(max_new_tokens=16, batch_size=2)
    written, plain = (drafters.generate(target, one, prompts, config) for one in (drafter, None))
    assert written.texts == plain.texts
    assert len(set(written.texts)) == 2
    assert plain.accepted_length == 1.0
    rounds = [one for generation in written.generations for one in generation.rounds if one.full]
    assert written.accepted_length == sum(one.accepted + 1 for one in rounds) / len(rounds)


MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"^conversations: there are none"),
        ("chats.jsonl", r"^conversations: got str; accepted: a list"),
        ({"messages": MESSAGES}, r"^conversations: got dict; accepted: a list"),
        (MESSAGES, r"^conversation 0: got the keys role, content; accepted: "),
        ([MESSAGES, "text"], r"^conversation 1: got a text; accepted: "),
        ([{"messages": []}], r"^conversation 0: it has no messages"),
        ([{"messages": 3}], r"^conversation 0: got int; accepted: a list of messages"),
        ([[{"role": "person", "content": "x"}]], r"^conversation 0, message 0: role: got 'person'; accepted: system"),
        ([[{"role": "user", "content": None}]], r"^conversation 0, message 0: content: got NoneType; accepted: text"),
        ([[{"role": "user", "content": "\ud83d"}]], r"^conversation 0, message 0: content: not Unicode text"),
        ([[MESSAGES]], r"^conversation 0, message 0: got list; accepted: "),
        ([MESSAGES[:1], MESSAGES[:1]], r"no assistant message"),
        ([MESSAGES], r"cannot be split into training and validation"),
    ],
)
def test_wrong_conversations_are_one_error(world, target, given, message):
    with pytest.raises(drafters.DataError, match=message):
        drafters.fit(composed(world, "name=wrong", "data.validation=0.5"), target, given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["+source.path=a.jsonl"], r"^source: the conversations are given.*leave it out"),
        (["report.num_prompts=2"], r"^report\.num_prompts: got 2; accepted here: 0 \(report=none\)"),
        (["trainer=ddp", "trainer.devices=2"], r"^trainer: got devices=2.*trainer=single"),
        (["trainer=fsdp", "trainer.devices=1"], r"^trainer: got devices=1, strategy=.*accepted here: trainer=single"),
        (["+trainer.speed=1"], r"^trainer: .*'speed'"),
        (["+logger.speed=1"], r"^logger: .*'speed'"),
        (["~logger", "+logger.name=x"], r"^logger: got .*accepted: settings with a `_target_`"),
        (["drafter.block_size=x"], r"^drafter\.block_size: got 'x'"),
    ],
)
def test_wrong_settings_are_one_error(world, target, chats, tmp_path, more, message):
    settings = to_plain(composed(world, f"outputs={tmp_path}", "name=refused", *more))
    with pytest.raises(drafters.ConfigError, match=message):
        drafters.fit(settings, target, chats)
    assert not list(tmp_path.rglob("settings.json")), "nothing is begun"


def test_a_drafter_without_training_and_missing_settings_are_one_error(world, target, chats):
    settings = to_plain(composed(world))
    with pytest.raises(drafters.ConfigError, match=r"^optim: missing; compose the settings"):
        drafters.fit({name: value for name, value in settings.items() if name != "optim"}, target, chats)
    ngram = {"_target_": "drafters.heads.ngram.NgramDrafter", "name": "ngram"}
    with pytest.raises(drafters.ConfigError, match=r"^drafter: 'ngram' has nothing to train"):
        drafters.fit({**settings, "drafter": ngram}, target, chats)


def test_another_target_than_the_settings_describe_is_refused(world, target, chats):
    other = drafters.FrozenTarget.from_model(
        tiny_llama(1, vocab_size=len(target.tokenizer)), tokenizer=target.tokenizer
    )
    with pytest.raises(drafters.ConfigError, match=r"^target\.weights: .* but the target that was given .*to null"):
        drafters.fit(composed(world, "name=other"), other, chats)
    with pytest.raises(drafters.DataError, match=r"^data\.validation: no conversation is held out"):
        drafters.fit(composed(world, "name=other", "target.weights=null", "data.validation=0"), other, chats)


def test_settings_that_are_none_are_one_error(target, chats):
    for call in (drafters.load_target, lambda settings: drafters.fit(settings, target, chats)):
        with pytest.raises(drafters.ConfigError, match=r"^settings: got list"):
            call([])
        with pytest.raises(drafters.ConfigError, match=r": missing; compose the settings"):
            call({})
    with pytest.raises(drafters.ConfigError, match=r"^target: got 'smollm2'; accepted: settings"):
        drafters.load_target({"target": "smollm2"})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("Why?", r"^prompts: got str; accepted: a list"),
        ([""], None),
        ([[]], r"^prompt 0: it has no messages"),
        (["x", [{"role": "user"}]], r"^prompt 1, message 0: content: got NoneType"),
    ],
)
def test_wrong_prompts_are_one_error(target, prompts, message):
    config = drafters.DecodeConfig(max_new_tokens=2)
    if message is None:
        assert len(drafters.generate(target, None, prompts, config).generations[0].tokens) == 2
        return
    with pytest.raises(drafters.DataError, match=message):
        drafters.generate(target, None, prompts, config)


def test_names_are_there_and_load_nothing_before():
    for name in drafters.__all__:
        assert getattr(drafters, name).__module__.startswith("drafters."), name
    assert set(drafters.__all__) < set(dir(drafters))
    assert sorted(name for names in drafters._PLACES.values() for name in names) == drafters.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(drafters, "nothing")  # noqa: B009
    code = "import drafters, sys; print(len({'torch', 'lightning', 'transformers', 'omegaconf'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(ROOT), capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
