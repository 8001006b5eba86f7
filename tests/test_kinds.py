# Settings of a wrong kind: none is accepted in silence, whoever reads it: a dataclass, Lightning, a logger, the target.

import pytest
from omegaconf import DictConfig, OmegaConf

import train
from data.plan import plan_capture
from drafters.config import suited, typed
from drafters.door import TARGET_KEYS, TargetConfig, check_target
from drafters.errors import CheckpointError, ConfigError
from drafters.target_loading import check_placement
from drafters.weights import load_tokenizer
from tests.door_world import settings, train_settings

GROUPS = ["logger=csv", "logger=wandb", "logger=tensorboard", "profiler=torch", "data=online", "trainer=fsdp"]


def leaves(node, place=""):
    """(dotted key, value) of all settings that are no groups; not of the sources, whose columns are anybody's."""
    for name in node:
        key = f"{place}.{name}" if place else name
        value = OmegaConf.select(node, name)
        if isinstance(value, DictConfig) and len(value):
            yield from leaves(value, key)
        elif not key.startswith("source."):
            yield key, value


@pytest.fixture(scope="module")
def switches(tmp_path_factory):
    """Every setting of a training that is true or false, by the group that has it."""
    world = tmp_path_factory.mktemp("world")
    found = {}
    for group in GROUPS:
        for key, value in leaves(train_settings(world, group)):
            if isinstance(value, bool):
                found.setdefault(key, group)
    return world, found


def test_a_switch_is_true_or_false(switches):
    world, found = switches
    assert {"logger.log_drafter", "profiler.record_shapes", "trainer.compile", "resume", "drafter.confidence"} <= {
        *found
    }
    for key, group in found.items():
        cfg = train_settings(world, group)
        OmegaConf.update(cfg, key, 7, force_add=True)
        with pytest.raises(ConfigError, match=rf"^{key}: got '?7'?; accepted: .*(true|True|false|False)"):
            train.read_plan(cfg)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("trainer.log_every_n_steps=often", r"^trainer\.log_every_n_steps: got 'often'; accepted: a number above 0"),
        ("trainer.num_sanity_val_steps=x", r"^trainer\.num_sanity_val_steps: got 'x'; accepted: a whole number, null"),
        ("trainer.limit_val_batches=x", r"^trainer\.limit_val_batches: got 'x'; accepted: a whole number, a number"),
        ("logger.flush_logs_every_n_steps=x", r"^logger\.flush_logs_every_n_steps: got 'x'; accepted: a whole number"),
        ("cache.codec=foo", r"^cache\.codec: got 'foo'; accepted: "),
        ("target.tp_plan=foo", r"^target\.tp_plan: got 'foo'; accepted: null, auto"),
        ("target.device_map=foo", r"^target\.device_map: got 'foo'; accepted: null, auto, or a device"),
        ("target.device_map=", r"^target\.device_map: got ''; accepted: null, auto"),
        ("target.sha256=abc", r"^target\.sha256: got 'abc'; accepted: 64 hexadecimal digits"),
        ("target.layer_ids=all", r"^target\.layer_ids: got 'all'"),
        ("device=true", r"^device: got True; accepted: text, null"),
        ("warm_start=", r"^warm_start: got ''; accepted: text, or null"),
        ("name=[3]", r"^name: got "),
        ("optim.betas=[0.9]", r"^optim\.betas: got \[0\.9\]; accepted: 2 values"),
        ("drafter.loss=''", r"^drafter\.loss: got ''; expected settings by name"),
        ("drafter._target_=7", r"^drafter\._target_: '7' is not a dotted path"),
    ],
)
def test_a_setting_of_another_kind_is_refused(tmp_path, override, match):
    with pytest.raises(ConfigError, match=match):
        train.read_plan(train_settings(tmp_path, "data=online", override))


@pytest.mark.parametrize("name", ["tp_plan", "device_map"])
def test_a_plan_refuses_what_the_capture_would(name):
    with pytest.raises(ConfigError, match=rf"^target\.{name}: got 'foo'; accepted: null, auto"):
        plan_capture(settings("capture", f"target.{name}=foo"))


def test_the_settings_of_a_target_stand_once():
    assert set(TargetConfig.__dataclass_fields__) == set(TARGET_KEYS)
    with pytest.raises(ConfigError, match=r"^target\.weightz: unknown setting"):
        check_target({"weightz": "x"})


def test_devices_of_modules():
    for fine in (None, "auto", {"all": 0}, {"model.layers.0": "cuda:1", "lm_head": "disk", "model": "cpu"}):
        check_placement(fine, None)
    for wrong in ({}, {"all": "gpu"}, {"all": None}, {"all": True}, {"all": "meta"}, ["cpu"], 7):
        with pytest.raises(ConfigError, match=r"^target\.device_map(\.all)?: got"):
            check_placement(wrong, None)


def make(*, text: str, count: int = 1, share: float | None = None, other: list[int] | None = None) -> None:
    """What a node names."""


def test_values_follow_the_signature_of_what_they_make():
    node = {"_target_": f"{__name__}.make"}
    assert suited({**node, "text": 7, "share": 1, "other": "x"}, key="k") == {
        **node,
        "text": "7",
        "share": 1,
        "other": "x",
    }
    for name, value in (("count", True), ("count", 1.5), ("share", "x"), ("text", None), ("count", None)):
        with pytest.raises(ConfigError, match=rf"^k\.{name}: got {value!r}; accepted: "):
            suited({**node, name: value}, key="k")


def test_a_target_without_a_tokenizer_says_what_is_missing(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"one of: \(1\) .*\(2\) .*\(3\) .*\.") as told:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(told.value)


def test_false_is_no_text():
    with pytest.raises(ConfigError, match=r"^target\.dtype: got False; accepted: text, null"):
        typed(TargetConfig, {"weights": "x", "dtype": False}, key="target")
