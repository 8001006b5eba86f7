# A small world for tests of the doors: a random target, conversations and prompts in a folder, the settings of a run in
# it, and ways to compare runs.

import json
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from drafters.checkpoint import save_drafter
from drafters.config import build_config, to_plain
from drafters.door import load_target
from tests.tiny import tiny_llama
from tests.tiny_chat import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
ANSWER = "The sky is blue, the grass is green. Once upon a time there was a tool. Be kind. "
STEPS, BLOCK = 14, 3


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_world(folder):
    """Fills a folder with a target, conversations and prompts."""
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
    return settings("train", *train_overrides(world), *overrides)


def train_overrides(world):
    """What a run in this world says on the command line."""
    return (
        *(f"target.weights={world}/target", "target.name=tiny", "target.sha256=null", "target.mask_token=0"),
        *("target.layer_ids=[0,2]", "target.dtype=float32"),
        *("source=jsonl", f"source.path={world}/chats.jsonl", "data.validation=0.2"),
        *(f"cache.root={world}/states", f"outputs={world}/outputs", "name=first"),
        *("drafter.draft_vocab_size=64", f"drafter.block_size={BLOCK}", "drafter.sequential.rank=4"),
        *("optim.minutes=null", f"optim.max_steps={STEPS}", "optim.warmup_steps=2"),
        *("trainer.val_check_interval=7", "trainer.log_every_n_steps=2", "callbacks.save_every_n_steps=5"),
        "callbacks.probe_every_n_steps=7",
        *("report.num_prompts=2", "report.max_new_tokens=12", "report.num_speed_prompts=1", "device=cpu"),
    )


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def same_weights(run, other):
    mine, others = (load_file(one / "drafter" / "model.safetensors") for one in (run, other))
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def make_run(world, name, *, seed=0, logger="csv", **source):
    """The folder of a run that needed no training: a random drafter over the whole vocabulary, and its settings."""
    cfg = train_settings(world, f"name={name}", "drafter.draft_vocab_size=null", f"logger={logger}")
    folder = world / "outputs" / name
    plain = {**to_plain(cfg), "cwd": str(world)}
    plain["source"].update(source)
    target = load_target(plain["target"], device="cpu")
    cls, config = build_config(plain["drafter"], key="drafter")
    torch.manual_seed(seed)
    save_drafter(cls(config, target.spec), folder / "drafter", spec=target.spec, provenance={"seed": seed})
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "settings.json").write_text(json.dumps(plain))
    return folder
