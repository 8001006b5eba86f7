# Adding a drafter is one file and one YAML, in a folder of one's own: the example of docs/add-a-drafter.md, copied from
# the page, goes through the doors by the commands that the page gives.

import ast
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.door_world import ROOT
from tests.out_of_tree import PAGE, example_files, write_example

STEPS = 12


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("mine"))


def commands() -> list[list[str]]:
    """What the page tells to run, as words."""
    (block,) = (
        b for b in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL) if "mine" in b
    )
    return [shlex.split(line) for line in block.splitlines()]


def test_the_example_is_two_short_files():
    files = example_files()
    assert sorted(files) == ["drafter/linear.yaml", "linear_drafter.py"]
    body = ast.parse(files["linear_drafter.py"]).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    lines = [line for node in classes for line in ast.unparse(node).splitlines() if line.strip()]
    assert len(lines) <= 45, f"{len(lines)} lines of code: what became harder?"
    assert all(len(line) <= 120 for line in files["linear_drafter.py"].splitlines())


def opened(arguments, *overrides, mine):
    """A door in a process of its own, with the folder of the example in place of ~/mine."""
    words = [word.replace("~/mine", str(mine)) for word in arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(mine)}
    done = subprocess.run(
        [sys.executable, *words[1:], *overrides], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_commands_of_the_page_train_and_measure_it(world, mine, tmp_path):
    export, train, evaluate = commands()
    assert export == ["export", "PYTHONPATH=~/mine"]
    opened(train, *short_training(world, outputs=tmp_path), mine=mine)
    run = tmp_path / "linear-tiny"
    own = json.loads((run / "drafter" / "config.json").read_text())["drafter"]
    assert own["_target_"] == "linear_drafter.LinearDrafter"
    facts = json.loads((run / "report.json").read_text())["provenance"]["drafter"]
    assert facts["class"] == "linear_drafter.LinearDrafter"
    assert 0 < facts["step"] <= STEPS
    words = [f"run={run}" if word == "run=outputs/linear-smollm2" else word for word in evaluate]
    assert words != evaluate
    prompts = ("source=jsonl", f"source.path={world}/maths.jsonl", "max_new_tokens=14", "profile_rounds=2")
    opened(words, *prompts, "device=cpu", f"out={tmp_path / 'measured'}", mine=mine)
    assert json.loads((tmp_path / "measured" / "report.json").read_text())["prompts"] == 2


def short_training(world, *, outputs):
    return (
        *(f"target.weights={world}/target", "target.name=tiny", "target.sha256=null", "target.mask_token=0"),
        *("target.layer_ids=[0,2]", "target.dtype=float32", "source=jsonl", f"source.path={world}/chats.jsonl"),
        *("data.validation=0.2", f"cache.root={world}/states", f"outputs={outputs}", "device=cpu", "logger=none"),
        *("optim.minutes=null", f"optim.max_steps={STEPS}", "optim.warmup_steps=2", "trainer.val_check_interval=6"),
        *("callbacks.probe_every_n_steps=null", "report.num_prompts=2", "report.max_new_tokens=12"),
    )
