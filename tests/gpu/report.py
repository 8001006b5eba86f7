# What a stage found: rows of a table, written as they come, so that a stage that is stopped keeps those it had.

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Context", "read_rows"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a stage runs, where it may write, and where its rows go."""

    stage: str
    device: torch.device
    tiny: bool
    folder: Path
    rows: Path

    def row(self, what: str, figure: str, **facts: Any) -> None:
        """One line of the table; `facts` are for the JSON file."""
        self._write({"stage": self.stage, "what": what, "figure": figure, "ok": True, "facts": facts})

    def skipped(self, what: str, why: str) -> None:
        """One line that says what was left out: neither right nor wrong."""
        self._write({"stage": self.stage, "what": what, "figure": why, "ok": None, "facts": {}})

    def failed(self, what: str, figure: str) -> None:
        """One line that says what went wrong."""
        self._write({"stage": self.stage, "what": what, "figure": figure, "ok": False, "facts": {}})

    def _write(self, row: dict[str, Any]) -> None:
        with self.rows.open("a") as stream:
            # After a row that a stopped stage was cut off in.
            stream.write("\n" * (not _is_whole(self.rows)) + json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a file; none where nothing was written. A row that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _is_whole(path: Path) -> bool:
    text = path.read_text() if path.exists() else ""
    return not text or text.endswith("\n")
