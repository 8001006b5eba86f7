# What is examined: the settings, typed, those of a run with what the command says over them, and what the rooms find
# and hand on. A wrong setting is an error of the command; whatever lies on a disk is examined.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.doctor.findings import Findings

if TYPE_CHECKING:
    from data.sources import DataConfig, SourceConfig
    from drafters.cache import HiddenCache
    from drafters.cache_config import CaptureConfig
    from drafters.chat import ChatEncoder, EncodeReport
    from drafters.runs import Run
    from drafters.target import FrozenTarget
    from drafters.types import Conversation, Example

__all__ = ["Case", "DoctorConfig", "read_case"]

PARTS = ("target", "source", "data", "cache", "trainer")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The settings of this door beside those of the target, the source, the data, the cache and the trainer."""

    run: str | None = None
    out: str | None = None
    device: str | None = None
    load_target: bool = True
    checksums: bool = True
    num_answers: int = 8
    max_new_tokens: int = 96
    example: bool = True

    def __post_init__(self) -> None:
        for name in ("run", "out"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}: got ''; accepted: a folder, or null")
        if self.num_answers < 0:
            raise ValueError(f"num_answers: got {self.num_answers}; accepted: 1 or more, or 0 for no measurement")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}; accepted: 1 or more")


@dataclass(kw_only=True)
class Case:
    """`outline` is the target without weights, `target` the loaded one; what could not be made stays None or empty."""

    config: DoctorConfig
    node: Mapping[str, Any]
    source: "SourceConfig"
    data: "DataConfig"
    cache: "CaptureConfig"
    trainer: Mapping[str, Any]
    run: "Run | None" = None
    findings: Findings = field(default_factory=Findings)
    outline: "FrozenTarget | None" = None
    target: "FrozenTarget | None" = None
    encoder: "ChatEncoder | None" = None
    conversations: "dict[str, list[Conversation]]" = field(default_factory=dict)
    splits: "dict[str, list[Example]]" = field(default_factory=dict)
    reports: "dict[str, EncodeReport]" = field(default_factory=dict)
    states: "HiddenCache | None" = None

    @property
    def has_outline(self) -> bool:
        """Whether the target's files could be read."""
        return self.outline is not None

    @property
    def has_target(self) -> bool:
        """Whether the target was loaded and checked itself."""
        return self.target is not None

    @property
    def examples(self) -> "list[Example]":
        """Those of all splits."""
        return [example for split in self.splits.values() for example in split]


def read_case(plain: Mapping[str, Any], overrides: Sequence[str]) -> Case:
    """The settings of the door; of a run those that it was begun with, but for what `overrides`, the words of the
    command, name. Raises ConfigError for a wrong setting, CheckpointError for a folder that is no run."""
    from data.sources import DataConfig, SourceConfig
    from drafters.cache_config import CaptureConfig
    from drafters.config import build_config, typed
    from drafters.door import check_target, pick_device
    from drafters.runs import open_run

    names = DoctorConfig.__dataclass_fields__
    config = typed(DoctorConfig, {name: plain[name] for name in names}, key="")
    run, nodes = None, {name: plain[name] for name in PARTS}
    if config.run is not None:
        run, settings = open_run(Path(config.run).expanduser())
        nodes = overlaid(_of_run(run, settings, nodes), nodes, overrides)
    check_target(nodes["target"])
    pick_device(config.device)
    return Case(
        config=config,
        node=nodes["target"],
        source=build_config(nodes["source"], key="source", base=SourceConfig)[1],
        data=typed(DataConfig, nodes["data"], key="data"),
        cache=typed(CaptureConfig, nodes["cache"], key="cache"),
        trainer=nodes["trainer"],
        run=run,
    )


def _of_run(run: "Run", settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, with relative paths meant from the folder that it was begun in."""
    from data.sources import SourceConfig
    from drafters.config import typed
    from drafters.contestants import Entry, target_node
    from drafters.storage import is_url

    nodes = {name: settings.get(name) or defaults[name] for name in PARTS}
    cwd = settings["cwd"]
    nodes["target"] = dict(target_node([Entry(name=run.folder.name, settings=settings, run=run)], None))
    source = dict(nodes["source"])
    if source.get("path") is not None:
        source["path"] = typed(SourceConfig, source, key="source").seen_from(cwd).path
    nodes["source"] = source
    root = nodes["cache"].get("root")
    if root and not is_url(root):
        nodes["cache"] = {**nodes["cache"], "root": str(Path(cwd, Path(root).expanduser()))}
    return nodes


def overlaid(nodes: Mapping[str, Any], given: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`nodes` with the values that `overrides` name, which stand in `given`: `target=x` replaces a node, and
    `target.dtype=x` one of its settings."""
    found = {name: dict(node) for name, node in nodes.items()}
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        name, *inner = key.split(".")
        if name not in found:
            continue
        if not inner:
            found[name] = dict(given[name])
            continue
        *path, last = inner
        into, value = found[name], given[name]
        for part in path:
            into[part] = dict(into.get(part) or {})
            into, value = into[part], value.get(part) or {}
        if last in value:
            into[last] = value[last]
        else:
            into.pop(last, None)
    return found
