# How much a capture costs beside the target's own forward pass, on the same batches, interleaved:
#
#     python -m tests.bench.capture [--conversations 64] [--weights ...] [--rounds 3]
#
# "model(tokens)" makes logits of every position; "decoder only" makes none. The bar is 85 % of the former.

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch.nn.utils.rnn import pad_sequence

from drafters.cache import CacheKey
from drafters.cache_writer import CaptureConfig, capture, plan_shards
from drafters.door import load_target
from drafters.target import FrozenTarget
from drafters.types import Example

CONF = Path(__file__).resolve().parents[2] / "conf" / "target"


def conversations(num: int, *, vocab_size: int) -> list[Example]:
    """Random tokens with the lengths of bundled conversations: 60 to 330, four fifths of them supervised."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(num):
        length = int(torch.randint(60, 331, (), generator=generator))
        tokens_T = torch.randint(0, vocab_size, (length,), generator=generator)
        mask_T = torch.arange(length) >= length // 5
        made.append(Example(id=str(i), source="bench", tokens_T=tokens_T, loss_mask_T=mask_T))
    return made


def bare(target: FrozenTarget, batches: list[torch.Tensor], *, logits: bool) -> float:
    """Seconds of plain forward passes."""
    started = time.perf_counter()
    with torch.inference_mode():
        for tokens_BT in batches:
            if logits:
                target.model(tokens_BT, use_cache=False)
            else:
                target.decoder(tokens_BT, use_cache=False)
    return time.perf_counter() - started


def stored(target: FrozenTarget, examples: list[Example], config: CaptureConfig, folder: Path) -> float:
    """Seconds of a whole capture, files and checksums included."""
    key = CacheKey.of(target.spec, examples, template_hash="", max_length=1024, codec=config.codec)
    started = time.perf_counter()
    capture(target, {"train": examples}, folder / "cache", key=key, config=config)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "cache")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2", help="a file of conf/target")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=CaptureConfig.batch_tokens)
    args = parser.parse_args()
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{args.target}.yaml"))
    target = load_target(node, device=None)
    config = CaptureConfig(layer_ids=tuple(node["layer_ids"]), batch_tokens=args.batch_tokens)
    examples = conversations(args.conversations, vocab_size=target.spec.vocab_size)
    sizes = {"tokens_per_shard": config.tokens_per_shard, "batch_tokens": config.batch_tokens}
    plans = plan_shards(examples, **sizes)
    batches = [
        pad_sequence([examples[i].tokens_T for i in batch], batch_first=True).to(target.device)
        for plan in plans
        for batch in plan.batches
    ]
    tokens = sum(len(example.tokens_T) for example in examples)
    bare(target, batches[:1], logits=True)
    times: dict[str, list[float]] = {"model(tokens)": [], "decoder only": [], "capture": []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for _ in range(args.rounds):
            times["capture"].append(stored(target, examples, config, Path(folder)))
            times["model(tokens)"].append(bare(target, batches, logits=True))
            times["decoder only"].append(bare(target, batches, logits=False))
    print(
        f"{tokens:,} tokens, {len(batches)} batches of up to {config.batch_tokens}, {torch.get_num_threads()} threads"
    )
    for name, seconds in times.items():
        rates = ", ".join(f"{tokens / s:,.0f}" for s in seconds)
        print(f"{name:>14}: best {tokens / min(seconds):,.0f} tokens/s of {rates}")
    for name in ("model(tokens)", "decoder only"):
        ratios = sorted(b / c for b, c in zip(times[name], times["capture"], strict=True))
        best = min(times[name]) / min(times["capture"])
        print(f"capture / {name}: {ratios[len(ratios) // 2]:.0%} (median of rounds), {best:.0%} (best)")


if __name__ == "__main__":
    main()
