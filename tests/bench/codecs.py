# Codecs of the cache on the states of a real one: bytes, error of a row, and rows coded and read back a second.
#     python -m tests.bench.codecs --cache ~/.cache/drafters/states/NAME [--samples 40]
# The cache should be bf16 or fp32: what another codec has lost cannot be measured any more.

import argparse
import time
from statistics import median

import torch

from drafters.cache import HiddenCache
from drafters.codecs import CODECS

ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", required=True)
    parser.add_argument("--samples", type=int, default=40)
    args = parser.parse_args()
    cache = HiddenCache.open(args.cache)
    samples = cache.read(range(min(args.samples, len(cache))))
    layers = {str(layer): torch.cat([s.aux_TLD[:, i] for s in samples]) for i, layer in enumerate(cache.layer_ids)}
    layers["last"] = torch.cat([sample.last_TD for sample in samples])
    rows, width = layers["last"].shape
    print(f"{rows} rows of {width}, codec of the cache: {cache.manifest.key.codec}")
    coded = {name: [codec.encode(states) for states in layers.values()] for name, codec in CODECS.items()}
    times = {name: ([], []) for name in CODECS}
    for _ in range(ROUNDS):
        for name, codec in CODECS.items():
            started = time.perf_counter()
            for states in layers.values():
                codec.encode(states)
            between = time.perf_counter()
            for parts in coded[name]:
                codec.decode(parts)
            times[name][0].append(between - started)
            times[name][1].append(time.perf_counter() - between)
    heads = ("bytes", "of bf16", "rows/s in", "out")
    print(
        f"{'codec':6s}"
        + "".join(f"{head:>14s}" for head in heads)
        + "  error of a row in the worst layer, %: median, 99 %"
    )
    for name, codec in CODECS.items():
        pairs = zip(layers.values(), coded[name], strict=True)
        errors = [row_errors(states, codec.decode(parts)) for states, parts in pairs]
        middle, most = (max(float(found.quantile(share)) for found in errors) for share in (0.5, 0.99))
        write, read = (rows * len(layers) / median(found) for found in times[name])
        size = codec.row_bytes(width)
        cells = f"{size:14d}{size / (2 * width):14.3f}{write:14,.0f}{read:14,.0f}"
        print(f"{name:6s}{cells}  {100 * middle:.2f}, {100 * most:.2f}")


def row_errors(states_ND, back_ND):
    wide_ND = states_ND.float()
    return (back_ND.float() - wide_ND).norm(dim=1) / wide_ND.norm(dim=1)


if __name__ == "__main__":
    main()
