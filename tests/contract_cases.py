# What the contract tests stand on: every drafter of conf/drafter, found by looking, and the one that
# docs/add-a-drafter.md shows, with settings cut to the size of a tiny target; and two tiny worlds. A world is a target
# with a few texts of its own and their states in memory.

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.nn.utils.rnn import pad_sequence

from drafters.batches import collate
from drafters.cache import CachedSample
from drafters.config import build_config, to_plain
from drafters.decoding.loop import DecodeConfig, decode
from drafters.decoding.sampling import Draws
from drafters.decoding.tree import static_tree
from drafters.heads.start import Start
from drafters.target import FrozenTarget
from drafters.types import Batch, Example, Needs, Sampling
from tests.laws import small_target
from tests.out_of_tree import load_example
from tests.test_families import sharpened
from tests.tiny import tiny_llama

CONF = Path(__file__).resolve().parent.parent / "conf"
SHOWN = "the example of docs/add-a-drafter.md"
NAMES = [*sorted(path.stem for path in (CONF / "drafter").glob("*.yaml")), SHOWN]
# Settings that a tiny target and short texts cannot bear as shipped: the most they may be, by name.
MOST = {"block_size": 3, "num_anchors": 8, "rank": 6, "size": 24, "window": 6}
LAYER_IDS = (0, 1, 2, 3, 4)
GREEDY = Sampling()


@dataclass(frozen=True)
class World:
    """`draft_vocab` is the size of a reduced draft vocabulary here."""

    target: FrozenTarget
    examples: tuple[Example, ...]
    draft_vocab: int

    @property
    def lengths(self) -> list[int]:
        return [len(example.tokens_T) for example in self.examples]

    def read(self, indices, needs=None) -> list[CachedSample]:
        """As a cache gives them."""
        needs = Needs(layer_ids=LAYER_IDS, last=True) if needs is None else needs
        return [self.sample(index, needs) for index in indices]

    def sample(self, index: int, needs: Needs) -> CachedSample:
        example = self.examples[index]
        rows_BT = example.tokens_T[None]
        states = self.target.states(rows_BT, needs=Needs(layer_ids=needs.layer_ids, last=True))
        return CachedSample(
            index=index,
            id=example.id,
            source="",
            tokens_T=example.tokens_T,
            loss_mask_T=example.loss_mask_T,
            aux_TLD=None if states.aux_BTLD is None else states.aux_BTLD[0].clone(),
            last_TD=states.last_BTD[0].clone(),
            lse_T=self.target.head.logits(states.last_BTD[0]).logsumexp(-1).clone(),
        )

    @cached_property
    def start(self) -> Start:
        return Start(target=self.target, examples=self.examples, states=self, indices=range(len(self.examples)))

    def batch(self, needs: Needs, indices, *, seed: int = 0) -> Batch:
        samples = self.read(indices, needs)
        return collate(samples, layer_ids=needs.layer_ids, seeds=[len(samples) * seed + i for i in range(len(samples))])

    def drafter(self, name: str, **changes):
        """A new one by the settings of conf/drafter/<name>.yaml, shrunk, and these changes."""
        cls, config = build_config({**self.shrunk(node_of(name)), **changes}, key="drafter")
        torch.manual_seed(0)
        return cls.create(config, self.target.spec, self.start)

    def shrunk(self, node: dict) -> dict:
        most = {**MOST, "draft_vocab_size": self.draft_vocab}
        small = {}
        for key, value in node.items():
            if isinstance(value, dict):
                value = self.shrunk(value)
            elif key in most and value is not None:
                value = min(value, most[key])
            small[key] = value
        return small


@cache
def node_of(name: str) -> dict:
    """The drafter's settings as the door of training composes them."""
    chosen = [] if name == SHOWN else [f"drafter={name}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [*chosen, f"target.layer_ids={list(LAYER_IDS)}"])
    if name == SHOWN:
        cfg.drafter = OmegaConf.create(load_example())
    return to_plain(cfg)["drafter"]


def texts_of(target, prompts, *, sampling: Sampling, num_tokens: int) -> tuple[Example, ...]:
    """The target's own answers, supervised."""
    config = DecodeConfig(max_new_tokens=num_tokens, sampling=sampling, stop_ids=(), batch_size=len(prompts))
    examples = []
    for prompt, row in zip(prompts, decode(target, None, prompts, config), strict=True):
        tokens_T = torch.cat([prompt, torch.tensor(row.tokens)])
        mask_T = torch.arange(len(tokens_T)) >= len(prompt)
        examples.append(Example(id=str(len(examples)), source="", tokens_T=tokens_T, loss_mask_T=mask_T))
    return tuple(examples)


@cache
def tiny_world() -> World:
    """A vocabulary of 128; texts of different lengths that vary, and repeat parts of themselves."""
    target = FrozenTarget.from_model(sharpened(tiny_llama(num_hidden_layers=6)), mask_token_id=3)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 128, (length,), generator=generator) for length in (9, 3, 6, 12, 4, 7, 5, 8)]
    examples = texts_of(target, prompts, sampling=GREEDY, num_tokens=30)
    return World(target, examples, draft_vocab=100)


@cache
def small_world() -> World:
    """The vocabulary of 5 on which laws are enumerated; one token cannot be drafted."""
    target = small_target(num_layers=5)
    prompts = [torch.tensor(ids) for ids in ([3, 0, 0, 3, 0, 0], [3], [1, 4], [2])]
    examples = texts_of(target, prompts, sampling=Sampling(temperature=1.0), num_tokens=14)
    return World(target, examples, draft_vocab=4)


def trains(name: str) -> bool:
    cls, config = build_config(node_of(name), key="drafter")
    return cls.trains(config)


TRAINED = [name for name in NAMES if trains(name)]


def shaken(drafter, *, scale: float = 0.2):
    """Away from where it starts: nothing is zero, so every part acts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


def tree_of(drafter):
    """One that branches as deep as the drafter drafts."""
    return static_tree([3, 2, 1][: drafter.block_size])


@cache
def taught(name: str):
    """A drafter of the tiny world that has learnt its texts, where there is something to learn; and its losses."""
    world = tiny_world()
    drafter = world.drafter(name)
    losses = []
    if name in TRAINED:
        optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
        for step in range(60):
            losses.append(learn(drafter, world.batch(drafter.needs, range(len(world.examples)), seed=step), optimizer))
    return drafter.eval(), losses


def learn(drafter, batch: Batch, optimizer, *, world: World | None = None) -> float:
    """One step in float32; the mean loss before it."""
    found = drafter.train().loss(batch, (world or tiny_world()).target.head)
    optimizer.zero_grad()
    (found.total / found.count).backward()
    optimizer.step()
    return float(found.total.detach() / found.count)


class Reading:
    """A session that has read prompts as decoding shows them to it."""

    @torch.inference_mode()
    def __init__(self, drafter, target, prompts) -> None:
        self.num_rows = len(prompts)
        tokens_BT, lengths_B = pad_sequence(prompts, batch_first=True), torch.tensor([len(p) for p in prompts])
        cache = target.new_cache(len(prompts))
        out = target.step(tokens_BT, cache, lengths_B=lengths_B, needs=drafter.needs, logits="last")
        self.session = drafter.session(target, len(prompts))
        self.session.share(cache)
        anchor_B = out.logits_BSV[:, 0].argmax(-1)
        self.session.extend(tokens_BT, lengths_B, anchor_B, out.aux_BSLD, out.last_BSD)

    @torch.inference_mode()
    def propose(self, length: int, uniforms_BS=None):
        """At temperature 0, or at 1 by these numbers."""
        draws = Draws(GREEDY) if uniforms_BS is None else Draws(Sampling(temperature=1.0), uniforms_BS)
        return self.session.propose(length, draws)

    def uniforms(self, length: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.num_rows, length, generator=generator, dtype=torch.float64)
