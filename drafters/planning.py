# What a capture and a training will cost, from the target's numbers alone: bytes on disk, bytes of memory, hours. Bytes
# on disk are exact but for file headers; memory is counted on small copies of a drafter and carried to its full width.

import json
import os
import platform
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.codecs import Codec
from drafters.heads.draft_vocab import STORED
from drafters.plain_json import parse
from drafters.spec import TargetSpec
from drafters.types import Batch, Example, Needs

if TYPE_CHECKING:
    from drafters.heads.base import Drafter

__all__ = [
    "MASTER_BYTES",
    "Rates",
    "activation_bytes",
    "device_name",
    "flops_per_token",
    "product_rate",
    "stored_bytes",
]

ROW_BYTES = torch.int32.itemsize + torch.bool.itemsize + torch.float32.itemsize  # token, loss mask, log-sum-exp
# Of a trained parameter, all float32: itself, its gradient, two moments of AdamW.
MASTER_BYTES = {"weights": 4, "gradients": 4, "AdamW": 8}
FEW_ROWS, TRIAL_OPERATIONS = 512, (40 * 10**9, 4 * 10**12)  # of a trial of products: on a CPU, on a GPU
SMALL_HEADS = (8, 16, 24)  # widths of an attention head, of the copies that memory is counted on


def stored_bytes(codec: Codec, *, hidden_size: int, num_layers: int, num_tokens: int, num_last: int) -> int:
    """Bytes of a cache of so many tokens on disk, without file headers; `num_last`: positions whose last state is
    stored."""
    state = codec.row_bytes(hidden_size)
    return (num_layers * state + ROW_BYTES) * num_tokens + state * num_last


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made within it: `peak` is the most that were alive at once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def activation_bytes(kind: tuple[Any, Any], spec: TargetSpec, examples: Sequence[Example]) -> int | None:
    """The most memory that a drafter's loss of a batch of `examples` takes beside weights and batch, in bf16 products.

    `kind` is a drafter's class and config. The real loss runs on copies of the drafter and target whose heads are 8, 16
    and 24 wide, with all other widths in proportion: what it keeps grows with the width, and with its square where
    weights are cast, so three copies tell the full one. None where the copy is not smaller (a drafter that takes its
    sizes from elsewhere).
    """
    points = []
    for head_dim in SMALL_HEADS:
        small = narrowed(spec, head_dim)
        with torch.device("meta"):
            sizes = [sum(p.numel() for p in _drafter(kind, one).parameters()) for one in (small, spec)]
        if sizes[0] > sizes[1] and small.hidden_size < spec.hidden_size:
            return None
        points.append((small.hidden_size / spec.hidden_size, loss_bytes(kind, small, examples)))
    widths = torch.tensor([[1.0, x, x * x] for x, _ in points], dtype=torch.float64)
    counted = torch.tensor([float(y) for _, y in points], dtype=torch.float64)
    return int(torch.linalg.solve(widths, counted).sum())


def narrowed(spec: TargetSpec, head_dim: int) -> TargetSpec:
    """The same target with heads of another width, and all other widths in proportion."""
    scale = head_dim / spec.head_dim
    return replace(
        spec,
        head_dim=head_dim,
        hidden_size=max(2, 2 * round(spec.hidden_size * scale / 2)),
        intermediate_size=max(1, round(spec.intermediate_size * scale)),
        rope_inv_freq=tuple(spec.rope_theta ** (-2 * i / head_dim) for i in range(head_dim // 2)),
        rope_scaling=None,
    )


def loss_bytes(kind: tuple[Any, Any], spec: TargetSpec, examples: Sequence[Example]) -> int:
    """The peak of the loss of one batch of random states, counted."""
    from drafters.target import DTYPES, TargetHead

    dtype, generator = DTYPES[spec.dtype], torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = _drafter(kind, spec).float()
    rows_VD = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator).to(dtype)
    head = TargetHead(spec, embedding_VD=rows_VD, lm_head_VD=rows_VD)
    batch = random_batch(examples, spec, drafter.needs, generator)
    given = [one for one in vars(batch).values() if isinstance(one, Tensor)]
    with LiveBytes([*drafter.parameters(), *drafter.buffers(), rows_VD, *given]) as live:
        with torch.autocast("cpu", torch.bfloat16):
            losses = drafter.loss(batch, head)
        peak = live.peak
        del losses
    return peak


def random_batch(examples: Sequence[Example], spec: TargetSpec, needs: Needs, generator: torch.Generator) -> Batch:
    """A batch with the tokens of `examples` and random states."""
    padded = torch.nn.utils.rnn.pad_sequence
    tokens_BT = padded([one.tokens_T.long() for one in examples], batch_first=True)
    shape = (*tokens_BT.shape, len(needs.layer_ids), spec.hidden_size)
    states = torch.randn(shape, generator=generator).bfloat16() if needs.layer_ids else None
    last_BTD = torch.randn(*tokens_BT.shape, spec.hidden_size, generator=generator).bfloat16()
    return Batch(
        tokens_BT=tokens_BT,
        lengths_B=torch.tensor([len(one.tokens_T) for one in examples]),
        loss_mask_BT=padded([one.loss_mask_T for one in examples], batch_first=True),
        aux_BTLD=states,
        last_BTD=last_BTD,
        lse_BT=torch.full(tokens_BT.shape, 20.0),
        layer_ids=needs.layer_ids,
        seeds=tuple(range(len(examples))),
    )


def _drafter(kind: tuple[Any, Any], spec: TargetSpec) -> "Drafter":
    cls, config = kind
    size = asdict(config).get("draft_vocab_size")
    drafter: Drafter = cls.from_tensors(
        config, spec, {} if size is None else {STORED: torch.arange(size, device="cpu")}
    )
    return drafter


def flops_per_token(model: Any, spec: TargetSpec, *, mean_length: float, supervised_share: float) -> float:
    """Operations of one captured token: two for each weight that it passes (of experts, those it is sent to), the
    attention to half a conversation, and the output rows where a prediction is supervised."""
    config = model.config.get_text_config()
    experts, chosen = (
        next((value for name in names if (value := getattr(config, name, None))), 1)
        for names in (("num_local_experts", "num_experts", "n_routed_experts"), ("num_experts_per_tok",))
    )
    weights = 0.0
    for name, parameter in model.get_decoder().layers.named_parameters():
        is_expert = ".experts." in name and experts > 1
        weights += parameter.numel() * (chosen / experts if is_expert else 1.0)
    attention = 2 * mean_length * spec.num_layers * spec.num_heads * spec.head_dim
    return 2 * weights + attention + 2 * supervised_share * spec.vocab_size * spec.hidden_size


def product_rate(spec: TargetSpec, device: torch.device, *, dtype: torch.dtype, rows: int) -> float:
    """Operations a second of the products of one layer of the target's widths on this device, each the best of three.
    `rows`: tokens of a batch; fewer are taken where the layer is so wide that the products would take long."""
    heads, shared = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    narrow, wide = spec.hidden_size, spec.intermediate_size
    shapes = [(1, narrow, heads), (2, narrow, shared), (1, heads, narrow), (2, narrow, wide), (1, wide, narrow)]
    weights = sum(count * a * b for count, a, b in shapes)
    rows = min(rows, max(FEW_ROWS, TRIAL_OPERATIONS[device.type == "cuda"] // (2 * weights)))
    seconds = 0.0
    for count, a, b in shapes:
        x, w = torch.randn(rows, a, device=device).to(dtype), torch.randn(b, a, device=device).to(dtype)
        seconds += count * min([_seconds(x, w) for _ in range(4)][1:])
    return 2 * rows * weights / seconds


def _seconds(x: Tensor, w: Tensor) -> float:
    """Of one product; reading a number of it waits for the device."""
    started = time.perf_counter()
    (x @ w.T)[-1, -1].item()
    return time.perf_counter() - started


def device_name(device: torch.device) -> str:
    """What a rate was measured on, such as "x86_64 cpu, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class Rates:
    """Tokens a second of earlier captures: `rates.json` beside the caches, by target, its sizes, dtype and device."""

    root: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.root / "rates.json"

    def read(self) -> dict[str, float]:
        """All there are; none where the file is missing or damaged, since they can be measured again."""
        try:
            values = parse(self.path.read_text())
            return {str(name): float(rate) for name, rate in values.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def find(self, spec: TargetSpec, device: torch.device) -> float | None:
        """The newest rate of this target here."""
        return self.read().get(self._name(spec, device))

    def add(self, spec: TargetSpec, device: torch.device, rate: float) -> None:
        """Remember a rate. Raises OSError."""
        text = json.dumps({**self.read(), self._name(spec, device): round(rate, 1)}, indent=1, sort_keys=True)
        temp = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temp.write_text(text + "\n")
        temp.replace(self.path)

    def _name(self, spec: TargetSpec, device: torch.device) -> str:
        sizes = f"{spec.num_layers}x{spec.hidden_size}, {spec.vocab_size} tokens"
        return f"{spec.name} ({sizes}), {spec.dtype}, {device_name(device)}"
