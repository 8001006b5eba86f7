# Arithmetic of a training step, counted from the products that really ran, and the rate that a device could reach: the
# published one of known GPUs, the measured one of everything else. Their ratio is the model-FLOPs utilisation.

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["Peak", "peak_rate", "step_counter"]

# Dense bfloat16 products with float32 sums, TFLOP/s, from the vendors' data sheets (half of what they print "with
# sparsity"). The first name that is part of the device's own name counts.
PUBLISHED = (
    ("B200", 2250.0),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("RTX A6000", 154.8),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
)
SECONDS = 0.2  # what a measurement takes
SIZE = 1024  # rows and columns of the measured product on a CPU; a GPU needs more to be full
SIZE_GPU = 8192

aten = torch.ops.aten


@dataclass(frozen=True)
class Peak:
    """Floating-point operations a second that one device could do, and where that number is from."""

    flops: float
    origin: str


def peak_rate(device: torch.device, dtype: torch.dtype) -> Peak:
    """The published rate for bfloat16 on a known GPU, else the rate of a square product in `dtype`, measured once."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, tera in PUBLISHED:
            if part.lower() in name.lower():
                return Peak(tera * 1e12, f"published for {name}, dense bfloat16")
    return _measured(device, dtype, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, num_threads: int) -> Peak:
    """The best of the products that fit into SECONDS. `num_threads` tells measurements on a CPU apart."""
    size = SIZE_GPU if device.type == "cuda" else SIZE
    # No random numbers: those of the run must stay as they are.
    one = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
    out = torch.empty_like(one)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < SECONDS or best == float("inf"):
        since = time.perf_counter()
        torch.mm(one, one, out=out)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - since)
    text = str(dtype).removeprefix("torch.")
    threads = f", {num_threads} threads" if device.type == "cpu" else ""
    return Peak(2 * size**3 / best, f"measured: {text} product of {size} x {size}{threads}")


def step_counter() -> FlopCounterMode:
    """A context that counts the products (forward and backward) inside it: `get_total_flops`. What is not a product of
    matrices, an attention or a convolution counts nothing."""
    return FlopCounterMode(
        display=False,
        custom_mapping={
            # torch counts these on GPUs only.
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        },
    )


Shape = tuple[int, ...]


def _attention(query: Shape, key: Shape, value: Shape, *rest: object, **options: object) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad_out: Shape, query: Shape, key: Shape, value: Shape, *rest: object, **options: object
) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))
