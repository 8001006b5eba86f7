# Seconds that an optimizer step of each drafter family takes, side by side on the default target's cached states:
#   python -m tests.bench.family_steps --minutes 10 mtp medusa parallel markov
# Families take turns, round by round; the printed number of steps is what each can do in the given minutes.

import argparse
import statistics
import time

import torch
from hydra import compose, initialize_config_dir

from data.capture import capture_states
from data.sources import load_splits
from drafters.batches import BatchConfig, StatesLoader
from drafters.chat import ChatEncoder
from drafters.config import to_plain
from drafters.door import load_target
from drafters.heads.start import Start
from drafters.splits import encode_splits
from drafters.training.optim import build_optimizer
from tests.door_world import ROOT
from train import read_plan

SETTLING = 3


def world(name, overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", [f"drafter={name}", *overrides])
    return read_plan(cfg), to_plain(cfg)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--steps", type=int, default=8, help="steps of a family before the next one has its turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="Hydra overrides, such as cache.root=/tmp/states")
    args = parser.parse_args()
    plan, settings = world(args.drafters[0], args.set)
    target = load_target(settings["target"], device="cpu")
    encoder = ChatEncoder(target.tokenizer, max_length=plan.data.max_length)
    parts = load_splits(plan.source, validation=plan.data.validation, seed=plan.data.seed)
    splits, _ = encode_splits(parts, encoder, weights_hash=target.spec.weights_hash)
    cache = capture_states(target, splits, plan.cache, encoder=encoder)
    start = Start(target=target, examples=splits["train"], states=cache, indices=cache.split("train"))
    families = {}
    for name in args.drafters:
        plan, _ = world(name, args.set)
        cls, config = plan.drafter
        drafter = cls.create(config, target.spec, start).train()
        batches = BatchConfig(batch_size=plan.data.batch_size, seed=0)
        loader = StatesLoader(
            cache, cache.split("train"), batches, needs=drafter.needs, rank=(0, 1), finished=lambda: 0
        )
        families[name] = (drafter, build_optimizer(drafter, plan.optim), iter(loader))
    times = {name: [] for name in families}
    for turn in range(args.rounds):
        # Another order each round, and the first steps of a turn do not count: memory comes back from the one before.
        first = turn * 3 % len(families)
        for name in [*families, *families][first : first + len(families)]:
            drafter, optimizer, batches = families[name]
            for step in range(SETTLING + args.steps):
                began = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16):
                    losses = drafter.loss(next(batches), target.head)
                (losses.total / losses.count).backward()
                torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if step >= SETTLING:
                    times[name].append(time.perf_counter() - began)
    for name, seconds in times.items():
        step = statistics.fmean(sorted(seconds)[: len(seconds) * 9 // 10])  # without the machine's slowest tenth
        print(f"{name:10s} {step:.4f} s a step, {args.minutes * 60 / step:6.0f} steps in {args.minutes:g} minutes")


if __name__ == "__main__":
    main()
