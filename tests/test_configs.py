# Every YAML of conf/ composes, alone and in its door, and every `_target_` in it names something that takes what the
# YAML gives. Nothing is fetched.

import inspect
import os
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from data.engines.answers import RegenerateConfig
from data.sources import DataConfig
from drafters.cache_writer import CaptureConfig
from drafters.config import build_config, locate, to_plain, typed
from drafters.decoding.measure import MeasureConfig
from drafters.door import TARGET_KEYS
from drafters.errors import ConfigError
from drafters.losses import TERMS, LossWeights
from drafters.scheduling.schedulers import Scheduler
from drafters.training.plan import OWN
from evaluate import MEASURE, Choice, task_settings
from export import table
from train import read_plan

CONF = Path(__file__).resolve().parent.parent / "conf"
DOORS = sorted(path.stem for path in CONF.glob("*.yaml"))
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__")
# Groups of evaluate.py, of the export and of data.regenerate alone, and what is Hydra's own.
ELSEWHERE = ("engine", "hydra", "schedule", "task", "to")
OPTIONS = [
    (group, path.stem) for group in GROUPS if group not in ELSEWHERE for path in sorted((CONF / group).glob("*.yaml"))
]
# What has no default on purpose, and a value for it.
NEEDED = {
    ("door", "evaluate"): ["run=outputs/x"],
    ("door", "export"): ["run=outputs/x"],
    ("source", "jsonl"): ["source.path=a.jsonl"],
    ("source", "hub"): ["source.hub_id=a/b"],
}
# Baselines that evaluate.py measures.
UNTRAINED = {("drafter", "ngram"), ("drafter", "draft_model"), ("drafter", "layer_skip")}
# Groups whose nodes a dataclass without a `_target_` types.
TYPED = {"cache": CaptureConfig, "data": DataConfig, "loss": LossWeights}


def composed(door, *overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(door, [*NEEDED.get(("door", door), []), *overrides])


def test_the_groups_are_the_ones_tested_here():
    assert set(GROUPS) == {
        *("cache", "callbacks", "data", "drafter", "experiment", "logger", "loss", "optim", "profiler"),
        *("report", "source", "target", "trainer", *ELSEWHERE),
    }
    assert DOORS == ["capture", "doctor", "evaluate", "export", "fit", "import", "regenerate", "show", "train"]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_composes_and_resolves(door):
    plain = to_plain(composed(door))
    if door == "evaluate":
        assert typed(MeasureConfig, {name: plain[name] for name in MEASURE}, key="").length == "auto"
    elif door == "regenerate":
        typed(RegenerateConfig, {name: plain[name] for name in RegenerateConfig.__dataclass_fields__}, key="")


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_binds(group, option, monkeypatch):
    if option == "slurm":
        monkeypatch.setenv("SLURM_PROCID", "0")  # it is refused outside of srun
    cfg = composed("train", f"{group}={option}", *NEEDED.get((group, option), []))
    to_plain(cfg)
    if (group, option) in UNTRAINED:
        build_config(cfg.drafter, key="drafter")
        with pytest.raises(ConfigError, match=f"drafter: '{option}' has nothing to train; .*evaluate.py run={option}"):
            read_plan(cfg)
        return
    # The whole plan of a run is typed, whichever option was chosen.
    plan = read_plan(cfg)
    assert (plan.num_prompts > 0) == ((group, option) != ("report", "none"))
    node = cfg.get(group)
    if group in TYPED:
        typed(TYPED[group], node, key=group)
    elif group == "target":
        assert set(node) <= set(TARGET_KEYS)
        assert plan.cache.layer_ids == tuple(node.layer_ids)
    for key, inner in targets(cfg):
        bind(inner, key=key)


@pytest.mark.parametrize("task", sorted(path.stem for path in (CONF / "task").glob("*.yaml")))
def test_every_task_composes_and_binds(task):
    node = to_plain(composed("evaluate", f"task={task}"))["task"]
    assert node["name"] == task
    config = task_settings(node, Choice(run="outputs/x"))
    for name, scheduler in (node.get("schedules") or {}).items():
        assert isinstance(build_config(scheduler, key=name)[1], Scheduler)
    assert set(config.__dataclass_fields__) == set(node), "a setting that the YAML does not show"


@pytest.mark.parametrize("schedule", sorted(path.stem for path in (CONF / "schedule").glob("*.yaml")))
def test_every_schedule_composes_and_binds(schedule):
    node = to_plain(composed("evaluate", f"schedule={schedule}"))["schedule"]
    assert isinstance(build_config(node, key="schedule")[1], Scheduler)


@pytest.mark.parametrize("engine", sorted(path.stem for path in (CONF / "engine").glob("*.yaml")))
def test_every_engine_composes_and_binds(engine):
    node = to_plain(composed("regenerate", f"engine={engine}"))["engine"]
    kind, options = build_config(node, key="engine")
    assert options == kind(), "a default that the YAML has otherwise"
    assert {"_target_", *kind.__dataclass_fields__} == set(node), "a setting that the YAML does not show"


@pytest.mark.parametrize("to", table.FORMATS)
def test_every_format_composes_and_binds(to):
    node = to_plain(composed("export", f"to={to}"))["to"]
    kind, options = build_config(node, key="to")
    assert options == kind(), "a default that the YAML has otherwise"
    assert {"_target_", *kind.__dataclass_fields__} == set(node), "a setting that the YAML does not show"
    assert node["_target_"] == f"export.to_{to}.Options"
    assert {path.stem for path in (CONF / "to").glob("*.yaml")} == set(table.FORMATS)


# Weights that the comments of conf/loss/*.yaml and ALGORITHMS name; those not named are 0.
LOSSES = {
    "ce": {"ce": 1.0},
    "dspark": {"ce": 0.1, "l1": 0.9},
    "kl": {"kl": 1.0},
    "l1": {"l1": 1.0},
    "l1_kl": {"l1": 1.0, "kl": 0.3},
    "lk": {"lk": 1.0},
}


def test_the_losses_are_the_ones_tested_here():
    assert sorted(LOSSES) == [option for group, option in OPTIONS if group == "loss"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_what_its_comment_says(name):
    loss = typed(LossWeights, composed("train", f"loss={name}").loss, key="loss")
    assert {term: getattr(loss, term) for term in TERMS} == {**dict.fromkeys(TERMS, 0.0), **LOSSES[name]}
    # The paper's confidence weight and, for seven drafts, its decay; the default's decay was tuned for five.
    assert (loss.confidence, loss.gamma) == (1.0, 2.0 if name == "l1_kl" else 4.0)
    assert loss.at(0.0) is loss


def test_a_schedule_from_the_command_line():
    overrides = ["loss.first={ce: 1.0, l1: 0}", "loss.first_share=0.25"]
    weights = typed(LossWeights, composed("train", "loss=l1_kl", *overrides).loss, key="loss")
    begin = weights.at(0.0)
    assert [(now.ce, now.l1, now.kl) for now in (begin, weights.at(0.25))] == [(1.0, 0.0, 0.3), (0.0, 1.0, 0.3)]


def targets(node, key=""):
    """(dotted key, node) of every node with a `_target_`."""
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield key, node
        for name in node:
            yield from targets(node[name], f"{key}.{name}".strip("."))


def bind(node, *, key):
    """Fails unless the node's target takes the node's settings."""
    plain = to_plain(node)
    path = plain.pop("_target_")
    assert not path.startswith("_"), key
    found = locate(path)
    if inspect.isclass(found) and (is_dataclass(found) or hasattr(found, "Config")):
        build_config(node, key=key)
    else:
        own = ("_partial_", *(OWN if key == "trainer" else ()))
        inspect.signature(found).bind_partial(**{name: value for name, value in plain.items() if name not in own})


def test_experiments_win_over_the_defaults():
    names = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
    for name in names:
        cfg = composed("train", f"experiment={name}")
        own = OmegaConf.load(CONF / "experiment" / f"{name}.yaml")
        own.pop("defaults", None)
        assert OmegaConf.merge(cfg, own) == cfg
        assert cfg.run_dir == f"outputs/{cfg.name}"


def test_a_command_line_wins_over_an_experiment():
    assert composed("train", "experiment=ci", "optim.max_steps=7").optim.max_steps == 7


def test_evaluate_takes_the_run_s_target_or_another():
    assert composed("evaluate").get("target") is None
    assert composed("evaluate", "target=qwen3_8b").target.name == "qwen3_8b"


@pytest.mark.parametrize(
    ("kind", "cls"), [("csv", CSVLogger), ("tensorboard", TensorBoardLogger), ("wandb", WandbLogger)]
)
def test_loggers_work_without_an_account(tmp_path, monkeypatch, kind, cls):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = instantiate(composed("train", f"logger={kind}", f"outputs={tmp_path}", "name=logged").logger)
    assert isinstance(logger, cls)
    try:
        logger.log_metrics({"train/loss": 1.5}, step=1)
        if kind == "wandb":
            assert logger.experiment.settings._offline
    finally:
        logger.finalize("success")
        if kind == "wandb":
            logger.experiment.finish()
    written = [path for path in (tmp_path / "logged").rglob("*") if path.is_file()]
    names = {"csv": "metrics.csv", "tensorboard": "events.out", "wandb": ".wandb"}
    assert any(names[kind] in path.name and path.stat().st_size for path in written), written


@pytest.mark.parametrize("override", ["logger=none", "~logger"])
def test_a_run_without_a_logger(override):
    assert not composed("train", override).get("logger")
