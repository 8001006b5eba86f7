# Reports made by hand, for what reads them: numbers that agree with each other, and the odd shapes that runs can have.

import math
from dataclasses import is_dataclass, replace
from itertools import accumulate
from operator import mul

from drafters.decoding.metrics import expected_length
from drafters.decoding.report import LengthCost, Part, Prediction, PromptCounts, Report, UnitSpeed

NAN = math.nan


def same(left, right):
    """Equality of values in which NaN equals NaN."""
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left):
        return type(left) is type(right) and same(vars(left), vars(right))
    return left == right


def around(value, width=0.1):
    return (value - width, value + width)


def cost(length, *, step=20.0, draft=1.0, verify=24.0, loop=0.5, tokens=2.5):
    """A row of the cost table from the milliseconds of a step, of one draft, of a pass and of the loop."""
    steps = step * tokens
    return LengthCost(
        length=length,
        draft_ms=draft * length,
        verify_ms=verify,
        overhead_ms=loop,
        accepted_length=tokens,
        single_steps_ms=steps,
        predicted_speedup=steps / (draft * length + verify + loop),
    )


def part(*, prompts=10, tokens_per_second=64.2, baseline=40.1, length=2.5):
    return Part(
        prompts=prompts,
        rounds=400,
        tokens=1000,
        accepted_length=length,
        accepted_length_ci95=around(length),
        acceptance_by_position=[0.8, 0.6],
        tokens_per_second=tokens_per_second,
        baseline_tokens_per_second=baseline,
        speedup=tokens_per_second / baseline,
    )


def prompts_of(lengths, rounds=1000):
    """Prompts with these accepted lengths."""
    return [
        PromptCounts(prompt=i, source="maths", turn=0, tokens=round(length * rounds), rounds=rounds)
        for i, length in enumerate(lengths)
    ]


def units_of(speedups):
    """Units of 25 seconds each with these speed-ups over plain decoding."""
    return [
        UnitSpeed(unit=i, tokens=round(1000 * s), seconds=25.0, baseline_tokens=1000, baseline_seconds=25.0)
        for i, s in enumerate(speedups)
    ]


def case(*, block_size=4, sources=("maths", "chat"), first=0.82, **changes):
    """A report; `first` is the acceptance of draft 1, and each later draft has 0.95 of the one before."""
    acceptances = [first * 0.95**k for k in range(block_size)]
    survival = list(accumulate(acceptances, mul))
    length = expected_length(acceptances)
    alive = [1.0, *survival, 0.0]
    histogram = [round(1000 * (alive[n] - alive[n + 1])) for n in range(block_size + 1)]
    values = dict(
        accepted_length=length,
        accepted_length_ci95=around(length, 0.15),
        acceptance_by_position=acceptances,
        acceptance_by_position_ci95=[around(a, 0.02 + 0.01 * k) for k, a in enumerate(acceptances)],
        survival_by_position=survival,
        accepted_histogram=histogram,
        verify_rate=sum(survival) / block_size,
        block_size=block_size,
        prompts=20,
        rounds=sum(histogram),
        tokens=round(length * sum(histogram)),
        tree=None,
        draft_length=block_size,
        accepted_length_at_draft_length=length,
        tokens_per_second=64.2,
        baseline_tokens_per_second=40.1,
        speedup=64.2 / 40.1,
        speedup_ci95=around(64.2 / 40.1, 0.12),
        end_to_end_speedup=1.5,
        draft_ms=4.1,
        verify_ms=24.3,
        overhead_ms=0.5,
        overhead_share=0.017,
        baseline_step_ms=20.2,
        verify_to_step=24.3 / 20.2,
        predicted_speedup=1.63,
        prediction=Prediction(speedup=1.58, accepted_length=2.4, prompts=12, error=1.58 / (64.2 / 40.1) - 1),
        costs=[cost(k, tokens=expected_length(acceptances[:k])) for k in range(1, block_size + 1)],
        dispatch_share=0.34,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_new_tokens=128,
        batch_size=8,
        processes=1,
        seed=0,
        drafter_parameters=11_500_000,
        drafter_bytes=23_000_000,
        by_source={name: part(prompts=5 + i) for i, name in enumerate(sources)},
        by_turn={"1": part()},
        by_context={"0-255": part(tokens_per_second=NAN, baseline=NAN)},
        per_prompt=prompts_of([length] * 20, rounds=50),
        per_unit=units_of([64.2 / 40.1] * 20),
        divergences={"prompts": 0, "compared": 20, "first": []},
        provenance={"command": "evaluate.py", "target": {"name": "tiny"}},
    )
    return Report(**{**values, **changes})


def unmeasured(report):
    """The report of a run in which no draft ever stood and nothing was timed."""
    rest = report.block_size - 1
    return replace(
        report,
        acceptance_by_position=[0.0] + [NAN] * rest,
        acceptance_by_position_ci95=[(0.0, 0.0)] + [(NAN, NAN)] * rest,
        survival_by_position=[0.0] * report.block_size,
        accepted_histogram=[report.rounds] + [0] * report.block_size,
        accepted_length=1.0,
        accepted_length_ci95=(NAN, NAN),
        tokens_per_second=NAN,
        baseline_tokens_per_second=NAN,
        speedup=NAN,
        speedup_ci95=(NAN, NAN),
        predicted_speedup=NAN,
        prediction=Prediction(speedup=NAN, accepted_length=NAN, prompts=0, error=NAN),
        costs=[replace(row, draft_ms=NAN, predicted_speedup=NAN, single_steps_ms=NAN) for row in report.costs],
        by_source={"chat": part(tokens_per_second=NAN, baseline=NAN)},
        per_prompt=prompts_of([1.0] * 20, rounds=50),
        per_unit=[],
    )


LONG = "a-source-with-a-name-that-nobody-would-type-by-hand"


def odd_cases():
    """(name, report) of the shapes that tables and pictures must bear."""
    many = tuple(f"{LONG}-{i}" if i % 2 else f"source{i}" for i in range(12))
    tree = {"parents": [-1, -1, 0, 0, 1], "ranks": [0, 1, 0, 1, 0]}
    all_on = dict(temperature=0.75, top_k=50, top_p=0.95, min_p=0.05, repetition_penalty=1.15, divergences=None)
    slow = [cost(k, step=1234.5, draft=99.9, verify=2345.6, loop=99.9, tokens=9.5) for k in range(1, 17)]
    return {
        "plain": case(),
        "one source, block 1": case(block_size=1, sources=("maths",)),
        "12 sources, block 16": case(block_size=16, sources=many, first=0.97, name="x" * 60, costs=slow, **all_on),
        "unmeasured": unmeasured(case()),
        "tree": case(block_size=2, tree=tree, draft_length=5, costs=[cost(k) for k in (4, 5, 8, 64)]),
        "turns and contexts": case(
            by_turn={"1": part(), "2": part()},
            by_context={name: part(tokens_per_second=NAN, baseline=NAN) for name in ("0-255", "256-1023", "1024-")},
            divergences={
                "prompts": 2,
                "compared": 20,
                "first": [{"prompt": 3, "position": 7, "logit_margin": m} for m in (0.0125, 0.0375)],
            },
        ),
    }
