# vLLM in tests and measurements: DRAFTERS_VLLM names the python of an environment that has it (docs/export.md).

import json
import os
import subprocess
from pathlib import Path
from typing import Any

VARIABLE = "DRAFTERS_VLLM"
WORKER = Path(__file__).with_name("vllm_worker.py")


def vllm_python() -> Path | None:
    """The interpreter of vLLM's environment, None where none is named."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def vllm(folder: Path, what: str, **job: Any) -> Any:
    """What vllm_worker.py finds for a job; its files go into `folder`. Raises RuntimeError, with what it said last,
    when it fails."""
    python = vllm_python()
    assert python is not None
    asked, found, log = folder / f"{what}-job.json", folder / f"{what}-found.json", folder / f"{what}.log"
    asked.write_text(json.dumps({"what": what, **job}))
    found.unlink(missing_ok=True)
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with log.open("w") as stream:
        done = subprocess.run(
            [python, "-P", WORKER, asked, found], stdout=stream, stderr=subprocess.STDOUT, env=outside
        )
    if done.returncode or not found.is_file():
        raise RuntimeError(f"vLLM did not do it (exit {done.returncode}); it said at last:\n{log.read_text()[-3000:]}")
    return json.loads(found.read_text())
