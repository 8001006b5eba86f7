# What `pip install` of a built wheel brings: the trunk, its licence and the settings that need nothing else, no leaf;
# and an sdist from which the tests run. The slow tests install it, type-check a program and train with it.

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch
import yaml

import drafters
from tests.door_world import train_overrides

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("drafters", "data", "conf", "docs", "export", "tests", "notebooks", ".ci")
# Groups of conf/ that name data/ or export/, or serve a door that is not in the wheel.
NOT_SHIPPED = {"engine", "experiment", "hydra", "source", "task", "to"}
DOORS = {"fit.yaml"}
# Of the environment, not of the build: PYTHONDONTWRITEBYTECODE.
HARMLESS = "byte-compiling is disabled"


def names_below(folder, *suffixes):
    """Files below a folder of the checkout, by their path in it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of an sdist and of the wheel that was built from it, and what the build said."""
    # A copy, because setuptools leaves build/ and *.egg-info beside the sources.
    sources, dist = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, sources)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return dist, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built[0].glob("*.whl")
    return path


def test_the_build_warns_of_nothing(built):
    said = [line for line in built[1].splitlines() if re.search("warn|deprecat|!!", line, re.IGNORECASE)]
    assert [line for line in said if HARMLESS not in line] == []


def test_the_wheel_holds_the_trunk_its_licence_and_the_settings_that_need_no_leaf(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"drafters", info}
    assert f"{info}/licenses/LICENSE" in names
    settings = {name for name in names_below("conf", ".yaml") if name.split("/")[1] not in NOT_SHIPPED}
    settings = {name for name in settings if name.count("/") == 2 or name.split("/")[1] in DOORS}
    trunk = names_below("drafters", ".py") | {f"drafters/{name}" for name in settings}
    trunk |= {"drafters/py.typed", "drafters/conf/__init__.py"}
    assert {name for name in names if name.startswith("drafters/")} == trunk
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name.split("/")[2] for name in names if name.count("/") == 3 and "/conf/" in name} == groups - NOT_SHIPPED


def test_shipped_settings_name_no_leaf(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".yaml")}
    assert len(texts) > 40
    targets = {name: re.findall(r"^\s*_target_: (\S+)", text, flags=re.MULTILINE) for name, text in texts.items()}
    assert {one.partition(".")[0] for found in targets.values() for one in found} == {"drafters", "lightning"}
    asked = [one for one in yaml.safe_load(texts["drafters/conf/fit.yaml"])["defaults"] if one != "_self_"]
    files = {f"drafters/conf/{group}/{name}.yaml" for one in asked for group, name in one.items() if name}
    assert len(files) > 8
    assert files <= set(texts)


def test_the_metadata_is_that_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        facts = HeaderParser().parsestr(archive.read(name).decode())
    assert facts["Name"] == "drafters"
    assert facts["Version"] == drafters.__version__
    assert facts["License-Expression"] == "Apache-2.0"
    assert facts["Description-Content-Type"] == "text/markdown"
    assert facts.get_payload().startswith("# drafters")
    assert facts["Requires-Python"] == f">=3.{min(supported())}"
    assert "Typing :: Typed" in facts.get_all("Classifier")
    # A version that is in no changelog was never released.
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.match(r"# Changelog\n", changes)
    versions = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", changes, flags=re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert len(re.findall("^## ", changes, flags=re.MULTILINE)) == len(versions)
    kinds = set(re.findall(r"^### (.+)$", changes, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Measured"}


def supported():
    """Minor versions of Python that pyproject.toml names."""
    return [int(minor) for minor in re.findall(r":: Python :: 3\.(\d+)", (ROOT / "pyproject.toml").read_text())]


def test_the_sdist_holds_what_the_tests_need(built):
    (path,) = built[0].glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = (
        names_below("tests", ".py", ".sh") | names_below("data", ".py", ".gz", ".jsonl") | names_below("export", ".py")
    )
    needed |= names_below("conf", ".py", ".yaml") | names_below("drafters", ".py")
    needed |= names_below("docs", ".md", ".png", ".py", ".sbatch", ".svg") | names_below("notebooks", ".py", ".ipynb")
    needed |= {
        ".ci/run",
        ".ci/check_report.py",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    needed |= {
        "train.py",
        "evaluate.py",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "drafters/py.typed",
        ".pre-commit-config.yaml",
    }
    assert needed - names == set()
    assert not [name for name in names if "__pycache__" in name or name.startswith("outputs")]


PROGRAM = """
from collections.abc import Mapping
from typing import Any

import drafters


def answer(settings: Mapping[str, Any], chats: list[drafters.Conversation]) -> str:
    target: drafters.FrozenTarget = drafters.load_target(settings)
    drafter: drafters.Drafter = drafters.fit(settings, target, chats)
    config = drafters.DecodeConfig(max_new_tokens=8, sampling=drafters.Sampling(temperature=0.5))
    written: drafters.Generated = drafters.generate(target, drafter, ["Why?"], config)
    length: float = written.accepted_length
    again: drafters.Drafter = drafters.load_drafter("x/drafter", spec=target.spec)
    drafters.save_drafter(again, "y", spec=target.spec)
    try:
        return f"{written.texts[0]} {length} {drafters.__version__}"
    except drafters.DraftersError as error:
        return str(error)
"""
WRONG = "\n\ndrafters.generate(drafters.__version__, None, ['x'])\n"


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel, which finds everything else in this one's packages."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file are searched, but the .pth files there, such as an editable install's, are not read.
    (site / "others.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return python


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_a_program_type_checks_against_the_installed_wheel(python, tmp_path):
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", "cache"]
    for name, text, code in (("program.py", PROGRAM, 0), ("wrong.py", PROGRAM + WRONG, 1)):
        (tmp_path / name).write_text(text)
        done = subprocess.run([*command, name], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
    line = len((PROGRAM + WRONG).splitlines())
    assert f'wrong.py:{line}: error: Argument 1 to "generate" has incompatible type "str"' in done.stdout, done.stdout


@pytest.mark.slow
def test_the_page_s_example_runs_with_the_installed_wheel(python, world, tmp_path):
    (tmp_path / "chats.jsonl").write_bytes((world / "chats.jsonl").read_bytes())
    page = (ROOT / "docs" / "library.md").read_text()
    example = re.search(r"<!-- example: library.py -->\n\n```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[
        1
    ]
    kept = [one for one in train_overrides(world) if not one.startswith(("source", "report", "outputs", "name"))]
    assert '"optim.minutes=5"]' in example
    program = example.replace('"optim.minutes=5"]', f'"optim.minutes=5", *{kept!r}]')
    program += "print(drafters.__file__)\n"
    done = subprocess.run(
        [str(python), "-W", "error::DeprecationWarning:drafters", "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"accepted length \d\.\d\d", done.stdout)
    assert str(python.parent.parent) in done.stdout.splitlines()[-1]
    assert (tmp_path / "outputs" / "markov-tiny" / "drafter" / "model.safetensors").is_file()
