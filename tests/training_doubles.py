# Stand-ins for the training tests: a drafter of a few hundred weights, a target head, and batches in memory whose
# order is permutation(seed, epoch) with a resumable position. Small enough for whole runs in a second.

import io
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from drafters.cache import CachedSample
from drafters.heads.base import Drafter
from drafters.spec import TargetSpec
from drafters.training.callbacks import CallbackConfig, build_callbacks
from drafters.training.module import DistillModule
from drafters.training.optim import OptimConfig
from drafters.types import Batch, Losses, Needs, Sampling
from drafters.vocab import DraftVocab

HIDDEN, VOCAB, LENGTH = 8, 16, 6

# What Lightning itself says on batches in memory.
LIGHTNING_NOISE = [
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
]

SPEC = TargetSpec(
    hidden_size=HIDDEN,
    num_layers=4,
    vocab_size=VOCAB,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_inv_freq=(1.0, 0.01),
    max_position=64,
    tied_head=True,
    logit_scale=1.0,
    logit_softcap=None,
    embed_scale=1.0,
    bos_id=0,
    eos_ids=(1,),
    mask_token_id=2,
    template_hash="template-a",
    weights_hash="weights-a",
    dtype="float32",
    name="toy",
)


class ToyHead:
    """Embedding and output projection, tied, as a plain object."""

    def __init__(self, spec=SPEC):
        self.spec = spec
        generator = torch.Generator().manual_seed(7)
        self.embedding_VD = self.lm_head_VD = torch.randn(VOCAB, HIDDEN, generator=generator)

    def to(self, device):
        return self


class ToyDrafter(Drafter):
    """Predicts the next token from one aux layer. Draws noise from a seed alone, as real losses draw anchors."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        width: int = 8
        layer_ids: tuple[int, ...] = (1,)
        noise: float = 0.1

    def __init__(self, config, spec, *, ids=None):
        super().__init__()
        self.config = config
        self.proj = nn.Linear(spec.hidden_size, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, spec.hidden_size, bias=False)
        ids = torch.arange(spec.vocab_size - 5, spec.vocab_size) if ids is None else ids
        self.vocab = DraftVocab(ids, num_full=spec.vocab_size)

    @classmethod
    def from_tensors(cls, config, spec, tensors):
        return cls(config, spec, ids=torch.arange(len(tensors["vocab.d2t"])))

    @property
    def needs(self):
        return Needs(layer_ids=self.config.layer_ids, last=True)

    @property
    def block_size(self):
        return 2

    def loss(self, batch, target_head):
        generator = torch.Generator().manual_seed(batch.seeds[0])
        noise = self.config.noise * torch.randn(batch.last_BTD.shape, generator=generator)
        hidden = self.out(self.norm(torch.tanh(self.proj(batch.aux_BTLD[:, :, 0] + noise))))
        logits = (hidden @ target_head.lm_head_VD.T)[:, :-1].float()
        counted = batch.loss_mask_BT[:, 1:]
        ce = nn.functional.cross_entropy(logits[counted], batch.tokens_BT[:, 1:][counted], reduction="sum")
        right = (logits.argmax(-1) == batch.tokens_BT[:, 1:]) & counted
        count = counted.sum()
        vector = (torch.stack([right.sum(), right.sum() // 2, 0 * count]), torch.stack([count, count, 0 * count]))
        length = ((1 + right.double())[counted].sum(), count)
        metrics = {"acceptance": vector, "accepted_length": length, "accepted_length_greedy": length}
        return Losses(total=ce, count=count, terms={"ce": ce.detach()}, metrics=metrics)

    def session(self, target, batch_size):
        raise NotImplementedError


def toy(*, seed=0, **config):
    torch.manual_seed(seed)
    return ToyDrafter(ToyDrafter.Config(**config), SPEC)


def sample(index):
    """Conversation `index`: as ragged and as unevenly supervised as real ones."""
    generator = torch.Generator().manual_seed(1000 + index)
    length = LENGTH - index % 3
    tokens = torch.randint(0, VOCAB, (length,), generator=generator)
    mask = torch.arange(length) >= 1 + index % 4
    return tokens, mask, torch.randn(length, HIDDEN, generator=generator)


def batch_of(indices, *, seed):
    """A right-padded Batch of these conversations."""
    tokens_BT = torch.zeros(len(indices), LENGTH, dtype=torch.int64)
    mask_BT = torch.zeros(len(indices), LENGTH, dtype=torch.bool)
    states_BTD = torch.zeros(len(indices), LENGTH, HIDDEN)
    for row, index in enumerate(indices):
        tokens, mask, states = sample(index)
        tokens_BT[row, : len(tokens)], mask_BT[row, : len(mask)], states_BTD[row, : len(tokens)] = tokens, mask, states
    lengths = torch.tensor([len(sample(i)[0]) for i in indices])
    return Batch(
        tokens_BT=tokens_BT,
        lengths_B=lengths,
        loss_mask_BT=mask_BT,
        aux_BTLD=states_BTD[:, :, None],
        last_BTD=states_BTD,
        lse_BT=torch.zeros(len(indices), LENGTH),
        layer_ids=(1,),
        seeds=(seed,) * len(indices),
        sample_ids=tuple(indices),
    )


class Ordered(DataLoader):
    """Batches in the order of permutation(seed, epoch), from a position that can be saved. Yields this rank's share."""

    def __init__(self, num_samples, batch_size, *, rank=0, world_size=1, on_batch=None):
        super().__init__(range(num_samples), batch_size=batch_size)
        self.place, self.on_batch = (rank, world_size), on_batch
        self.epoch = self.position = 0

    def __len__(self):
        return len(self.dataset) // (self.batch_size * self.place[1])

    def __iter__(self):
        rank, world_size = self.place
        for step in range(self.position, len(self)):
            order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).tolist()
            first = (step * world_size + rank) * self.batch_size
            self.position = step + 1
            batch = batch_of(order[first : first + self.batch_size], seed=1000 * self.epoch + first)
            yield self.on_batch(batch) if self.on_batch else batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class ToyData(LightningDataModule):
    def __init__(self, *, num_samples=16, batch_size=2, on_batch=None):
        super().__init__()
        self.options = SimpleNamespace(num_samples=num_samples, batch_size=batch_size, on_batch=on_batch)

    def train_dataloader(self):
        o, trainer = self.options, self.trainer
        place = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        return Ordered(o.num_samples, o.batch_size, on_batch=o.on_batch, **place)

    def val_dataloader(self):
        # The same batches with the same seeds at every validation.
        return DataLoader([batch_of(pair, seed=9) for pair in ((0, 1), (2, 3))], batch_size=None)


class Source:
    """The same conversations as a StateSource; calls `on_read` with each group it reads."""

    def __init__(self, num_samples, *, on_read=None):
        self.lengths, self.on_read = [len(sample(i)[0]) for i in range(num_samples)], on_read

    def read(self, indices, needs=None):
        if self.on_read:
            self.on_read(indices)
        return [self._sample(index) for index in indices]

    def _sample(self, index):
        tokens, mask, states = sample(index)
        return CachedSample(
            index=index,
            id=str(index),
            source="toy",
            tokens_T=tokens,
            loss_mask_T=mask,
            aux_TLD=states[:, None],
            last_TD=states,
            lse_T=torch.zeros(len(tokens)),
        )


def toy_trainer(folder, *, callbacks, **options):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "max_steps": -1,
        "logger": False,
        "gradient_clip_val": 1.0,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    return Trainer(**settings | options, callbacks=callbacks)


class ToyRun:
    """One fit in `folder` with all callbacks a real run has. `probe(drafter)` stands for greedy decoding; a pair with a
    Sampling for another."""

    def __init__(self, folder, *, probe=None, config=None, head=None, trainer=None, **optim):
        settings = {"max_steps": 8, "warmup_steps": 2, "precision": "float32", "lr": 0.05, **optim}
        self.optim, self.folder = OptimConfig(**settings), folder
        self.console = Console(record=True, width=100, file=io.StringIO())
        self.module = DistillModule(toy(), head or ToyHead(), self.optim)
        self.callbacks = build_callbacks(
            folder,
            optim=self.optim,
            config=CallbackConfig(**config or {}),
            console=self.console,
            probe=(probe, Sampling()) if callable(probe) else probe,
            provenance={"seed": 0},
        )
        self.trainer = toy_trainer(folder, callbacks=self.callbacks, **trainer or {})

    def fit(self, data=None, *, resume=False):
        last = self.folder / "checkpoints" / "last.ckpt" if resume else None
        self.trainer.fit(self.module, data or ToyData(), ckpt_path=last, weights_only=True)
        return self

    def callback(self, kind):
        return next(one for one in self.trainer.callbacks if isinstance(one, kind))


def same_weights(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
