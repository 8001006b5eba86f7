# The pages keep what they promise: every command of README, CONTRIBUTING and docs/ composes, with settings of the right
# kind, or says what it needs; the commands of the tutorial run, in its order; links lead somewhere.

import json
import re
import shlex

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tests.door_world import train_overrides, write_rows
from tests.out_of_tree import write_example
from tests.pages import NEEDS, ROOT, anchors, broken_links, commands, config_name, door_of, jobs, pages, problems

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = [(path.relative_to(ROOT).as_posix(), path) for path in pages()]
BY_NAME = {name: path.read_text() for name, path in PAGES}


@pytest.mark.parametrize("page", BY_NAME)
def test_every_command_of_a_page_composes_or_says_what_it_needs(page, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")  # trainer=slurm is refused outside of srun
    monkeypatch.syspath_prepend(tmp_path)
    found = commands(BY_NAME[page], page=page)
    assert BY_NAME[page].count("```bash") == 0 or found
    assert not (told := problems(found, mine=write_example(tmp_path))), "\n".join(told)


def test_the_pages_have_commands_for_every_door():
    opened = {door[0] for text in BY_NAME.values() for one in commands(text) if (door := door_of(one.words))}
    places = [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py"), *(ROOT / "export").glob("*.py")]
    doors = {path.relative_to(ROOT).as_posix() for path in places}
    assert opened == {path for path in doors if config_name(path)}
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


def test_pages_are_of_a_length_that_is_read():
    long = {name: lines for name, text in BY_NAME.items() if (lines := text.count("\n")) > 220}
    assert not long


# What makes a command of a page small, by its door: the rest of it stands as it is on the page.
PROMPTS = ("num_prompts=2", "max_new_tokens=12", "device=cpu")


def small(door, world):
    target = [one for one in train_overrides(world) if one.startswith("target.") and "name" not in one]
    own = ("source=jsonl", f"source.path={world}/maths.jsonl")
    return {
        "data/show.py": ("source=jsonl", f"source.path={world}/chats.jsonl", *target),
        "train.py": tuple(
            one for one in train_overrides(world) if not one.startswith(("name=", "outputs=", "target.name="))
        ),
        "evaluate.py": (*PROMPTS, "profile_rounds=2"),
        "export/__main__.py": (*PROMPTS, *own),
    }[door]


def run_door(door, cfg):
    from data.show import show
    from evaluate import evaluate
    from export.__main__ import export
    from train import train

    {"data/show.py": show, "train.py": train, "evaluate.py": evaluate, "export/__main__.py": export}[door](cfg)


def test_the_tutorial_runs_in_its_order_and_leaves_the_files_that_it_names(world, tmp_path, monkeypatch, capsys):
    page = "docs/first-drafter.md"
    monkeypatch.chdir(tmp_path)
    (rows,) = re.findall(r"^```json\n(.*?)^```", BY_NAME[page], re.MULTILINE | re.DOTALL)
    write_rows(tmp_path / "prompts.jsonl", [json.loads(row) for row in rows.splitlines()])
    ran, named = [], []
    for command in commands(BY_NAME[page], page=page):
        if command.needs:
            named += [path for word in command.words for path in re.findall(r"outputs/[\w./-]+", word)]
            continue
        door, settings = door_of(command.words)
        settings = [one for one in settings if not (door == "data/show.py" and one.startswith("source"))]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose(config_name(door), [*settings, *small(door, world)])
        run_door(door, cfg)
        ran.append(door)
    assert ran == ["data/show.py", "train.py", *["evaluate.py"] * 3, *["export/__main__.py"] * 2]
    assert named
    assert [path for path in named if not (tmp_path / path).exists()] == []
    said = capsys.readouterr().out
    assert "tokens supervised" in said
    assert (tmp_path / "outputs" / "markov-smollm2" / "report.md").is_file()
