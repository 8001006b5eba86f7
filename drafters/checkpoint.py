# The one artefact that training hands on: a folder `drafter/` = config.json + model.safetensors. Never pickle. The
# folder appears whole or not at all, and loading it checks bytes, names, shapes and the target it was trained for.

import errno
import json
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import drafters
from drafters.config import locate, typed
from drafters.errors import CheckpointError, ConfigError
from drafters.files import file_sha256, flush, save_tensors
from drafters.heads.base import Drafter
from drafters.packed.block import Block
from drafters.packed.load import load_packed
from drafters.plain_json import parse, sealed, unsealed
from drafters.spec import TargetSpec
from drafters.system_errors import advice

__all__ = [
    "WHOLE",
    "drafter_of_checkpoint",
    "is_packed",
    "load_drafter",
    "provenance",
    "read_config",
    "replace_path",
    "save_drafter",
    "write_error",
    "write_whole",
]

SCHEMA = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# What torch says of a checkpoint that is damaged, or that holds more than tensors: that is never run.
DAMAGED = (
    *(OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError, OverflowError),
)
WHOLE = "drafter.safetensors"  # beside the parts of a training checkpoint that is a folder
# What must agree even where another target is allowed: the drafter's own sizes follow from these.
SIZES = ("hidden_size", "num_layers", "vocab_size", "embed_scale", "logit_scale", "logit_softcap")


def save_drafter(
    drafter: Drafter, folder: Path | str, *, spec: TargetSpec, provenance: Mapping[str, Any] | None = None
) -> Path:
    """Writes `drafter` (its state dict, buffers such as `vocab.d2t` included) to `folder`, replacing it atomically.

    `spec` is the target's; `provenance` any JSON-able facts about the run. Raises CheckpointError when it cannot be
    written; what was there before stays.
    """
    folder = Path(folder)
    temp = _beside(folder, "tmp")
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in drafter.state_dict().items()}
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        save_tensors(tensors, temp / WEIGHTS)
        config = {
            "schema": SCHEMA,
            "drafters_version": drafters.__version__,
            "drafter": {"_target_": _class_path(drafter), **asdict(drafter.config)},
            "target": spec.to_dict(),
            "draft_vocab_size": tensors["vocab.d2t"].numel() if "vocab.d2t" in tensors else None,
            "weights": {"file": WEIGHTS, "sha256": file_sha256(temp / WEIGHTS)},
            "provenance": dict(provenance or {}),
        }
        (temp / CONFIG).write_text(json.dumps(sealed(config), indent=2) + "\n")
        replace_path(temp, folder)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        raise write_error(folder, error) from error
    return folder


def load_drafter(folder: Path | str, *, spec: TargetSpec | None = None, allow_other_target: bool = False) -> Drafter:
    """The drafter of a folder, float32 on the CPU.

    `spec` is the target it shall draft for; None trusts the stored one (export). Raises CheckpointError when a file is
    missing or damaged, the class is unknown, a tensor is missing, unexpected or of another shape, or the target is not
    the one it was trained for. `allow_other_target` accepts other weights (a fine-tune) of the same sizes.
    """
    folder = _present(Path(folder))
    config = read_config(folder)
    try:
        stored = TargetSpec.from_dict(config["target"])
    except CheckpointError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    if spec is not None:
        _check_target(folder, stored, spec, allow_other_target)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{folder}: no {WEIGHTS}; give the `drafter` folder of a run")
    digest = file_sha256(weights)
    if digest != config["weights"]["sha256"]:
        if is_packed(config):
            Block.open(weights).check()  # tells which tensor is damaged
        raise CheckpointError(
            f"{weights}: sha256 is {digest}, {CONFIG} says {config['weights']['sha256']}; "
            "the file is damaged or from another run: copy the folder again"
        )
    if is_packed(config):
        own_rows = spec is None or spec.weights_hash == stored.weights_hash
        return load_packed(weights, partial(_construct, folder, config["drafter"], spec or stored), own_rows=own_rows)
    try:
        tensors = load_file(weights)
    except SafetensorError as error:  # its checksum is right
        raise CheckpointError(
            f"{weights}: is no safetensors file: {error}; train or export the drafter again"
        ) from error
    drafter = _construct(folder, config["drafter"], spec or stored, tensors)
    try:
        drafter.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{weights}: does not fit {type(drafter).__name__}: {error}") from error
    return drafter.eval()


def drafter_of_checkpoint(path: Path, cls: type[Drafter], config: Any, spec: TargetSpec) -> Drafter:
    """The drafter of a training checkpoint, its draft vocabulary included. Of a checkpoint in parts, a folder, it is
    the file WHOLE there. Raises CheckpointError when the file is damaged or holds a drafter of another shape."""
    try:
        if path.is_dir():
            state = load_file(path / WHOLE)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        prefix = "drafter."
        tensors = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    except DAMAGED as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if found := re.search(r"global:? ([\w.]+)", str(error), re.IGNORECASE):
            reason = f"it names {found[1]}, which would run code; tensors and numbers alone are read"
        raise CheckpointError(
            f"resume: {path} is damaged: {reason}; remove it to start anew, or choose another name="
        ) from error
    drafter = cls.from_tensors(config, spec, tensors)
    try:
        drafter.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"resume: {path} does not fit the settings: {reason}; choose another name=") from error
    return drafter


def read_config(folder: Path | str) -> dict[str, Any]:
    """The parsed config.json of a `drafter` folder. Raises CheckpointError when it is missing, malformed, of a schema
    that this version does not read, or not as it was written."""
    path = _present(Path(folder)) / CONFIG
    try:
        config = parse(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; give the `drafter` folder of a run") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; copy the folder again") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); the file is damaged") from error
    schema = config.get("schema") if isinstance(config, dict) else None
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: schema is {schema!r}; this version reads {SCHEMA}")
    missing = [key for key in ("drafter", "target", "weights", "provenance") if not isinstance(config.get(key), dict)]
    if missing:
        raise CheckpointError(f"{path}: no '{missing[0]}' section; the file is damaged")
    if "sha256" not in config["weights"]:
        raise CheckpointError(f"{path}: no 'sha256' in its 'weights' section; the file is damaged")
    try:
        return unsealed(config)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}: copy the folder again, or remove the key 'checksum' to take it as it stands"
        ) from error


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether the weights of a config, as `read_config` gives it, are one block of rounded ones."""
    return bool(config["weights"].get("packed", False))


def provenance(folder: Path | str) -> dict[str, Any]:
    """What a report says of the drafter in `folder`: its class, the hash of its weights, how it was trained."""
    config = read_config(folder)
    facts = {"class": config["drafter"]["_target_"], "sha256": config["weights"]["sha256"]}
    return {**config["provenance"], **facts}


def replace_path(temp: Path, final: Path) -> None:
    """Moves a finished file or folder onto `final` so that a crash leaves the old or the new one, on disk.

    Files are replaced in one step. A folder needs two: between them only `<final>.old` is there, which readers here
    fall back to.
    """
    for path in [temp, *temp.rglob("*")]:
        flush(path)
    if final.is_dir():
        old = _beside(final, "old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temp.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temp.replace(final)
        shutil.rmtree(_beside(final, "old"), ignore_errors=True)
    flush(final.parent)


def write_whole(path: Path, write: Callable[[Path], Any], *, make_folder: bool = True) -> Path:
    """A file that appears whole or not at all: `write` fills one beside it, which then takes its place. Raises
    CheckpointError when the disk does not take it; what was there before stays."""
    temp = _beside(path, "tmp")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write(temp)
        replace_path(temp, path)
    except OSError as error:
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        raise write_error(path, error) from error
    return path


def write_error(path: Path, error: OSError) -> CheckpointError:
    """What a user reads when `path` could not be written."""
    reason = "no space left on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    known = advice(error)
    step = "" if known is None else f"; {known}"
    return CheckpointError(f"{path}: cannot be written: {reason}; what was saved there before is unchanged{step}")


def _construct(folder: Path, node: dict[str, Any], spec: TargetSpec, tensors: Mapping[str, torch.Tensor]) -> Drafter:
    key = f"{folder / CONFIG}: drafter"
    try:
        cls: Any = locate(str(node.get("_target_", "")), key=f"{key}._target_")
        is_drafter = isinstance(cls, type) and issubclass(cls, Drafter)
        if not is_drafter:
            raise CheckpointError(
                f"{key}._target_: '{node['_target_']}' is not a Drafter class; accepted: one of heads.base.Drafter"
            )
        drafter: Drafter = cls.from_tensors(typed(cls.Config, node, key=key), spec, tensors)
        return drafter
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:  # of sizes that no drafter has
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{key}: makes no drafter: {reason}; the file is damaged: copy the folder again"
        ) from error


def _check_target(folder: Path, stored: TargetSpec, spec: TargetSpec, allow_other: bool) -> None:
    mine, given = stored.to_dict(), spec.to_dict()
    for name in SIZES:
        if mine[name] != given[name]:
            raise CheckpointError(
                f"{folder}: trained for a target with {name} = {mine[name]} ({_named(stored)}), "
                f"but this target has {given[name]} ({_named(spec)}); use the target it was trained for"
            )
    if stored.weights_hash != spec.weights_hash and not allow_other:
        raise CheckpointError(
            f"{folder}: trained for target {_named(stored)}, but this target is {_named(spec)}; use the one it was "
            "trained for, or allow_other_target=true for a fine-tune of it"
        )
    if stored.template_hash != spec.template_hash:
        warnings.warn(
            f"{folder}: trained with chat template {stored.template_hash[:12]}, this target uses "
            f"{spec.template_hash[:12]}; fewer drafts may be accepted",
            stacklevel=3,
        )


def _class_path(drafter: Drafter) -> str:
    return f"{type(drafter).__module__}.{type(drafter).__qualname__}"


def _named(spec: TargetSpec) -> str:
    return f"'{spec.name}', weights {spec.weights_hash[:12]}"


def _present(folder: Path) -> Path:
    """`folder`, or what a crash in the middle of its replacement left of it."""
    old = _beside(folder, "old")
    if not folder.exists() and old.is_dir():
        return old
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the `drafter` folder of a run")
    return folder


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")
