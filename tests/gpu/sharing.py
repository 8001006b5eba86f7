# Strategies that share weights out (FSDP, DeepSpeed stages 2 and 3), on all GPUs there are, one included: four steps in
# one go, and two, saved and resumed for two more, give the same losses. Started by torchrun it is the worker:
#     torchrun ... -m tests.gpu.sharing FOLDER DEVICE KIND

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from hydra.utils import instantiate

from drafters.batches import BatchConfig, StatesDataModule
from drafters.distributed import Ranks, leave
from drafters.training.budget import StepBudget
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from drafters.training.saving import LastCheckpoint, SaveDrafter
from drafters.training.strategies import RanksEnvironment
from tests.contract_cases import tiny_world
from tests.gpu.report import Context
from tests.strategy_worker import SHARDED, ZERO, Watch
from tests.training_doubles import toy_trainer

__all__ = ["run_strategies"]

ROOT = Path(__file__).resolve().parents[2]
ZERO_ON_GPUS = {"_target_": "drafters.training.strategies.ZeroStrategy"}
KINDS = ("fsdp", "zero 2", "zero 3")
STEPS, SAVED = 4, 2


def run_strategies(context: Context) -> None:
    """A row a strategy; those of DeepSpeed are skipped, and say so, where it is not installed."""
    count = torch.cuda.device_count() if context.device.type == "cuda" else 1
    for kind in KINDS:
        if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            context.skipped(kind, "deepspeed is not installed")
            continue
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        folder = context.folder / kind.replace(" ", "-")
        command = [*start, "-m", "tests.gpu.sharing", str(folder), context.device.type, kind]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.stderr.write(done.stderr)
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            context.failed(kind, (errors or ["no error was printed"])[-1][:200])
            continue
        seen = json.loads((folder / "seen.json").read_text())
        error = max(abs(a / b - 1) for a, b in zip(seen["resumed"], seen["whole"][SAVED:], strict=True))
        text = f"{count} processes, {STEPS} steps, saved after {SAVED} and resumed: losses differ by {error:.1e}"
        if error < 1e-3 and len(set(seen["whole"])) == STEPS:
            context.row(kind, text, **seen)
        else:
            context.failed(kind, f"{text}; {seen}")


def train(folder: Path, device: torch.device, kind: str, ranks: Ranks, *, resume: bool = False, stop: int) -> Watch:
    """Up to step `stop`, from a new drafter or from the checkpoint of `folder`."""
    world = tiny_world()
    drafter = world.drafter("markov")
    optim = OptimConfig(max_steps=stop, warmup_steps=0, schedule="constant", precision="float32", lr=0.01)
    module = DistillModule(drafter, world.target.head, optim)
    data = StatesDataModule(
        world, train=range(8), validation=range(4), needs=drafter.needs, config=BatchConfig(batch_size=4, seed=3)
    )
    watch = Watch()
    callbacks = [watch, StepBudget(), SaveDrafter(folder / "drafter"), LastCheckpoint(folder)]
    zero = {**(ZERO_ON_GPUS if device.type == "cuda" else ZERO), "stage": int(kind[-1])} if "zero" in kind else SHARDED
    trainer = toy_trainer(
        folder,
        callbacks=callbacks,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=ranks.size,
        strategy=instantiate(zero),
        plugins=[RanksEnvironment(ranks, per_node=ranks.size)],
    )
    checkpoint = folder / "last.ckpt" if resume else None
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return watch


def main() -> None:
    folder, device, kind = Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    with Ranks.from_environment() as ranks:
        if device.type == "cuda":
            torch.cuda.set_device(ranks.local_rank)
        whole = train(folder / "whole", device, kind, ranks, stop=STEPS)
        train(folder / "parts", device, kind, ranks, stop=SAVED)
        resumed = train(folder / "parts", device, kind, ranks, resume=True, stop=STEPS)
        if ranks.is_first:
            seen = {"whole": whole.losses, "resumed": resumed.losses, "kinds": sorted(whole.kinds)}
            (folder / "seen.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main()
