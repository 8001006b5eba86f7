# How a target comes into memory where one device does not hold it: its layers spread over devices and disk (accelerate,
# `device_map`), or each of them split over processes (the tensor-parallel plan of transformers). What drafters read of
# it, its embedding and output rows, is made whole on one device: the one that inputs go to.

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.errors import CheckpointError, ConfigError
from drafters.weights import cache_root, fingerprint, load_model, reading

__all__ = [
    "Placement",
    "WholeTensors",
    "check_placement",
    "head_is_tied",
    "head_tensors",
    "input_device",
    "outline",
    "whole",
]

ALL = "all"  # a name that can be written in a command; transformers' own is ""
ACCEPTED = "null, auto, or a device (a GPU's number, cpu, disk) for each module, such as {model.layers.0: 0}"
DeviceMap = str | Mapping[str, str | int] | None


class Placement:
    """Where a target's weights go: all to `device`, or as `device_map` or `tp_plan` say, of which one is given at most.

    `device_map`: "auto", or a device (a GPU's number, "cpu" or "disk") for each module by its name, where "all" is the
    whole model; `tp_plan`: "auto",
    under torchrun. Raises ConfigError for anything else.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        device_map: DeviceMap = None,
        tp_plan: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        check_placement(device_map, tp_plan)
        if isinstance(device_map, Mapping):
            _check_devices(device_map)
        if tp_plan is not None and int(os.environ.get("WORLD_SIZE", "1")) < 2:
            raise ConfigError(
                "target.tp_plan: got 'auto', but there is one process; start the command with "
                "`torchrun --nproc-per-node N`, or use target.device_map=auto"
            )
        self.device, self.device_map, self.tp_plan = device, device_map, tp_plan
        self.trust_remote_code = trust_remote_code

    def load(self, folder: Path, dtype: torch.dtype) -> Any:
        """The causal LM in `folder`. Raises CheckpointError when it cannot be loaded so."""
        trust = {"trust_remote_code": self.trust_remote_code}
        if self.tp_plan is not None:
            from transformers.distributed import DistributedConfig

            split = DistributedConfig(tp_plan=self.tp_plan)
            return load_model(folder, dtype=dtype, **trust, distributed_config=split)
        if self.device_map is None:
            return load_model(folder, dtype=dtype, **trust).to(self.device)
        spare = cache_root() / "offload" / f"{fingerprint(folder)[:12]}-{str(dtype).removeprefix('torch.')}"
        given = self.device_map
        if isinstance(given, Mapping):
            given = {"" if name == ALL else name: device for name, device in given.items()}
        if isinstance(given, dict):
            _check_names(given, outline(folder, trust_remote_code=self.trust_remote_code))
        return load_model(folder, dtype=dtype, device_map=given, offload_folder=spare, **trust)


def check_placement(device_map: Any, tp_plan: Any) -> None:
    """Raises ConfigError for what is no placement on any machine, and for two of them."""
    if device_map is not None and device_map != "auto" and (not isinstance(device_map, Mapping) or not device_map):
        raise ConfigError(f"target.device_map: got {device_map!r}; accepted: {ACCEPTED}")
    for module, device in device_map.items() if isinstance(device_map, Mapping) else ():
        reason = "" if device not in (None, "meta") else ": it is no place for weights"
        try:
            if device not in (None, "disk", "meta") and not _is_number(device):
                torch.device(device)
        except (RuntimeError, TypeError) as error:
            reason = f": {str(error).splitlines()[0]}"
        if reason:
            raise ConfigError(f"target.device_map.{module}: got {device!r}{reason}; accepted: {ACCEPTED}")
    if tp_plan not in (None, "auto"):
        raise ConfigError(f"target.tp_plan: got {tp_plan!r}; accepted: null, auto")
    if tp_plan is not None and device_map is not None:
        raise ConfigError("target.tp_plan: given beside target.device_map; leave one of them null")


def _is_number(device: Any) -> bool:
    """Whether it is that of a GPU, which need not be here."""
    return isinstance(device, int) and not isinstance(device, bool) and device >= 0


def _check_devices(device_map: Mapping[str, Any]) -> None:
    """Raises ConfigError for a device that is not here."""
    for module, device in device_map.items():
        try:
            if device != "disk":
                torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"target.device_map.{module}: got {device!r}: {reason}; accepted: {ACCEPTED}") from error


def outline(folder: Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False) -> Any:
    """The causal LM of the configs in `folder` without memory for its weights, which need not be there. Raises
    CheckpointError when transformers makes none of it."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with reading(f"{folder / 'config.json'} makes no causal LM"), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if (folder / "generation_config.json").is_file():  # it may know more ends of an answer
        with reading(f"cannot read {folder / 'generation_config.json'}"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def _check_names(device_map: Mapping[str, Any], model: nn.Module) -> None:
    """Raises ConfigError for a name that is no module, and for a weight that no name holds."""
    modules = {name for name, _ in model.named_modules()}
    for name in device_map:
        if name not in modules:
            known = ", ".join(sorted(one for one in modules if one.count(".") == 1 or (one and "." not in one)))
            raise ConfigError(f"target.device_map.{name}: no such module; accepted: {ALL}, {known}, and those in them")
    for weight, _ in model.named_parameters():
        if not any(not name or weight.startswith(f"{name}.") for name in device_map):
            raise ConfigError(f"target.device_map: says no device for {weight}; name a module that holds it")


def input_device(model: Any) -> torch.device:
    """Where a model's tokens go: where its embedding is, or computes when its weights wait elsewhere."""
    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta" or not hasattr(embedding, "_hf_hook"):
        device: torch.device = embedding.weight.device
        return device
    (found,) = {torch.device(one) for one in _execution_devices(embedding._hf_hook)}
    return found


def _execution_devices(hook: Any) -> Iterator[Any]:
    """Of accelerate's hook, which may be a sequence of them."""
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "execution_device", None) is not None:
            yield one.execution_device


def whole(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer of `module` itself (not of one inside it), complete. Where it waits on the disk it is read;
    where processes hold parts of it, all of them have to ask for it. Raises CheckpointError where it is nowhere."""
    from torch.distributed.tensor import DTensor

    tensor: Tensor = getattr(module, name)
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    if tensor.device.type != "meta" or not hasattr(module, "_hf_hook"):
        return tensor.detach()
    from accelerate.utils import align_module_device

    with align_module_device(module):
        read = getattr(module, name).detach()
    if read.device.type == "meta":
        raise CheckpointError(f"target.device_map: the weights of {type(module).__name__}.{name} are on no device")
    return read


def head_is_tied(model: Any) -> bool:
    """Whether the output rows are the embedding's. Spread, split or not loaded, tied weights are two tensors: there the
    config says it."""
    embedding, head = (one.weight for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    if head is embedding:
        return True
    is_loaded = type(head) is type(embedding) is nn.Parameter and head.device.type != "meta"
    if is_loaded and head.device == embedding.device:
        return bool(head.data_ptr() == embedding.data_ptr())
    return bool(model.config.get_text_config().tie_word_embeddings)


def head_tensors(model: Any) -> tuple[Tensor, Tensor]:
    """Embedding and output rows [V, D], complete, on the device that inputs go to; one tensor where they are tied."""
    device = input_device(model)
    embedding_VD = whole(model.get_input_embeddings(), "weight").to(device)
    if head_is_tied(model):
        return embedding_VD, embedding_VD
    return embedding_VD, whole(model.get_output_embeddings(), "weight").to(device)


class WholeTensors(Mapping[str, Tensor]):
    """A model's tensors by name as `state_dict` has them, each made complete when it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = dict.fromkeys(model.state_dict())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        place, _, own = name.rpartition(".")
        return whole(self._model.get_submodule(place), own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
