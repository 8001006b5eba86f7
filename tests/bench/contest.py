# Contestants of one training step, each a process of its own, which take turns; medians and peaks of memory.

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import torch

from tests.bench.step_world import Setting, as_argument
from tests.door_world import ROOT

# The Python of an environment with speculators; see `make peers`.
SPECULATORS = "DRAFTERS_SPECULATORS"


@dataclass
class Found:
    """What a contestant needed: seconds of its steps, supervised positions of each, megabytes at its highest."""

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    count: float = 0.0
    peak_mb: float = 0.0

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Supervised positions a second."""
        return self.count / self.step


class Contestant:
    """A process that takes steps when asked."""

    def __init__(self, setting: Setting) -> None:
        python = os.environ[SPECULATORS] if setting.who == "speculators" else sys.executable
        command = [python, "-m", "tests.bench.step_world", as_argument(setting)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(setting.threads)}
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
            )
        except OSError as error:
            said = f"{setting.who}: {python!r} cannot be started ({error.strerror}); see {SPECULATORS}"
            raise SystemExit(said) from None
        self.found = Found(setting)
        self._answer()

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def steps(self, number: int, *, keep: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.found.count, self.found.peak_mb = answer["count"], answer["peak_mb"]
        if keep:
            self.found.seconds += answer["seconds"]

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.found.setting.who}: ended with {self.process.wait()}; see its error above")
        return json.loads(line)


def contest(settings: Mapping[str, Setting], *, rounds: int, steps: int = 1) -> dict[str, Found]:
    """Each takes `steps` in its turn, `rounds` times, after two that do not count."""
    with ExitStack() as stack:
        racing = {name: stack.enter_context(Contestant(setting)) for name, setting in settings.items()}
        for turn in range(rounds + 1):
            for one in racing.values():
                one.steps(steps if turn else 2, keep=turn > 0)
        return {name: one.found for name, one in racing.items()}


def product_rate(num_rows: int = 1344, hidden: int = 576, vocab: int = 49152, *, rounds: int = 7) -> float:
    """FLOP/s of this machine's bfloat16 product of [rows, hidden] with [hidden, vocab]."""
    x, weight = torch.randn(num_rows, hidden).bfloat16(), torch.randn(vocab, hidden).bfloat16()
    out, seconds = torch.empty(num_rows, vocab, dtype=torch.bfloat16), []
    for _ in range(rounds):
        begin = time.perf_counter()
        torch.mm(x, weight.T, out=out)
        seconds.append(time.perf_counter() - begin)
    return 2 * num_rows * hidden * vocab / median(seconds)


def floor_flops(setting: Setting) -> float:
    """FLOPs of a step that nothing can spare: three vocabulary products a supervised position (the draft's, the
    target's, the gradient of the states), and the backbone's products three times (forward, and two gradients)."""
    hidden, heads, mlp = 576, 576 + 2 * 192 + 576, 3 * 1536
    slots = setting.num_rows * setting.num_anchors * setting.block_size
    context = sum(setting.lengths) / 2 * setting.num_rows
    vocab = 3 * 2 * hidden * (setting.draft_vocab or setting.vocab) * slots
    layers = 3 * 2 * hidden * (heads + mlp) * setting.num_layers * slots
    fused = 2 * 2 * 5 * hidden * hidden * context  # its input needs no gradient
    kv = 3 * 2 * hidden * 2 * 192 * setting.num_layers * context
    return vocab + layers + fused + kv
