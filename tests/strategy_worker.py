# Short trainings of a tiny block drafter by whatever processes there are. Started by torchrun, it does those that its
# arguments name and writes what the first rank saw; tests/test_strategies.py compares.
#     torchrun ... -m tests.strategy_worker FOLDER NAME...

import json
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from lightning.pytorch import Callback

from drafters.batches import BatchConfig, StatesDataModule
from drafters.checkpoint import drafter_of_checkpoint
from drafters.distributed import Ranks, leave
from drafters.training.budget import StepBudget
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from drafters.training.saving import LastCheckpoint, SaveDrafter
from drafters.training.strategies import placement
from tests.contract_cases import World, tiny_world
from tests.training_doubles import toy_trainer

STEPS = 5
BUDGET = 170  # tokens of a pass, padding included
SHARDED = {"_target_": "drafters.training.strategies.ShardedStrategy"}
ZERO = {"_target_": "tests.cpu_zero.CpuZero"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`batch` conversations a pass, over all ranks, or up to `max_tokens`. `resumes`: the case whose checkpoint it
    takes."""

    batch: int = 4
    accumulate: int = 1
    strategy: object = "auto"
    stop: int = STEPS
    resumes: str | None = None
    max_tokens: int | None = None
    options: dict = field(default_factory=dict)


CASES = {
    "ddp": Case(),
    "accumulated": Case(batch=2, accumulate=2),
    "of a token budget": Case(max_tokens=BUDGET, accumulate=2),
    "fsdp": Case(strategy=SHARDED),
    "fsdp accumulated": Case(strategy=SHARDED, batch=2, accumulate=2),
    "fsdp begun": Case(strategy=SHARDED, stop=2),
    "fsdp resumed": Case(strategy=SHARDED, resumes="begun alone"),
    "zero 2": Case(strategy=ZERO, options={"stage": 2}),
    "zero 3": Case(strategy=ZERO, options={"stage": 3}, stop=2),
    "zero 3 resumed": Case(strategy=ZERO, options={"stage": 3}, resumes="zero 3"),
}


def silent_world() -> World:
    """Texts, a third of which have nowhere to draft: no two supervised tokens in a row."""
    world = tiny_world()
    few = [replace(one, loss_mask_T=torch.arange(len(one.tokens_T)) % 4 == 3) for one in world.examples[:4]]
    return replace(world, examples=(*world.examples, *few))


class Watch(Callback):
    """Losses by step, how many positions each batch of this rank had, and the kinds of the weights."""

    def __init__(self) -> None:
        self.losses, self.counts, self.kinds = [], [], set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > len(self.losses) and "train/loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.kinds = {type(p.data).__name__ for p in pl_module.drafter.parameters()}

    def on_before_backward(self, trainer, pl_module, loss):
        self.counts.append(float(pl_module._window.sums["count"]))


def train(world: World, case: Case, folder: Path, ranks: Ranks) -> Watch:
    """One training into `folder`, from a new drafter or the checkpoint of another case."""
    drafter = world.drafter("markov")
    begun = None if case.resumes is None else folder.parent / case.resumes / "last.ckpt"
    if begun is not None:
        drafter = drafter_of_checkpoint(begun, type(drafter), drafter.config, world.target.spec)
    optim = OptimConfig(max_steps=case.stop, warmup_steps=0, schedule="constant", precision="float32", lr=0.01)
    module = DistillModule(drafter, world.target.head, optim)
    batches = BatchConfig(batch_size=case.batch, max_tokens=case.max_tokens, seed=3)
    data = StatesDataModule(world, train=range(12), validation=range(4), needs=drafter.needs, config=batches)
    watch = Watch()
    callbacks = [watch, StepBudget(), SaveDrafter(folder / "drafter"), LastCheckpoint(folder)]
    given = placement({"strategy": case.strategy}, ranks, torch.device("cpu"))
    if not isinstance(case.strategy, str) and ranks.size > 1:
        from hydra.utils import instantiate

        given["strategy"] = instantiate({**case.strategy, **case.options})
    trainer = toy_trainer(folder, callbacks=callbacks, accumulate_grad_batches=case.accumulate, **given)
    trainer.fit(module, datamodule=data, ckpt_path=begun, weights_only=True)
    return watch


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with Ranks.from_environment() as ranks:
        for name in names:
            watch = train(silent_world(), CASES[name], folder / name, ranks)
            counts = ranks.gather([watch.counts])
            if ranks.is_first:
                found = {"losses": watch.losses, "counts": counts, "kinds": sorted(watch.kinds)}
                (folder / name / "seen.json").write_text(json.dumps(found))
    if ranks.size > 1:
        leave()


if __name__ == "__main__":
    main()
