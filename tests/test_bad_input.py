# One clear error for each thing that a user can get wrong: it names the key, the value, what is accepted and what to
# do, and nothing is lost.

import errno
import fcntl
import json
import shutil

import pytest
import torch
from lightning.pytorch import Trainer

import drafters.files
import evaluate
import train
from drafters.cache import CacheKey
from drafters.distributed import Ranks
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.runs import claim
from drafters.training.strategies import placement
from tests.door_world import STEPS, contents, settings, train_settings, write_rows
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["drafter.num_layers=abc"], ConfigError, r"drafter\.num_layers: got 'abc'.*Integer"),
        (["data.max_length=abc"], ConfigError, r"data\.max_length: got 'abc'.*Integer"),
        (["data.validation=1.5"], ConfigError, r"data\.validation: got 1\.5; accepted: a share from 0 to below 1"),
        (["data.max_tokens=0"], ConfigError, r"data\.max_tokens: got 0; accepted: 1 or more, or null for batch_size"),
        (["data.max_tokens=many"], ConfigError, r"data\.max_tokens: got 'many'.*Integer"),
        (["data.prefetch=none"], ConfigError, r"data\.prefetch: got 'none'; accepted: auto, or the batches to make"),
        (["data.prefetch=-1"], ConfigError, r"data\.prefetch: got -1; accepted: auto, or the batches to make ahead"),
        (["data.validation=0"], DataError, r"data\.validation: no conversation is held out.*share above 0"),
        (["+optim.speed=1"], ConfigError, r"optim\.speed: unknown setting; accepted: .*lr"),
        (["optim.minutes=5"], ConfigError, r"optim.max_steps: got 14 with minutes=5.*give one"),
        (["name=''"], ConfigError, r"name: got ''; accepted: the name of a folder"),
        (["name=../up"], ConfigError, r"name: got '\.\./up'"),
        (["report.max_new_tokens=4"], ConfigError, r"report\.max_new_tokens: got 4; accepted: 5 or more"),
        (["trainer.precision=bf16-mixed"], ConfigError, r"trainer\.precision: got 'bf16-mixed'; accepted: 32-true"),
        (["report.length=9"], ConfigError, r"report\.length: got 9; accepted: 'auto' or 1 to 3"),
        (["trainer.devices=none"], ConfigError, r"trainer"),
        (["trainer.devices=2"], ConfigError, r"trainer\.devices: got 2, but 1 were started"),
        (["trainer.devices=0"], ConfigError, r"trainer\.devices: got 0; accepted: a number of processes"),
        (["trainer.devices=srun"], ConfigError, r"trainer\.devices: got srun, .*srun python train\.py"),
        (["trainer.num_nodes=2"], ConfigError, r"trainer\.num_nodes: got 2, but one process was started"),
        (["trainer.max_steps=9"], ConfigError, r"trainer\.max_steps: got 9; accepted: -1, since optim"),
        (["trainer.max_epochs=1"], ConfigError, r"trainer\.max_epochs: got 1; accepted: -1, since optim"),
        (
            ["trainer.val_check_interval=0"],
            ConfigError,
            r"trainer\.val_check_interval: got 0; accepted: a number above 0",
        ),
        (["trainer.accumulate_grad_batches=-1"], ConfigError, r"accumulate_grad_batches: got -1; accepted: a number"),
        (["trainer.accumulate_grad_batches=x"], ConfigError, r"accumulate_grad_batches: got 'x'; accepted: a number"),
        (["trainer.limit_val_batches=-1"], ConfigError, r"trainer: .*-1 for limit_val_batches"),
        (["+trainer.speed=1"], ConfigError, r"trainer: .*'speed'"),
        (["logger.save_dir=/dev/null/x"], ConfigError, r"^logger: .*/dev/null"),
        (["logger=tensorboard", "+logger.speed=1"], ConfigError, r"^logger: .*'speed'"),
        (["cache.root=file:///"], ConfigError, r"cache\.root: got 'file:///', which names no folder"),
        (
            ["cache.root=file:///x", "cache.mirror=s3://x/y"],
            ConfigError,
            r"cache.mirror: got 's3://x/y'; accepted: a f",
        ),
        # Before anything is fetched.
        (
            ["trainer.strategy=fsdp", "source.path=missing.jsonl"],
            ConfigError,
            r"trainer\.strategy: got 'fsdp'; accepted",
        ),
        (
            ["trainer=fsdp", "optim.ema_decay=0.9", "source.path=missing.jsonl"],
            ConfigError,
            r"^optim\.ema_decay",
        ),
        (
            ["trainer=fsdp", "trainer.strategy._target_=tests.no.X", "source.path=missing.jsonl"],
            ConfigError,
            r"trainer\.strategy\._target_: no module 'tests\.no'",
        ),
        (["trainer.precision=abc", "source.path=missing.jsonl"], ConfigError, r"trainer\.precision: got .abc."),
        (["+logger.speed=1", "source.path=missing.jsonl"], ConfigError, r"logger: .*'speed'"),
        (["callbacks.probe_every_n_steps=0"], ConfigError, r"callbacks.probe_every_n_steps: got 0; accepted"),
        (["callbacks.save_every_n_steps=0"], ConfigError, r"callbacks.save_every_n_steps: got 0; accepted"),
        (["callbacks.probe_tolerance=0"], ConfigError, r"callbacks.probe_tolerance: got 0\.0; must be in \(0, 1\)"),
        (["callbacks.monitor=loss"], ConfigError, r"callbacks.monitor: got 'loss'; accepted: val/accepted_length"),
        (
            ["callbacks.monitor=probe/accepted_length", "callbacks.probe_every_n_steps=null"],
            ConfigError,
            r"callbacks.monitor: got 'probe/accepted_length', but probe_every_n_steps is null",
        ),
        (["report.num_prompts=abc"], ConfigError, r"report\.num_prompts: got 'abc'.*Integer"),
        (["report.num_prompts=-1"], ConfigError, r"report\.num_prompts: got -1; accepted: 1 or more, or 0 for no"),
        (["resume=maybe"], ConfigError, r"^resume: got 'maybe'"),
        (["device=tpu9"], ConfigError, r"device: got 'tpu9'.*accepted: null, cpu, cuda"),
        (["target.layer_ids=[0,4]"], ConfigError, r"layer_ids: layer 4 is out of range; the target has layers 0\.\.3"),
        (["drafter.layer_ids=[1]"], DataError, r"stores the layers \[0, 2\], not \[1\].*cache\.layer_ids=\[0, 1, 2\]"),
        (["target.mask_token='<nope>'"], ConfigError, r"target\.mask_token: '<nope>' is not in the vocabulary; name"),
        (["target.mask_token=99999"], ConfigError, r"target\.mask_token: id 99999 is not in .*accepted: 0\.\."),
        (["target.weights=/nowhere"], ConfigError, r"target\.weights: '/nowhere' is not an existing folder; accepted"),
        (
            ["drafter.block_size=400"],
            ConfigError,
            r"block_size: got 400, but the longest of 16.*has \d+ .*accepted: 1 to",
        ),
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
    with claim(tmp_path / "wrong", {"any": "other"}):
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
    manifest["key_digest"] = CacheKey(**manifest["key"]).digest
    del manifest["checksum"]
    (states / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"belongs to something else: it has weights_hash 0+ instead of.*cache\.root"):
        train.train(train_settings(world, f"outputs={tmp_path}", f"cache.root={tmp_path}/states"))


def test_a_damaged_shard_is_refused_by_name(world, tmp_path, states):
    shard = next(states.glob("shard-*.safetensors"))
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
        patched.setattr(drafters.files, "save_file", no_space)
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
        train.train(train_settings(world, "drafter.num_layers=1", "resume=no"))
    assert contents(first) == before


def test_a_drafter_of_another_shape_does_not_go_on(world, first, tmp_path):
    shutil.copytree(first, tmp_path / "wider")
    own = (f"outputs={tmp_path}", "name=wider", "resume=true", f"optim.max_steps={STEPS + 3}")
    with pytest.raises(CheckpointError, match=r"cannot go on with another drafter\.num_layers: it was 2, now 3"):
        train.train(train_settings(world, *own, "drafter.num_layers=3"))


def test_a_damaged_checkpoint_is_named(world, first, tmp_path):
    shutil.copytree(first, tmp_path / "damaged")
    (tmp_path / "damaged" / "report.json").unlink()
    (tmp_path / "damaged" / "checkpoints" / "last.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"resume: .*last\.ckpt is damaged: .*remove it to start anew"):
        train.train(train_settings(world, f"outputs={tmp_path}", "name=damaged"))


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["run=nowhere"], ConfigError, r"run: got 'nowhere', which is no folder and no baseline; accepted: .*ngram"),
        (["run=no/where"], CheckpointError, r"run: no folder no/where; give one that train\.py wrote"),
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
        (["source.path={world}/target/config.json"], DataError, r"config\.json' line 1: malformed JSON.*an array"),
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


def test_tasks_of_a_slurm_job_are_ours_to_count(world, monkeypatch):
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    cfg = train_settings(world)
    assert train.read_plan(cfg).name == "first"
    place = placement({}, Ranks(), torch.device("cpu"))
    assert train.build_trainer(cfg, **place | {"logger": False}).world_size == 1
