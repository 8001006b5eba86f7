# The speed of this project on this machine, beside what a user would otherwise run, in one table:
#     python -m tests.bench [--only step curves capture decode] [--rounds 7]
# Contestants take turns, medians of rounds; nothing else may run on the machine meanwhile. Speculators takes part where
# DRAFTERS_SPECULATORS names the Python of an environment that has it (`make peers`).

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from tests.bench.contest import SPECULATORS, contest, floor_flops, product_rate
from tests.bench.step_world import Setting

if TYPE_CHECKING:
    from drafters.heads.base import Drafter
    from drafters.target import FrozenTarget

REDUCED, WINDOW = 8192, 64


def show(what: str, figure: str, note: str = "") -> None:
    print(f"{what:<58} {figure:>16}  {note}".rstrip(), flush=True)


def step(args: argparse.Namespace) -> None:
    """One training step: full and reduced vocabulary, ours and others'."""
    rate = median(product_rate() for _ in range(3))
    show("bf16 product [1344, 576] x [576, 49152]", f"{rate / 1e9:.0f} GFLOP/s")
    for title, draft_vocab in (("all 49,152 tokens", 0), (f"{REDUCED:,} of 49,152 tokens", REDUCED)):
        settings = {"ours": Setting(who="ours", draft_vocab=draft_vocab, threads=args.threads)}
        settings["ours, compiled"] = replace(settings["ours"], compiled=True)
        settings["reference"] = replace(settings["ours"], who="reference")
        if SPECULATORS in os.environ:
            settings["speculators"] = replace(settings["ours"], who="speculators")
        found = contest(settings, rounds=args.rounds)
        own = found["ours"]
        for name, one in found.items():
            ratio = "" if name == "ours" else f"ours is {own.rate / one.rate:.2f} times as fast"
            share = own.peak_mb / one.peak_mb
            memory = "" if name == "ours" else f", and takes {share:.2f} of its memory"
            show(
                f"step, {title}: {name}",
                f"{one.rate:.0f} positions/s",
                f"{1e3 * one.step:.0f} ms, peak {one.peak_mb / 1e3:.2f} GB; {ratio}{memory}".rstrip("; "),
            )
        best = max(own.rate, found["ours, compiled"].rate)
        at_rate = floor_flops(own.setting) / rate
        show(
            f"step, {title}: share of the products' rate",
            f"{at_rate * best / own.count:.0%}",
            "floor: three vocabulary products a position, and the backbone",
        )


def curves(args: argparse.Namespace) -> None:
    """What doubling costs."""
    base = Setting(who="ours", threads=args.threads)
    small = replace(base, window=WINDOW)
    cases = {
        "T 300-640 -> 600-1280, all context": (base, replace(base, lengths=(600, 1280))),
        f"T 300-640 -> 600-1280, window {WINDOW}": (small, replace(small, lengths=(600, 1280))),
        "anchors 48 -> 96": (base, replace(base, num_anchors=96)),
        "vocabulary 24,576 -> 49,152": (replace(base, vocab=24576), base),
        "draft vocabulary 8,192 -> 16,384": (
            replace(base, draft_vocab=REDUCED),
            replace(base, draft_vocab=2 * REDUCED),
        ),
    }
    for title, (one, two) in cases.items():
        found = contest({"one": one, "two": two}, rounds=args.rounds)
        show(
            f"cost of {title}",
            f"{found['two'].step / found['one'].step:.2f} x",
            f"{1e3 * found['one'].step:.0f} -> {1e3 * found['two'].step:.0f} ms a step",
        )


def capture(args: argparse.Namespace) -> None:
    """Capture against the target's own forward pass."""
    from omegaconf import OmegaConf
    from torch.nn.utils.rnn import pad_sequence

    from drafters.cache_writer import CaptureConfig, plan_shards
    from drafters.door import load_target
    from tests.bench.capture import CONF, bare, conversations, stored

    node = OmegaConf.to_container(OmegaConf.load(CONF / "smollm2.yaml"))
    target = load_target(node, device="cpu")
    config = CaptureConfig(layer_ids=tuple(node["layer_ids"]))
    examples = conversations(32, vocab_size=target.spec.vocab_size)
    plans = plan_shards(examples, tokens_per_shard=config.tokens_per_shard, batch_tokens=config.batch_tokens)
    batches = [
        pad_sequence([examples[i].tokens_T for i in b], batch_first=True) for plan in plans for b in plan.batches
    ]
    tokens = sum(len(example.tokens_T) for example in examples)
    ways: dict[str, Callable[[Path], float]] = {
        "capture": lambda folder: stored(target, examples, config, folder),
        "forward pass with logits": lambda _: bare(target, batches, logits=True),
        "forward pass without": lambda _: bare(target, batches, logits=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for turn in range(args.rounds // 2 + 2):
            for name, way in ways.items():
                spent = way(Path(folder))
                if turn:
                    seconds[name].append(spent)
    for name, found in seconds.items():
        ratio = (
            "" if name == "capture" else f"capture is {median(found) / median(seconds['capture']):.2f} times as fast"
        )
        show(f"capture of SmolLM2-135M: {name}", f"{tokens / median(found):.0f} tokens/s", ratio)


def decode(args: argparse.Namespace) -> None:
    """Milliseconds of a round by part, with an untrained drafter of the default shape, by dtype and threads."""
    from omegaconf import OmegaConf

    from drafters.door import load_target
    from tests.bench.block_step import make_drafter
    from tests.bench.capture import CONF

    node = OmegaConf.to_container(OmegaConf.load(CONF / "smollm2.yaml"))
    for dtype in ("bfloat16", "float32"):
        target = load_target({**node, "dtype": dtype}, device="cpu")
        drafter = make_drafter(target.spec, num_draft=REDUCED, window=WINDOW).eval()
        for threads in sorted({1, args.threads}):
            torch.set_num_threads(threads)
            for batch_size in (1, 8):
                for name, one in (("drafted", drafter), ("plain", None)):
                    parts = round_parts(target, one, batch_size)
                    cells = ", ".join(f"{part} {value:.1f}" for part, value in parts.items())
                    title = f"decoding, {dtype}, {threads} threads, batch {batch_size}, {name}"
                    show(title, f"{sum(parts.values()):.1f} ms a round", cells)


def round_parts(target: "FrozenTarget", drafter: "Drafter | None", batch_size: int) -> dict[str, float]:
    """Medians over rounds, in milliseconds: drafts, the target's pass, and the loop around them."""
    from drafters.decoding.loop import DecodeConfig, RunTimings, decode

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, target.spec.vocab_size, (64,), generator=generator) for _ in range(batch_size)]
    config = DecodeConfig(max_new_tokens=32, batch_size=batch_size, stop_ids=())
    for _ in range(2):  # the first time warms up
        decode(target, drafter, prompts, config, timings=(timings := RunTimings()))
    parts = {"draft": "draft_s", "target": "verify_s", "loop": "overhead_s"}
    return {name: 1e3 * median(getattr(cost, key) for cost in timings.rounds) for name, key in parts.items()}


SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "step": step,
    "curves": curves,
    "capture": capture,
    "decode": decode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed beside what one would otherwise run.")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if min(args.rounds, args.threads) < 1:
        parser.error(f"--rounds {args.rounds}, --threads {args.threads}: accepted are 1 or more")
    print(f"torch {torch.__version__}, {args.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    for name in args.only:
        SECTIONS[name](args)


if __name__ == "__main__":
    main()
