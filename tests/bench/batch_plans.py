# What similar lengths in a step are worth: padding, and supervised positions a second of training, of batches of
# data.batch_size conversations and of those under data.max_tokens, taking turns, with as many steps each:
#   python -m tests.bench.batch_plans --cache FOLDER [--drafter markov] [--batch-size 2] [--max-tokens 700]

import argparse
import statistics
import time
from itertools import pairwise

import torch

from drafters.batches import BatchConfig, StatesLoader
from drafters.cache import HiddenCache
from drafters.door import load_target
from drafters.heads.start import Start
from drafters.training.optim import build_optimizer
from drafters.types import Example, Needs
from tests.bench.family_steps import SETTLING, world


def padding(loader: StatesLoader, *, epochs: int = 3) -> float:
    """The share of padded positions of whole epochs."""
    kept = padded = 0
    for epoch in range(epochs):
        drawn = loader.plan.epoch(epoch)
        for start, stop in pairwise(drawn.cuts):
            lengths = [loader.source.lengths[loader.indices[i]] for i in drawn.order[start:stop]]
            kept, padded = kept + sum(lengths), padded + len(lengths) * max(lengths)
    return 1 - kept / padded


def examples(cache: HiddenCache) -> list[Example]:
    samples = cache.read(cache.split("train"), Needs(last=True))
    return [Example(id=s.id, source=s.source, tokens_T=s.tokens_T, loss_mask_T=s.loss_mask_T) for s in samples]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", required=True)
    parser.add_argument("--drafter", default="markov")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=700)
    parser.add_argument("--steps", type=int, default=24, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    plan, settings = world(args.drafter, [])
    target, cache = load_target(settings["target"], device="cpu"), HiddenCache.open(args.cache)
    start = Start(target=target, examples=examples(cache), states=cache, indices=cache.split("train"))
    cls, config = plan.drafter
    kinds = {
        f"batch_size={args.batch_size}": BatchConfig(batch_size=args.batch_size),
        f"max_tokens={args.max_tokens}": BatchConfig(max_tokens=args.max_tokens),
    }
    runs, rates = {}, {name: [] for name in kinds}
    for name, batches in kinds.items():
        drafter = cls.create(config, target.spec, start).train()
        loader = StatesLoader(cache, cache.split("train"), batches, needs=drafter.needs, finished=lambda: 0)
        print(f"{name}: {len(loader)} steps an epoch, padding {padding(loader):.1%}", flush=True)
        runs[name] = (drafter, build_optimizer(drafter, plan.optim), iter(loader))
    for turn in range(args.rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            drafter, optimizer, batches = runs[name]
            positions, began = 0.0, 0.0
            for step in range(SETTLING + args.steps):
                if step == SETTLING:
                    positions, began = 0.0, time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16):
                    losses = drafter.loss(next(batches), target.head)
                (losses.total / losses.count).backward()
                optimizer.step()
                optimizer.zero_grad()
                positions += float(losses.count)
            rates[name].append(positions / (time.perf_counter() - began))
    one, other = (rates[name] for name in kinds)
    for name, found in rates.items():
        print(f"{name}: median {statistics.median(found):,.0f} positions/s of {[round(rate) for rate in found]}")
    print(f"ratio: {statistics.median(b / a for a, b in zip(one, other, strict=True)):.2f} (median of rounds)")


if __name__ == "__main__":
    main()
