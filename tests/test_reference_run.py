# A short run on the default target with the numbers that it must give: training, capture, losses and decoding together.
# All is float32 on one thread, so that processors with and without bfloat16 units compute alike but for the order of
# their sums.


import pytest

import train
from tests.door_world import settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "no_cublas")]

STEPS = 40
OVERRIDES = (
    *("name=reference", "target.dtype=float32", "source.limit=40", "data.validation=0.1", "data.max_length=256"),
    *("device=cpu", "deterministic=true", "optim.minutes=null", f"optim.max_steps={STEPS}", "optim.warmup_steps=5"),
    *("optim.precision=float32", f"trainer.val_check_interval={STEPS}", "trainer.log_every_n_steps=1"),
    *("callbacks.probe_every_n_steps=null", "report.num_prompts=4", "report.max_new_tokens=32"),
    *("report.num_speed_prompts=1", "report.length=2"),
)
EXPECTED = {}


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("reference")
    train.train(settings("train", *OVERRIDES, f"outputs={folder}", f"cache.root={folder}/states"))
    return folder / "reference"
