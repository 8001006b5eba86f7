# A command line of any door, run in this process as a person runs it, and what it printed.

import runpy
import sys
from dataclasses import dataclass

from tests.door_world import ROOT

MODULES = {
    "capture": "data.capture",
    "regenerate": "data.regenerate",
    "show": "data.show",
    "export": "export.__main__",
    "import": "export.import_draft",
}


@dataclass(frozen=True)
class Said:
    """`code`: the exit status. `errors`: lines of stderr that are no warnings."""

    code: int
    errors: list[str]
    out: str


def run_door(door, words, monkeypatch, capsys):
    """What `door` says to a command line of `words`."""
    monkeypatch.setattr(sys, "argv", [f"{door}.py", *words])
    capsys.readouterr()
    code = 0
    try:
        if door in MODULES:
            sys.modules.pop(MODULES[door], None)
            runpy.run_module(MODULES[door], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / f"{door}.py"), run_name="__main__")
    except SystemExit as stop:
        code = 1 if isinstance(stop.code, str) else stop.code or 0
    told = capsys.readouterr()
    errors = [line for line in told.err.splitlines() if line.strip() and not line.startswith("warning: ")]
    return Said(code=code, errors=errors, out=told.out)
