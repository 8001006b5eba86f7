# The pages keep what they promise: every command of README, CONTRIBUTING and docs/ composes, with settings of the right
# kind, or says what it needs; the commands of the tutorial run, in its order; links lead somewhere.

import json
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tests.door_world import train_overrides, write_rows
from tests.out_of_tree import write_example
from tests.pages import NEEDS, ROOT, anchors, broken_links, commands, config_name, door_of, jobs, pages, problems

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = [(path.relative_to(ROOT).as_posix(), path) for path in pages()]
BY_NAME = {name: path.read_text() for name, path in PAGES}
MODULES = [*ROOT.glob("*.py"), *(ROOT / "data").rglob("*.py"), *(ROOT / "export").rglob("*.py")]
DOORS = sorted(path for one in MODULES if config_name(path := one.relative_to(ROOT).as_posix()))


@pytest.mark.parametrize("page", BY_NAME)
def test_every_command_of_a_page_composes_or_says_what_it_needs(page, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")  # trainer=slurm is refused outside of srun
    monkeypatch.syspath_prepend(tmp_path)
    found = commands(BY_NAME[page], page=page)
    assert BY_NAME[page].count("```bash") == 0 or found
    assert not (told := problems(found, mine=write_example(tmp_path))), "\n".join(told)


def test_the_pages_have_commands_for_every_door():
    opened = {door[0] for text in BY_NAME.values() for one in commands(text) if (door := door_of(one.words))}
    assert opened == set(DOORS)
    assert {need for text in BY_NAME.values() for one in commands(text) for need in one.needs} <= NEEDS


def test_what_opens_a_door_behind_a_launcher():
    def opened(line):
        return door_of(tuple(shlex.split(line)))

    assert opened("python train.py a=1") == ("train.py", ["a=1"])
    assert opened("torchrun --nnodes=2 -m data.capture a=1") == ("data/capture.py", ["a=1"])
    assert opened("torchrun --nproc-per-node=2 evaluate.py run=x") == ("evaluate.py", ["run=x"])
    assert opened("srun python -m data.capture") == ("data/capture.py", [])
    assert opened("sbatch docs/slurm/capture.sbatch a=1") == ("data/capture.py", ["a=1"])
    assert opened("sbatch docs/slurm/train.sbatch a=1") == ("train.py", ["a=1"])
    assert opened("A=1 python -m export to=hf") == ("export/__main__.py", ["to=hf"])
    assert opened("python -m sglang.launch_server --model-path x") is None
    assert list(jobs(["-m", "a=1,2", "b=3"])) == [["a=1", "b=3"], ["a=2", "b=3"]]


def asked(path, *settings):
    """A door in a process of its own, asked for its settings alone."""
    opened = ["-m", path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")] if "/" in path else [path]
    command = [sys.executable, *opened, *settings, "--cfg", "job"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_every_door_opens_as_pages_open_it():
    with ThreadPoolExecutor(2) as pool:
        answers = dict(zip(DOORS, pool.map(asked, DOORS), strict=True))
    assert [path for path, done in answers.items() if done.returncode] == []
    assert all(done.stdout.count(": ") > 5 for done in answers.values())
    assert asked("train.py", "no_such_setting=1").returncode


WRONG = {
    "python train.py no_such_setting=1": "no_such_setting",
    "python train.py drafter=markof": "markof",
    "python train.py optim.lr=fast": r"optim\.lr: got 'fast'",
    "python train.py -m drafter=markov,markof": "markof",
    "python train.py \\\n  drafter.ranks=3": r"drafter\.ranks|ranks",
    "python evaluate.py run=outputs/x batch_size=many": "batch_size",
    "python evaluate.py run=outputs/x task=calibrate task.fitt=false": "fitt",
    "python evaluate.py temperature=1": "run: got run=None",
    "python -m data.capture cache.codec=int3": r"cache\.codec: got 'int3'",
    "python -m data.regenerate out=chats.txt": r"out: got 'chats\.txt'",
    "python -m data.show n=0": "n: got 0",
    "python -m export run=outputs/x quant=int2": "quant: got 'int2'",
    "torchrun --nproc-per-node=2 -m data.capture speed=1": "speed",
    "make coffee": "the Makefile has no coffee",
    "vllm serve TARGET": "neither a door nor a target of make",
    "python -m data.no_such_door": "neither a door",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_page_with_a_wrong_command_fails(command):
    (told,) = problems(commands(f"# A page\n\n```bash\nmake test\n{command}\n```\n", page="docs/page.md"))
    assert told.startswith("docs/page.md:5: ")
    assert re.search(WRONG[command], told.split("\n", 1)[1]), told


def test_a_block_that_needs_what_is_unknown_fails_and_its_doors_compose_all_the_same():
    page = "<!-- needs: {} -->\n\n```bash\nvllm serve TARGET\npython train.py {}\n```\n"
    assert not problems(commands(page.format("engine, gpu", "name=x")))
    assert len(problems(commands(page.format("luck", "name=x")))) == 2
    assert len(problems(commands(page.format("engine", "nme=x")))) == 1


@pytest.mark.parametrize(("name", "path"), PAGES, ids=BY_NAME.keys())
def test_links_lead_somewhere(name, path):
    assert not broken_links(path, BY_NAME[name])


def test_a_link_to_nowhere_is_found():
    page = ROOT / "docs" / "index.md"
    text = "# A word\n[a](#a-word) [b](#no-word) [c](no.md) [d](words.md#words) [e](words.md#none) [f](../README.md)"
    told = [problem.split()[-1] for problem in broken_links(page, text)]
    assert told == ["#no-word", "no.md", "words.md#none", "../README.md"]
    assert anchors("# `task=x`: a, b\n## [c_d](e.md)\n```bash\n# f\n```") == {"taskx-a-b", "c_d"}


def test_every_page_is_in_the_navigation_of_the_site():
    site = yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text())
    named = [page for part in site["nav"] for entry in next(iter(part.values())) for page in entry.values()]
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert site["theme"]["font"] is False


def test_the_site_is_built_so_that_a_warning_fails_it():
    (build,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in build
    # Where warnings are not shown, they are not counted.
    assert "--quiet" not in build


def test_pages_are_of_a_length_that_is_read():
    long = {name: lines for name, text in BY_NAME.items() if (lines := text.count("\n")) > 220}
    assert not long


# What makes a command small, by its door; the rest of it stands as it is on the page.
PROMPTS = ("num_prompts=2", "max_new_tokens=12", "device=cpu")
# Pages whose commands run in their order on runs that are there, and the doors that each opens.
RUN = {
    "README.md": {"train.py", "evaluate.py", "export/__main__.py", "data/show.py", "data/regenerate.py"},
    "docs/data.md": {"data/show.py", "data/regenerate.py", "data/capture.py", "train.py"},
    "docs/evaluate.md": {"evaluate.py"},
    "docs/schedule.md": {"evaluate.py"},
    "docs/train.md": {"train.py"},
}


def small(door, world, settings):
    tiny = [
        one for one in train_overrides(world) if not one.startswith(("name=", "outputs=", "target.name=", "source"))
    ]
    target = [one for one in tiny if one.startswith("target.")]
    chats = [] if named(settings, "source.path") else ["source=jsonl", f"source.path={world}/chats.jsonl"]
    prompts = ["source=jsonl", f"source.path={world}/maths.jsonl"]
    if door == "train.py":
        # Two processes are for other tests; a block head of the page's kind may have no sequential part.
        other = [one for one in tiny if one.split("=")[0] not in ("drafter.sequential.rank", *map(key_of, settings))]
        return [
            *chats,
            *other,
            "trainer.devices=1",
            *(["profiler.skip_steps=2", "profiler.steps=2"] if "profiler=torch" in settings else []),
        ]
    return {
        "data/show.py": [*chats, *target],
        "data/capture.py": [*chats, *target, f"cache.root={world}/states", "device=cpu"],
        "data/regenerate.py": [*target, "limit=2", "max_new_tokens=8", "device=cpu"],
        "evaluate.py": [*PROMPTS, "profile_rounds=2"],
        "export/__main__.py": [*PROMPTS, *prompts],
    }[door]


def key_of(setting):
    return setting.partition("=")[0]


def named(settings, key):
    return any(key_of(one) == key for one in settings)


def run_door(door, cfg):
    from data.capture import run as capture
    from data.plan import plan_capture
    from data.regenerate import run as regenerate
    from data.show import show
    from evaluate import evaluate
    from export.__main__ import export
    from train import train

    doors = {"data/show.py": show, "train.py": train, "evaluate.py": evaluate, "export/__main__.py": export}
    doors |= {"data/regenerate.py": regenerate, "data/capture.py": plan_capture if cfg.get("plan") else capture}
    doors[door](cfg)


def run_page(page, world):
    """Opens the doors of a page's commands, in their order, in the current folder; gives the doors."""
    ran = []
    for command in commands(BY_NAME[page], page=page):
        if command.needs or (opened := door_of(command.words)) is None or {"-m", "--cfg"} & set(opened[1]):
            continue
        door, settings = opened
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose(config_name(door), [*settings, *small(door, world, settings)])
        run_door(door, cfg)
        ran.append(door)
    return ran


def test_the_tutorial_runs_in_its_order_and_leaves_the_files_that_it_names(world, tmp_path, monkeypatch, capsys):
    page = "docs/first-drafter.md"
    monkeypatch.chdir(tmp_path)
    (rows,) = re.findall(r"^```json\n(.*?)^```", BY_NAME[page], re.MULTILINE | re.DOTALL)
    write_rows(tmp_path / "prompts.jsonl", [json.loads(row) for row in rows.splitlines()])
    ran = run_page(page, world)
    assert ran == ["data/show.py", "train.py", *["evaluate.py"] * 3, *["export/__main__.py"] * 2]
    words = [word for one in commands(BY_NAME[page]) if one.needs for word in one.words]
    exports = {path for word in words for path in re.findall(r"outputs/[\w./-]+", word)}
    assert len(exports) == 2
    assert [path for path in exports if not (tmp_path / path).exists()] == []
    assert "tokens supervised" in capsys.readouterr().out
    assert (tmp_path / "outputs" / "markov-smollm2" / "report.md").is_file()


@pytest.fixture(scope="module")
def shelf(world, tmp_path_factory):
    """A folder with the runs and files that pages speak of."""
    folder = tmp_path_factory.mktemp("shelf")
    for drafter in ("markov", "parallel"):
        settings = [f"drafter={drafter}", f"outputs={folder}/outputs"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            run_door("train.py", compose("train", [*settings, *small("train.py", world, settings)]))
    shutil.copytree(folder / "outputs" / "markov-smollm2", folder / "outputs" / "short")
    for name in ("prompts", "math", "code", "mine"):
        shutil.copy(world / "maths.jsonl", folder / f"{name}.jsonl")
    shutil.copy(world / "chats.jsonl", folder / "my_chats.jsonl")
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page, shelf, world, tmp_path, monkeypatch):
    shutil.copytree(shelf, tmp_path, dirs_exist_ok=True)
    for name in re.findall(r" name=(\w+)", BY_NAME[page]):
        shutil.rmtree(tmp_path / "outputs" / name, ignore_errors=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert set(run_page(page, world)) == RUN[page]
