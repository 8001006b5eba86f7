# What a random batch costs to read from a cache, and that it does not depend on the cache's size: a small cache and one
# ten times as large, of random states, per codec; with the files in the page cache, and dropped from it before.
#     python -m tests.bench.cache_reads --codecs bf16 int8      (2.2 GB of /tmp in bf16 while it runs)

import argparse
import hashlib
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from drafters.cache import CacheKey, HiddenCache, Manifest
from drafters.cache_manifest import SAMPLES, SPLITS, json_bytes
from drafters.cache_records import shard_name, write_shard
from drafters.codecs import CODECS, find_codec
from drafters.storage import LocalFolder

LAYERS, HIDDEN, LENGTH, SHARD_SAMPLES = (0, 10, 20, 29), 576, 256, 16


def make(folder: LocalFolder, name: str, num_shards: int) -> None:
    """Shards of equal samples; all have the same random states."""
    codec, rows = find_codec(name), LENGTH * SHARD_SAMPLES
    folder.make()
    tensors = {
        "tokens": torch.zeros(rows, dtype=torch.int32),
        "loss_mask": torch.ones(rows, dtype=torch.bool),
        "lse": torch.ones(rows),
        "offsets": torch.arange(0, rows + 1, LENGTH),
    }
    for one in ("last", *(f"layer.{layer}" for layer in LAYERS)):
        states_ND = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
        tensors |= {f"{one}.{part}": tensor for part, tensor in codec.encode(states_ND).items()}
    shards = tuple(write_shard(folder, shard_name(number), tensors) for number in range(num_shards))
    num_samples = num_shards * SHARD_SAMPLES
    samples = json_bytes(
        {"ids": list(map(str, range(num_samples))), "sources": ["x"] * num_samples, "lengths": [LENGTH] * num_samples}
    )
    folder.write(SAMPLES, samples)
    folder.write(SPLITS, json_bytes({"train": list(range(num_samples))}))
    key = CacheKey(weights_hash="", template_hash="", data_hash="", max_length=LENGTH, codec=name, dtype="bfloat16")
    Manifest(
        key=key,
        layer_ids=LAYERS,
        hidden_size=HIDDEN,
        tokens_per_shard=rows,
        batch_tokens=rows,
        num_samples=num_samples,
        num_tokens=num_samples * LENGTH,
        num_supervised=num_samples * LENGTH,
        samples_sha256=hashlib.sha256(samples).hexdigest(),
        shards=shards,
    ).save(folder)


def drop(folder: LocalFolder) -> None:
    """Take the shards out of the page cache, where the system does so when asked."""
    for path in folder.path.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def batch_ms(folder: LocalFolder, *, batches: int, batch_size: int) -> list[float]:
    """Milliseconds of each of some random batches, by a reader that has opened no shard before."""
    cache, draw, times = HiddenCache.open(folder, verify=False), random.Random(0), []
    for _ in range(batches):
        indices = draw.sample(range(len(cache)), batch_size)
        started = time.perf_counter()
        for sample in cache.read(indices):
            # Reading is by memory map: a sum touches every page.
            assert sample.aux_TLD is not None
            sample.aux_TLD.view(torch.uint8).sum(dtype=torch.int32)
            sample.last_TD.view(torch.uint8).sum(dtype=torch.int32)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--shards", type=int, default=8, help="of the small cache; the large one has ten times as many")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    sizes = {"batches": args.batches, "batch_size": args.batch_size}
    print(f"a batch: {args.batch_size} conversations of {LENGTH} tokens; median ms (90 % of batches)")
    for name in args.codecs:
        root = Path(tempfile.mkdtemp(prefix="cache-reads-"))
        try:
            for kind, num_shards in (("small", args.shards), ("large", 10 * args.shards)):
                folder = LocalFolder(root / kind)
                make(folder, name, num_shards)
                drop(folder)
                cold = batch_ms(folder, **sizes)
                for path in folder.path.glob("*.safetensors"):
                    path.read_bytes()
                warm = batch_ms(folder, **sizes)
                size = sum(folder.sizes().values()) / 1e9
                told = [f"{statistics.median(t):6.1f} ({sorted(t)[len(t) * 9 // 10]:.1f})" for t in (warm, cold)]
                print(f"{name:>5} {kind} {size:5.2f} GB: warm {told[0]}, dropped before {told[1]}", flush=True)
        finally:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
