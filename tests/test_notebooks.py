# The notebooks: pytest runs each (nbmake; their assertions hold what their texts claim), they lie in git without
# outputs, and they use public names. Here, too, that they open runs of train.py.

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(notebook):
    """The text of its code cells, without lines for IPython alone."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(cell["source"]) for cell in cells).split("\n")
    return "\n".join(line for line in lines if not line.startswith("%"))


def verify(*notebooks):
    """What `make check` does."""
    command = [sys.executable, "-m", "nbstripout", "--verify", *map(str, notebooks)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pytest_runs_the_notebooks_by_itself(pytestconfig):
    assert [path.stem for path in NOTEBOOKS] == ["1_masks_and_cache", "2_verification", "3_confidence"]
    assert "notebooks" in pytestconfig.getini("testpaths")
    assert pytestconfig.getoption("nbmake")


def test_outputs_are_stripped(tmp_path):
    assert verify(*NOTEBOOKS).returncode == 0
    notebook = json.loads(NOTEBOOKS[0].read_text())
    ran = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    ran.update(execution_count=1, outputs=[{"name": "stdout", "output_type": "stream", "text": ["done\n"]}])
    spoilt = tmp_path / "spoilt.ipynb"
    spoilt.write_text(json.dumps(notebook))
    assert verify(spoilt).returncode == 1


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_are_public(notebook):
    imports = [node for node in ast.walk(ast.parse(code_of(notebook))) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module.startswith("drafters.")]
    assert ours
    for node in ours:
        public = importlib.import_module(node.module).__all__
        assert {alias.name for alias in node.names} <= set(public), node.module


@pytest.fixture
def open_world(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    return importlib.import_module("worlds").open_world


def test_a_run_is_opened(open_world, run):
    world = open_world(str(run), dtype="float32")
    assert (world.folder, world.target.spec.name, world.layer_ids) == (run.resolve(), "tiny", (0, 2))
    assert world.drafter.block_size == 3
    held_out = len(world.conversations)
    assert 0 < held_out < 20
    prompts = world.prompts(2)
    assert len(prompts) == 2
    assert world.target.tokenizer.decode(prompts[0]).endswith("<|im_start|>assistant\n")


def test_a_folder_that_is_no_run_is_told_in_one_line(open_world, capsys, tmp_path):
    with pytest.raises(SystemExit):
        open_world(str(tmp_path))
    assert capsys.readouterr().err.startswith(f"error: run: {tmp_path} is not a run of train.py")
