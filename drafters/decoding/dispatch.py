# How much of a target step is Python, dispatch and launch instead of arithmetic. A large share means that a verify pass
# of several tokens is cheap here because single steps are wasteful, so that a leaner engine would gain less.

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["dispatch_share"]

ARITHMETIC = {
    functional.linear,
    functional.scaled_dot_product_attention,
    torch.addmm,
    torch.baddbmm,
    torch.bmm,
    torch.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.matmul,
}


class _Stopwatch(TorchFunctionMode):
    """Adds up the seconds inside matrix products and attention."""

    seconds = 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in ARITHMETIC:
            return func(*args, **(kwargs or {}))
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - started
        return result


def dispatch_share(target: "FrozenTarget", prompt: Tensor, *, num_steps: int = 16) -> float:
    """1 - (kernel seconds / wall seconds) of single-token steps after `prompt` [T], between 0 and 1.

    Wall seconds: median plain step. Kernel seconds, on a CPU: median over other steps, taking turns, of the time
    inside matrix products and attention (what those calls dispatch themselves counts as arithmetic, so the share is a
    lower bound by some hundredths); on a GPU: all device kernels under torch.profiler. The rest is Python, dispatch,
    launch and small elementwise operators, whose arithmetic on one token is nothing beside their dispatch.
    """
    token_B1 = prompt[-1:].to(target.device)[None]
    wall_s, kernel_s = [], []
    with torch.inference_mode():
        cache = target.new_cache(1)
        target.step(prompt.to(target.device)[None], cache, logits="none")

        def step() -> float:
            started = time.perf_counter()
            target.step(token_B1, cache).logits_BSV.argmax(-1).item()
            return time.perf_counter() - started

        step()
        for _ in range(num_steps):
            wall_s.append(step())
            if target.device.type == "cpu":
                with _Stopwatch() as watch:
                    step()
                kernel_s.append(watch.seconds)
        if target.device.type != "cpu":
            kernel_s.append(_device_seconds(step, num_steps))
    return min(max(1 - median(kernel_s) / median(wall_s), 0.0), 1.0)


def _device_seconds(step: Callable[[], float], num_steps: int) -> float:
    with torch.profiler.profile() as profiler:
        for _ in range(num_steps):
            step()
    return float(sum(event.self_device_time_total for event in profiler.key_averages())) / 1e6 / num_steps
