# From a trained drafter to a folder that is whole, checked and described: written beside its place, read back, decoded
# with, and only then given its name. What fails leaves nothing behind.

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafters.checkpoint import load_drafter, replace_path, write_error
from drafters.decoding.render import Section
from drafters.decoding.report import plain
from drafters.errors import CheckpointError, ConfigError
from drafters.heads.base import Drafter
from export.card import CardFacts, card_text
from export.formats import Format, format_of
from export.kept import AFTER, BEFORE, Cost, Kept, cost_section, kept_section
from export.selfcheck import check_tensors, check_values
from export.source import Source

__all__ = ["Exported", "Plan", "export_drafter", "push_folder"]

REPORT, CARD = "export.json", "README.md"
# Decodes with the drafter as it was and as it came back: what is kept by source, and milliseconds by name.
Measure = Callable[[Drafter, Drafter], tuple[list[Kept], dict[str, tuple[float, float]]]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for. `options` is an instance of the `Options` of the format `to`; `base_model` (where the target
    comes from) and `license` are for the card."""

    to: str
    quant: str
    options: Any
    out: Path
    base_model: str
    license: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is known of an export. `worst_error`: the largest of a weight, relative to the largest of its tensor. `kept`
    and `costs` are empty where nothing was decoded."""

    num_tensors: int
    worst_error: float
    kept: list[Kept] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def sections(self) -> list[Section]:
        """Tables of what was measured."""
        return [kept_section(self.kept), cost_section(self.costs)] if self.kept else []


def export_drafter(source: Source, plan: Plan, measure: Measure | None) -> Exported:
    """Write, check and describe an export; without `measure` it is not decoded with. Raises ConfigError for what the
    format or its engines do not take, CheckpointError when a check fails or the disk does not take it; `plan.out` is
    then as it was before."""
    made, out = format_of(plan.to), plan.out
    made.refuse(source, plan.quant, options=plan.options)
    _check_place(out, overwrite=plan.overwrite)
    temp = out.with_name(f".{out.name}.export.tmp")
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        made.write(source, plan.quant, temp, options=plan.options)
        exported = _checked(made, source, plan, temp, measure)
        report = {"schema": 1, "to": plan.to, "quant": plan.quant, "options": asdict(plan.options), **asdict(exported)}
        (temp / REPORT).write_text(json.dumps(plain(report), indent=1, default=str) + "\n")
        (temp / CARD).write_text(_card(made, source, plan, exported), encoding="utf-8")
        replace_path(temp, out)
    except OSError as error:
        raise write_error(out, error) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return exported


def _check_place(out: Path, *, overwrite: bool) -> None:
    """Raises ConfigError where something lies that an export must not take the place of. What a crash in the middle of
    a replacement left gets its name back."""
    if not out.name:
        raise ConfigError(f"out: got '{out}'; accepted: a folder of its own, or null")
    old = out.with_name(f"{out.name}.old")
    if old.exists() and not (old / REPORT).is_file():
        raise ConfigError(f"out: {old} is there, and would be in the way; choose another folder, or move that one")
    if old.exists() and not out.exists():
        try:
            old.rename(out)
        except OSError as error:
            raise write_error(out, error) from error
    if not out.exists():
        return
    if not overwrite:
        raise ConfigError(f"out: {out} is there already; choose another folder, or overwrite=true")
    if not out.is_dir() or (not (out / REPORT).is_file() and any(out.iterdir())):
        raise ConfigError(
            f"out: {out} is no export (it has no {REPORT}), so overwrite=true does not take its place; choose another "
            "folder, or move that one"
        )


def _checked(made: Format, source: Source, plan: Plan, folder: Path, measure: Measure | None) -> Exported:
    """The export, compared with what it is of, and decoded with."""
    found = made.stored(folder)
    check_tensors(made.manifest(source, plan.quant, options=plan.options), found, where=plan.out)
    started = time.perf_counter()
    drafter = made.load(folder, source=source)
    load_s = time.perf_counter() - started
    if drafter is None:
        return Exported(num_tensors=len(found), worst_error=0.0)
    _, back = made.read(folder, spec=source.spec)
    bounds = made.bounds(source, plan.quant, options=plan.options)
    worst = check_values(source.tensors, back, bounds, where=plan.out)
    if measure is None:
        return Exported(num_tensors=len(found), worst_error=worst)
    started = time.perf_counter()
    before = load_drafter(source.folder)
    before_s = time.perf_counter() - started
    kept, times = measure(before, drafter)
    costs = {
        BEFORE: Cost(_weights_bytes(source.folder), before_s, *times[BEFORE]),
        AFTER: Cost(_new_bytes(folder, source), load_s, *times[AFTER]),
    }
    return Exported(num_tensors=len(found), worst_error=worst, kept=kept, costs=costs)


def _card(made: Format, source: Source, plan: Plan, exported: Exported) -> str:
    places = {"target": plan.base_model, "folder": plan.out.name}
    facts = CardFacts(
        to=plan.to,
        quant=plan.quant,
        base_model=plan.base_model,
        license=plan.license,
        sections=exported.sections,
        commands=made.commands(source, options=plan.options, **places),
        notes=made.notes(source, options=plan.options),
    )
    return card_text(source, facts)


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for suffix in ("safetensors", "gguf") for path in folder.rglob(f"*.{suffix}"))


def _new_bytes(folder: Path, source: Source) -> int:
    """Without the target's own weights, where a copy of them is part of the export."""
    size = _weights_bytes(folder)
    target = 0 if source.target_folder is None else _weights_bytes(source.target_folder)
    return size - target if size > target > 0 and (folder / "model.safetensors.index.json").exists() else size


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder to a model hub, making the repository where there is none; its address. Raises ConfigError for a
    name that is none, CheckpointError when the hub does not take it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ConfigError(f"push: got '{repo}'; accepted: org/name, or null")
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        # Settings of a run name places of this machine.
        info = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="A draft head", ignore_patterns=[".hydra/*"]
        )
    except HFValidationError as error:
        raise ConfigError(f"push: got '{repo}': {error}; accepted: org/name, or null") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"push: {repo}: {reason}; the export stays in {folder}: log in and push again") from error
    return str(info.commit_url)
