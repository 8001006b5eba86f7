# Jobs on a cluster, without one: the launcher and the sbatch templates drive a double of SLURM. What only a cluster
# shows, such as several nodes, is not tested here.

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from drafters import launcher
from drafters.batches import StatesLoader
from drafters.errors import ConfigError, DraftersError
from tests.door_world import ROOT, same_weights, train_overrides, train_settings
from tests.slurm_doubles import calls, make_slurm

TEMPLATES = sorted((ROOT / "docs" / "slurm").glob("*.sbatch"))
# In the place of python: says what it was asked, saves nothing, and ends as train.py would at a SIGTERM.
PATIENT = """#!/bin/bash
echo "asked: $*, $MASTER_ADDR, $MASTER_PORT, restart $SLURM_RESTART_COUNT"
if [ "$SLURM_RESTART_COUNT" != 0 ]; then exit 0; fi
trap 'echo saved; exit 130' TERM
echo ready
while true; do sleep 0.05; done
"""


def wait_for(condition, *, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.02)


def test_a_launcher_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"hydra/launcher: got 'slurm' without -m, .*add -m"):
        launcher.check_launcher(["hydra/launcher=slurm", "drafter=markov"], checkout=tmp_path)


def test_a_launcher_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "PLUGIN", "hydra_plugins.absent")
    with pytest.raises(ConfigError, match=r"plug-in is not installed; pip install .*\[slurm\]"):
        launcher.check_launcher(["-m", "hydra/launcher=slurm"], checkout=tmp_path)


def test_a_machine_without_slurm_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="got 'slurm', and there is no srun here; run this on a login node"):
        launcher.check_launcher(["-m", "hydra/launcher=slurm"], checkout=tmp_path)
    assert launcher.check_launcher(["-m", "hydra/launcher=submitit_local"], checkout=tmp_path) == "submitit_local"


@pytest.mark.parametrize("quoted", ["Error stream produced:\n--\nlog", "No output/error stream produced ! Check: x"])
def test_a_job_without_a_result_is_named_without_its_log(quoted):
    told = f"Job 7 (task: 0) with path P\nhas not produced any output (state: FAILED)\n{quoted}"
    with pytest.raises(DraftersError) as error, launcher.submitting("outputs/.submitit"):
        raise RuntimeError(told)
    said = "hydra/launcher: Job 7 (task: 0) with path P has not produced any output (state: FAILED); logs "
    assert str(error.value).startswith(said)
    assert "outputs/.submitit" in str(error.value)


def test_an_interrupt_of_the_wait_says_that_the_jobs_go_on():
    with pytest.raises(KeyboardInterrupt, match=r"the waiting, not the jobs: .*scancel"), launcher.submitting("logs"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter=glob(zzz*)"], "error: -m: got choices that name no job"),
        (["hydra/launcher=slurm", "drafter=glob(zzz*)"], "error: -m: got choices that name no job"),
        (["hydra/launcher=slurm", "name=one"], "error: hydra/launcher: sbatch: error: invalid partition; logs of"),
    ],
)
def test_a_sweep_without_jobs_ends_with_one_line(tmp_path, overrides, said):
    pytest.importorskip("submitit")
    env = make_slurm(tmp_path / "slurm")
    (tmp_path / "slurm" / "bin" / "sbatch").write_text("#!/bin/sh\necho sbatch: error: invalid partition >&2\nexit 1\n")
    command = [sys.executable, ROOT / "train.py", "-m", *overrides, f"outputs={tmp_path}/outputs"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [[], ["-m", "drafter=markov,eagle3"], ["-m", "hydra/launcher=basic"]])
def test_commands_without_a_cluster_are_left_alone(tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("PYTHONPATH", "before")
    assert launcher.check_launcher(arguments, checkout=tmp_path) is None
    assert os.environ["PYTHONPATH"] == "before"


def test_jobs_find_our_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", make_slurm(tmp_path / "slurm")["PATH"])
    monkeypatch.setenv("PYTHONPATH", "before")
    assert launcher.check_launcher(["--multirun", "hydra/launcher=slurm"], checkout=tmp_path) == "slurm"
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "before"]


def test_the_launcher_s_settings_are_the_plug_in_s():
    config = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = ["hydra/launcher=slurm", "hydra.launcher.tasks_per_node=4", "hydra.launcher.partition=gpu"]
        cfg = compose("train", overrides, return_hydra_config=True)
    node = OmegaConf.to_container(cfg.hydra.launcher, resolve=False)
    assert set(node) == set(config.SlurmQueueConf.__dataclass_fields__)
    assert cfg.hydra.launcher.gpus_per_node == 4
    assert cfg.hydra.launcher.partition == "gpu"
    assert cfg.hydra.launcher.max_num_timeout > 0


def test_a_warning_is_passed_on_once_everything_is_saved(world, one_thread, monkeypatch):
    saved = []
    checkpoint = world / "outputs" / "warned" / "checkpoints" / "last.ckpt"

    def requeue(number, frame):
        saved.append(torch.load(checkpoint, weights_only=True)["global_step"])
        raise SystemExit(255)

    left = [9]
    batches = StatesLoader.batch

    def warn_in_the_middle(loader, epoch, step):
        left[0] -= loader.finished is not None
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        return batches(loader, epoch, step)

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        monkeypatch.setattr(StatesLoader, "batch", warn_in_the_middle)
        with pytest.raises(SystemExit) as stop:
            train.train(train_settings(world, "name=warned"))
        assert stop.value.code == 255
        assert signal.getsignal(signal.SIGUSR2) is requeue
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(saved) == 1
    assert 1 <= saved[0] < 14


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_sound(template):
    subprocess.run(["bash", "-n", template], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", template], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
    text = template.read_text()
    body = text[text.index("\ncd ") :]
    assert "#SBATCH" not in body, "sbatch reads options only above the first command"
    assert {"--requeue", "--signal=B:USR1@300"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE))


def submitted(tmp_path, template, *arguments):
    """(environment, log) of a submitted template, with the double of python in the place of python."""
    env = make_slurm(tmp_path / "slurm")
    python = tmp_path / "slurm" / "bin" / "python"
    python.write_text(PATIENT)
    python.chmod(0o755)
    done = subprocess.run(["sbatch", template, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "Submitted batch job 1", done.stderr
    log = tmp_path / "slurm" / "1.out"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    return env, log


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_saves_and_goes_back_into_the_queue(tmp_path, template):
    env, log = submitted(tmp_path, template, "target=qwen3_8b", "name=a b")
    subprocess.run(["scancel", "--signal=USR1", "--batch", "1"], env=env, check=True)
    wait_for(lambda: "1 ended 0" in calls(tmp_path / "slurm"))
    asked = {"train": "train.py trainer=slurm", "capture": "-m data.capture"}[template.stem]
    told = [f"asked: {asked} target=qwen3_8b name=a b, localhost, 20001, restart {count}" for count in range(2)]
    lines = log.read_text().splitlines()
    assert [line for line in lines if line in (*told, "saved")] == [told[0], "saved", told[1]]
    heard = [line for line in calls(tmp_path / "slurm") if "srun" not in line]
    warned = ["1 scancel --signal=USR1 --batch", "1 scancel --signal=TERM", "1 requeue"]
    assert heard == [*warned, "1 ended 130", "1 ended 0"]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_cancelled_template_saves_once_and_stays_away(tmp_path, template):
    env, log = submitted(tmp_path, template)
    for kind in (["--batch"], []):
        subprocess.run(["scancel", "--signal=TERM", *kind, "1"], env=env, check=True)
    wait_for(lambda: "1 ended 130" in calls(tmp_path / "slurm"))
    assert log.read_text().count("saved") == 1
    assert not [line for line in calls(tmp_path / "slurm") if "requeue" in line]


def submit(world, root, *overrides):
    """`train.py -m hydra/launcher=slurm` in this world, on a SLURM of its own in `root`."""
    command = [sys.executable, ROOT / "train.py", "-m", "hydra/launcher=slurm", *train_overrides(world), *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    root.mkdir(exist_ok=True)
    return subprocess.Popen(command, env=make_slurm(root / "slurm"), cwd=root, **pipes)


@pytest.mark.slow
def test_a_sweep_on_a_cluster_trains_what_one_process_does(world, first, tmp_path):
    pytest.importorskip("submitit")
    job = submit(world, tmp_path, "name=one,two", "data.seed=0")
    told = job.communicate(timeout=200)
    assert job.returncode == 0, told
    assert same_weights(world / "outputs" / "one", world / "outputs" / "two")
    script = (tmp_path / "slurm" / "1.sh").read_text()
    expected = {"--array=0-1%2", "--requeue", "--signal=USR2@180", "--gpus-per-node=1", "--open-mode=append"}
    assert expected <= set(re.findall(r"^#SBATCH (\S+)", script, re.MULTILINE))


@pytest.mark.slow
def test_a_warned_job_saves_goes_back_and_resumes(world, tmp_path):
    pytest.importorskip("submitit")
    long = ["name=long", "optim.max_steps=400", "trainer.val_check_interval=400", "callbacks.probe_every_n_steps=null"]
    job = submit(world, tmp_path, *long)
    checkpoint = world / "outputs" / "long" / "checkpoints" / "last.ckpt"
    wait_for(checkpoint.exists)
    scancel = tmp_path / "slurm" / "bin" / "scancel"
    subprocess.run([scancel, "--signal=USR2", "1"], check=True)
    told = job.communicate(timeout=200)
    assert job.returncode == 0, told
    wait_for(lambda: "1 ended 0" in calls(tmp_path / "slurm"))  # its result came before
    heard = [line for line in calls(tmp_path / "slurm") if "srun" not in line]
    assert heard == ["1 scancel --signal=USR2", "1 requeue", "1 ended 255", "1 ended 0"]
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 400
    # The second life of the job went on from a step between: its log begins there.
    *_, again = sorted((world / "outputs" / "long" / "logs").glob("*/metrics.csv"))
    header, row = again.read_text().splitlines()[:2]
    assert int(row.split(",")[header.split(",").index("step")]) > 1


@pytest.mark.slow
def test_a_job_that_fails_is_named(world, tmp_path):
    pytest.importorskip("submitit")
    job = submit(world, tmp_path, "name=bad", "optim.lr=-1")
    _, told = job.communicate(timeout=200)
    assert job.returncode == 1
    assert "Traceback" not in told
    (log,) = re.findall(r"error: not trained: bad; its log says why: (\S+)", told)
    assert "error: optim.lr: got -1.0; must be above 0" in Path(log).read_text()
