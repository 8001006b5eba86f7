# The drafter that docs/add-a-drafter.md shows, as the files that a reader would write.

import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parent.parent / "docs" / "add-a-drafter.md"


def example_files() -> dict[str, str]:
    """Text by file name, of every block that the page marks as a file of the example."""
    pattern = r"^<!-- example: (\S+) -->\n\n```\w+\n(.*?)^```$"
    return dict(re.findall(pattern, PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))


def write_example(folder: Path) -> Path:
    for name, text in example_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def load_example() -> str:
    """Its YAML; its classes are importable afterwards, without files."""
    files = example_files()
    module = ModuleType("linear_drafter")
    sys.modules[module.__name__] = module
    exec(compile(files["linear_drafter.py"], str(PAGE), "exec"), module.__dict__)
    return files["drafter/linear.yaml"]
