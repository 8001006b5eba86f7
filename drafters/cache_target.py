# What a capture keeps of its target beside the states: `target_spec.json`, the numbers that it measured and proved on
# the whole model. A training that has not the target's layers in memory takes them from here.

import json
import logging
from typing import Any

from drafters.cache_manifest import CacheKey, Manifest, json_bytes
from drafters.errors import CheckpointError, DataError
from drafters.plain_json import parse, sealed, unsealed
from drafters.spec import TargetSpec
from drafters.storage import Folder

__all__ = ["find_spec", "keep_spec"]

logger = logging.getLogger(__name__)

SPEC = "target_spec.json"
# Measured on the whole model, or not of the weights: what an outline of the target does not have to agree in.
FREE = ("embed_scale", "logit_scale", "tied_head", "mask_token_id", "name", "template_hash")


def keep_spec(folder: Folder, spec: TargetSpec) -> None:
    """Write `target_spec.json` where it is not there. The cache is whole without it, so a folder that cannot be written
    gets a note in the log."""
    content = json_bytes(sealed(spec.to_dict()), indent=1)
    try:
        if SPEC not in folder.names() or not _is_same(folder.read(SPEC), spec):
            folder.write(SPEC, content)
    except (OSError, DataError) as error:  # a store says its own
        logger.info(
            "cache: %s cannot be written (%s): trainings from it load the whole target", folder.name_of(SPEC), error
        )


def find_spec(folder: Folder, key: CacheKey, outline: TargetSpec) -> TargetSpec | str:
    """What the capture of a finished cache kept of its target; or else in words why the target itself is needed.
    `outline` is what can be known without its weights. Raises DataError for a cache of something else."""
    try:
        names = folder.sizes()
        manifest = Manifest.load(folder)
    except DataError as error:
        return str(error)
    manifest.check_key(key, folder)
    if missing := manifest.missing(names):
        return f"{len(missing)} of {len(manifest.shards)} shards are to be captured into {folder}"
    again = "python -m data.capture, where the target fits, writes it in no time"
    if SPEC not in names:
        return f"{folder.name_of(SPEC)} is not there (a cache of an earlier version); {again}"
    try:
        found = TargetSpec.from_dict(unsealed(parse(folder.read(SPEC))))
        mine, theirs = _compared(outline), _compared(found)
    except (OSError, ValueError, TypeError, AttributeError, CheckpointError) as error:
        return f"{folder.name_of(SPEC)} is damaged ({error}); {again}"
    if differing := [name for name in mine if mine[name] != theirs[name]]:
        return f"{folder.name_of(SPEC)} says {', '.join(differing)} otherwise than the target's config; {again}"
    return found


def _is_same(content: bytes, spec: TargetSpec) -> bool:
    """But for what the settings of a run decide."""
    try:
        return _measured(TargetSpec.from_dict(unsealed(parse(content)))) == _measured(spec)
    except (ValueError, TypeError, AttributeError, CheckpointError):
        return False


def _measured(spec: TargetSpec) -> dict[str, Any]:
    return {name: value for name, value in spec.to_dict().items() if name not in ("name", "mask_token_id")}


def _compared(spec: TargetSpec) -> dict[str, Any]:
    """As JSON has it: tuples are lists there."""
    plain: dict[str, Any] = json.loads(json.dumps(spec.to_dict()))
    return {name: value for name, value in plain.items() if name not in FREE}
