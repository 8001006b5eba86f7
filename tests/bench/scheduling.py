# Microseconds that a schedule takes to say how many drafts to verify, and the naive loops of its tests, interleaved:
#
#     python -m tests.bench.scheduling [rows] [drafts] [rounds]
#
# Medians over the rounds, at several depths of admission, since a loop that stops early is cheap. The costs are a table
# that is read once for a number of rows, as in a decode run.

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from drafters.scheduling.gate import Gated
from drafters.scheduling.schedulers import Asynchronous, Fixed, Off, Prefix, Schedule, Scheduler, Threshold
from tests.scheduling_doubles import (
    TableCosts,
    naive_budget,
    naive_prefix,
    naive_threshold,
    outcome,
    random_survival,
    roofline,
)

Naive = Callable[[Tensor], list[int]]


def ways(costs: TableCosts, num_slots: int) -> dict[str, tuple[Scheduler, Naive]]:
    """Every scheduler, and the loop that does the same from Python numbers."""

    def naive_asynchronous(survival_RS: Tensor) -> list[int]:
        survival = survival_RS.tolist()
        return naive_prefix(survival, costs, budget=naive_budget(survival, costs))

    return {
        "Off": (Off(), lambda survival_RS: [0] * len(survival_RS)),
        "Fixed": (Fixed(), lambda survival_RS: [num_slots] * len(survival_RS)),
        "Threshold": (Threshold(threshold=0.6), lambda survival_RS: naive_threshold(survival_RS.tolist(), 0.6)),
        "Prefix": (Prefix(), lambda survival_RS: naive_prefix(survival_RS.tolist(), costs)),
        "Asynchronous": (Asynchronous(), naive_asynchronous),
        "Gated(Prefix)": (Gated(), lambda survival_RS: naive_prefix(survival_RS.tolist(), costs)),
    }


def one_round(schedule: Schedule, survival_RS: Tensor) -> Tensor:
    """All that a schedule does in a round, but for the decoding."""
    schedule.want(len(survival_RS))
    lengths_R = schedule.lengths(survival_RS)
    schedule.observe(outcome(lengths_R, torch.zeros_like(lengths_R), drafted=survival_RS.shape[1]))
    return lengths_R


def measure(layout: str, flat: int, num_rows: int, num_slots: int, num_rounds: int) -> None:
    """Print a line for each scheduler, for steps whose cost rises from `flat` tokens on."""
    costs = TableCosts(steps_s=roofline(num_rows * (1 + num_slots), flat=flat), layout=layout)
    generator = torch.Generator().manual_seed(0)
    cases = {name: (way.begin(costs, num_slots), naive) for name, (way, naive) in ways(costs, num_slots).items()}
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    admitted: dict[str, float] = {}
    for turn in range(num_rounds + 3):
        survival_RS = random_survival(num_rows, num_slots, generator).float()
        for name, (schedule, naive) in cases.items():
            started = time.perf_counter()
            lengths_R = one_round(schedule, survival_RS)
            between = time.perf_counter()
            naive(survival_RS)
            ended = time.perf_counter()
            if turn >= 3:  # the first fill tables and the asynchronous past
                found[name][0].append(between - started)
                found[name][1].append(ended - between)
            admitted[name] = float(lengths_R.double().mean())
    print(f"{layout}, steps as dear as {flat} tokens at least:")
    for name, (ours, loop) in found.items():
        fast, slow = (median(seconds) * 1e6 for seconds in (ours, loop))
        times = f"{fast:>7.0f} us, loop {slow:>8.0f} us, {slow / fast:>6.1f}x"
        print(f"{name:>14}: {times}   {admitted[name]:.2f} drafts a row")


def main(num_rows: int = 1024, num_slots: int = 8, num_rounds: int = 21) -> None:
    torch.set_num_threads(1)
    print(f"{num_rows} rows, {num_slots} drafts, medians of {num_rounds} rounds")
    for layout in ("ragged", "padded"):
        for flat in (num_rows, 4 * num_rows):
            measure(layout, flat, num_rows, num_slots, num_rounds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
