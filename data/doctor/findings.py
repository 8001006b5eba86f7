# What was found, how it is shown, and what it means for the exit code. A finding that may cost drafts says how many, by
# its own evidence: these are listed once more, the costliest first.

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from drafters.errors import DraftersError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["AREAS", "LEVELS", "Finding", "Findings"]

SCHEMA = 1
LEVELS = ("ok", "note", "warning", "problem")
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
AREAS = {
    "machine": "The machine",
    "target": "The target",
    "text": "Conversations, template and loss mask",
    "answers": "The answers",
    "cache": "The cache of states",
    "run": "The run and its drafter",
    "acceptance": "The accepted length",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`check` is "area/name"; `found` the evidence, with its threshold; `advice` what to do. `is_cause`: it can lower
    the accepted length; `cost`: the share of drafts that it may cost, by its evidence, None where that is not known."""

    check: str
    level: str
    found: str
    advice: str = ""
    is_cause: bool = False
    cost: float | None = None

    @property
    def area(self) -> str:
        """Its place in the report, one of AREAS."""
        return self.check.partition("/")[0]


class Findings:
    """All findings, in the order in which they were made."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def ok(self, check: str, found: str) -> None:
        """Looked at, and as it should be."""
        self._add(Finding(check=check, level="ok", found=found))

    def note(self, check: str, found: str, advice: str = "") -> None:
        """Good to know; also of what could not be looked at."""
        self._add(Finding(check=check, level="note", found=found, advice=advice))

    def warning(
        self, check: str, found: str, advice: str, *, is_cause: bool = False, cost: float | None = None
    ) -> None:
        """Works, but worse than it could."""
        self._add(Finding(check=check, level="warning", found=found, advice=advice, **_cause(is_cause, cost)))

    def problem(
        self, check: str, found: str, advice: str = "", *, is_cause: bool = False, cost: float | None = None
    ) -> None:
        """Does not work, or gives wrong results."""
        self._add(Finding(check=check, level="problem", found=found, advice=advice, **_cause(is_cause, cost)))

    def _add(self, finding: Finding) -> None:
        assert finding.area in AREAS, finding.check
        self.all.append(finding)

    @contextmanager
    def watched(self, check: str) -> Iterator[None]:
        """What goes wrong within is a problem, and what is warned of within a warning, of this check."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                yield
            except DraftersError as error:
                self.problem(check, str(error))
        for one in caught:
            if one.category is UserWarning:
                self.warning(check, str(one.message), "see the message")
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def named(self, check: str) -> list[Finding]:
        """The findings of a check."""
        return [one for one in self.all if one.check == check]

    @property
    def has_problem(self) -> bool:
        """Whether any finding is a problem."""
        return any(one.level == "problem" for one in self.all)

    @property
    def causes(self) -> list[Finding]:
        """What can lower the accepted length: first what does not fit the run at all, whose cost is not known, then by
        cost."""
        found = [one for one in self.all if one.is_cause]
        return sorted(found, key=lambda one: -math.inf if one.cost is None else -one.cost)

    def counts(self) -> dict[str, int]:
        """How many findings there are of each level."""
        return {level: sum(one.level == level for one in self.all) for level in LEVELS}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, as doctor.json holds them."""
        return {
            "schema": SCHEMA,
            "healthy": not self.has_problem,
            "counts": self.counts(),
            "findings": [asdict(one) for one in self.all],
            "causes": [one.check for one in self.causes],
        }

    def render(self) -> "Iterator[RenderableType]":
        """A table for each area, the ranked causes, a last line."""
        from rich.text import Text

        for area, title in AREAS.items():
            found = [one for one in self.all if one.area == area]
            if found:
                yield _table(title, found)
        if any(one.area == "acceptance" for one in self.all):
            yield _ranked(self.causes)
        counts = ", ".join(f"{count} {level}" for level, count in self.counts().items())
        yield Text(f"{counts}. " + ("There is a problem." if self.has_problem else "No problem."), style="bold")


def _cause(is_cause: bool, cost: float | None) -> dict[str, Any]:
    return {"is_cause": is_cause or cost is not None, "cost": cost}


def _table(title: str, findings: list[Finding]) -> "RenderableType":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("what to do", overflow="fold", ratio=2)
    for one in findings:
        name = one.check.partition("/")[2]
        table.add_row(Text(one.level, style=STYLES[one.level]), name, Text(one.found), Text(one.advice))
    return table


def _ranked(causes: list[Finding]) -> "RenderableType":
    from rich.text import Text

    if not causes:
        return Text("Causes of a low accepted length: none found. What was measured is above, with its thresholds.\n")
    lines = [
        "Likely causes of a low accepted length, the likeliest first, with the share of drafts that each may cost:"
    ]
    for place, one in enumerate(causes, start=1):
        cost = "not known: it does not fit the run" if one.cost is None else f"about {one.cost:.0%}"
        lines.append(f"  {place}. {one.check}: {cost}")
    return Text("\n".join(lines) + "\n")
