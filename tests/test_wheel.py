# What `pip install` of a built wheel would bring: the trunk and its licence, no leaf.

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ["drafters", "data", "conf", "tests", "train.py", "evaluate.py", "pyproject.toml", "README.md", "LICENSE"]


@pytest.mark.slow
def test_wheel_holds_the_trunk_only(tmp_path):
    # A copy, because setuptools leaves build/ and *.egg-info beside the sources.
    sources = tmp_path / "sources"
    sources.mkdir()
    subprocess.run(["cp", "-r", *PARTS, str(sources)], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done = subprocess.run([*command, str(sources)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"drafters"}
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "drafters").rglob("*.py")}
    assert expected | {"drafters/py.typed"} == {name for name in names if name.startswith("drafters/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
