# Refuses a confidence that has seen the draft it speaks of. A schedule that reads such a one is not lossless: it lets
# through what the drafter likes (DSpark 2607.05147, the non-anticipating property).

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.decoding.batch import LiveBatch
from drafters.decoding.loop import DecodeConfig
from drafters.decoding.records import RunTimings
from drafters.decoding.sampling import Draws
from drafters.errors import ConfigError
from drafters.heads.base import Drafter
from drafters.types import SIGNALS, Sampling

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["check_confidence"]

TRIES = 4
SAMPLING = Sampling(temperature=1.0)


@torch.inference_mode()
def check_confidence(target: "FrozenTarget", drafter: Drafter, prompt: Tensor) -> None:
    """Draft after `prompt` (ids [T]) again and again with other random numbers from a slot on: what the drafter says of
    that slot and of those before must stay. Raises ConfigError where it does not."""
    size = drafter.block_size
    config = DecodeConfig(max_new_tokens=size + 2, sampling=SAMPLING, stop_ids=())
    batch = LiveBatch(target, drafter, config, num_slots=size, timings=RunTimings())
    batch.admit([(0, prompt, 0)])
    assert batch.rows is not None
    assert batch.rows.session is not None
    session, generator = batch.rows.session, torch.Generator().manual_seed(0)
    uniforms_1S = torch.rand(1, size, dtype=torch.float64, generator=generator)
    first = session.propose(size, Draws(SAMPLING, uniforms_1S.to(target.device)))
    for slot in range(first.tokens_BS.shape[1]):
        for _ in range(TRIES):
            other_1S = torch.cat([uniforms_1S[:, :slot], torch.rand(1, size - slot, generator=generator)], 1)
            again = session.propose(size, Draws(SAMPLING, other_1S.to(target.device)))
            for name in SIGNALS:
                seen, kept = (one.signal(name)[0, : slot + 1] for one in (again, first))
                if not torch.allclose(seen, kept, rtol=1e-3, atol=1e-5):
                    raise ConfigError(
                        f"schedule: the confidence of {type(drafter).__name__} in draft {slot + 1} changes with that "
                        f"draft ({float(kept[-1]):.4f}, then {float(seen[-1]):.4f}); a schedule that reads it would "
                        "change what is written; accepted: a confidence that depends on the tokens before the draft "
                        "alone"
                    )
