# README promises commands, settings and files: each must exist. Doors are asked with `--cfg job`, which composes every
# setting of a command and refuses unknown ones without running anything.

import itertools
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
# Commands of the shell and of pip, which are not ours to test.
FOREIGN = {"pip", "python3", "source", "torchrun"}
# Files that only a user or a run can bring.
BROUGHT = re.compile(
    r"^(outputs/|evaluate/|~|\.venv|\.hydra/|checkpoints/|drafter/|profile/|report\.|throughput\.|config\.json|model\.safetensors)"
)


def blocks(text: str) -> list[list[str]]:
    """Command lines of each bash block, comments left out and continued lines joined."""
    found = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    joined = [block.replace("\\\n", " ").splitlines() for block in found]
    return [[line for line in lines if line.strip() and not line.lstrip().startswith("#")] for lines in joined]


def doors() -> list[list[str]]:
    """Arguments after `python`, or after the options of torchrun, of every command that opens a door of ours."""
    commands = (shlex.split(line, comments=True) for block in blocks(README) for line in block)
    found = []
    for words in commands:
        if words[0] == "torchrun":
            words = words[next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")) - 1 :]
        elif words[0] != "python":
            continue
        found += swept(words[1:])
    return found


def swept(words: list[str]) -> list[list[str]]:
    """The jobs of a command: with `-m` behind the door, one for each of the values between commas."""
    if "-m" not in words[1:]:
        return [words]
    options = [word.split(",") if "," in word else [word] for word in words if word != "-m"]
    keys = [first.partition("=")[0] for first, *_ in options]
    values = [[one if "=" in one else f"{key}={one}" for one in many] for key, many in zip(keys, options, strict=True)]
    return [[words[0], *job] for job in itertools.product(*values[1:])]


def compose(arguments: list[str]) -> str:
    """What went wrong when the door composed its settings; empty when nothing did."""
    asked = [sys.executable, *arguments, *([] if "--cfg" in arguments else ["--cfg", "job"])]
    done = subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"}
    )
    return "" if done.returncode == 0 else f"python {shlex.join(arguments)}\n{done.stderr[-800:]}"


def test_first_block_has_the_two_commands():
    assert blocks(README)[0] == ["make demo", "make test"]


def test_output_shown_is_real():
    assert "REPLACE WITH REAL OUTPUT" not in README


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(
        re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`([^`]*)`", README)) + "\nmake demo\nmake test")
    ):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"README names `make {target}`"


def test_every_command_is_known():
    words = {shlex.split(line, comments=True)[0] for block in blocks(README) for line in block}
    assert words - FOREIGN == {"make", "python"}


def test_every_door_composes():
    assert len(doors()) > 8
    with ThreadPoolExecutor(2) as pool:
        failures = list(filter(None, pool.map(compose, doors())))
    assert not failures, "\n\n".join(failures)


def test_a_wrong_setting_is_noticed():
    assert compose([*doors()[0], "no_such_setting=1"])


def test_files_and_links_exist():
    spans = re.findall(r"`([\w.~<>/*-]+(?:/|\.(?:py|md|yaml|toml|txt|json|safetensors)))`", README)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert {"data/", "train.py", "docs/pipeline.svg"} <= {*spans, *links}
    missing = [name for name in {*spans, *links} if not BROUGHT.match(name) and not (ROOT / name).exists()]
    assert not missing, f"README names what is not there: {sorted(missing)}"
