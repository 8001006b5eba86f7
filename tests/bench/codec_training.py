# What a drafter loses by a codec of the cache, in accepted length: the same trainings (steps, seeds) from each codec.
# A cache of bf16 is spelled anew by each, which gives the states that a capture would (the target's are bfloat16).
#     python -m tests.bench.codec_training make --cache FOLDER --root ROOT
#     python -m tests.bench.codec_training train --root ROOT --out RUNS --steps 1200   (goes on where it was)
#     python -m tests.bench.codec_training judge --out RUNS --prompts a.jsonl b.jsonl --each 24

import argparse
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from drafters.cache import HiddenCache
from drafters.cache_manifest import SAMPLES, SPLITS
from drafters.cache_records import shard_name, write_shard
from drafters.cache_writer import CaptureConfig, cache_folder
from drafters.codecs import find_codec
from drafters.door import load_target
from drafters.states import log_sum_exp
from tests.bench.acceptance import decoded, tokens_and_rounds
from tests.door_world import ROOT

CODECS = ("bf16", "fp8", "int8", "int4")


def make(cache: HiddenCache, root: Path, head, name: str) -> None:
    """The cache as `name` spells it, in the folder where train.py looks for it."""
    codec = find_codec(name)
    key = replace(cache.manifest.key, codec=name)
    folder = cache_folder(CaptureConfig(name="smollm2", root=str(root)), key)
    folder.make()
    manifest = replace(cache.manifest, key=key, shards=(None,) * len(cache.shards))
    for number in range(len(cache.shards)):
        file = cache._file(number)
        tensors = {one: file.get_tensor(one) for one in file.keys()}  # noqa: SIM118  (not a mapping)
        for one in [one for one in tensors if one.endswith(".data")]:
            coded = codec.encode(tensors.pop(one))
            tensors |= {f"{one.removesuffix('data')}{part}": tensor for part, tensor in coded.items()}
        read_N = tensors["lse"] != 0
        last_ND = codec.decode({part: tensors[f"last.{part}"] for part in codec.parts})
        tensors["lse"][read_N] = log_sum_exp(head, last_ND[read_N])
        manifest = manifest.with_shards({number: write_shard(folder, shard_name(number), tensors)})
    for one in (SAMPLES, SPLITS):
        folder.write(one, cache.folder.read(one))
    manifest.save(folder)


def train(root: Path, out: Path, steps: int, seeds: list[int], more: list[str]) -> None:
    for seed, codec in product(seeds, CODECS):
        settings = [f"cache.root={root}", f"cache.codec={codec}", f"outputs={out}", f"name={codec}-{seed}"]
        settings += [f"data.seed={seed}", "optim.minutes=null", f"optim.max_steps={steps}", *more]
        settings += ["callbacks.probe_every_n_steps=null", "report.num_prompts=2", "report.num_speed_prompts=1"]
        subprocess.run([sys.executable, "train.py", "drafter=markov", *settings], cwd=ROOT, check=True)


def judge(out: Path, paths: list[str], each: int, seeds: list[int]) -> None:
    names = [str(out / f"{codec}-{seed}") for seed, codec in product(seeds, CODECS)]
    args = argparse.Namespace(names=names, prompts=paths, each=each, tokens=128, batch=16, journal=out / "journal")
    _, prompts = decoded(args, {})
    sums = {
        name: {number: tokens_and_rounds(rounds) for number, (_, rounds) in found.items()}
        for name, found in prompts.items()
    }
    numbers = sorted(sums[f"{CODECS[0]}-{seeds[0]}"])
    table = {codec: torch.tensor([[sums[f"{codec}-{s}"][n] for n in numbers] for s in seeds]) for codec in CODECS}
    print(f"{len(numbers)} prompts; drafts accepted a round by seed, all, and as a share of bf16's [95 %]")
    generator = torch.Generator().manual_seed(0)
    for codec, sums_SN2 in table.items():
        by_seed = " ".join(f"{drafts(one):.3f}" for one in sums_SN2)
        ratio = drafts(sums_SN2) / drafts(table["bf16"])
        draws = [torch.randint(len(numbers), (len(numbers),), generator=generator) for _ in range(2000)]
        picks = [torch.randint(len(seeds), (len(seeds),), generator=generator) for _ in range(2000)]

        def interval(draw, sums_SN2=sums_SN2):
            ratios = [drafts(sums_SN2[s][:, n]) / drafts(table["bf16"][s][:, n]) for s, n in draw]
            low, high = torch.tensor(ratios).quantile(torch.tensor([0.025, 0.975])).tolist()
            return f"[{low:.3f}, {high:.3f}]"

        prompts = interval([(torch.arange(len(seeds)), n) for n in draws])
        both = interval(list(zip(picks, draws, strict=True)))
        print(f"{codec:5s} {by_seed}  {drafts(sums_SN2):.3f}  {ratio:.3f} by prompt {prompts}, seed too {both}")


def drafts(sums: torch.Tensor) -> float:
    tokens, rounds = sums.reshape(-1, 2).sum(0).tolist()
    return tokens / rounds - 1 if rounds else math.nan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["make", "train", "judge"])
    parser.add_argument("--cache")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--each", type=int, default=24)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("settings", nargs="*", help="more settings of train.py")
    args = parser.parse_args()
    if args.what == "make":
        from hydra import compose, initialize_config_dir

        from drafters.config import to_plain

        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            head = load_target(to_plain(compose("capture").target), device="cpu").head
        for name in CODECS:
            make(HiddenCache.open(args.cache), args.root, head, name)
    elif args.what == "train":
        train(args.root, args.out, args.steps, args.seeds, args.settings)
    else:
        judge(args.out, args.prompts, args.each, args.seeds)


if __name__ == "__main__":
    main()
