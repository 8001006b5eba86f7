# Lightning on several processes: who they are (`RanksEnvironment`), how weights are shared out over them, and how the
# whole drafter comes back where it is saved or decodes. Strategies are Lightning's; `trainer=` chooses one.

# mypy: disable-error-code="override"
# Lightning's strategies name LightningModule; these serve DistillModule alone.

import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from drafters.config import locate
from drafters.distributed import Ranks, is_lost
from drafters.errors import CheckpointError, ConfigError, DraftersError
from drafters.heads.base import Drafter
from drafters.training.parts import foreign_names
from drafters.types import Losses

if TYPE_CHECKING:
    from drafters.training.module import DistillModule

__all__ = [
    "DATA_PARALLEL",
    "RanksEnvironment",
    "ShardedStrategy",
    "ZeroStrategy",
    "check_kind",
    "check_strategy",
    "num_processes",
    "placement",
    "together",
    "total_norm",
    "whole_drafter",
]

AUTO, SRUN = "auto", "srun"  # values of trainer.devices beside numbers
# Some drafters leave a part out (a head whose loss has no weight), so the reduction has to ask which parts were used.
DATA_PARALLEL = "ddp_find_unused_parameters_true"
# What torch, DeepSpeed and Lightning raise for parts of a checkpoint that cannot be read.
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError),
    *(pickle.UnpicklingError, MisconfigurationException),
)
NAMED = (AUTO, "ddp", DATA_PARALLEL)


class RanksEnvironment(ClusterEnvironment):
    """Tells Lightning of processes that are connected already."""

    def __init__(self, ranks: Ranks, *, per_node: int) -> None:
        super().__init__()
        self.ranks, self.per_node = ranks, per_node

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.ranks.size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self.ranks.rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self.ranks.local_rank

    def node_rank(self) -> int:
        return self.ranks.rank // self.per_node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks: each keeps a part of the weights, gradients and optimizer state, and the drafter is whole
    while a loss is computed. A checkpoint is one file with everything, which any strategy goes on from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()
        # Lightning asks modules to share themselves out; ours does so under this strategy alone.
        module: Any = self.lightning_module
        module.configure_model = partial(share_out, module, self)

    # Lightning numbers parameters in the order of the module; optimizers number them by their groups, as checkpoints of
    # one process do.

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        own = getattr(optimizer, "_optimizer", optimizer)
        state = get_optimizer_state_dict(
            self.model, own, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self.global_rank != 0:
            return {}
        groups: Any = state["param_groups"]
        numbers = {name: i for i, name in enumerate(n for group in groups for n in group["params"])}
        return _renamed(state, numbers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        checkpoint: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only
        )
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=options)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states"), strict=True):
            order = dict(enumerate(names[id(p)] for group in optimizer.param_groups for p in group["params"]))
            set_optimizer_state_dict(self.model, optimizer, _renamed(state, order), options=options)
        return checkpoint


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """The state of an optimizer with other keys for its parameters."""
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[one]: values for one, values in state["state"].items()}, "param_groups": groups}


class _AsTheyAre(DeepSpeedPrecision):
    """Batches as they come: Lightning would make float32 of the states, and cannot write into a frozen dataclass."""

    def convert_input(self, data: Any) -> Any:
        return data


class ZeroStrategy(DeepSpeedStrategy):
    """DeepSpeed's ZeRO: stage 2 shares out gradients and optimizer state, stage 3 the weights too."""

    needs_gpu = True  # says Lightning

    def __init__(self, **options: Any) -> None:
        if (stage := options.get("stage", 2)) not in (2, 3):
            raise ValueError(f"stage: got {stage!r}; accepted: 2, 3")
        super().__init__(precision_plugin=_AsTheyAre("32-true"), **options)
        # Small weights that stay whole come in another order after a resume than the one that stage 3 has learned.
        assert self.config is not None
        zero = self.config.setdefault("zero_optimization", {})
        zero.setdefault("stage3_param_persistence_threshold", 0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Raises CheckpointError where a part is damaged or missing; Ranks ends those who wait for it."""
        try:
            return super().load_checkpoint(checkpoint_path, weights_only)
        except UNREADABLE as error:
            if isinstance(error, RuntimeError) and is_lost(error):
                raise
            raise _damaged(checkpoint_path, (str(error) or type(error).__name__).splitlines()[0]) from error


def _damaged(path: Path | str, reason: str) -> CheckpointError:
    return CheckpointError(f"resume: {path} is damaged: {reason}; remove it to start anew, or choose another name=")


def check_kind(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError where the trainer's `settings` name a strategy that this module does not serve."""
    strategy = settings.get("strategy", AUTO)
    if not isinstance(strategy, Mapping):
        if strategy not in NAMED:
            raise ConfigError(
                f"trainer.strategy: got {strategy!r}; accepted: {', '.join(NAMED)}, or a class, as trainer=fsdp and "
                "trainer=deepspeed choose"
            )
        return
    kind = locate(str(strategy.get("_target_")), key="trainer.strategy._target_")
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise ConfigError(
            f"trainer.strategy._target_: got {strategy['_target_']!r}; accepted: a subclass of Lightning's Strategy"
        )


def check_strategy(settings: Mapping[str, Any], checkpoint: Path | None, *, averages: bool, size: int) -> None:
    """Raises ConfigError for what a strategy cannot do: go on from the checkpoint of another kind, or of other ranks;
    average weights that ranks share out; accumulate gradients that DeepSpeed owns."""
    strategy = settings.get("strategy", AUTO)
    target = str(strategy["_target_"]) if isinstance(strategy, Mapping) else ""
    is_zero, is_sharded = is_deepspeed(strategy), target.endswith(ShardedStrategy.__name__)
    if averages and (is_zero or is_sharded):
        raise ConfigError(
            "optim.ema_decay: weights that ranks share out are not averaged; accepted: null, or trainer=ddp"
        )
    if is_zero and settings.get("accumulate_grad_batches", 1) != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches: got {settings['accumulate_grad_batches']}; accepted with DeepSpeed: 1, "
            "since batches of one step are weighted by their common count; raise data.batch_size instead"
        )
    if checkpoint is None:
        return
    if checkpoint.is_dir() != is_zero:
        kind = "DeepSpeed" if checkpoint.is_dir() else "another strategy"
        raise ConfigError(
            f"trainer.strategy: {checkpoint} was written by {kind}; go on with that, or choose another name="
        )
    if is_zero:
        _check_parts(checkpoint, size)


def _check_parts(checkpoint: Path, size: int) -> None:
    """Raises CheckpointError where a part is missing or foreign, ConfigError where all are there but not those of
    `size` ranks."""
    names = [path.name for path in checkpoint.glob("checkpoint/*_optim_states.pt")]
    numbers = sorted(int(found[1]) for name in names if (found := re.search(r"zero_pp_rank_(\d+)_", name)))
    if not numbers or numbers != [*range(len(numbers))]:
        absent = min({*range(len(numbers) + 1)} - {*numbers})
        raise _damaged(checkpoint, f"the part of process {absent} is missing")
    if reason := foreign_names(checkpoint):
        raise _damaged(checkpoint, reason)
    if len(numbers) != size:
        raise ConfigError(
            f"trainer.devices: {checkpoint} is of {len(numbers)} processes, these are {size}; start {len(numbers)} "
            "(or its last part was lost: then choose another name=)"
        )


def is_deepspeed(strategy: Any) -> bool:
    """Whether the setting of a strategy is one of DeepSpeed's. Raises ConfigError for a class that is not there."""
    return isinstance(strategy, Mapping) and issubclass(
        locate(str(strategy["_target_"]), key="trainer.strategy._target_"), DeepSpeedStrategy
    )


def share_out(module: "DistillModule", strategy: ShardedStrategy) -> None:
    """Let ranks share the drafter's weights. They come and go together: heads reach into their parts, and weights are
    few beside gradients and moments."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.export import register_dataclass
    from torch.utils._pytree import SUPPORTED_NODES

    if Losses not in SUPPORTED_NODES:
        register_dataclass(Losses)  # the tensors of a result are found by this
    module.drafter.to(strategy.root_device)
    fully_shard(module.drafter, mesh=strategy.device_mesh["data_parallel"], reshard_after_forward=False)
    register_fsdp_forward_method(module.drafter, "loss")


def whole_drafter(trainer: Trainer, module: "DistillModule") -> Drafter | None:
    """The drafter with all of its weights, on the first rank at least; None elsewhere. Called on all ranks."""
    drafter = module.drafter
    if isinstance(trainer.strategy, ShardedStrategy):
        tensors: Mapping[str, Any] = get_model_state_dict(
            drafter, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
    elif isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.strategy.zero_stage_3:
        from deepspeed import zero

        with zero.GatheredParameters(list(drafter.parameters())):
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in drafter.state_dict().items()}
    else:
        return drafter
    return _copy(module, tensors) if trainer.is_global_zero else None


@contextmanager
def together(trainer: Trainer) -> Iterator[None]:
    """Within it, ranks do what one of them may fail at: an error of any is raised on all, since the others would wait
    for it. Left by all ranks at once."""
    failure: DraftersError | None = None
    try:
        yield
    except DraftersError as error:
        failure = error
    told: list[str | None] = [None] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(told, failure and str(failure))
    if failure is not None:
        raise failure
    if (others := next(filter(None, told), None)) is not None:
        raise CheckpointError(others)


def total_norm(gradients: Collection[Tensor]) -> Tensor:
    """Norm [] of all gradients together; of parts that ranks share, that of the whole. Called on all ranks."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _copy(module: "DistillModule", tensors: Mapping[str, Tensor]) -> Drafter:
    drafter = type(module.drafter).from_tensors(module.drafter.config, module.target_head.spec, tensors)
    drafter.load_state_dict(tensors)
    return drafter.to(module.device).train(module.drafter.training)


def num_processes(settings: Mapping[str, Any], ranks: Ranks) -> int:
    """How many processes train: those that were started together, or, of one alone, what `trainer.devices` asks for on
    this machine. Raises ConfigError for a number or a launcher that is not accepted."""
    asked = settings.get("devices", 1)
    is_number = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
    if not is_number and asked not in (AUTO, SRUN):
        raise ConfigError(
            f"trainer.devices: got {asked!r}; accepted: a number of processes on this machine, {AUTO} (one a GPU), or "
            f"{SRUN} (those that srun starts)"
        )
    if asked == SRUN and "SLURM_PROCID" not in os.environ:
        raise ConfigError(
            "trainer.devices: got srun, but srun did not start this process; write `srun python train.py`"
        )
    if ranks.size > 1 or asked == SRUN:
        return ranks.size
    if settings.get("num_nodes", 1) != 1:
        raise ConfigError(
            f"trainer.num_nodes: got {settings['num_nodes']}, but one process was started; start them on all nodes "
            "with torchrun or srun"
        )
    return max(1, torch.cuda.device_count()) if asked == AUTO else int(asked)


def placement(settings: Mapping[str, Any], ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """What makes Lightning's Trainer compute where the target is, on all ranks. Raises ConfigError where the number of
    processes is not the one that `settings` (of the trainer) ask for."""
    local = ranks.gather([ranks.local_rank])
    num_nodes = local.count(0)
    per_node = ranks.size // max(1, num_nodes)
    for name, asked, found in (
        ("devices", settings.get("devices", 1), per_node),
        ("num_nodes", settings.get("num_nodes", 1), num_nodes),
    ):
        if isinstance(asked, int) and asked not in (1, found):
            raise ConfigError(f"trainer.{name}: got {asked}, but {found} were started; give one or leave it out")
    accelerator = "gpu" if device.type == "cuda" else device.type
    strategy = settings.get("strategy", AUTO)
    if is_deepspeed(strategy) and device.type != "cuda" and getattr(locate(strategy["_target_"]), "needs_gpu", True):
        raise ConfigError(
            f"trainer.strategy: DeepSpeed needs GPUs, and this is {device}; accepted here: trainer=ddp, fsdp"
        )
    # Of one process there is nothing to share out; of several, plain "ddp" waits for parts that nobody used.
    shared = {} if is_deepspeed(strategy) else {"strategy": AUTO}
    # Of one process too: in a job of SLURM, Lightning would look for tasks and answer signals by itself.
    plugins = [RanksEnvironment(ranks, per_node=per_node)]
    if ranks.size == 1:
        devices: Any = [device.index or 0] if device.type == "cuda" else 1
        return {"accelerator": accelerator, "devices": devices, "num_nodes": 1, "plugins": plugins, **shared}
    if sorted(local) != sorted([*range(per_node)] * num_nodes):
        raise ConfigError(f"processes: {local} are the places of all on their machines; start equally many on each")
    return {
        "accelerator": accelerator,
        "devices": per_node,
        "num_nodes": num_nodes,
        "plugins": plugins,
        **({"strategy": DATA_PARALLEL} if strategy in (AUTO, "ddp") else {}),
    }
