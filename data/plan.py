# What a capture and the training after it will cost, before either: `python -m data.capture plan=true` with the
# settings of the capture. It needs the target's config and tokenizer alone, so a target of any size can be planned.

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from drafters.cache_writer import CaptureConfig
    from drafters.chat import EncodeReport
    from drafters.heads.base import Drafter
    from drafters.target import FrozenTarget
    from drafters.types import Example

__all__ = ["MachineConfig", "Plan", "make_plan", "plan_capture", "render"]

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The machines that a plan is for; None is this one. `rate`: tokens a second that one process captures; `ranks`:
    processes that share the capture; `memory_gb`: of the device that trains; `disk_gb`: free at cache.root."""

    rate: float | None = None
    ranks: int = 1
    memory_gb: float | None = None
    disk_gb: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "ranks", "memory_gb", "disk_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}: got {value}; accepted: a number above 0" + (", or null" * (name != "ranks")))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All figures. `disk` has bytes by (codec, last); `memory` bytes by part; `rate` is of one process."""

    target: str
    layer_ids: tuple[int, ...]
    splits: Mapping[str, "EncodeReport"]
    num_tokens: int
    num_last: int
    chosen: tuple[str, str]
    disk: Mapping[tuple[str, str], int]
    needs_all: bool
    root: str
    free_bytes: int | None
    target_bytes: int
    rate: float
    rate_from: str
    ranks: int
    drafter: str
    memory: Mapping[str, int | None]
    device: str
    device_bytes: int
    missing_layers: tuple[int, ...] = ()

    @property
    def hours(self) -> float:
        """Of the capture, shared by all ranks."""
        return self.num_tokens / self.rate / self.ranks / 3600

    @property
    def memory_bytes(self) -> int:
        """Of the training, the target aside."""
        return sum(size for size in self.memory.values() if size is not None)

    @property
    def is_trained(self) -> bool:
        """Whether the drafter has weights of its own."""
        return bool(self.memory["drafter, gradients"])

    @property
    def disk_fits(self) -> bool | None:
        """Whether the capture as it is set would begin; None where the store does not tell."""
        from drafters.cache_writer import SPARE_BYTES

        if self.free_bytes is None:
            return None
        return 1.05 * self.disk[self.chosen] + SPARE_BYTES <= self.free_bytes


def plan_capture(cfg: DictConfig) -> None:
    """Make the plan of a capture's settings and print it."""
    from data.sources import DataConfig, load_splits
    from drafters.cache_writer import CaptureConfig
    from drafters.config import build_config, to_plain, typed
    from drafters.door import check_target, say
    from drafters.target import FrozenTarget

    node = to_plain(cfg.target)
    check_target(node)
    config, data = typed(CaptureConfig, cfg.cache, key="cache"), typed(DataConfig, cfg.data, key="data")
    machine = typed(MachineConfig, cfg.machine, key="machine")
    _, source = build_config(cfg.source, key="source")
    kind = build_config(cfg.drafter, key="drafter")
    parts = load_splits(source, validation=data.validation, seed=data.seed)
    kept = {
        name: node[name] for name in ("mask_token", "sha256", "name", "trust_remote_code") if node.get(name) is not None
    }
    target = FrozenTarget.outline(node.get("weights"), dtype=node.get("dtype", "bfloat16"), **kept)
    say(render(make_plan(target, parts, kind, (config, data, machine), device=cfg.device)))


def make_plan(
    target: "FrozenTarget", parts: Any, kind: tuple[type, Any], settings: tuple[Any, Any, Any], *, device: str | None
) -> Plan:
    """The plan for the conversations `parts`; `settings` are those of the cache, the data and the machine. Raises what
    the capture itself would, and ConfigError where the drafter does not fit the target."""
    import torch

    from drafters.chat import ChatEncoder
    from drafters.codecs import CODECS, find_codec
    from drafters.door import pick_device
    from drafters.planning import device_name, stored_bytes
    from drafters.spec import check_layer_ids
    from drafters.splits import encode_splits
    from drafters.states import predicts
    from drafters.training.fit import check_fits

    config, data, machine = settings
    spec = target.spec
    check_layer_ids(config.layer_ids, spec, key="cache.layer_ids")
    find_codec(config.codec)
    drafter = check_fits(*kind, target)
    encoder = ChatEncoder(target.tokenizer, max_length=data.max_length, template_kwargs=data.template_kwargs)
    splits, reports = encode_splits(parts, encoder, weights_hash=None)
    examples = [example for split in splits.values() for example in split]
    num_tokens = sum(len(one.tokens_T) for one in examples)
    num_last = sum(int(predicts(one.loss_mask_T).sum()) for one in examples)
    sizes = {"hidden_size": spec.hidden_size, "num_layers": len(config.layer_ids), "num_tokens": num_tokens}
    place = torch.device(pick_device(device))
    rate, rate_from = capture_rate(target, (config, machine, place), num_tokens, num_last, len(examples))
    root, free = states_place(config)
    longest = sorted(splits["train"], key=lambda one: -len(one.tokens_T))[: data.batch_size]
    return Plan(
        target=f"{spec.name}: {spec.num_layers} layers, hidden {spec.hidden_size}, vocabulary {spec.vocab_size:,}",
        layer_ids=config.layer_ids,
        splits=reports,
        num_tokens=num_tokens,
        num_last=num_last,
        chosen=(config.codec, config.last),
        disk={
            (name, last): stored_bytes(codec, num_last=count, **sizes)
            for name, codec in CODECS.items()
            for last, count in (("all", num_tokens), ("supervised", num_last))
        },
        needs_all=drafter.needs.last_input,
        root=root,
        free_bytes=free if machine.disk_gb is None else int(machine.disk_gb * GB),
        target_bytes=sum(one.nbytes for one in target.model.parameters()),
        rate=rate,
        rate_from=rate_from,
        ranks=machine.ranks,
        drafter=kind[1].name,
        memory=training_memory(target, kind, drafter, longest),
        device=device_name(place) if machine.memory_gb is None else "the device given",
        device_bytes=device_memory(place) if machine.memory_gb is None else int(machine.memory_gb * GB),
        missing_layers=tuple(sorted(set(drafter.needs.layer_ids) - set(config.layer_ids))),
    )


def training_memory(
    target: "FrozenTarget", kind: tuple[type, Any], drafter: "Drafter", batch: Sequence["Example"]
) -> dict[str, int | None]:
    """Bytes by part of a training step of these conversations, the longest ones; None where a part is not known."""
    from drafters.planning import MASTER_BYTES, activation_bytes
    from drafters.target import DTYPES

    spec, dtype = target.spec, DTYPES[target.spec.dtype]
    trained = sum(one.numel() for one in drafter.parameters() if one.requires_grad)
    frozen = sum(one.numel() for one in drafter.parameters() if not one.requires_grad)
    parts: dict[str, int | None] = {f"drafter, {name}": each * trained for name, each in MASTER_BYTES.items()}
    parts["drafter, weights"] = MASTER_BYTES["weights"] * (trained + frozen)
    parts["target's head"] = spec.vocab_size * spec.hidden_size * dtype.itemsize * (1 if spec.tied_head else 2)
    width = max((len(one.tokens_T) for one in batch), default=0) * len(batch)
    states = len(drafter.needs.layer_ids) + 1
    parts["a batch of states"] = width * states * spec.hidden_size * dtype.itemsize
    config = type(drafter).complete(kind[1], target)
    parts["activations, about"] = activation_bytes((kind[0], config), spec, batch) if batch and trained else 0
    return parts


def capture_rate(
    target: "FrozenTarget", here: tuple["CaptureConfig", MachineConfig, Any], tokens: int, last: int, count: int
) -> tuple[float, str]:
    """Tokens a second of one process, and where that number comes from."""
    from drafters.planning import Rates, device_name, flops_per_token, product_rate
    from drafters.target import DTYPES

    config, machine, device = here
    if machine.rate is not None:
        return machine.rate, "machine.rate"
    name = device_name(device)
    if (known := Rates(states_root(config)).find(target.spec, device)) is not None:
        return known, f"measured by an earlier capture on this machine ({name})"
    speed = product_rate(target.spec, device, dtype=DTYPES[target.spec.dtype], rows=config.batch_tokens)
    work = flops_per_token(target.model, target.spec, mean_length=tokens / count, supervised_share=last / tokens)
    return speed / work, (
        f"estimated, an upper bound: {work / 1e9:,.2f} GFLOP a token, and products of its widths run at "
        f"{speed / 1e9:,.0f} GFLOP/s here ({name})"
    )


def states_root(config: "CaptureConfig") -> Path:
    """The folder on this machine that caches and rates lie in, without caches where they go to a URL."""
    from drafters.storage import is_url
    from drafters.weights import cache_root

    return Path(config.root).expanduser() if config.root and not is_url(config.root) else cache_root() / "states"


def states_place(config: "CaptureConfig") -> tuple[str, int | None]:
    """Where the caches lie, or will, and the bytes free there; None at a URL. Raises DataError where no folder can
    be."""
    from drafters.errors import DataError
    from drafters.storage import is_url

    if config.root and is_url(config.root):
        return config.root, None
    root = states_root(config)
    there = next(one for one in (root.absolute(), *root.absolute().parents) if one.exists())
    if not there.is_dir():
        raise DataError(f"cache.root: got '{root}', but {there} is a file; accepted: a folder, or a URL")
    return str(root), shutil.disk_usage(there).free


def device_memory(device: Any) -> int:
    """Bytes of a GPU, or of this machine."""
    import os

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def render(plan: Plan) -> str:
    """The plan as text."""
    lines = [f"Plan for {plan.target}", f"  weights {size(plan.target_bytes)}", ""]
    lines += [f"{name}: {report.summary()}" for name, report in plan.splits.items()]
    lines += [
        f"in all {plan.num_tokens:,} tokens, {plan.num_last:,} of them with a supervised prediction",
        "",
        f"Disk, layers {list(plan.layer_ids)}, by codec (marked: as set)",
        f"  {'':6}{'last=all':>12}{'last=supervised':>18}",
    ]
    for codec in dict.fromkeys(name for name, _ in plan.disk):
        sizes = [plan.disk[codec, last] for last in ("all", "supervised")]
        mark = f"  <- last={plan.chosen[1]}" if codec == plan.chosen[0] else ""
        lines.append(f"  {codec:6}{size(sizes[0]):>12}{size(sizes[1]):>18}{mark}")
    free = "what is" if plan.free_bytes is None else size(plan.free_bytes)
    lines.append(f"  {free} free at {plan.root}: {verdict(plan.disk_fits)}")
    if plan.needs_all:
        lines.append(f"  {plan.drafter} reads the last state everywhere: cache.last=all")
    if plan.missing_layers:
        union = sorted({*plan.layer_ids, *plan.missing_layers})
        lines.append(f"  {plan.drafter} reads layers {list(plan.missing_layers)} too: 'cache.layer_ids={union}'")
    lines += ["", f"Capture: {duration(plan.hours)} at {plan.rate:,.0f} tokens/s a process", f"  {plan.rate_from}"]
    if plan.ranks > 1:
        each = -(-plan.num_tokens // plan.ranks)
        share = plan.disk[plan.chosen] / plan.ranks
        lines.append(f"  each of {plan.ranks} processes: about {each:,} tokens, {size(share)}")
    if not plan.is_trained:
        return "\n".join([*lines, "", f"{plan.drafter} has nothing to train, and needs no cache"])
    lines += ["", f"Training of {plan.drafter}, memory of one process"]
    for name, part in plan.memory.items():
        lines.append(f"  {name:22}{'not known' if part is None else size(part):>12}")
    both = plan.memory_bytes + plan.target_bytes
    lines += [
        f"  {'together':22}{size(plan.memory_bytes):>12}",
        f"  {'with the target':22}{size(both):>12}  "
        "(train.py holds it too, to measure the drafter; not with report=none)",
        f"  {size(plan.device_bytes)} on {plan.device}: training {verdict(plan.memory_bytes <= plan.device_bytes)}, "
        f"with the target {verdict(both <= plan.device_bytes)}",
    ]
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """In GB, or MB below a tenth of one."""
    return f"{num_bytes / GB:,.2f} GB" if num_bytes >= GB / 10 else f"{num_bytes / 1e6:,.1f} MB"


def duration(hours: float) -> str:
    """In hours, or minutes below two of them."""
    return f"{hours:,.1f} h" if hours >= 2 else f"{hours * 60:,.1f} min"


def verdict(fits: bool | None) -> str:
    """In words."""
    if fits is None:
        return "not known"
    return "fits" if fits else "DOES NOT FIT"
