# The machine: versions, devices, memory, folders that can be written, the compiler.

import os
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    from data.doctor.case import Case
    from data.doctor.findings import Findings

__all__ = ["check", "check_folder", "check_memory", "check_versions"]

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "transformers", "lightning")
TIGHT = 0.7  # of the memory: what is left for the cache of a step, a drafter and other programs


def check(case: "Case") -> None:
    """All that can be told without the target."""
    from data.plan import states_root
    from drafters.errors import ConfigError
    from drafters.files import cache_root
    from drafters.storage import is_url
    from drafters.training.plan import how_computed

    findings = case.findings
    check_versions(findings, ROOT)
    check_devices(findings)
    check_folder(findings, "states", states_root(case.cache), "cache.root=")
    if case.cache.root and is_url(case.cache.root):
        findings.note("machine/states", f"the cache lies at {case.cache.root}; its room is not known from here")
    check_folder(findings, "weights", cache_root() / "weights", "the variable DRAFTERS_CACHE=")
    check_folder(findings, "outputs", case.run.folder if case.run else Path("outputs"), "outputs=")
    try:
        if how_computed(case.trainer).compile:
            findings.ok("machine/compiler", "trainer.compile is on, and torch finds a C++ compiler")
    except ConfigError as error:
        findings.problem("machine/compiler", str(error), "install g++ or clang, or trainer.compile=false")


def check_versions(findings: "Findings", root: Path) -> None:
    """Installed packages against the ranges of pyproject.toml (a problem) and the tested versions of constraints.txt
    (a note), both in `root`."""
    import platform

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    tested = [Requirement(line) for line in _lines(root / "constraints.txt")]
    if not Requirement(f"python{project['requires-python']}").specifier.contains(platform.python_version()):
        findings.problem(
            "machine/versions",
            f"python {platform.python_version()}, but {project['requires-python']} is needed",
            "make the environment anew with another python: make setup",
        )
    found: dict[str, Version] = {}
    for requirement in wanted:
        try:
            found[requirement.name] = Version(version(requirement.name))
        except PackageNotFoundError:
            findings.problem("machine/versions", f"{requirement.name} is not installed", "make setup")
            continue
        if not requirement.specifier.contains(found[requirement.name], prereleases=True):
            findings.problem(
                "machine/versions",
                f"{requirement.name} {found[requirement.name]}, but pyproject.toml asks for {requirement.specifier}",
                f"pip install -c constraints.txt '{requirement}'",
            )
    shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    findings.ok("machine/versions", f"python {platform.python_version()}, {shown}; {len(found)} packages looked at")
    other = [
        f"{one.name} {found[one.name]} ({one.specifier})"
        for one in tested
        if one.name in found and not one.specifier.contains(found[one.name], prereleases=True)
    ]
    if other:
        findings.note(
            "machine/versions",
            f"other than the tested versions of constraints.txt: {', '.join(other)}",
            "if something fails, pip install -c constraints.txt -e .",
        )


def _lines(path: Path) -> list[str]:
    """Requirements of a file, without comments."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line for raw in lines if (line := raw.partition("#")[0].strip())]


def check_devices(findings: "Findings") -> None:
    """GPUs, and the threads that torch takes."""
    import torch

    from data.plan import device_memory

    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    for gpu in gpus:
        name = torch.cuda.get_device_name(gpu)
        findings.ok("machine/devices", f"{gpu}: {name}, {device_memory(gpu) / 1e9:.0f} GB")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, memory = torch.get_num_threads(), device_memory(torch.device("cpu")) / 1e9
    found = f"{cores} cores, torch takes {threads} threads, {memory:.0f} GB of memory"
    if threads < cores and not gpus:
        findings.note("machine/devices", found, "faster with all cores, where nothing else needs them: OMP_NUM_THREADS")
    else:
        findings.ok("machine/devices", found)


def check_folder(findings: "Findings", what: str, folder: Path, setting: str) -> None:
    """Whether a folder can be written, or made where it is not there. Nothing is left behind."""
    try:
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        findings.problem(
            f"machine/{what}", f"{folder} cannot be written: {error.strerror}", f"choose another place: {setting}"
        )
        return
    findings.ok(f"machine/{what}", f"{folder} can be written")


def check_memory(case: "Case") -> bool:
    """The target's weights against the memory of its device; whether they fit."""
    import torch

    from data.plan import device_memory
    from drafters.door import pick_device

    assert case.outline is not None
    if case.node.get("device_map") is not None or case.node.get("tp_plan") is not None:
        case.findings.note("machine/memory", "the target is spread over devices (device_map, tp_plan): not added up")
        return True
    device = torch.device(pick_device(case.config.device))
    size, room = sum(one.nbytes for one in case.outline.model.parameters()), device_memory(device)
    found = f"the target's weights take {size / 1e9:.2f} GB of {room / 1e9:.1f} GB ({device})"
    if size > room:
        advice = "target.device_map=auto spreads the layers over GPUs, memory and disk; or capture on another machine"
        case.findings.problem("machine/memory", found, advice)
    elif size > TIGHT * room:
        case.findings.warning("machine/memory", f"{found}, more than {TIGHT:.0%}", "target.device_map=auto")
    else:
        case.findings.ok("machine/memory", found)
    return size <= room
