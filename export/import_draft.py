# The way in: `python -m export.import_draft draft=FOLDER target=NAME` makes a published draft a run of this package, so
# that `evaluate.py run=outputs/NAME` measures it and `train.py warm_start=outputs/NAME` trains it further.

import os
from typing import Any

import hydra
from omegaconf import DictConfig


def bring_in(cfg: DictConfig) -> None:
    """Do what `cfg` says. Raises ConfigError for settings that are wrong, CheckpointError for a draft that is damaged
    or none of ours, and for a run folder that holds another run."""
    from drafters.checkpoint import save_drafter
    from drafters.config import to_plain
    from drafters.door import load_target, say
    from drafters.errors import CheckpointError, ConfigError
    from drafters.files import file_sha256
    from drafters.runs import claim
    from drafters.weights import resolve
    from export.importing import drafter_of, import_draft

    plain: dict[str, Any] = to_plain(cfg)
    if not plain["draft"]:
        raise ConfigError(
            f"draft: got {plain['draft']!r}; accepted: the folder or the hub id of a published draft head"
        )
    try:
        folder = resolve(str(plain["draft"]))
    except (ConfigError, CheckpointError) as error:
        reason = str(error).replace("target.weights", "draft")
        raise type(error)(reason) from error
    if not isinstance(plain["given"], dict | None):
        raise ConfigError(f"given: got {plain['given']!r}; accepted: settings by name, such as +given.block_size=7")
    name = plain["name"] or folder.resolve().name
    target = load_target(plain["target"], device=plain["device"])
    node, tensors = import_draft(
        folder,
        spec=target.spec,
        target_folder=resolve(plain["target"]["weights"], sha256=plain["target"].get("sha256")),
        given=plain["given"],
    )
    drafter = drafter_of(node, tensors, spec=target.spec)
    settings = {**plain, "name": name, "drafter": node, "cwd": os.getcwd()}
    with claim(os.path.join(plain["outputs"], name), settings) as run:
        files = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
        provenance = {"imported": str(plain["draft"]), "files": files}
        save_drafter(drafter, run.drafter, spec=target.spec, provenance=provenance)
    say(f"{node['name']}: {len(tensors)} tensors, {drafter.block_size} drafts a round")
    say(f"Written: {run.drafter}; measure it with: python evaluate.py run={run.folder}")


@hydra.main(version_base="1.3", config_path="../conf", config_name="import")
def main(cfg: DictConfig) -> None:
    from drafters.door import door

    with door():
        bring_in(cfg)


if __name__ == "__main__":
    from drafters.door import start

    start(main)
