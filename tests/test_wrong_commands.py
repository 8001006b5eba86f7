# Wrong command lines of every door: each ends with one line that names what is wrong, an exit status above 0, no
# traceback, and nothing written or lost.

import re

import pytest

from tests.door_world import contents, train_overrides
from tests.wrong_commands import run_door

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = {
    "drafter/broken.yaml": b"a: [1,\n b: }",
    "drafter/list.yaml": b"- 1\n- 2\n",
    "drafter/bytes.yaml": b"\xff\xfe\x00",
    "drafter/bare.yaml": b"name: bare\n",
    "drafter/loops.yaml": b"name: ${drafter.name}\n",
    "drafter/absent.yaml": b"defaults: [nowhere]\n",
    "experiment/cluster.yaml": b"# @package _global_\ndefaults:\n  - override /hydra/launcher: slurm\n",
    "experiment/other.yaml": b"# @package _global_\ndefaults:\n  - override /drafter: nope\n",
    "experiment/typo.yaml": b"# @package _global_\noptim: {lrr: 3}\n",
}
MINE = "--config-dir {mine}"

# Of every door that has the group or setting: Hydra, its parser of arguments, the grammar of overrides.
GRAMMAR = [
    ("target=nope", "target: got 'nope'; accepted: gemma3_12b, "),
    ("target", "target: cannot be read: missing EQUAL"),
    ("trget=smollm2", "trget: unknown setting or group; accepted: "),
    ("+foo=1", "foo: unknown setting; accepted: "),
    ("++foo=1", "foo: unknown setting; accepted: "),
    ("~foo", "'foo' does not exist"),
    ("target.nme=x", "target.nme: unknown setting or group"),
    ("--config-dir /nowhere", "--config-dir: .*'/nowhere' not found"),
    ("--foo", "unrecognized arguments: --foo"),
    ("device=[1", r"device=\[1: cannot be read: "),
    ("device='cpu", "device='cpu: cannot be read; write key=value"),
    ("device=${nope}", "device: Interpolation key 'nope' not found"),
]

WRONG = {
    "train": [
        ("drafter=nope", "drafter: got 'nope'; accepted: draft_model, eagle3"),
        ("drafter=", "drafter: got ''; accepted: draft_model"),
        ("drafter=Markov", r"drafter: got 'Markov'; accepted: .* \(did you mean markov\?\)"),
        ("drafter=é", "drafter=é: cannot be read"),
        ("drafter=null", "drafter=null: is no choice"),
        ("drafter=3", "drafter=3: is no choice"),
        ("drafter=markov,mtp", "'drafter=markov,mtp'.*--multirun"),
        ("drafter.name.x=1", r"drafter\.name\.x: unknown setting"),
        ("~drafter", "drafter.name"),
        ("~drafter=mtp", "'drafter=mtp'"),
        ("+drafter=mtp", "Multiple values for drafter"),
        ("++drafter=mtp", "'\\+\\+drafter=mtp'"),
        ("=3", "=3"),
        ("+", r"\+: cannot be read"),
        ("optim.lrr=1", r"optim\.lrr: unknown setting or group; accepted: .* \(did you mean lr\?\)"),
        ("+optim.lrr=1", r"optim\.lrr: unknown setting; accepted: lr"),
        ("optim.lr:1", "optim.lr:1: cannot be read"),
        ("optim.lr=1,2", "'optim.lr=1,2'"),
        ("optim.lr=nope(1)", r"optim\.lr=nope\(1\): cannot be read"),
        ("optim.lr=nan", r"optim\.lr: got nan"),
        ("optim.lr=-1", r"optim\.lr: got -1\.0"),
        ("optim.lr=[1]", r"optim\.lr: got \[1\]"),
        ("optim.lr=null", r"optim\.lr: got None"),
        ("optim.max_steps=1.5", r"optim\.max_steps: got 1\.5"),
        ("target.layer_ids[0]=1", "cannot be read"),
        ("target.layer_ids.9=1", r"target\.layer_ids"),
        ("experiment=nope", "experiment: got 'nope'; accepted: ci, "),
        ("name=${oc.env:NOPE}", "name: .*'NOPE' not found"),
        ("name=${nope:1}", "name: Unsupported interpolation type nope"),
        ("device=${device}", "device: Recursive interpolation"),
        ("hydra.nope=1", r"hydra\.nope: "),
        ("hydra.mode=NOPE", r"hydra\.mode: Invalid value 'NOPE', expected one of"),
        ("hydra.run.dir=/proc/x", "/proc/x: .*choose another folder"),
        ("hydra/launcher=nope", "hydra/launcher: got 'nope' without -m"),
        ("hydra/sweeper=nope", "hydra/sweeper: got 'nope'"),
        ("--config-dir", "--config-dir/-cd: expected one argument"),
        ("--config-name nope", "--config-name: got 'nope'"),
        ("--config-path /nowhere", "--config-path: "),
        ("--cfg nope", "--cfg/-c: invalid choice: 'nope'"),
        ("--info nope", "--info/-i: invalid choice: 'nope'"),
        ("--resolve", "--resolve: it goes with --cfg"),
        ("--package x", "--package: got 'x' without --cfg"),
        ("--run --multirun", "--run: got --run and --multirun"),
        ("-m drafter=markov,nope", "drafter: got 'nope'; accepted"),
        ("-m drafter=markov,mtp optim.lrr=1,2", r"optim\.lrr: unknown setting or group"),
        ("drafter=markov --config-dir {mine} name=x", "name=x: options such as -m and --config-dir stand before all"),
        ("-m drafter=glob(zz*)", "-m: got choices that name no job"),
        ("-m hydra.sweep.dir=/proc/x", "/proc/x: "),
        (f"{MINE} drafter=broken", r"YAML .*broken\.yaml"),
        (f"{MINE} drafter=list", "name: "),
        (f"{MINE} drafter=bytes", "not UTF-8 text"),
        (f"{MINE} drafter=bare", "drafter: needs a `_target_`"),
        (f"{MINE} drafter=loops", "Recursive interpolation"),
        (f"{MINE} drafter=absent", r"'nowhere' \(from drafter/absent\)"),
        (f"{MINE} experiment=other", "drafter: got 'nope'"),
        (f"{MINE} experiment=typo", r"optim\.lrr: unknown setting"),
        (f"{MINE} experiment=cluster", "hydra/launcher: got 'slurm' without -m"),
        (f"-m {MINE} experiment=cluster", "hydra/launcher: got 'slurm', "),
        ("trainer.devices=2.5", r"trainer"),
        ("drafter.draft_vocab_size=64 report.length=-1", r"report\.length: got -1"),
        ("data.batch_size=0", r"data\.batch_size: got 0"),
        ("warm_start={world}/nothing", "warm_start: .*nothing"),
        ("warm_start=/etc/passwd", "warm_start: .*/etc/passwd"),
        ("outputs={world}/maths.jsonl", "run_dir: cannot write to .*choose another outputs="),
        ("source.path={world}", "source.path: "),
    ],
    "evaluate": [
        ("task=nope", "task: got 'nope'; accepted: calibrate, measure"),
        ("task.name=nope", r"task\.name: got 'nope'; accepted: measure, show"),
        ("schedule=nope", "schedule: got 'nope'; accepted: asynchronous"),
        ("run=null", "run: got run=None and compare=None"),
        ("run=", "run: got ''"),
        ("run=/etc/passwd", "run: .*/etc/passwd"),
        ("run={world}", "run: .* is not a run of train.py"),
        ("run=null compare=ngram", "compare: got 'ngram'"),
        ("baselines.ngram.max_ngram=abc", r"baselines\.ngram\.max_ngram: got 'abc'"),
        ("baselines.ngrm.x=1", r"baselines\.ngrm: unknown setting or group; accepted: .*did you mean ngram"),
        ("by_round=true", "by_round: got true; it is for task=show"),
        ("task=calibrate task.method=best", r"task\.method: got 'best'; accepted: "),
        ("task=calibrate task.observations=/nowhere", r"task\.observations: got '/nowhere', which is no file"),
        ("task=simulate task.num_steps=0", r"task\.num_steps: got 0"),
        ("task=profile task.rows=many", r"task\.rows: got 'many'"),
        ("schedule=fixed task=show", "schedule: it is for task=measure"),
        ("temperature=nan", "temperature: got nan"),
        ("seed=1.5", "seed: got 1.5"),
        ("max_new_tokens=1e30", "max_new_tokens: "),
    ],
    "capture": [
        ("plan=maybe", "plan: got 'maybe'"),
        ("cache.codec=zip", r"cache\.codec: got 'zip'"),
        ("cache.tokens_per_shard=0", r"cache\.tokens_per_shard: got 0"),
        ("cache.root=nope://x", r"cache\.root: "),
        ("data.max_length=-1", r"data\.max_length: got -1"),
        ("target.dtype=float7", r"target\.dtype: got 'float7'"),
    ],
    "regenerate": [
        ("engine=nope", r"engine: got 'nope'; accepted: local, openai"),
        ("engine.x=1", r"engine\.x: unknown setting or group"),
        ("engine=openai engine.timeout=-1", r"engine\.timeout: got -1"),
        ("engine=openai engine.concurrency=0", r"engine\.concurrency: got 0"),
        ("engine=openai engine.base_url=nowhere", r"engine\.base_url: got 'nowhere'"),
        ("prompts={mine}/none.jsonl", "prompts: no file .*none.jsonl"),
        ("prompts={mine}", "prompts: "),
        ("out=answers.txt", "out: got 'answers.txt'; accepted: "),
        ("limit=0", "limit: got 0; accepted: 1 or more"),
        ("temperature=-1", "temperature: got -1"),
        ("seed=many", "seed: got 'many'"),
    ],
    "show": [
        ("n=0", "n: got 0; accepted: "),
        ("n=abc", "n: got 'abc'"),
        ("source=nope", "source: got 'nope'; accepted: aime"),
        ("source=jsonl", r"source\.path: missing"),
        ("source=jsonl source.path=/nowhere", r"source\.path: no file '/nowhere'"),
        ("tokenizer=/nowhere", "tokenizer: no folder '/nowhere'"),
    ],
    "export": [
        ("to=nope", "to: got 'nope'; accepted: gguf, hf, mtp"),
        ("quant=int2", "quant: got 'int2'; accepted: none, int8"),
        ("run=null", "run: got null; accepted: the folder"),
        ("run={world}", "run: .* is not a run of train.py"),
        ("out=''", "out: got ''; accepted"),
        ("to.dtype=int2", r"to\.dtype: got 'int2'; accepted: "),
        ("to=gguf to.type=Q9", r"to\.type: got 'Q9'"),
        ("to=gguf to.target_gguf=/nowhere", r"to\.target_gguf: .*/nowhere"),
        ("to=packed to.output_rows=maybe", r"to\.output_rows: got 'maybe'"),
        ("to=mtp", "to=mtp|to: "),
        ("check=maybe", "check: got 'maybe'"),
        ("num_prompts=-1", "num_prompts: got -1"),
    ],
    "import": [
        ("draft=null", "draft: got None; accepted: the folder"),
        ("draft=/nowhere", "draft: '/nowhere'"),
        ("draft={mine}", "draft"),
        ("given.x=1", r"given\.x: unknown setting"),
        ("draft={world}/target +given.nope=1", "given|draft"),
    ],
}
CASES = [(door, words, said) for door, cases in WRONG.items() for words, said in cases]
# evaluate.py and the export have no target of their own, data.show no device.
LACK = {"evaluate": "target.", "export": "target.", "show": "device"}
CASES += [(door, words, said) for door in WRONG for words, said in GRAMMAR if LACK.get(door, "\0") not in words]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder of the user's own, with files that are wrong."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def whole(door, words, world, run, mine):
    """The words of a command that is right but for `words`."""
    target = [one for one in train_overrides(world) if one.startswith("target.")]
    source = ["source=jsonl", f"source.path={world}/maths.jsonl"]
    right = {
        "train": [one for one in train_overrides(world) if not one.startswith(("drafter.", "outputs=", "name="))],
        "evaluate": [f"run={run}", *source, "device=cpu", "max_new_tokens=14"],
        "capture": [*target, "source=jsonl", f"source.path={world}/chats.jsonl", "cache.root=states", "device=cpu"],
        "regenerate": [*target, f"prompts={world}/maths.jsonl", "out=out.jsonl", "device=cpu"],
        "show": target,
        "export": [f"run={run}", *source, "out=exported", "device=cpu", "max_new_tokens=14"],
        "import": target,
    }[door]
    given = [word.format(world=world, mine=mine) if "{world}" in word or "{mine}" in word else word for word in words]
    # Options stand first; one that lacks its value would take a setting for it.
    if given[0].startswith("-"):
        return [*given, *(right if len(given) > 1 else [])]
    return [*right, *given]


@pytest.fixture
def told(world, run, mine, tmp_path, monkeypatch, capsys):
    """A function that runs a command in an empty folder, and holds that nothing was written or lost."""
    monkeypatch.chdir(tmp_path)

    def call(door, words):
        before = contents(world) | contents(mine)
        found = run_door(door, whole(door, words.split(" "), world, run, mine), monkeypatch, capsys)
        assert contents(world) | contents(mine) == before
        kept = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert kept <= {"run.lock", "environment.json", "settings.json", "multirun.yaml", ".lock"}, kept
        return found

    return call


@pytest.mark.parametrize(("door", "words", "said"), CASES, ids=lambda value: value if value in WRONG else None)
def test_a_wrong_command_ends_with_one_line(told, door, words, said):
    found = told(door, words)
    assert found.code != 0, found
    assert len(found.errors) == 1, found
    assert found.errors[0].startswith("error: "), found
    assert "Traceback" not in found.out
    assert re.search(said, found.errors[0]), found
