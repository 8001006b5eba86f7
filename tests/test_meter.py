# The throughput meter: numbers worked by hand under a clock that only reading and training move, one count of the
# arithmetic, sessions that add up, and nothing of it in the weights.

import csv
import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from drafters import batches, progress
from drafters.batches import BatchConfig, StatesDataModule
from drafters.training import budget, flops, meter
from drafters.training.flops import Peak, peak_rate, step_counter
from drafters.training.meter import Amounts, ThroughputMeter, one_line, peak_memory
from drafters.training.module import DistillModule
from drafters.types import Needs
from tests.training_doubles import HIDDEN, LIGHTNING_NOISE, VOCAB, Source, ToyHead, ToyRun, same_weights, toy

pytestmark = [*LIGHTNING_NOISE, pytest.mark.filterwarnings("ignore:.*warm-up steps in a run")]

READING, TRAINING = 3.0, 5.0  # seconds that one batch takes
TRILLION = Peak(1e12, "a test's")


@pytest.fixture(autouse=True)
def peak(monkeypatch):
    monkeypatch.setattr(meter, "peak_rate", lambda device, dtype: TRILLION)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when something is read or trained."""
    now = SimpleNamespace(seconds=0.0)
    fake = SimpleNamespace(perf_counter=lambda: now.seconds)
    monkeypatch.setattr(batches, "time", fake)
    monkeypatch.setattr(budget, "time", fake)
    return now


def metered(folder, clock, *, resume=False, module=DistillModule, **options):
    """A run on samples of a source, its meter, and the batches it trained on."""
    seen = []

    class Timed(module):
        def training_step(self, batch, batch_idx):
            clock.seconds += TRAINING
            seen.append(batch)
            return super().training_step(batch, batch_idx)

    def on_read(indices):
        clock.seconds += READING

    run = ToyRun(folder, **options)
    run.module = Timed(toy(), ToyHead(), run.optim)
    needs = Needs(layer_ids=(1,), last=True)
    source, config = Source(20, on_read=on_read), BatchConfig(batch_size=2)
    data = StatesDataModule(source, train=range(16), validation=range(16, 20), needs=needs, config=config)
    run.fit(data, resume=resume)
    return run, run.callback(ThroughputMeter), seen


def test_rates_by_hand():
    done = Amounts(steps=4, seconds=2.0, tokens=100, positions=50, waited=1.0)
    assert done.rates(num_ranks=1, flops=4e9, peak=TRILLION) == {
        "tokens_per_second": 50.0,
        "positions_per_second": 25.0,
        "steps_per_second": 2.0,
        "data_wait": 0.5,
        "mfu": 0.1,
    }
    # Two ranks: their waits were added up, their arithmetic has two devices.
    both = done.rates(num_ranks=2, flops=4e9, peak=TRILLION)
    assert (both["data_wait"], both["mfu"], both["tokens_per_second"]) == (0.25, 0.05, 50.0)
    twice = done + Amounts(steps=1, seconds=1.0, tokens=1, positions=1, waited=None)
    assert "data_wait" not in twice.rates(num_ranks=1, flops=None, peak=TRILLION)
    assert "mfu" not in twice.rates(num_ranks=1, flops=None, peak=TRILLION)
    assert Amounts().rates(num_ranks=1, flops=1.0, peak=TRILLION) == {}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_measures_its_steps_and_nothing_else(tmp_path, clock, accumulate):
    run, found, seen = metered(tmp_path, clock, trainer={"accumulate_grad_batches": accumulate})
    measured = seen[2 * accumulate :]
    assert len(measured) == 6 * accumulate
    # Validation reads too, but does not count.
    assert found.all.seconds == len(measured) * (READING + TRAINING)
    assert found.all.tokens == sum(int(batch.lengths_B.sum()) for batch in measured)
    assert found.all.positions == sum(int(batch.loss_mask_BT[:, 1:].sum()) for batch in measured)
    facts = json.loads((tmp_path / "throughput.json").read_text())
    assert facts["data_wait"] == READING / (READING + TRAINING)
    assert facts["tokens_per_second"] == found.all.tokens / found.all.seconds
    assert facts["measured"]["steps"] == 6
    assert facts["peak_origin"] == "a test's"
    assert facts["mfu"] == pytest.approx(facts["flops_per_position"] * facts["positions_per_second"] / 1e12)
    text = run.console.export_text()
    assert one_line(facts) in " ".join(text.split())


def test_the_arithmetic_is_that_of_the_second_step(tmp_path, clock):
    _, found, seen = metered(tmp_path, clock)
    batch = seen[1]
    rows = batch.tokens_BT.numel()
    # Forward; backward for weights and, where something before it is trained, for inputs. The head is frozen.
    first, second, head = HIDDEN * 8, 8 * HIDDEN, HIDDEN * VOCAB
    by_hand = 2 * rows * (2 * first + 3 * second + 2 * head)
    assert found.flops == by_hand / int(batch.loss_mask_BT[:, 1:].sum())


def test_attention_on_a_cpu_is_counted():
    query, key, value = (torch.randn(1, 4, 16, 8, requires_grad=True) for _ in range(3))
    with step_counter() as counter:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    product = 2 * 4 * 16 * 16 * 8
    assert counter.get_total_flops() == (2 + 5) * product


def test_sessions_add_up_and_count_the_arithmetic_once(tmp_path, clock, monkeypatch):
    _, first, _ = metered(tmp_path, clock, max_steps=4)
    monkeypatch.setattr(meter, "step_counter", None)
    _, second, seen = metered(tmp_path, clock, resume=True)
    assert len(seen) == 4
    assert second.flops == first.flops
    assert second.all.steps == first.all.steps + 2 == 4
    assert second.all.tokens == first.all.tokens + sum(int(batch.lengths_B.sum()) for batch in seen[2:])
    assert json.loads((tmp_path / "throughput.json").read_text())["measured"]["steps"] == 4


def test_numbers_are_sums_over_ranks(tmp_path, clock):
    class Pair(DistillModule):
        """As if another rank had the same."""

        def _reduce(self, tensor):
            return 2 * tensor

    _, alone, _ = metered(tmp_path / "alone", clock)
    _, pair, _ = metered(tmp_path / "pair", clock, module=Pair, config={"monitor": "val/acceptance@1"})
    assert pair.all.tokens == 2 * alone.all.tokens
    assert pair.all.waited == 2 * alone.all.waited
    assert pair.all.positions == 2 * alone.all.positions
    assert pair.flops == alone.flops


def test_a_run_too_short_to_measure_says_nothing(tmp_path, clock):
    run, found, _ = metered(tmp_path, clock, max_steps=2)
    assert not (tmp_path / "throughput.json").exists()
    assert "throughput" not in run.console.export_text()
    assert found.flops is not None


def test_another_loader_has_no_data_wait(tmp_path):
    run = ToyRun(tmp_path).fit()
    facts = json.loads((tmp_path / "throughput.json").read_text())
    assert facts["tokens_per_second"] > 0
    assert "data_wait" not in facts
    assert "data wait" not in run.console.export_text()


def test_the_meter_changes_no_weight(tmp_path):
    run = ToyRun(tmp_path / "with").fit()
    without = ToyRun(tmp_path / "without")
    without.trainer.callbacks = [one for one in without.trainer.callbacks if not isinstance(one, ThroughputMeter)]
    assert same_weights(run.module, without.fit().module)


def test_a_failure_in_the_counted_step_leaves_no_counter_behind(tmp_path):
    class Failing(DistillModule):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 1:
                assert _get_current_dispatch_mode() is not None
                raise KeyError("broken")
            return super().training_step(batch, batch_idx)

    run = ToyRun(tmp_path)
    run.module = Failing(toy(), ToyHead(), run.optim)
    with pytest.raises(KeyError, match="broken"):
        run.fit()
    assert _get_current_dispatch_mode() is None


def test_loggers_get_the_same_names(tmp_path, clock):
    both = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board", default_hp_metric=False)]
    metered(tmp_path / "run", clock, trainer={"logger": both, "log_every_n_steps": 2})
    with (tmp_path / "csv/version_0/metrics.csv").open() as file:
        names = {*csv.DictReader(file).fieldnames} - {"step"}
    board = EventAccumulator(str(tmp_path / "board/version_0")).Reload()
    assert {*board.Tags()["scalars"]} == names
    wanted = ("tokens_per_second", "positions_per_second", "steps_per_second", "data_wait", "mfu", "memory_gib")
    assert {f"throughput/{name}" for name in wanted} <= names
    assert {"train/loss", "train/lr", "val/accepted_length", "val/acceptance@1"} <= names
    waits = [event.value for event in board.Scalars("throughput/data_wait")]
    assert waits == pytest.approx([READING / (READING + TRAINING)] * 3)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA H20", 148.0),
    ],
)
def test_known_gpus_have_a_published_peak(monkeypatch, name, tera):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = peak_rate(torch.device("cuda"), torch.bfloat16)
    assert peak == Peak(tera * 1e12, f"published for {name}, dense bfloat16")


def test_everything_else_is_measured_once(monkeypatch):
    monkeypatch.setattr(flops, "SECONDS", 0.0)
    state = torch.get_rng_state()
    peak = peak_rate(torch.device("cpu"), torch.float32)
    assert peak.flops > 1e6
    assert peak.origin.startswith("measured: float32 product of 1024 x 1024, ")
    assert peak_rate(torch.device("cpu"), torch.float32) is peak
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_of_this_process_is_in_bytes():
    assert 50 * 2**20 < peak_memory(torch.device("cpu")) < 2**40


def test_the_progress_shows_tokens_and_the_wait(tmp_path, clock, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_is_shown", True)
    metered(tmp_path, clock)
    assert "tokens/s, data wait 37.5%" in " ".join(capsys.readouterr().err.split())
