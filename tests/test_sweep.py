# `python train.py -m drafter=a,b`: several runs from one cache. One that fails does not take the others with it.

import os
import subprocess
import sys

import pytest

from tests.door_world import ROOT, train_overrides

# Of markov alone; the others have no such setting.
OWN = ("drafter.sequential.rank", "drafter.block_size", "name=")


def sweep(world, *overrides):
    common = [one for one in train_overrides(world) if not one.startswith(OWN)]
    short = ["optim.max_steps=2", "optim.warmup_steps=1", "trainer.val_check_interval=2", "name=${drafter.name}-swept"]
    command = [sys.executable, "train.py", "-m", *common, *short, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_all_jobs_share_the_cache_and_one_wrong_one_is_named_at_the_end(world):
    done = sweep(world, "drafter=eagle3,medusa,parallel", "target.layer_ids=[0,2]")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: drafter.layer_ids[1]: Interpolation key 'target.layer_ids[2]' not found" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("error: not trained: eagle3-swept")
    for name in ("medusa-swept", "parallel-swept"):
        assert (world / "outputs" / name / "report.json").is_file(), done.stderr
    assert len([path for path in (world / "states").iterdir() if path.is_dir()]) == 1
