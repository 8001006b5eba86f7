# The stages of tests/gpu/run.sh, each for a process of its own:
#     python -m tests.gpu.stages NAME --device cuda --folder FOLDER --rows FILE [--tiny]

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from tests.gpu import check_gpu
from tests.gpu.report import Context

__all__ = ["STAGES", "Stage"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`limit`: seconds that it may take on a GPU. `gpu_only`: why it does not run on a CPU."""

    run: Callable[[Context], None]
    limit: float
    gpu_only: str = ""


def _check(name: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        steps = 4 if context.tiny else 200
        args = argparse.Namespace(device=context.device, out=context.folder, steps=steps, target="auto")
        for what, value in check_gpu.CHECKS[name](args).items():
            context.row(what.replace("_", " "), str(value), value=value)

    return run


def _steps(size: str) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        from tests.gpu.steps import measure_steps

        measure_steps(context, size)

    return run


def _profile(context: Context) -> None:
    from tests.gpu.steps import profile_step

    profile_step(context, "qwen3_8b")


def _decode(context: Context) -> None:
    from tests.gpu.speed import decode_latency

    decode_latency(context)


def _packed(context: Context) -> None:
    from tests.gpu.speed import packed_products

    packed_products(context)


def _capture(context: Context) -> None:
    from tests.gpu.speed import capture_speed

    capture_speed(context)


def _sharing(context: Context) -> None:
    from tests.gpu.sharing import run_strategies

    run_strategies(context)


# What a check of check_gpu needs, where it is not the ordinary.
LIMITS = {"attention": 120.0, "training": 150.0}
NO_CPU = {
    "attention": "flex attention has no backward pass on a CPU; tests/test_flex.py has its forward pass",
    "dense": "on a CPU the compiler takes minutes; tests/test_dense.py (slow) has it",
    "step": "it compares a GPU with the CPU",
    "training": "tests/test_doors.py trains on a CPU",
}


def _stages() -> dict[str, Stage]:
    """By importance: what runs last is left out first. A check that someone adds to check_gpu.CHECKS is a stage."""
    checks = {
        f"check {name}": Stage(run=_check(name), limit=LIMITS.get(name, 60.0), gpu_only=NO_CPU.get(name, ""))
        for name in check_gpu.CHECKS
    }
    first, last = ("check loss", "check attention", "check decoding"), ("check step", "check training")
    return {
        **{name: checks[name] for name in first},
        "step 8B": Stage(run=_steps("qwen3_8b"), limit=150),
        "profile 8B": Stage(run=_profile, limit=60),
        "step 4B": Stage(run=_steps("qwen3_4b"), limit=120),
        **{name: stage for name, stage in checks.items() if name not in (*first, *last)},
        "strategies": Stage(run=_sharing, limit=120),
        "decode": Stage(run=_decode, limit=90),
        "capture": Stage(run=_capture, limit=60),
        "packed products": Stage(run=_packed, limit=40, gpu_only="tests/test_packed_products.py has them"),
        **{name: checks[name] for name in last},
    }


STAGES = _stages()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=STAGES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("default")
    context = Context(
        stage=args.name, device=torch.device(args.device), tiny=args.tiny, folder=args.folder, rows=args.rows
    )
    stage = STAGES[args.name]
    if args.device == "cpu" and stage.gpu_only:
        context.skipped("", stage.gpu_only)
        return
    try:
        stage.run(context)
    except check_gpu.FAILURES as error:
        traceback.print_exc()
        context.failed(type(error).__name__, " ".join(str(error).split())[:200])
        leave(1)
    leave(0)


def leave(status: int) -> NoReturn:
    """At once: a kernel that hangs, or a library's thread, must not cost the time of the next stage."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
