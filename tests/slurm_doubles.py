# A SLURM of one machine, for tests: sbatch, srun, sacct, scontrol and scancel as one small script under five names.
# Jobs run in the background, one task each; `scontrol requeue` runs a job's script again when it has ended.

import os
import stat
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scontrol", "scancel")
SCRIPT = """#!{python} -SE
import os, re, signal, subprocess, sys, time
from pathlib import Path

ROOT = Path("{root}")
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]


def note(job, text):
    with open(ROOT / "calls", "a") as log:
        log.write(f"{{job}} {{text}}\\n")


def set_state(job, text):
    (ROOT / "states" / job).write_text(text)


def run_jobs(base, script, directory, rest):
    text = Path(script).read_text()
    array = re.search(r"^#SBATCH --array=0-(\\d+)", text, re.M)
    for index in range(int(array[1]) + 1) if array else [None]:
        job = base if index is None else f"{{base}}_{{index}}"
        env = os.environ | {{"SLURM_JOB_ID": base if index is None else str(int(base) * 100 + index)}}
        env |= {{"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_RESTART_COUNT": "0"}}
        env |= {{"SLURM_NNODES": "1", "SLURM_SUBMIT_DIR": directory}}
        if index is not None:
            env |= {{"SLURM_ARRAY_JOB_ID": base, "SLURM_ARRAY_TASK_ID": str(index)}}
        for count in range(9):
            set_state(job, "RUNNING")
            with open(ROOT / f"{{job}}.out", "a") as out:
                batch = subprocess.Popen(["bash", script, *rest], cwd=directory, env=env, stdout=out, stderr=out)
            (ROOT / f"batch-{{job}}").write_text(str(batch.pid))
            code = batch.wait()
            note(job, f"ended {{code}}")
            if not (ROOT / f"requeue-{{job}}").exists():
                break
            (ROOT / f"requeue-{{job}}").unlink()
            env["SLURM_RESTART_COUNT"] = str(count + 1)
        set_state(job, "COMPLETED" if code == 0 else "FAILED")


if name == "sbatch":
    at = next(i for i, word in enumerate(arguments) if not word.startswith("--"))
    counter = ROOT / "number"
    base = str(int(counter.read_text()) + 1 if counter.exists() else 1)
    counter.write_text(base)
    script = str(ROOT / f"{{base}}.sh")
    Path(script).write_text(Path(arguments[at]).read_text())
    daemon = [sys.executable, "-SE", str(ROOT / "bin" / "daemon"), base, script, os.getcwd(), *arguments[at + 1 :]]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(daemon, start_new_session=True, **quiet)
    print(f"Submitted batch job {{base}}")
elif name == "daemon":
    run_jobs(*arguments[:3], arguments[3:])
elif name == "srun":
    job = os.environ["SLURM_JOB_ID"]
    label = "_".join(filter(None, [os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")])) or job
    out = err = None
    while arguments[0].startswith("--"):
        word = arguments.pop(0)
        if word in ("--output", "--error"):
            path = arguments.pop(0).replace("%j", label).replace("%A_%a", label).replace("%t", "0")
            out, err = (open(path, "a"), err) if word == "--output" else (out, open(path, "a"))
    env = os.environ | {{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1"}}
    signal.signal(signal.SIGTERM, lambda *_: note(job, "srun was terminated"))
    task = subprocess.Popen(arguments, env=env, stdout=out, stderr=err)
    (ROOT / f"task-{{job}}").write_text(str(task.pid))
    note(job, "srun " + " ".join(arguments))
    sys.exit(task.wait() % 256)
elif name == "sacct":
    print("JobID|State|NodeList")
    for path in sorted((ROOT / "states").iterdir()):
        print(f"{{path.name}}|{{path.read_text()}}|localhost")
elif name == "scontrol" and arguments[0] == "requeue":
    note(arguments[1], "requeue")
    (ROOT / f"requeue-{{arguments[1]}}").touch()
elif name == "scontrol":
    print("localhost")
elif name == "scancel":
    *options, job = arguments
    note(job, "scancel " + " ".join(options))
    kind = "batch" if "--batch" in options else "task"
    os.kill(int((ROOT / f"{{kind}}-{{job}}").read_text()), getattr(signal, "SIG" + options[0].partition("=")[2]))
"""


def make_slurm(root: Path) -> dict[str, str]:
    """Fills `root` with the commands and gives an environment that finds them first."""
    (root / "bin").mkdir(parents=True)
    (root / "states").mkdir()
    for name in (*COMMANDS, "daemon"):
        script = root / "bin" / name
        script.write_text(SCRIPT.format(python=sys.executable, root=root))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def calls(root: Path) -> list[str]:
    """What was asked of SLURM, one line a call: the job, then what happened."""
    log = root / "calls"
    return log.read_text().splitlines() if log.exists() else []
