# Ways to run a test's script or door as several processes.

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def environment(**more):
    """One thread a process, on the CPU, with this checkout first."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    return {**os.environ, **own, **more}


def torchrun_command(*command, size=2):
    """The command line of `size` processes of `command`: a script or `-m` and a module, and their arguments."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [*start, *map(str, command)]


def torchrun(*command, size=2, timeout=120, **more):
    """Run them to their end, with `more` variables: what subprocess.run says."""
    line = torchrun_command(*command, size=size)
    return subprocess.run(line, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=timeout)


def torch_world(rank, port):
    world = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def slurm_world(rank, port):
    world = dict(SLURM_JOB_ID="123456", SLURM_STEP_ID="2", SLURM_NTASKS="2", SLURM_STEP_NODELIST="127.0.0.1")
    return {**world, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port)}


def as_ranks(script, world=torch_world):
    """Two processes without a launcher that run the Python text `script`; their (exit code, stdout, stderr), in the
    order of ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment(**world(rank, port)), **PIPES)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]
