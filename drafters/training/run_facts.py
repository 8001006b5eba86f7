# What a run is made of, for its logger: every setting, the versions, the target's numbers, the size of the drafter.
# wandb shows it as the run's config, TensorBoard in its HPARAMS tab, and both files keep it as hparams.yaml.

import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from drafters import __version__
from drafters.plain_json import parse
from drafters.runs import SETTINGS

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = ["log_facts", "run_facts"]

PACKAGES = ("torch", "lightning", "transformers")
# What TensorBoard compares runs by.
COMPARED = ("val/accepted_length", "report/accepted_length")


def run_facts(run: Path, module: "DistillModule") -> dict[str, Any]:
    """The settings in the folder of a run, at the top, and beside them `versions`, `target_spec` and
    `drafter_parameters`."""
    path = run / SETTINGS
    settings = parse(path.read_text()) if path.is_file() else {}
    parameters = list(module.drafter.parameters())
    facts = {
        "versions": {"drafters": __version__, "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "target_spec": module.target_head.spec.to_dict(),
        "drafter_parameters": {
            "trainable": sum(one.numel() for one in parameters if one.requires_grad),
            "all": sum(one.numel() for one in parameters),
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings | facts))
    return plain


@rank_zero_only
def log_facts(run: Path, logger: Any, module: "DistillModule") -> None:
    """`run_facts` as the hyperparameters of a logger of Lightning; nothing for False, no logger."""
    if not logger:
        return
    facts = run_facts(run, module)
    logger.log_hyperparams(facts)
    if isinstance(logger, TensorBoardLogger):
        from torch.utils.tensorboard.summary import hparams

        # Lightning gives TensorBoard none without a number of now.
        for one in hparams(dict(_flat(facts)), dict.fromkeys(COMPARED, 0.0)):
            logger.experiment._get_file_writer().add_summary(one)


def _flat(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names with values that TensorBoard takes: numbers, truths, and text for the rest."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", value if isinstance(value, bool | int | float | str) else json.dumps(value)
