# The house rules of CONTRIBUTING.md that a machine can hold. Everything is read, nothing is imported, so a broken
# module still gets its verdict here.

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {".git", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build", "dist", "outputs"}
TEXT = {"", ".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
LEAVES = {"data", "evaluate", "export", "tests", "train"}

# Third-party imports of the trunk beside torch, by module or folder. A longer list makes every import slower.
TRUNK_IMPORTS = {
    "batches.py": {"lightning"},
    "cache.py": {"safetensors"},
    "chat.py": {"jinja2", "transformers"},
    "checkpoint.py": {"safetensors"},
    "config.py": {"omegaconf"},
    "files.py": {"safetensors"},
    "decoding/comparison.py": {"rich"},
    "decoding/pictures.py": {"matplotlib"},
    "decoding/render.py": {"rich"},
    "decoding/show.py": {"rich"},
    "door.py": {"rich"},
    "progress.py": {"rich", "tqdm"},
    "heads/mtp_block.py": {"transformers"},
    "scheduling/calibration.py": {"scipy"},
    "scheduling/jobs.py": {"matplotlib"},
    "scheduling/observations.py": {"safetensors"},
    "scheduling/pictures.py": {"matplotlib"},
    "scheduling/profile.py": {"scipy"},
    "scheduling/reliability.py": {"matplotlib", "rich", "torchmetrics"},
    "scheduling/simulate.py": {"numpy", "scipy"},
    "scheduling/surface.py": {"numpy"},
    "scheduling/sweep.py": {"matplotlib"},
    "head_only.py": {"safetensors", "transformers"},
    "kv_cache.py": {"transformers"},
    "storage_remote.py": {"fsspec"},
    "target.py": {"transformers"},
    "target_loading.py": {"accelerate", "transformers"},
    "target_probe.py": {"transformers"},
    "training/": {"lightning", "rich"},
    "training/curve.py": {"matplotlib"},
    "training/determinism.py": {"numpy"},
    "training/strategies.py": {"deepspeed"},
    "training/loggers.py": {"matplotlib", "wandb"},
    "weights.py": {"gguf", "huggingface_hub", "safetensors", "transformers"},
}
# What a door may not import before it knows what it was asked for: `--cfg job` must answer at once.
HEAVY = {"datasets", "gguf", "lightning", "matplotlib", "numpy", "pandas", "torch", "transformers", "wandb"}


def files(suffixes: set[str]) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED and not name.endswith(".egg-info")]
        found += [Path(folder, name) for name in names if Path(name).suffix in suffixes]
    return sorted(found)


MODULES = files({".py"})
TRUNK = [path for path in MODULES if path.is_relative_to(ROOT / "drafters")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names that import statements among `nodes` ask for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: neither function bodies nor TYPE_CHECKING blocks."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not is_typing and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                waiting.append(child)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [arg.arg for arg in named if arg.arg not in {"self", "cls", "ctx"}]


def module_file(name: str) -> Path | None:
    """The file of this checkout that a dotted name is, if any."""
    base = ROOT.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def heavy_imports(path: Path) -> dict[str, str]:
    """Heavy packages that importing `path` loads, and the module that asks for each."""
    found: dict[str, str] = {}
    seen, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports(run_at_import(tree_of(current))):
            if name.partition(".")[0] in HEAVY:
                found[name.partition(".")[0]] = name_of(current)
            # `import a.b` runs a/__init__.py too.
            parts = name.split(".")
            waiting += filter(None, (module_file(".".join(parts[:n])) for n in range(1, len(parts) + 1)))
    return found


def trunk_allowed(path: Path) -> set[str]:
    inside = path.relative_to(ROOT / "drafters").as_posix()
    extra = (packages for place, packages in TRUNK_IMPORTS.items() if inside == place or inside.startswith(place))
    return {"drafters", "torch"}.union(*extra)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_is_short_and_opens_with_a_word_to_the_reader(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400, f"{len(lines)} lines: split it by noun"
    if not lines:
        return
    opening = []
    for line in lines:
        if not line.startswith("#"):
            break
        opening.append(line)
    opening = opening or (ast.get_docstring(tree_of(path)) or "").splitlines()
    assert 1 <= len(opening) <= 6, f"opens with {len(opening)} lines of comment or docstring, expected 1 to 6"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_are_short_with_few_parameters(path):
    for function in functions(tree_of(path)):
        where, length = f"{name_of(path)}:{function.lineno} {function.name}", function.end_lineno - function.lineno + 1
        assert length <= 60, f"{where}: {length} lines"
        assert len(parameters(function)) <= 6, f"{where}: {len(parameters(function))} parameters; use a dataclass"


@pytest.mark.parametrize("path", TRUNK, ids=name_of)
def test_trunk_does_not_print(path):
    calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not prints, f"print in lines {prints}: use logging, or let the door say it"


@pytest.mark.parametrize("path", TRUNK, ids=name_of)
def test_trunk_catches_no_blind_exception(path):
    handlers = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler))
    blind = [h.lineno for h in handlers if h.type is None or ast.unparse(h.type) in {"Exception", "BaseException"}]
    assert not blind, f"blind except in lines {blind}: name what can be raised"


@pytest.mark.parametrize("path", TRUNK, ids=name_of)
def test_trunk_imports_what_its_room_may(path):
    used = {name.partition(".")[0] for name in imports(ast.walk(tree_of(path)))} - set(sys.stdlib_module_names)
    assert not used & LEAVES, f"the trunk imports a leaf: {sorted(used & LEAVES)}"
    allowed = trunk_allowed(path)
    assert used <= allowed, f"imports {sorted(used - allowed)}; allowed here: {sorted(allowed)} (see TRUNK_IMPORTS)"


def test_trunk_imports_lists_no_ghost():
    ghosts = [place for place in TRUNK_IMPORTS if not (ROOT / "drafters" / place).exists()]
    assert not ghosts, f"TRUNK_IMPORTS names what is not there: {ghosts}"


def test_doors_import_nothing_heavy():
    leaves = [path for path in MODULES if path not in TRUNK and not path.is_relative_to(ROOT / "tests")]
    doors = [
        path for path in leaves if "hydra" in {name.partition(".")[0] for name in imports(ast.walk(tree_of(path)))}
    ]
    assert {"train.py", "evaluate.py"} <= {name_of(path) for path in doors}
    heavy = {name_of(path): heavy_imports(path) for path in doors}
    assert not any(heavy.values()), f"import these inside the door's function: {heavy}"


def test_no_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users)/\w+")
    texts = [path for path in files(TEXT) if path.stat().st_size < 1_000_000]
    found = [f"{name_of(p)}: {m[0]}" for p in texts for m in pattern.finditer(p.read_text(errors="ignore"))]
    assert not found, f"machine paths: {found}"


def test_the_rules_can_fail(tmp_path):
    source = "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wandb\n"
    source += "def f(self, a, *b, c, **d):\n    import lightning\n    print(a)\n"
    tree = ast.parse(source)
    assert "torch" in set(imports(run_at_import(tree)))
    assert not {"wandb", "lightning"} & set(imports(run_at_import(tree)))
    assert {"wandb", "lightning"} <= set(imports(ast.walk(tree)))
    assert parameters(next(functions(tree))) == ["a", "c", "b", "d"]
    assert heavy_imports(ROOT / "drafters" / "types.py") == {"torch": "drafters/types.py"}
