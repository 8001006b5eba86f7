# What a round of decoding costs, for a drafter in floats and packed, and how fast states are captured beside the
# target's own forward pass; on a random target of the default one's size.

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from subprocess import run
from sys import executable

import torch
from torch.nn.utils.rnn import pad_sequence

from drafters.cache_writer import CaptureConfig, plan_shards
from drafters.checkpoint import load_drafter
from drafters.decoding.loop import DecodeConfig, RunTimings, decode
from drafters.heads.base import Drafter
from drafters.target import FrozenTarget
from tests.bench import block_step, capture
from tests.gpu.report import Context
from tests.packed_doubles import written
from tests.tiny import tiny_llama

__all__ = ["capture_speed", "decode_latency", "packed_products"]

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 2048,
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 30, "vocab_size": 320}


def make_target(context: Context) -> FrozenTarget:
    """Random, of the default target's size: speed does not depend on weights, and no file has to be fetched."""
    model = tiny_llama(**(TINY if context.tiny else SMOLLM2), tie_word_embeddings=True)
    dtype = torch.bfloat16 if context.device.type == "cuda" else torch.float32
    return FrozenTarget.from_model(model.to(context.device, dtype), mask_token_id=3)


def decode_latency(context: Context) -> None:
    """Milliseconds of a round's parts, batch 1 and 16: without a drafter, with the shipped one, with packed ones."""
    target = make_target(context)
    spec = target.spec
    num_draft = 96 if context.tiny else 8192
    torch.manual_seed(0)
    drafter = block_step.make_drafter(spec, num_draft=num_draft, window=64)
    contestants: dict[str, Drafter | None] = {"no drafter": None, "float": drafter.to(context.device)}
    with tempfile.TemporaryDirectory(dir=context.folder) as temporary:
        for quant in ("int8", "int4"):
            folder = Path(temporary) / quant
            folder.mkdir()
            packed = load_drafter(written(drafter, target, folder, quant=quant), spec=spec)
            contestants[f"packed {quant}"] = packed.to(context.device)
        for name, one in contestants.items():
            for batch_size in (1, 16):
                _rounds(context, target, one, f"{name}, batch {batch_size}", batch_size)


def _rounds(context: Context, target: FrozenTarget, drafter: Drafter | None, what: str, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, target.spec.vocab_size, (64,), generator=generator) for _ in range(batch_size)]
    config = DecodeConfig(max_new_tokens=4 if context.tiny else 16, stop_ids=(), batch_size=batch_size)
    decode(target, drafter, prompts, config)  # warms up
    timings = RunTimings()
    decode(target, drafter, prompts, replace(config, max_new_tokens=6 if context.tiny else 64), timings=timings)
    parts = ("draft_s", "verify_s", "overhead_s")
    found = {part: 1e3 * median(getattr(cost, part) for cost in timings.rounds) for part in parts}
    text = ", ".join(f"{part.removesuffix('_s')} {ms:.2f} ms" for part, ms in found.items())
    context.row(what, f"{text} a round", rounds=timings.steps, **{f"{part[:-1]}ms": ms for part, ms in found.items()})


def packed_products(context: Context) -> None:
    """What tests/gpu/packed.py prints of the largest product; all must be right."""
    done = run([executable, "-m", "tests.gpu.packed"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if "head" in line:
            what, figure = line.split(":", 1)
            context.row(" ".join(what.split()), figure.strip())
    if done.returncode != 0:
        context.failed("all products", (done.stderr or done.stdout).strip().rpartition("\n")[2][:200])


def capture_speed(context: Context) -> None:
    """Tokens a second of a whole capture, of forward passes with logits, and without; and the ratios."""
    target = make_target(context)
    config = CaptureConfig(layer_ids=block_step.LAYER_IDS, batch_tokens=CaptureConfig.batch_tokens)
    examples = capture.conversations(6 if context.tiny else 512, vocab_size=target.spec.vocab_size)
    plans = plan_shards(examples, tokens_per_shard=config.tokens_per_shard, batch_tokens=config.batch_tokens)
    batches = [
        pad_sequence([examples[i].tokens_T for i in batch], batch_first=True).to(target.device)
        for plan in plans
        for batch in plan.batches
    ]
    tokens = sum(len(example.tokens_T) for example in examples)
    rates: dict[str, list[float]] = {"capture": [], "forward with logits": [], "forward without": []}
    for turn in range(2 if context.tiny else 4):
        seconds = {
            "capture": capture.stored(target, examples, config, context.folder),
            "forward with logits": capture.bare(target, batches, logits=True),
            "forward without": capture.bare(target, batches, logits=False),
        }
        if turn:  # the first warms up
            for name, one in seconds.items():
                rates[name].append(tokens / one)
    for name, found in rates.items():
        context.row(name, f"{median(found):,.0f} tokens/s", tokens_per_second=median(found))
    for name in ("forward with logits", "forward without"):
        ratio = median(a / b for a, b in zip(rates["capture"], rates[name], strict=True))
        context.row(f"capture / {name}", f"{ratio:.0%}", ratio=ratio)
