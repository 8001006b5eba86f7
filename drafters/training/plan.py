# What a run was asked for, typed before anything is fetched or written, so that a wrong setting costs nothing. What has
# to fit the target, the conversations or the cache is checked once these are there. Objects that YAML instantiates (the
# Trainer, the logger) are built at the door, which knows hydra; what they may be is said here.

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from drafters.cache_writer import CaptureConfig
from drafters.computing import Computing
from drafters.config import build_config, typed
from drafters.decoding.measure import MeasureConfig
from drafters.door import check_target
from drafters.errors import ConfigError
from drafters.heads.base import Drafter

if TYPE_CHECKING:
    from drafters.training.callbacks import CallbackConfig
    from drafters.training.optim import OptimConfig
    from drafters.training.profiling import ProfilerConfig

__all__ = ["OWN", "Plan", "check_trainer", "how_computed", "one_line", "read_plan"]

# Settings of Lightning's Trainer that are decided elsewhere: the value they keep, and where to turn.
DECIDED = {
    "max_steps": (-1, "optim.max_steps or optim.minutes is the length of a run"),
    "max_epochs": (-1, "optim.max_steps or optim.minutes is the length of a run"),
    "max_time": (None, "optim.minutes is the length of a run"),
    "accelerator": ("auto", "device= says where a run computes"),
    "precision": ("32-true", "optim.precision says what products run in"),
    "deterministic": (None, "deterministic=true, without trainer., decides it"),
}


OWN = ("compile", "activation_checkpointing")  # settings of `trainer` that are not of Lightning's Trainer


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run that belong to no group. `resume`: whether to go on in a folder that was begun with other
    settings. `warm_start`: a run to begin from. `run`: one to repeat. `seed`: of training alone."""

    name: str
    outputs: str
    resume: bool = False
    run: str | None = None
    warm_start: str | None = None
    device: str | None = None
    seed: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(
                f"name: got '{self.name}'; accepted: the name of a folder, since a run lies in outputs/<name>"
            )
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}; accepted: 0 to {2**32 - 1}, or null for data.seed")
        for key in ("outputs", "warm_start", "device"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: got ''; accepted: text" + (", or null" if key != "outputs" else ""))


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What the report is measured on; 0: there is none."""

    num_prompts: int

    def __post_init__(self) -> None:
        if self.num_prompts < 0:
            raise ValueError(f"num_prompts: got {self.num_prompts}; accepted: 1 or more, or 0 for no measurement")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run. `seed` is that of the weights, the order of samples and the anchors. `source` and `data`
    have the types of the leaf that reads conversations, `logger` is one of Lightning, or False for none."""

    name: str
    source: Any
    data: Any
    cache: CaptureConfig
    drafter: tuple[type, Any]
    optim: "OptimConfig"
    callbacks: "CallbackConfig"
    report: MeasureConfig
    num_prompts: int
    resume: bool
    warm_start: str | None
    seed: int
    deterministic: bool
    logger: Any
    profiler: "ProfilerConfig | None" = None

    @property
    def decodes(self) -> bool:
        """Whether the target generates text, while the run trains or at its end."""
        return self.num_prompts > 0 or self.callbacks.probe_every_n_steps is not None


def read_plan(settings: Mapping[str, Any], *, data: type, logger: Any) -> Plan:
    """The plan of plain `settings`; `data` is the dataclass that types their `data`. Raises ConfigError for the first
    setting that is unknown or wrong."""
    run = typed(
        RunSettings, {one.name: settings[one.name] for one in fields(RunSettings) if one.name in settings}, key=""
    )
    check_target(settings["target"])
    measured = dict(settings["report"])
    held_out = {"num_prompts": measured.pop("num_prompts", "???")}
    drafter = build_config(settings["drafter"], key="drafter")
    if issubclass(drafter[0], Drafter) and not drafter[0].trains(drafter[1]):
        raise ConfigError(
            f"drafter: '{drafter[1].name}' has nothing to train; measure it with evaluate.py run={drafter[1].name} "
            "target=NAME, or beside a run with compare="
        )
    profiler = settings.get("profiler")
    sampled = typed(data, settings["data"], key="data")
    if run.deterministic and settings["trainer"].get("benchmark"):
        raise ConfigError(
            "trainer.benchmark: got true with deterministic=true, which takes fixed kernels; leave one out"
        )
    return Plan(
        name=run.name,
        source=build_config(settings["source"], key="source")[1],
        data=sampled,
        cache=typed(CaptureConfig, settings["cache"], key="cache"),
        drafter=drafter,
        optim=build_config(settings["optim"], key="optim")[1],
        callbacks=build_config(settings["callbacks"], key="callbacks")[1],
        num_prompts=typed(HeldOut, held_out, key="report").num_prompts,
        report=typed(MeasureConfig, measured, key="report"),
        resume=run.resume,
        warm_start=run.warm_start,
        seed=sampled.seed if run.seed is None else run.seed,
        deterministic=run.deterministic,
        logger=logger,
        profiler=build_config(profiler, key="profiler")[1] if profiler else None,
    )


def check_trainer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's Trainer keeps whatever its `settings`. Raises ConfigError where they say otherwise."""
    for name, (value, reason) in DECIDED.items():
        if settings.get(name, value) != value:
            raise ConfigError(f"trainer.{name}: got {settings[name]!r}; accepted: {value}, since {reason}")
    for name in ("val_check_interval", "log_every_n_steps", "num_nodes"):
        value = settings.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"trainer.{name}: got {value!r}; accepted: a number above 0")
    window = settings.get("accumulate_grad_batches", 1)
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"trainer.accumulate_grad_batches: got {window!r}; accepted: a number of batches, 1 or more")
    return {name: value for name, (value, _) in DECIDED.items()}


def how_computed(settings: Mapping[str, Any]) -> Computing:
    """How draft layers are computed, of the trainer's `settings`. Raises ConfigError."""
    given = {name: settings.get(name, False) for name in OWN}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigError(f"trainer.{name}: got {value!r}; accepted: true, false")
    if given["compile"]:
        _check_compiler()
    return Computing(
        compile=given["compile"], compile_loss=given["compile"], recompute=given["activation_checkpointing"]
    )


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.compile: got True, but torch finds no C++ compiler ({one_line(error)}); install g++ or clang, or "
            "name it by CXX=; or set trainer.compile=false"
        ) from error


def one_line(error: Exception) -> str:
    """The text of a library's error, which may come on several lines."""
    return " ".join(str(error).split())
