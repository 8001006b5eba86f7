# Whole training steps at published shapes: milliseconds, positions a second, MFU and memory, beside those of the plain
# step that a user would otherwise run; and where the time of a step goes.

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from drafters.computing import Computing, computed_as
from drafters.heads.block import BlockDrafter
from drafters.training.flops import peak_rate
from drafters.training.meter import peak_memory
from tests.bench.reference import reference_loss
from tests.gpu.arithmetic import Work, of_reference, of_step
from tests.gpu.report import Context
from tests.gpu.shapes import SIZES, Size, make_batch, make_drafter, make_head

__all__ = ["measure_steps", "profile_step"]

KERNELS = 15  # that a profile shows
OUT_OF_MEMORY = torch.OutOfMemoryError
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train a step. `anchors` None = the recipe's."""

    reference: bool = False
    reduced: bool = False
    compile: bool = False
    anchors: int | None = None

    def __str__(self) -> str:
        words = ["plain reference" if self.reference else "ours", "32k" if self.reduced else "whole vocabulary"]
        words += ["compiled"] if self.compile else []
        return ", ".join([*words, f"{self.anchors} anchors"] if self.anchors else words)


class Bench:
    """A target's head and texts of one size on a device, and steps of drafters for it."""

    def __init__(self, context: Context, size: Size) -> None:
        torch.manual_seed(0)
        self.context, self.size, self.device = context, size, context.device
        self.head = make_head(size, self.device)
        self.batch = make_batch(size, self.head, self.device)
        self.warmup, self.repeats = (1, 2) if context.tiny else (3, 10)

    def step(self, variant: Variant) -> tuple[Step, Work]:
        """A whole step (loss, gradients, clipping, AdamW), and what it computes."""
        drafter = make_drafter(self.size, self.device, reduced=variant.reduced, num_anchors=variant.anchors)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
        work = (of_reference if variant.reference else of_step)(drafter, self.batch)
        how = Computing(compile=variant.compile, compile_loss=variant.compile)

        def step() -> None:
            with torch.autocast(self.device.type, torch.bfloat16), computed_as(how):
                loss = self._loss(drafter, variant)
            (loss / work.positions).backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step, work

    def _loss(self, drafter: BlockDrafter, variant: Variant) -> Tensor:
        if variant.reference:
            return reference_loss(drafter, self.batch, self.head)[0]
        return drafter.loss(self.batch, self.head).total

    def measure(self, variant: Variant) -> dict[str, float]:
        """Milliseconds, positions a second, operations, MFU, GiB. Raises OUT_OF_MEMORY."""
        free(self.device)
        step, work = self.step(variant)
        for _ in range(self.warmup):
            step()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(self.repeats):
            step()
        self.synchronize()
        seconds = (time.perf_counter() - started) / self.repeats
        peak = peak_rate(self.device, torch.bfloat16)
        return {
            "ms": 1e3 * seconds,
            "positions": work.positions,
            "positions_per_second": work.positions / seconds,
            "tflop": work.total / 1e12,
            "vocabulary_share": work.vocabulary / work.total,
            "mfu": work.total / seconds / peak.flops,
            "peak_tflops": peak.flops / 1e12,
            "memory_gib": peak_memory(self.device) / 2**30,
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def show(self, variant: Variant) -> dict[str, float] | None:
        """Measure and report; None where it does not fit into memory."""
        try:
            found = self.measure(variant)
        except OUT_OF_MEMORY:
            free(self.device)
            self.context.row(str(variant), "out of memory", out_of_memory=True)
            return None
        text = f"{found['ms']:.1f} ms, {found['positions_per_second']:,.0f} positions/s, MFU {found['mfu']:.1%}"
        self.context.row(str(variant), f"{text}, {found['memory_gib']:.1f} GiB", **found)
        return found


def measure_steps(context: Context, name: str) -> None:
    """Ours and the reference, whole and reduced vocabulary, ours compiled too."""
    bench = Bench(context, SIZES["tiny" if context.tiny else name])
    for reduced in (False, True):
        ours = bench.show(Variant(reduced=reduced))
        compare(bench, ours, reduced=reduced)
        if context.device.type == "cuda":
            bench.show(Variant(reduced=reduced, compile=True))
        else:
            context.skipped(str(Variant(reduced=reduced, compile=True)), "on a CPU the compiler takes a minute")


def compare(bench: Bench, ours: dict[str, float] | None, *, reduced: bool) -> None:
    """The reference with as many anchors as fit, halved until they do, and ours with as many."""
    anchors: int | None = None
    while True:
        theirs = bench.show(Variant(reference=True, reduced=reduced, anchors=anchors))
        if theirs is not None:
            break
        anchors = (anchors or bench.size.num_anchors) // 2
        assert anchors >= 1, "the reference does not fit with one anchor"
    if anchors is not None:
        ours = bench.show(Variant(reduced=reduced, anchors=anchors))
    if ours is None:
        return
    faster = ours["positions_per_second"] / theirs["positions_per_second"]
    smaller = theirs["memory_gib"] / ours["memory_gib"]
    what = f"ours / plain reference, {'32k' if reduced else 'whole vocabulary'}"
    text = f"{faster:.2f} x positions/s, {smaller:.2f} x less memory"
    bench.context.row(what, text, speed_ratio=faster, memory_ratio=smaller, anchors=anchors or bench.size.num_anchors)


def profile_step(context: Context, name: str) -> None:
    """The kernels that take most of our step, how busy the device is, and where the host waits for it."""
    bench = Bench(context, SIZES["tiny" if context.tiny else name])
    step, _ = bench.step(Variant())
    for _ in range(bench.warmup):
        step()
    bench.synchronize()
    on_gpu = context.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    started = time.perf_counter()
    with profile(activities=activities) as found:
        for _ in range(bench.repeats):
            step()
        bench.synchronize()
    wall_us = 1e6 * (time.perf_counter() - started)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [e for e in found.key_averages() if e.device_type == kind]
    times = {e: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events}
    busy = sum(times.values())
    calls = sum(event.count for event in events) / bench.repeats
    context.row("device busy", f"{busy / wall_us:.0%} of the wall time, profiled; {calls:,.0f} kernels a step")
    for event in sorted(events, key=times.__getitem__, reverse=True)[:KERNELS]:
        each, count = times[event] / bench.repeats / 1e3, event.count / bench.repeats
        text = f"{each:.2f} ms, {times[event] / busy:.1%}, {count:,.0f} calls a step"
        context.row(event.key[:90], text, ms=each, calls=count)
    waits(context, step)


def waits(context: Context, step: Step) -> None:
    """Lines of a step at which the host waits for the GPU, as torch tells; most are waited for twice or more."""
    if context.device.type != "cuda":
        context.skipped("host waits", "nothing to wait for on a CPU")
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{one.filename.rpartition('/drafters/')[2][-60:]}:{one.lineno}" for one in said)
    context.row("host waits", f"{sum(places.values())} a step, at {len(places)} places", places=dict(places))
    for place, count in places.most_common(8):
        context.row(f"host waits at {place}", f"{count} a step")


def free(device: torch.device) -> None:
    """Gives back what earlier variants held, and begins to measure the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
