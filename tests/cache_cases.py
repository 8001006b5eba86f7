# Conversations and captures that the tests of caches, captures and batches share.

from pathlib import Path

import torch

from drafters.cache import CacheKey, HiddenCache
from drafters.cache_writer import CaptureConfig, Crew, Estimate, capture
from drafters.distributed import Ranks
from drafters.types import Example

CONFIG = CaptureConfig(layer_ids=(0, 2, 3), codec="fp32", tokens_per_shard=60, batch_tokens=40)


def examples(num: int = 14, *, seed: int = 0, longest: int = 23) -> list[Example]:
    """Random conversations: a prompt, an answer, one token of end."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(num):
        length = int(torch.randint(4, longest + 1, (), generator=generator))
        mask_T = torch.arange(length) >= length // 3
        mask_T[-1] = i % 2 == 0
        tokens_T = torch.randint(0, 128, (length,), generator=generator)
        made.append(Example(id=f"c{i}", source=f"s{i % 3}", tokens_T=tokens_T, loss_mask_T=mask_T))
    return made


def key_of(target, data, *, codec: str = "fp32") -> CacheKey:
    return CacheKey.of(target.spec, data, template_hash="t", max_length=32, codec=codec)


def captured(target, folder, data=None, config: CaptureConfig = CONFIG, *, watcher=None, ranks=None) -> HiddenCache:
    data = examples() if data is None else data
    splits = {"train": data[:10], "validation": data[10:]}
    key = key_of(target, data, codec=config.codec)
    return capture(target, splits, folder, key=key, config=config, crew=Crew(ranks=ranks or Ranks(), watcher=watcher))


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder of states."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


class Recorder:
    def __init__(self):
        self.begun: list[Estimate] = []
        self.steps: list[tuple[int, int, int]] = []

    def begin(self, estimate):
        self.begun.append(estimate)

    def advance(self, done, total, tokens):
        self.steps.append((done, total, tokens))
