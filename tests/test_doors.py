# The doors, in process, on a tiny random target that lies in a folder as a real one would: the whole job, its resume,
# and one clear error for each thing that a user can get wrong.

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from safetensors.torch import load_file

import drafters.cache
import drafters.cache_writer
import drafters.runs
import evaluate
import train
from drafters.batches import StatesLoader
from drafters.door import door
from drafters.errors import CheckpointError, ConfigError, DataError
from tests.test_report import CONTRACT
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "The sky is blue, the grass is green. Once upon a time there was a tool. Be kind. "
STEPS, BLOCK = 14, 3


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a target, conversations and prompts."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = tiny_tokenizer("chatml")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    chats = [
        {"messages": [{"role": "user", "content": f"Tool {i}?"}, {"role": "assistant", "content": ANSWER[i:] + str(i)}]}
        for i in range(20)
    ]
    write_rows(folder / "chats.jsonl", chats)
    for name in ("maths", "code"):
        write_rows(folder / f"{name}.jsonl", [{"turns": [f"What {name} is {i}?"]} for i in range(2)])
    return folder


def settings(name, *overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, list(overrides))


def train_settings(world, *overrides):
    return settings(
        "train",
        *(f"target.weights={world}/target", "target.name=tiny", "target.sha256=null", "target.mask_token=0"),
        *("target.layer_ids=[0,2]", "target.dtype=float32"),
        *("source=jsonl", f"source.path={world}/chats.jsonl", "data.validation=0.2"),
        *(f"cache.root={world}/states", f"outputs={world}/outputs", "name=first"),
        *("drafter.draft_vocab_size=64", f"drafter.block_size={BLOCK}", "drafter.sequential.rank=4"),
        *("optim.minutes=null", f"optim.max_steps={STEPS}", "optim.warmup_steps=2"),
        *("trainer.val_check_interval=7", "trainer.log_every_n_steps=2", "callbacks.save_every_n_steps=5"),
        "callbacks.probe_every_n_steps=7",
        *("report.num_prompts=2", "report.max_new_tokens=12", "report.num_speed_prompts=1", "device=cpu"),
        *overrides,
    )


@pytest.fixture(scope="module")
def first(world):
    """The folder of a finished run."""
    train.train(train_settings(world))
    return world / "outputs" / "first"


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def same_weights(run, other):
    mine, others = (load_file(one / "drafter" / "model.safetensors") for one in (run, other))
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_run_leaves_a_drafter_and_a_report(first):
    report = json.loads((first / "report.json").read_text())
    assert set(report) >= CONTRACT
    assert report["prompts"] == 2
    assert report["provenance"]["target"]["name"] == "tiny"
    assert report["provenance"]["weights"].endswith("/target")
    assert report["provenance"]["drafter"]["class"] == "drafters.heads.block.BlockDrafter"
    assert {"data_hash", "sha256", "step", "seed"} <= set(report["provenance"]["drafter"])
    assert "| tokens/s with and without |" in (first / "report.md").read_text()
    assert {path.name for path in (first / "drafter").iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in (first / "checkpoints").iterdir()] == ["last.ckpt"]
    assert "probe/accepted_length" in (first / "logs" / "version_0" / "metrics.csv").read_text()
    # Lightning's own ModelCheckpoint stays out.
    assert [path.relative_to(first) for path in first.rglob("*.ckpt")] == [Path("checkpoints/last.ckpt")]


def test_a_finished_run_is_left_alone(world, first, capsys):
    before = contents(first)
    train.train(train_settings(world))
    assert "is finished" in capsys.readouterr().out
    assert contents(first) == before


def test_a_second_name_takes_the_cache_and_repeats_the_first(world, first, monkeypatch):
    before = contents(first) | contents(world / "states")
    monkeypatch.setattr(drafters.cache_writer, "target_states", None)
    train.train(train_settings(world, "name=second", "logger=none"))
    second = world / "outputs" / "second"
    assert same_weights(first, second)
    assert not (second / "logs").exists()
    assert contents(first) | contents(world / "states") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_equals_uninterrupted(world, first, monkeypatch, number):
    batches = StatesLoader.batch
    left = [9]

    def stop_in_the_middle(loader, epoch, step):
        left[0] -= loader.finished is not None
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return batches(loader, epoch, step)

    name = f"name=stopped-{number.name}"
    monkeypatch.setattr(StatesLoader, "batch", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        train.train(train_settings(world, name))
    stopped = world / "outputs" / f"stopped-{number.name}"
    step = torch.load(stopped / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 5 < step < STEPS
    assert not (stopped / "report.json").exists()
    train.train(train_settings(world, name))
    assert same_weights(first, stopped)
    states = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (first, stopped)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_run_that_was_killed_while_measuring_only_measures(world, first, tmp_path):
    shutil.copytree(first, tmp_path / "killed")
    (tmp_path / "killed" / "report.json").unlink()
    before = contents(tmp_path / "killed" / "drafter")
    train.train(train_settings(world, f"outputs={tmp_path}", "name=killed"))
    assert (tmp_path / "killed" / "report.json").is_file()
    assert contents(tmp_path / "killed" / "drafter") == before


def test_resume_goes_on_with_a_longer_budget_and_keeps_the_first_report(world, first, tmp_path):
    longer = (f"outputs={tmp_path}", "name=longer", f"optim.max_steps={STEPS + 3}")
    shutil.copytree(first, tmp_path / "longer")
    with pytest.raises(CheckpointError, match=r"optim\.max_steps was 14, now 17.*resume=true"):
        train.train(train_settings(world, *longer))
    train.train(train_settings(world, *longer, "resume=true"))
    assert torch.load(tmp_path / "longer" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == STEPS + 3
    assert {path.name for path in (tmp_path / "longer").glob("*.json")} == {"report.json", "report.before.json"}


@pytest.mark.parametrize(("length", "accepted"), [("auto", {1, 2, 3}), ("2", {2})])
def test_evaluate_measures_the_prompts_of_several_files(world, first, tmp_path, length, accepted):
    files = f"source.path=[{world}/maths.jsonl,{world}/code.jsonl]"
    out = [f"out={tmp_path}"] if length == "auto" else []
    own = (f"run={first}", "device=cpu", "source=jsonl", files, f"length={length}", "max_new_tokens=12", *out)
    evaluate.evaluate(settings("evaluate", *own))
    folder = tmp_path if out else first / "evaluate" / "code-maths"
    report = json.loads((folder / "report.json").read_text())
    assert set(report) >= CONTRACT
    assert set(report["by_source"]) == {"maths", "code"}
    assert report["by_source"]["code"]["prompts"] == 2
    assert report["draft_length"] in accepted
    assert (folder / "acceptance.png").is_file()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["drafter.num_layers=abc"], ConfigError, r"drafter\.num_layers: got 'abc'.*[Ii]nteger"),
        (["data.max_length=abc"], ConfigError, r"data\.max_length: got 'abc'.*[Ii]nteger"),
        (["data.validation=1.5"], ConfigError, r"data: validation: got 1\.5; accepted: a share from 0 to below 1"),
        (["data.validation=0"], DataError, r"data\.validation: no conversation is held out.*share above 0"),
        (["+optim.speed=1"], ConfigError, r"optim\.speed: unknown setting; accepted: .*lr"),
        (["optim.minutes=5"], ConfigError, r"optim: max_steps: got 14 with minutes=5.*give one"),
        (["report.length=9"], ConfigError, r"report\.length: got 9; accepted: 'auto' or 1 to 3"),
        (["trainer.devices=none"], ConfigError, r"trainer"),
        (["device=tpu9"], ConfigError, r"device: got 'tpu9'.*accepted: null, cpu, cuda"),
        (["target.layer_ids=[0,4]"], ConfigError, r"layer_ids: layer 4 is out of range; the target has layers 0\.\.3"),
        (["drafter.layer_ids=[1]"], DataError, r"stores the layers \[0, 2\], not \[1\].*cache\.layer_ids=\[0, 1, 2\]"),
        (["target.mask_token='<nope>'"], ConfigError, r"target\.mask_token: '<nope>' is not in the vocabulary; name"),
        (["target.mask_token=99999"], ConfigError, r"target\.mask_token: id 99999 is not in .*accepted: 0\.\."),
        (["target.weights=/nowhere"], ConfigError, r"target\.weights: '/nowhere' is not an existing folder; accepted"),
        (["drafter.block_size=400"], ConfigError, r"block_size: got 400, but the longest of 16.*has \d+ .*accepted: 1 to"),
        (["source.path=missing.jsonl"], DataError, r"source\.path: no file 'missing\.jsonl'"),
    ],
    ids=lambda value: value[0].split("=")[0].lstrip("+") if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_named_and_the_right_one_still_works(world, first, tmp_path, overrides, error, message):
    before = contents(first) | contents(world / "states")
    own = [f"outputs={tmp_path}", "name=wrong"]
    with pytest.raises(error, match=message):
        train.train(train_settings(world, *own, *overrides))
    assert contents(first) | contents(world / "states") == before
    assert not (tmp_path / "wrong" / "drafter").exists()
    # The folder is not bound to the wrong settings.
    with drafters.runs.claim(tmp_path / "wrong", {"any": "other"}):
        pass


def test_a_source_without_messages_says_what_it_found(world, tmp_path):
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "no chat"}] * 3)
    with pytest.raises(DataError, match=r"texts\.jsonl.*text.*messages"):
        train.train(train_settings(world, f"outputs={tmp_path}", f"source.path={texts}"))
    silent = [{"messages": [{"role": "user", "content": "Anyone?"}]}] * 9
    silent_file = write_rows(tmp_path / "silent.jsonl", silent)
    with pytest.raises(DataError, match="no supervised token in"):
        train.train(train_settings(world, f"outputs={tmp_path}", f"source.path={silent_file}"))


@pytest.fixture
def states(world, first, tmp_path):
    """A copy of the cache of the first run."""
    shutil.copytree(world / "states", tmp_path / "states")
    return next((tmp_path / "states").glob("tiny-*"))


def test_a_cache_of_another_target_is_refused(world, tmp_path, states):
    manifest = json.loads((states / "cache.json").read_text())
    manifest["key"]["weights_hash"] = "0" * 64
    (states / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"belongs to something else: it has weights_hash 0+ instead of.*cache\.root"):
        train.train(train_settings(world, f"outputs={tmp_path}", f"cache.root={tmp_path}/states"))


def test_a_damaged_shard_is_refused_by_name(world, tmp_path, states):
    shard = next(states.glob("shard-*"))
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    own = (f"outputs={tmp_path}", f"cache.root={tmp_path}/states")
    with pytest.raises(DataError, match=rf"shard .*{shard.name} is damaged; remove that file"):
        train.train(train_settings(world, *own))
    shard.unlink()
    train.train(train_settings(world, *own, "optim.max_steps=7"))
    assert (tmp_path / "first" / "report.json").is_file()


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_space_for_the_cache(world, tmp_path, monkeypatch):
    own = (f"outputs={tmp_path}", f"cache.root={tmp_path}/states")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(DataError, match=r"GB of states do not fit into .*are free.*cache\.root"):
            train.train(train_settings(world, *own))
    with monkeypatch.context() as patched:
        patched.setattr(drafters.cache, "save_file", no_space)
        with pytest.raises(DataError, match=r"(?i)cache: .*no space left"):
            train.train(train_settings(world, *own))


def test_no_space_for_a_checkpoint_keeps_the_last_one(world, first, tmp_path, monkeypatch):
    shutil.copytree(first, tmp_path / "full")
    before = contents(tmp_path / "full" / "checkpoints")
    own = (f"outputs={tmp_path}", "name=full", f"optim.max_steps={STEPS + 3}", "resume=true")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save_checkpoint", no_space)
        with pytest.raises(CheckpointError, match=r"last\.ckpt: cannot be written: no space left.*unchanged"):
            train.train(train_settings(world, *own))
    assert contents(tmp_path / "full" / "checkpoints") == before
    train.train(train_settings(world, *own))
    assert (tmp_path / "full" / "report.json").is_file()


def test_a_run_in_use_and_a_run_with_other_settings_are_refused(world, first):
    before = contents(first)
    with (first / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"first is in use by another process; wait for it, or choose"):
            train.train(train_settings(world))
    with pytest.raises(CheckpointError, match=r"drafter\.num_layers was 2, now 1; choose another name="):
        train.train(train_settings(world, "drafter.num_layers=1"))
    assert contents(first) == before


def test_a_damaged_checkpoint_is_named(world, first, tmp_path):
    shutil.copytree(first, tmp_path / "damaged")
    (tmp_path / "damaged" / "report.json").unlink()
    (tmp_path / "damaged" / "checkpoints" / "last.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"resume: .*last\.ckpt is damaged: .*remove it to start anew"):
        train.train(train_settings(world, f"outputs={tmp_path}", "name=damaged"))


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["run=nowhere"], CheckpointError, r"run: no folder nowhere; give one that train\.py wrote"),
        (["run={world}"], CheckpointError, r"run: .* is not a run of train\.py: it has no \.hydra"),
        (["run={world}/begun"], CheckpointError, r"run: .*begun has no drafter yet; go on with the train\.py command"),
        (["length=9"], ConfigError, r"length: got 9; accepted: 'auto' or 1 to 3"),
        (["length=most"], ConfigError, r"length: got 'most'; accepted: 'auto' or 1 to 3"),
        (["max_new_tokens=abc"], ConfigError, r"^max_new_tokens: got 'abc'"),
        (["temperature=-1"], ConfigError, r"temperature: got -1"),
        (["batch_size=0"], ConfigError, r"batch_size: got 0; accepted: 1 or more"),
        (["num_prompts=0"], ConfigError, r"num_prompts: got 0; accepted: 1 or more"),
        (["split=test"], ConfigError, r"split: got 'test'; accepted: train, validation, or null"),
        (["source.path={world}/nothing.jsonl"], DataError, r"source\.path: no file '.*nothing\.jsonl'"),
        (["source.path={world}/target/config.json"], DataError, r"config\.json.*messages"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_evaluate_names_what_is_wrong(world, first, overrides, error, message):
    shutil.copytree(first / ".hydra", world / "begun" / ".hydra", dirs_exist_ok=True)
    own = [f"run={first}", "device=cpu", "source=jsonl", f"source.path={world}/maths.jsonl"]
    with pytest.raises(error, match=message):
        evaluate.evaluate(settings("evaluate", *own, *(one.format(world=world) for one in overrides)))


def test_evaluate_refuses_another_target_unless_it_is_told_to(world, first, tmp_path):
    tiny_llama(seed=1, vocab_size=len(tiny_tokenizer("chatml"))).save_pretrained(tmp_path / "tuned")
    tiny_tokenizer("chatml").save_pretrained(tmp_path / "tuned")
    own = (
        *(f"run={first}", "device=cpu", "source=jsonl", f"source.path={world}/maths.jsonl", "max_new_tokens=12"),
        *("target=smollm2", f"target.weights={tmp_path}/tuned", "target.sha256=null", "target.mask_token=0"),
        *("target.dtype=float32", "target.name=tuned", f"out={tmp_path}/out"),
    )
    with pytest.raises(CheckpointError, match=r"trained for target 'tiny'.*'tuned'.*allow_other_target=true"):
        evaluate.evaluate(settings("evaluate", *own))
    evaluate.evaluate(settings("evaluate", *own, "allow_other_target=true"))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["provenance"]["target"]["name"] == "tuned"


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (ConfigError("optim.lr: got 0"), 1, "error: optim.lr: got 0\n"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.csv"), 1, "No space left on device: 'metrics.csv'"),
        (KeyboardInterrupt(), 130, "the same command goes on from there"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_door_says_one_line_and_the_exit_code(capsys, raised, code, text):
    with pytest.raises(SystemExit) as exit_info, door():
        raise raised
    err = capsys.readouterr().err
    assert exit_info.value.code == code
    assert text in err
    assert err.count("\n") == 1


def test_an_unknown_choice_lists_the_options_and_a_run_prints_no_chatter(world, first, tmp_path):
    command = [sys.executable, str(ROOT / "train.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "drafter=nope"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "Available options in 'drafter':\n\tmarkov" in done.stderr
    own = json.loads((first / ".hydra" / "settings.json").read_text())
    overrides = train_overrides(own, outputs=tmp_path)
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "accepted length (bonus included)" in done.stdout
    for noise in ("Warning", "Tip:", "GPU available", "LeafSpec", "workers", "Trainer.fit"):
        assert noise not in done.stdout + done.stderr


def train_overrides(own, *, outputs):
    """A command line for the settings of a run, elsewhere."""
    changed = {"target": ("weights", "name", "sha256", "mask_token", "layer_ids", "dtype"), "source": ("path",)}
    changed |= {"data": ("validation",), "cache": ("root",), "optim": ("minutes", "max_steps", "warmup_steps")}
    changed |= {"drafter": ("draft_vocab_size", "block_size"), "report": ("num_prompts", "max_new_tokens")}
    values = {f"{group}.{name}": own[group][name] for group, names in changed.items() for name in names}
    pairs = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    return ["source=jsonl", "device=cpu", f"outputs={outputs}", *pairs]
