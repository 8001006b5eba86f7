# The pages that people read, as tests see them: the commands of their bash blocks, what a block needs that tests have
# not, links and headings. A command that opens a door is composed and typed as the door would do it, in this process.
# `<!-- needs: hub, gpu -->` before a block says that not all of it can run anywhere; its doors compose all the same.

import re
import shlex
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafters.config import build_config, to_plain, typed
from drafters.errors import DraftersError

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {"account", "cluster", "engine", "gpu", "hub", "network", "weights"}
BLOCK = re.compile(r"^(?:<!-- needs: ([^\n]*) -->\n\n?)?```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CONFIG_NAME = re.compile(r'@hydra\.main\(.*config_name="(\w+)"')


@dataclass(frozen=True)
class Command:
    """One command line: where it stands, what its block needs, its words."""

    page: str
    line: int
    needs: frozenset[str]
    words: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str, *, page: str = "page") -> list[Command]:
    """Command lines of each bash block, comments left out and continued lines joined."""
    found = []
    for match in BLOCK.finditer(text):
        needs = frozenset(word.strip() for word in (match[1] or "").split(",")) - {""}
        first = text.count("\n", 0, match.start(2)) + 1
        lines = match[2].split("\n")
        number = 0
        while number < len(lines):
            at, line = number, lines[number]
            while line.endswith("\\"):
                number += 1
                line = line[:-1] + lines[number]
            number += 1
            if words := shlex.split(line, comments=True):
                found.append(Command(page, first + at, needs, tuple(words)))
    return found


def door_of(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The file of the door that a command opens, relative to the checkout, and the settings; None for what is no door
    of ours. Looks behind variables, torchrun, srun and the templates of sbatch."""
    rest = [word for word in words if word != "$@"]
    while rest and re.match(r"\w+=", rest[0]):
        rest = rest[1:]
    if not rest or rest[0] not in ("python", "torchrun", "srun", "sbatch"):
        return None
    if rest[0] == "sbatch":
        template = (ROOT / rest[1]).read_text()
        opened = re.search(r"python (-m )?([\w./]+)", template)
        return opened and door_of(("python", *opened[0].split()[1:], *rest[2:]))
    for i, word in enumerate(rest):
        name = rest[i + 1].replace(".", "/") if word == "-m" and i + 1 < len(rest) else word.removesuffix(".py")
        for path in (f"{name}.py", f"{name}/__main__.py"):
            if (word == "-m" or word.endswith(".py")) and (ROOT / path).is_file() and config_name(path):
                return path, rest[i + 1 + (word == "-m") :]
    return None


def config_name(path: str) -> str | None:
    found = CONFIG_NAME.search((ROOT / path).read_text())
    return found and found[1]


def jobs(settings: list[str]) -> Iterator[list[str]]:
    """The settings of a command, one list a job: with `-m` as many as the longest list between commas, so that each of
    the values stands in one of them."""
    words = [word for word in settings if word not in ("--cfg", "job")]
    if "-m" not in words:
        yield words
        return
    lists = [
        [f"{key}={one}" for one in values.split(",")]
        for key, _, values in (w.partition("=") for w in words if w != "-m")
    ]
    for i in range(max(len(values) for values in lists)):
        yield [values[min(i, len(values) - 1)] for values in lists]


def problems(found: list[Command], *, mine: Path | None = None) -> list[str]:
    """What is wrong with commands, by their places; empty where nothing is. `mine` stands for ~/mine, a folder with
    settings of a reader's own."""
    told = []
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for command in found:
            reason = _problem(command, mine)
            told += [f"{command.place}\n    {reason}"] if reason else []
    return told


def _problem(command: Command, mine: Path | None) -> str:
    if unknown := command.needs - NEEDS:
        return f"needs {', '.join(sorted(unknown))}; accepted: {', '.join(sorted(NEEDS))}"
    if (opened := door_of(command.words)) is not None:
        path, settings = opened
        return next(filter(None, (composed_wrongly(path, job, mine) for job in jobs(settings))), "")
    if command.words[0] == "make":
        targets = [word for word in command.words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        absent = [one for one in targets if not re.search(rf"^{re.escape(one)}:", makefile, re.MULTILINE)]
        return f"the Makefile has no {', '.join(absent)}" if absent else ""
    if command.needs or command.words[0] == "export":
        return ""
    return "neither a door nor a target of make; say what it needs: <!-- needs: engine -->"


def composed_wrongly(path: str, settings: list[str], mine: Path | None = None) -> str:
    """What a door would say of its settings, before it fetches anything; empty when it is content."""
    name = config_name(path)
    assert name is not None, path
    if "--config-dir" in settings:
        at = settings.index("--config-dir")
        settings = [*settings[:at], *settings[at + 2 :], f"hydra.searchpath=[file://{mine}]"]
    try:
        # The driver of a store need not be installed here; any other knows the same settings.
        cfg = compose(name, [re.sub(r"=s3://", "=memory://", one) for one in settings])
        to_plain(cfg)
        READ.get(name, lambda cfg: None)(cfg)
    except (DraftersError, HydraException, OmegaConfBaseException) as error:
        return str(error)
    return ""


def _typed(cfg: DictConfig, kind: type) -> Any:
    plain = to_plain(cfg)
    return typed(kind, {f.name: plain[f.name] for f in fields(kind)}, key="")


def _read_train(cfg: DictConfig) -> None:
    from train import read_plan

    # Here is one process, wherever the command is for.
    OmegaConf.update(cfg, "trainer.devices", 1)
    OmegaConf.update(cfg, "trainer.num_nodes", 1)
    read_plan(cfg)


def _read_evaluate(cfg: DictConfig) -> None:
    from data.prompts import PromptConfig
    from drafters.decoding.measure import MeasureConfig
    from evaluate import MEASURE, Choice, task_settings

    choice = _typed(cfg, Choice)
    _typed(cfg, PromptConfig)
    plain = to_plain(cfg)
    typed(MeasureConfig, {name: plain[name] for name in MEASURE}, key="")
    task_settings(plain["task"], choice, has_schedule=plain.get("schedule") is not None)
    build_config(cfg.source, key="source")
    if plain.get("schedule") is not None:
        build_config(plain["schedule"], key="schedule")


def _read_capture(cfg: DictConfig) -> None:
    from data.plan import MachineConfig
    from data.sources import DataConfig
    from drafters.cache_writer import CaptureConfig
    from drafters.door import check_target

    check_target(to_plain(cfg.target))
    for key, kind in (("cache", CaptureConfig), ("data", DataConfig), ("machine", MachineConfig)):
        typed(kind, cfg[key], key=key)
    build_config(cfg.source, key="source")


def _read_regenerate(cfg: DictConfig) -> None:
    from data.engines.answers import RegenerateConfig
    from data.regenerate import FilesConfig
    from drafters.door import check_target

    check_target(to_plain(cfg.target))
    for kind in (RegenerateConfig, FilesConfig):
        _typed(cfg, kind)
    build_config(cfg.engine, key="engine")


def _read_show(cfg: DictConfig) -> None:
    from data.show import ShowConfig

    _typed(cfg, ShowConfig)
    build_config(cfg.source, key="source")


def _read_export(cfg: DictConfig) -> None:
    from export.__main__ import Choice

    _typed(cfg, Choice)
    build_config(cfg.to, key="to")
    build_config(cfg.source, key="source")


# How each door reads its settings before it does anything, by the name of its config. Others are composed alone.
READ: dict[str, Callable[[DictConfig], None]] = {
    "train": _read_train,
    "evaluate": _read_evaluate,
    "capture": _read_capture,
    "regenerate": _read_regenerate,
    "show": _read_show,
    "export": _read_export,
}


def links(text: str) -> list[str]:
    """Targets of links and pictures outside of code, those of the web left out."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    return [link for link in LINK.findall(prose) if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """What a link may name behind `#`: headings, as the site and a Markdown view of a repository spell them, where
    both agree."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", text), flags=re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        bare = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        site, view = re.sub(r"[-\s]+", "-", bare), re.sub(r"\s", "-", bare)
        found |= {site} & {view}
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere. Those of docs/ stay in docs/, where the site has them."""
    told = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (page.parent.name == "docs" and not path.is_relative_to(page.parent)):
            told.append(f"{page.name}: no {link}")
        elif anchor and anchor not in anchors(text if path == page else path.read_text()):
            told.append(f"{page.name}: no heading for {link}")
    return told
