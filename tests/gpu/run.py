# All that needs an NVIDIA GPU, in one call of less than ten minutes: stages in processes of their own, by importance,
# each with a time limit; what there is no time for is named. One table at the end, and summary.json in $OUT.
#     python -m tests.gpu.run [--device cuda|cpu] [--tiny] [--minutes 9.5] [--only STAGE ...]

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.gpu.report import Context, read_rows
from tests.gpu.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
LEAST = 20.0  # seconds that a stage is worth starting with
STDERR = 2  # stages print there: the table alone is the output
GRACE = 5.0  # seconds that a stage has to end what it started
MARKS = {True: "ok", False: "FAILED", None: "skipped"}
# Where there is no network, the default target's wheel is soon given up.
ENVIRONMENT = {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "10", "PYTHONPATH": str(ROOT)}
Rows = list[dict[str, Any]]


def run_stage(name: str, args: argparse.Namespace, folder: Path, seconds: float) -> Rows:
    """Its rows, with one that says how it ended where it did not end well."""
    place = folder / name.replace(" ", "-")
    place.mkdir()
    rows = place.with_suffix(".jsonl")
    context = Context(stage=name, device=torch.device(args.device), tiny=args.tiny, folder=place, rows=rows)
    started = time.monotonic()
    # A session of its own, so that what it started ends with it.
    process = subprocess.Popen(
        command_of(context), cwd=ROOT, env=os.environ | ENVIRONMENT, start_new_session=True, stdout=STDERR
    )
    try:
        status: int | None = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end(process)
    if status is None:
        context.failed("time", f"stopped after {seconds:.0f} s; what it had is above")
    elif status != 0 and all_fine(read_rows(rows)):
        context.failed("exit", f"ended with status {status}; see the log above")
    found = read_rows(rows)
    took = time.monotonic() - started
    sys.stderr.write(f"== {name}: {MARKS[all_fine(found)]} in {took:.0f} s\n")
    return found


def command_of(context: Context) -> list[str]:
    """What runs a stage in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.stages", context.stage, "--device", context.device.type]
    return [*command, "--folder", str(context.folder), "--rows", str(context.rows), *["--tiny"] * context.tiny]


def end(process: subprocess.Popen) -> None:
    """Ends a stage that still runs, with what it started: torchrun ends its workers when it is asked to end."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def all_fine(rows: Rows) -> bool:
    """Whether nothing failed."""
    return all(row["ok"] is not False for row in rows)


def run_all(args: argparse.Namespace, folder: Path) -> tuple[Rows, list[str]]:
    """Rows of all stages, and the names of those that there was no time for."""
    end = time.monotonic() + 60 * args.minutes
    found, skipped = [], []
    for name in [name for name in STAGES if not args.only or name in args.only]:
        left = end - time.monotonic()
        if left < LEAST:
            skipped.append(name)
            continue
        found += run_stage(name, args, folder, min(STAGES[name].limit, left))
    return found, skipped


def table_of(rows: Rows, skipped: list[str]) -> Table:
    """Stage, what, figure, ok or FAILED."""
    table = Table("stage", "what", "figure", "", box=None, padding=(0, 2, 0, 0))
    shown = ""
    for row in rows:
        stage = "" if row["stage"] == shown else row["stage"]
        table.add_row(stage, row["what"], row["figure"], MARKS[row["ok"]])
        shown = row["stage"]
    for name in skipped:
        table.add_row(name, "", "no time left", MARKS[None])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="All checks and measurements that need an NVIDIA GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to try the script itself")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("tests.gpu.run: no CUDA device here; --device cpu --tiny tries the script without one")
    on_gpu = args.device == "cuda"
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tiny": args.tiny,
    }
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as temporary:
        rows, skipped = run_all(args, Path(temporary))
    summary = {**facts, "ok": all_fine(rows), "skipped": skipped, "rows": rows}
    if out := os.environ.get("OUT"):
        (Path(out) / "summary.json").write_text(json.dumps(summary, indent=1, default=str) + "\n")
    console = Console(width=max(160, Console().width), highlight=False, markup=False)
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()))
    console.print(table_of(rows, skipped))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
