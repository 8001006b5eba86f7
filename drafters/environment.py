# What a run was computed with: versions, processor, GPUs, the code's commit, the command. It is kept beside the
# results, so that two runs that differ can be told apart later. Secrets of the command line are left out.

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from drafters import __version__
from drafters.checkpoint import write_whole
from drafters.errors import CheckpointError
from drafters.storage_remote import without_secrets

__all__ = [
    "ENVIRONMENT",
    "REPEATING",
    "command_line",
    "differences",
    "environment",
    "read_environments",
    "record_environment",
]

ENVIRONMENT = "environment.json"
CHECKOUT = Path(__file__).resolve().parents[1]
# Those whose versions may change a number; `installed` lists all.
PACKAGES = ("torch", "lightning", "transformers", "numpy", "safetensors", "gguf", "datasets", "deepspeed", "triton")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")  # kernels are chosen by them
GIT_SECONDS = 20
REPEATING = ["--config-name", "rerun"]  # what train.py adds to a command with run=, for Hydra
HIDDEN = "***"
NAMES = r"api_?key|access_?key|secret(?:_?key)?|password|passwd|token|credentials?|signature|sig"
SECRETS = re.compile(rf"([\w.+@-]*(?:{NAMES})['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^,}}&\s]+)", re.IGNORECASE)
NO_SECRET = "mask_token"
TOKENS = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_)[\w-]{12,}")


def command_line(words: Sequence[str] | None = None) -> str:
    """The command of this process (or `words`), with values that look like secrets replaced."""
    words = [*(sys.argv if words is None else words)]
    if words[1:3] == REPEATING:
        del words[1:3]
    shown = [_without_secrets(word) for word in words[1:]]
    return " ".join([Path(words[0]).name, *(word if HIDDEN in word else shlex.quote(word) for word in shown)])


def _without_secrets(word: str) -> str:
    def hide(found: re.Match[str]) -> str:
        return found[0] if NO_SECRET in found[1] else found[1] + HIDDEN

    return without_secrets(TOKENS.sub(HIDDEN, SECRETS.sub(hide, word)))


def environment(code: type | None = None) -> dict[str, Any]:
    """What this process computes with; `code` is a class that may lie outside of this package, whose file is hashed."""
    found = {**_machine(), "threads": torch.get_num_threads(), "code": {**_code()}}
    module = sys.modules.get(code.__module__) if code is not None else None
    if code is not None and module is not None and code.__module__.partition(".")[0] != "drafters":
        path = Path(str(module.__file__))
        found["code"] |= {"drafter": code.__module__, "drafter_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return found


def record_environment(path: Path, facts: Mapping[str, Any], *, code: type | None = None) -> str:
    """Append this command, `facts` and the environment to the list in the file at `path`; gives the hash of the
    environment. Raises CheckpointError when the file is damaged or cannot be written."""
    now = environment(code)
    digest = hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        **facts,
        "sha256": digest,
        "environment": now,
    }
    entries = [*read_environments(path), entry]
    write_whole(path, lambda temp: temp.write_text(json.dumps({"schema": 1, "commands": entries}, indent=1) + "\n"))
    return digest


def read_environments(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of `record_environment`, oldest first; none where there is no file. Raises
    CheckpointError when it is damaged."""
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())["commands"]
        if not all(isinstance(one["environment"], dict) for one in found):
            raise TypeError("an entry has no environment")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"run: {path} is damaged ({error}); move it away, and the environment counts as not recorded"
        ) from error
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, what of two environments may make two runs differ: `torch 2.12.0 -> 2.13.0`."""
    pairs: list[tuple[str, Any, Any]] = [(name, before.get(name), now.get(name)) for name in ("python", "platform")]
    old, new = (one.get("packages", {}) for one in (before, now))
    pairs += [(name, old.get(name), new.get(name)) for name in PACKAGES]
    pairs += [("threads", before.get("threads"), now.get("threads"))]
    pairs += [("processor", _cpu_name(before), _cpu_name(now))]
    pairs += [("GPUs", _gpu_names(before), _gpu_names(now))]
    pairs += [("driver", before.get("nvidia_driver"), now.get("nvidia_driver"))]
    old, new = before.get("code", {}), now.get("code", {})
    names = {
        "version": "drafters",
        "commit": "commit",
        "diff_sha256": "uncommitted changes",
        "drafter_sha256": "drafter",
    }
    pairs += [(shown, old.get(name), new.get(name)) for name, shown in names.items()]
    return [f"{name} {_short(then)} -> {_short(this)}" for name, then, this in pairs if then != this]


def _short(value: Any) -> str:
    text = "none" if value is None or value == "" else str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{40,64}", text) else text


def _cpu_name(found: Mapping[str, Any]) -> str:
    cpu = found.get("cpu", {})
    return f"{cpu.get('model')} ({' '.join(cpu.get('features', [])) or 'no vector units'})"


def _gpu_names(found: Mapping[str, Any]) -> str:
    return ", ".join(found.get("gpus", []))


@cache
def _machine() -> dict[str, Any]:
    """What does not change while a process runs."""
    installed = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"]}
    has_gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_gpu else [],
        "cuda": torch.version.cuda if has_gpu else None,
        "nvidia_driver": _driver(),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "installed": [f"{name}=={installed[name]}" for name in sorted(installed, key=str.lower)],
    }


def _cpu() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    own = set(flags[1].split()) if flags else set()
    return {
        "model": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "features": [name for name in CPU_FEATURES if name in own],
    }


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None


@cache
def _code(checkout: Path = CHECKOUT) -> dict[str, Any]:
    """The version, and of a git checkout its commit, the files that were changed since, and a hash of their changes."""
    found: dict[str, Any] = {"version": __version__, "commit": None}
    # An installed package may lie in an environment inside of somebody's own repository.
    top = _git(checkout, "rev-parse", "--show-toplevel")
    commit = _git(checkout, "rev-parse", "HEAD")
    if top is None or commit is None or Path(os.fsdecode(top).strip()) != checkout:
        return {**found, "note": "not in a git checkout: an installed package, or files without their history"}
    changed = (_git(checkout, "status", "--porcelain", "-z") or b"").split(b"\0")
    diff = hashlib.sha256(_git(checkout, "diff", "HEAD", "--binary") or b"")
    new = _git(checkout, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py", "*.yaml") or b""
    for name in filter(None, new.split(b"\0")):
        diff.update(name + b"\0" + _bytes_of(checkout / os.fsdecode(name)))
    is_dirty = any(changed)
    return {
        **found,
        "commit": os.fsdecode(commit).strip(),
        "dirty": is_dirty,
        "changed": [os.fsdecode(line) for line in changed if line],
        "diff_sha256": diff.hexdigest() if is_dirty else None,
    }


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a link to nowhere, or gone by now
        return b""


def _git(folder: Path, *words: str) -> bytes | None:
    """What git says; None where there is no git, no repository or no commit."""
    command = ["git", "-C", str(folder), *words]
    own = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, env=own, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
