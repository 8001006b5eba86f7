"""Turns small reference functions into Python tasks in several forms.

A task is a working function with a description and a function that draws arguments. The examples shown in a
prompt are computed by calling the reference, so they are always right. The reference itself is never shown.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.samples.templates.base import Template

Draw = Callable[[random.Random], tuple[Any, ...]]
COMPLETE = (
    "Complete the following Python function.",
    "Complete this function so that the examples in the docstring hold:",
    "Implement the function below.",
    "Please finish the following Python code:",
    "Fill in the body of this function and return the complete function:",
    "Here is a function signature with a docstring. Write the body:",
    "Write the missing code for this function:",
    "Solve the programming task below in Python and make sure your code passes the examples:",
    "Write a correct implementation of the function described here:",
    "Read the docstring and complete the code.",
    "Can you implement this for me?",
    "Write a solution for this Python problem:",
    "Give me the full code for the function below, including the signature:",
)
AFTER = (
    "",
    "",
    "",
    "",
    "",
    "",
    "\nOnly show the code.",
    "\nAdd a short explanation after the code.",
    "\nKeep the code simple and readable.",
    "\nAlso state its time complexity.",
    "\nDo not use any external libraries.",
)
FOLLOWUPS = (
    "Can you make it more efficient?",
    "Now write three unit tests for it with pytest.",
    "What is the time complexity of your solution?",
    "Explain your code line by line.",
    "Rewrite it without importing anything.",
    "How would you change it so that it raises a ValueError for invalid input?",
    "Can you rewrite it in JavaScript?",
    "Now write a shorter version.",
)


@dataclass(frozen=True)
class Task:
    """A reference function, what it does in two wordings, and how its arguments are drawn."""

    function: Callable[..., Any]
    do: str
    doc: str
    draw: Draw

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def parameters(self) -> list[tuple[str, str]]:
        """Names and annotations of the parameters."""
        return [(p.name, str(p.annotation)) for p in inspect.signature(self.function).parameters.values()]

    def header(self, *, hints: bool = True) -> str:
        """The `def` line."""
        if not hints:
            return f"def {self.name}({', '.join(name for name, _ in self.parameters())}):"
        arguments = ", ".join(f"{name}: {kind}" for name, kind in self.parameters())
        return f"def {self.name}({arguments}) -> {inspect.signature(self.function).return_annotation}:"

    def examples(self, rng: random.Random, *, count: int) -> list[tuple[str, str]]:
        """Up to `count` calls with their results, as text, with results as different as the draws allow."""
        found: dict[str, str] = {}
        for attempt in range(200):
            if attempt >= 14 and len(found) >= count:
                break
            arguments = self.draw(rng)
            call = f"{self.name}({', '.join(map(repr, arguments))})"
            result = repr(self.function(*arguments))
            if len(call) <= 78 and len(result) <= 78:
                found.setdefault(call, result)
        fresh, seen = [], set()
        for pair in found.items():
            if pair[1] not in seen:
                fresh.append(pair)
                seen.add(pair[1])
        rest = [pair for pair in found.items() if pair not in fresh]
        return (fresh + rest)[:count]


def registrar(
    templates: list[Template],
) -> Callable[[str, str, Draw], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """A decorator factory that adds a reference function to `templates` as a task."""

    def task(do: str, doc: str, draw: Draw) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            made = Task(function, do, doc, draw)
            templates.append(Template(f"py_{made.name}", "python", lambda rng: render(made, rng=rng), FOLLOWUPS))
            return function

        return register

    return task


def render(task: Task, *, rng: random.Random) -> str:
    """The task in one of its forms."""
    draw = rng.random()
    if draw < 0.56:
        return as_docstring(task, rng=rng)
    if draw < 0.70:
        return as_tests(task, rng=rng)
    return as_request(task, rng=rng)


def typing_style(header: str) -> tuple[str, str]:
    """The header with `typing` names instead of builtin generics, and the import line it needs (or "")."""
    names: set[str] = set()

    def swap(match: re.Match[str]) -> str:
        names.add(match[1].capitalize())
        return match[1].capitalize() + "["

    header = re.sub(r"\b(list|dict|tuple|set)\[", swap, header)
    if " | None" in header:
        names.add("Optional")
        header = re.sub(r"(\w+) \| None", r"Optional[\1]", header)
    return header, f"from typing import {', '.join(sorted(names))}\n\n\n" if names else ""


def wrap(text: str, *, width: int = 88) -> list[str]:
    """Lines of at most `width` characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def as_docstring(task: Task, *, rng: random.Random) -> str:
    """An instruction and a code block with imports, signature, docstring and examples."""
    header, imports = task.header(hints=rng.random() < 0.85), ""
    if rng.random() < 0.6:
        header, imports = typing_style(header)
    text = task.doc if rng.random() < 0.6 else task.do[0].upper() + task.do[1:] + "."
    lines = wrap(text)
    examples = task.examples(rng, count=rng.randint(2, 4))
    style = rng.random()
    if style < 0.72:
        lines += [""] * (rng.random() < 0.5)
        lines += [line for call, result in examples for line in (f">>> {call}", result)]
    elif style < 0.88:
        lines += ["", "Examples:"] + [f"    {call} -> {result}" for call, result in examples]
    else:
        lines += ["", "For example:"] + [f"{call} should return {result}" for call, result in examples]
    body = "\n".join(f"    {line}".rstrip() for line in ['"""' + lines[0], *lines[1:], '"""'])
    lead = rng.choice(COMPLETE) if rng.random() < 0.95 else ""
    return f"{lead}\n```python\n{imports}{header}\n{body}\n```{rng.choice(AFTER)}".lstrip("\n")


def as_tests(task: Task, *, rng: random.Random) -> str:
    """A request with assertions that the code has to pass."""
    lead = rng.choice(
        [
            f"Write a Python function to {task.do}.",
            f"Implement a function `{task.name}` in Python. {task.doc}",
            f"I need a Python function called `{task.name}` to {task.do}.",
        ]
    )
    introduction = rng.choice(["Your code should pass these tests:", "It should satisfy these assertions:", "Tests:"])
    asserts = "\n".join(f"assert {call} == {result}" for call, result in task.examples(rng, count=3))
    if rng.random() < 0.5:
        return f"{lead} {introduction}\n\n{asserts}"
    return f"{lead} {introduction}\n```python\n{asserts}\n```"


def as_request(task: Task, *, rng: random.Random) -> str:
    """A request in words, with or without the signature or an example."""
    names = ", ".join(name for name, _ in task.parameters())
    lead = rng.choice(
        [
            f"Write a Python function to {task.do}.",
            f"Write a function to {task.do}.",
            f"Write a Python function `{task.name}({names})` to {task.do}.",
            f"How can I {task.do} in Python? Please write a function for it.",
            f"Write a Python function named {task.name}. {task.doc}",
            f"Please write a short Python function with type hints to {task.do}.",
            f"Implement `{task.header()[4:-1]}` in Python. {task.doc}",
            f"In Python, write a function to {task.do}, with a docstring and one usage example.",
        ]
    )
    if rng.random() < 0.35:
        call, result = task.examples(rng, count=1)[0]
        lead += rng.choice(
            [f" For example, `{call}` should return `{result}`.", f"\n\nExample: {call} returns {result}"]
        )
    return lead
