"""Shared parts of the word problems: the registering decorator and the closing instructions."""

from __future__ import annotations

import random
from collections.abc import Callable

from data.samples.templates.base import Maker, Template

COMMON = r"Please reason step by step, and put your final answer within \boxed{}."
OTHERS = (
    r"Think step by step and give the final answer in \boxed{}.",
    r"Show your reasoning, then write the final answer inside \boxed{}.",
    r"Solve this step by step. The final answer should appear in \boxed{}.",
    r"Work through it one step at a time and finish with the result in \boxed{}.",
    r"Explain each step of your calculation and end with \boxed{answer}.",
    r"Reason carefully, and put only the answer in \boxed{} at the end.",
    r"Let's solve it step by step, with the final answer in \boxed{}.",
    "Show your work.",
    "Explain how you got the answer.",
    "Let's think step by step.",
)
FOLLOWUPS = (
    "Can you check the answer in a different way?",
    "Now explain the solution to a ten-year-old.",
    "Write a similar problem with different numbers and solve it.",
    "How would the answer change if the first number in the problem were twice as large?",
    "Write the calculation as a single expression.",
    "Can you summarize the solution in two sentences?",
)


def finish(text: str, *, rng: random.Random) -> str:
    """The problem, and for about two in three an instruction on how to answer it."""
    draw = rng.random()
    if draw < 0.34:
        return text
    if draw < 0.74:
        return f"{text}\n{COMMON}"
    return text + rng.choice((" ", "\n")) + rng.choice(OTHERS)


def registrar(templates: list[Template]) -> Callable[[Maker], Maker]:
    """A decorator that adds a problem-writing function to `templates` under its own name."""

    def register(write: Maker) -> Maker:
        def make(rng: random.Random) -> str:
            return finish(write(rng), rng=rng)

        templates.append(Template(write.__name__, "word-problem", make, FOLLOWUPS))
        return write

    return register
