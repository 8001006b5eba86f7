# README promises more than commands, which tests/test_docs.py holds: its first block, targets of make, and files.

import re

from tests.pages import ROOT, commands, links

README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
# Files that only a user or a run can bring.
BROUGHT = re.compile(
    r"^(outputs/|evaluate/|calibrate/|~|\.venv|\.hydra/|checkpoints/|drafter/|profile/|site/|report\.|throughput\.|"
    r"config\.json|model\.safetensors)"
)


def test_first_block_has_the_two_commands():
    assert [one.words for one in commands(README)][:2] == [("make", "demo"), ("make", "test")]
    first = re.search(r"^```bash\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[1]
    assert [line for line in first.splitlines() if not line.startswith("#")] == ["make demo", "make test"]


def test_output_shown_is_real():
    assert "REPLACE WITH REAL OUTPUT" not in README
    tutorial = (ROOT / "docs" / "first-drafter.md").read_text()
    shown = re.search(r"^```text\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[1]
    assert all(line in tutorial for line in shown.splitlines())


def test_it_is_short():
    assert README.count("\n") <= 200


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(PAGES.values())
    spans = "\n".join([*re.findall(r"`([^`\n]*)`", text), *re.findall(r"^    (make .*)$", text, flags=re.MULTILINE)])
    named = set(re.findall(r"\bmake ([a-z-]+)", spans))
    assert {"setup", "docs", "check"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"a page names `make {target}`"


def test_files_exist():
    for page, text in PAGES.items():
        spans = re.findall(r"`([\w.~<>/*-]+(?:/|\.(?:py|md|yaml|toml|txt|json|safetensors)))`", text)
        missing = [name for name in spans if not BROUGHT.match(name) and "<" not in name and not (ROOT / name).exists()]
        assert not missing, f"{page} names what is not there: {sorted(missing)}"
    assert {"docs/pipeline.svg", "docs/first-drafter.md"} <= set(links(README))
