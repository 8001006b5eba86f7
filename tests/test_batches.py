# Batches: padding, sharing out over ranks, and a training that is stopped anywhere and goes on with the same batches.

import threading
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from drafters.batch_plan import batch_seed
from drafters.batches import BatchConfig, StatesDataModule, StatesLoader, collate
from drafters.errors import CheckpointError, ConfigError, DataError
from drafters.types import Batch, Needs
from tests.cache_cases import captured
from tests.tiny import tiny_target

NEEDS = Needs(layer_ids=(0, 3), last=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return captured(tiny_target(), tmp_path_factory.mktemp("cache") / "made")


def loader(cache, *, size=3, rank=(0, 1), finished=lambda: 0, indices=None, **config):
    indices = range(len(cache)) if indices is None else indices
    config = BatchConfig(batch_size=size, **config)
    return StatesLoader(cache, indices, config, needs=NEEDS, rank=rank, finished=finished)


def same(a: Batch, b: Batch) -> bool:
    pairs = [(vars(a)[name], vars(b)[name]) for name in vars(a)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def test_collate_pads_on_the_right(cache):
    samples = cache.read([0, 5, 9], NEEDS)
    batch = collate(samples, layer_ids=NEEDS.layer_ids, seeds=[7, 8, 9])
    width = max(len(sample.tokens_T) for sample in samples)
    assert batch.seeds == (7, 8, 9)
    assert batch.sample_ids == (0, 5, 9)
    assert batch.layer_ids == (0, 3)
    assert batch.lengths_B.tolist() == [len(sample.tokens_T) for sample in samples]
    for b, sample in enumerate(samples):
        n = len(sample.tokens_T)
        named = [("tokens_BT", sample.tokens_T), ("loss_mask_BT", sample.loss_mask_T), ("aux_BTLD", sample.aux_TLD)]
        for name, alone in [*named, ("last_BTD", sample.last_TD), ("lse_BT", sample.lse_T)]:
            row = vars(batch)[name][b]
            assert row.shape[0] == width
            assert row.dtype == alone.dtype
            assert torch.equal(row[:n], alone)
            assert not row[n:].any()
    assert collate(cache.read([1], Needs(last=True)), layer_ids=(), seeds=[0]).aux_BTLD is None


def test_batches_are_copies_that_may_be_written(cache):
    before = cache[2].last_TD.clone()
    collate(cache.read([2]), layer_ids=(0, 2, 3), seeds=[0]).last_BTD.zero_()
    assert torch.equal(cache[2].last_TD, before)


def test_an_epoch_is_a_permutation_and_depends_on_seed_and_epoch(cache):
    steps = len(loader(cache))
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        batches = list(loader(cache, seed=seed, finished=lambda epoch=epoch: epoch * steps))
        orders.append([i for batch in batches for i in batch.sample_ids])
        assert sorted(orders[-1]) == list(range(14))
        assert len(batches) == steps == 4
        assert {len(batch.sample_ids) for batch in batches} == {3, 4}
        assert len({seed for batch in batches for seed in batch.seeds}) == 14
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_any_position_goes_on_with_the_same_batches(cache, max_tokens):
    steps = len(loader(cache, max_tokens=max_tokens))
    whole = [
        batch
        for epoch in range(3)
        for batch in loader(cache, finished=lambda epoch=epoch: epoch * steps, max_tokens=max_tokens)
    ]
    for position in range(3 * steps):
        rest = list(loader(cache, finished=lambda position=position: position, max_tokens=max_tokens))
        expected = whole[position : (position // steps + 1) * steps]
        assert len(rest) == len(expected)
        assert all(map(same, rest, expected))


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_each_step_of_one_rank(cache, num_ranks, max_tokens):
    alone = list(loader(cache, max_tokens=max_tokens))
    parts = [list(loader(cache, rank=(rank, num_ranks), max_tokens=max_tokens)) for rank in range(num_ranks)]
    assert {len(part) for part in parts} == {len(alone)}
    for step, batch in enumerate(alone):
        together = [part[step].sample_ids for part in parts]
        assert all(together)
        assert max(map(len, together)) - min(map(len, together)) <= 1
        pairs = [pair for part in parts for pair in zip(part[step].sample_ids, part[step].seeds, strict=True)]
        assert sorted(pairs) == sorted(zip(batch.sample_ids, batch.seeds, strict=True))


def test_a_token_budget_bounds_each_step_of_training_and_of_validation(cache):
    for finished in (lambda: 0, None):
        batches = list(loader(cache, max_tokens=60, finished=finished))
        assert sorted(i for batch in batches for i in batch.sample_ids) == list(range(14))
        assert all(batch.tokens_BT.numel() <= 60 for batch in batches)
        assert len({len(batch.sample_ids) for batch in batches}) > 2
        assert len({seed for batch in batches for seed in batch.seeds}) == 14


@pytest.mark.parametrize(("num_samples", "size"), [(14, 4), (7, 3), (5, 2), (2, 2), (3, 8)])
def test_validation_has_equally_many_steps_on_every_rank(cache, num_samples, size):
    indices = range(14)[-num_samples:]
    parts = [list(loader(cache, indices=indices, size=size, rank=(rank, 2), finished=None)) for rank in (0, 1)]
    assert len(parts[0]) == len(parts[1]) == max(1, num_samples // size)
    seen = [i for part in parts for batch in part for i in batch.sample_ids]
    assert sorted(seen) == list(indices)
    assert all(batch.sample_ids for part in parts for batch in part)
    lengths = [
        cache.lengths[i] for batch in loader(cache, indices=indices, size=size, finished=None) for i in batch.sample_ids
    ]
    assert lengths == sorted(lengths)


def test_validation_is_the_same_every_time(cache):
    validation = loader(cache, finished=None)
    assert all(map(same, validation, validation))


def test_seeds_depend_on_all_parts():
    seeds = [batch_seed(*parts) for parts in [(1, 2, 3), (1, 3, 2), (12, 3), (1, 23), ("train", 1), ("order", 1)]]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert batch_seed("train", 0, 0, 0) == 2504956022939340735  # on every machine


def test_too_little_for_the_ranks(cache):
    with pytest.raises(DataError, match=r"1 conversations for 2 ranks; each rank needs one"):
        loader(cache, indices=[0], rank=(0, 2), finished=None)
    with pytest.raises(ConfigError, match=r"data.batch_size: got 3 for 4 ranks.*accepted is 4 or more"):
        loader(cache, rank=(0, 4))
    with pytest.raises(ConfigError, match=r"data.max_tokens: got 30 for 2 ranks.*a step of 1 leaves one without"):
        loader(cache, rank=(0, 2), max_tokens=30)
    with pytest.raises(ValueError, match="batch_size: got 0"):
        BatchConfig(batch_size=0)
    with pytest.raises(ValueError, match="max_tokens: got 0; accepted: 1 or more, or null"):
        BatchConfig(max_tokens=0)


# Under the trainer


class Learner(lightning.LightningModule):
    """Remembers what it was given; its weights depend on every batch."""

    def __init__(self, *, fail_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated, self.fail_at = [], [], fail_at

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.fail_at:
            raise RuntimeError("stopped on purpose")
        self.seen.append(batch)
        return (self.weight - batch.last_BTD.float().mean()) ** 2

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch.sample_ids)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEverywhere(Callback):
    def __init__(self, folder):
        self.folder, self.saved = folder, []

    def save(self, trainer, learner, where):
        path = self.folder / f"{len(self.saved)}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append((path, len(learner.seen), where))

    def on_train_batch_end(self, trainer, learner, *_):
        self.save(trainer, learner, "batch")

    def on_validation_end(self, trainer, learner):
        if not trainer.sanity_checking:
            self.save(trainer, learner, "validation")

    def on_train_epoch_end(self, trainer, learner):
        self.save(trainer, learner, "epoch")

    def on_exception(self, trainer, learner, exception):
        self.save(trainer, learner, "exception")


def fit(cache, *, steps=11, resume=None, learner=None, config=BatchConfig(batch_size=2), **settings):  # noqa: B008
    learner = learner or Learner()
    data = StatesDataModule(cache, train=range(10), validation=range(10, 14), needs=NEEDS, config=config)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(learner, datamodule=data, ckpt_path=resume, weights_only=True if resume else None)
    return learner


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        {},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"config": BatchConfig(prefetch=2)},
        {"config": BatchConfig(max_tokens=60)},
    ],
    ids=["validation every 3 steps", "validation every epoch", "short epochs", "read ahead", "token budget"],
)
def test_a_resumed_training_sees_the_same_batches(cache, tmp_path, settings):
    saver = SaveEverywhere(tmp_path)
    whole = fit(cache, callbacks=[saver], **settings)
    assert len(whole.seen) == 11
    seen = [i for batch in whole.seen for i in batch.sample_ids]
    assert sorted(seen[:10]) == list(range(10))
    assert {where for _, _, where in saver.saved} == {"batch", "validation", "epoch"}
    for path, finished, where in saver.saved:
        again = fit(cache, resume=path, **settings)
        assert len(again.seen) == 11 - finished, (where, finished)
        assert all(map(same, again.seen, whole.seen[finished:])), (where, finished)
        assert torch.equal(again.weight, whole.weight), (where, finished)
        assert set(again.validated) <= set(whole.validated)


def test_a_training_that_failed_in_a_step_repeats_that_step(cache, tmp_path):
    whole, saver = fit(cache), SaveEverywhere(tmp_path)
    with pytest.raises(RuntimeError, match="stopped on purpose"):
        fit(cache, callbacks=[saver], learner=Learner(fail_at=7))
    path, finished, where = saver.saved[-1]
    assert (finished, where) == (7, "exception")
    again = fit(cache, resume=path)
    assert len(again.seen) == 4
    assert all(map(same, again.seen, whole.seen[7:]))
    assert torch.equal(again.weight, whole.weight)


def test_accumulated_steps_resume_too(cache, tmp_path):
    saver = SaveEverywhere(tmp_path)
    whole = fit(cache, steps=6, callbacks=[saver], accumulate_grad_batches=2)
    at_steps = [(path, seen) for path, seen, where in saver.saved if where == "batch" and seen in (2, 4, 7)]
    assert len(at_steps) == 3
    for path, finished in at_steps:
        again = fit(cache, steps=6, resume=path, accumulate_grad_batches=2)
        assert all(map(same, again.seen, whole.seen[finished:]))
        assert torch.equal(again.weight, whole.weight)


def test_reading_ahead_gives_the_same_training_and_leaves_no_thread(cache):
    before, whole = set(threading.enumerate()), fit(cache)
    ahead = fit(cache, config=BatchConfig(batch_size=2, prefetch=2))
    assert all(map(same, ahead.seen, whole.seen))
    assert torch.equal(ahead.weight, whole.weight)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def test_another_order_of_batches_is_refused_on_resume(cache, tmp_path):
    saver = SaveEverywhere(tmp_path)
    fit(cache, steps=2, callbacks=[saver])
    path = saver.saved[0][0]
    with pytest.raises(CheckpointError, match=r"data.batch_size was 2, is 3; resume with the data it began with"):
        fit(cache, resume=path, config=BatchConfig(batch_size=3))
    with pytest.raises(CheckpointError, match=r"data.batch_size was 2, is None, data.max_tokens was None, is 60"):
        fit(cache, resume=path, config=BatchConfig(max_tokens=60))
    module = StatesDataModule(cache, train=range(9), validation=(), needs=NEEDS, config=BatchConfig())
    with pytest.raises(CheckpointError, match=r"data.samples was"):
        module.load_state_dict(torch.load(path)["StatesDataModule"])


def test_ranks_come_from_the_trainer(cache):
    module = StatesDataModule(cache, train=range(10), validation=range(10, 14), needs=NEEDS, config=BatchConfig())
    progress = SimpleNamespace(total=SimpleNamespace(processed=3))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module.trainer = SimpleNamespace(global_rank=1, world_size=2, fit_loop=loop, strategy=strategy)
    assert module.train_dataloader().num_ranks == module.val_dataloader().num_ranks == 2
    alone = loader(cache, indices=range(10), size=2, finished=lambda: 3)
    shorter = [(min(b.sample_ids, key=lambda i: cache.lengths[i]),) for b in alone]
    assert [b.sample_ids for b in module.train_dataloader()] == shorter
