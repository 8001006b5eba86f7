# How much of a target step is Python, dispatch and launch instead of arithmetic. A large share means that a verify pass
# of several tokens is cheap here because single steps are wasteful, so that a leaner engine would gain less.

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["dispatch_share"]

# CPU operators whose own time is arithmetic and weight traffic. Elementwise operators on one token are not listed:
# they move a few kilobytes, and what they take is their dispatch.
ARITHMETIC = {
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::mm",
    "aten::mv",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
}


def dispatch_share(target: "FrozenTarget", prompt: Tensor, *, num_steps: int = 16) -> float:
    """1 - (kernel seconds / wall seconds) of single-token steps after `prompt` [T], between 0 and 1.

    Wall seconds: median step without the profiler. Kernel seconds: under torch.profiler, a step's self time in matrix
    products and attention on a CPU, of all device kernels on a GPU. The rest is Python, dispatch, launch and small
    elementwise operators. Machine noise between the two runs moves the value by a few hundredths.
    """
    on_gpu = target.device.type == "cuda"
    token_B1 = prompt[-1:].to(target.device)[None]
    with torch.inference_mode():
        cache = target.new_cache(1)
        target.step(prompt.to(target.device)[None], cache, logits="none")

        def step() -> float:
            started = time.perf_counter()
            target.step(token_B1, cache).logits_BSV.argmax(-1).item()
            return time.perf_counter() - started

        step()
        wall_s = median(step() for _ in range(num_steps))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(num_steps):
                step()
    events = profiler.key_averages()
    if on_gpu:
        kernels_us = sum(event.self_device_time_total for event in events)
    else:
        kernels_us = sum(event.self_cpu_time_total for event in events if event.key in ARITHMETIC)
    return min(max(1 - kernels_us / 1e6 / num_steps / wall_s, 0.0), 1.0)
