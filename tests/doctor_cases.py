# Ways to let the doctor examine a small world, in process, and to break that world for real.

import json
import shutil
from pathlib import Path

from data.doctor.__main__ import doctor
from data.doctor.case import read_case
from drafters.config import to_plain
from tests.door_world import settings

CHATML_END = 4  # <|im_end|>
QUICK = ("example=false", "num_answers=0", "load_target=false")


def world_overrides(world, *, states="states"):
    """The world's target, conversations and cache, as a command would name them."""
    return (
        *(f"target.weights={world}/target", "target.name=tiny", "target.sha256=null", "target.mask_token=0"),
        *("target.layer_ids=[0,2]", "target.dtype=float32", "device=cpu"),
        *("source=jsonl", f"source.path={world}/chats.jsonl", "data.validation=0.2"),
        f"cache.root={world}/{states}",
    )


def case_of(*overrides):
    """The settings of a command, typed."""
    return read_case(to_plain(settings("doctor", *overrides)), overrides)


def examined(*overrides):
    """The findings of a command."""
    return doctor(settings("doctor", *overrides), overrides).findings


def levels(findings, check):
    """The levels of a check's findings, in order."""
    return [one.level for one in findings.named(check)]


def the(findings, check, level):
    """The one finding of a check that has a level."""
    (one,) = [one for one in findings.named(check) if one.level == level]
    return one


def flip(path: Path, place: int = -5):
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def copied(run: Path, folder: Path) -> Path:
    """A copy of a run to break."""
    return Path(shutil.copytree(run, folder / run.name))


def edit_config(run: Path, change):
    """Let `change` edit the config.json of a run's drafter."""
    path = run / "drafter" / "config.json"
    config = json.loads(path.read_text())
    del config["checksum"]
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(run: Path, change):
    """Let `change` edit the weights of a run's drafter, checksum included."""
    from safetensors.torch import load_file, save_file

    from drafters.files import file_sha256

    path = run / "drafter" / "model.safetensors"
    tensors = {name: one.clone() for name, one in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    edit_config(run, lambda config: config["weights"].update(sha256=file_sha256(path)))
