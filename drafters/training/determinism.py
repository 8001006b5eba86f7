# `deterministic=true`: the same numbers from the same settings on the same machine, on a GPU too. torch then takes
# kernels that add in a fixed order, which may be slower, and refuses operations that have none.

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from drafters.errors import ConfigError

__all__ = ["reproducible", "seed_everything"]

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")  # sizes of cuBLAS's workspace with which it is deterministic
REFUSED = "does not have a deterministic implementation"  # in torch's own words


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's own generators. What training draws comes from generators of its own; these
    are for what a drafter or a library may draw beside them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def reproducible(*, deterministic: bool, seed: int) -> Iterator[None]:
    """Seeded; inside, with `deterministic`, torch computes in a fixed order. Raises ConfigError where an operation
    cannot, or where CUDA was started in a way that cannot be changed any more."""
    seed_everything(seed)
    if not deterministic:
        yield
        return
    _fix_cublas()
    cudnn = torch.backends.cudnn
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    before_cudnn = (cudnn.deterministic, cudnn.benchmark)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if REFUSED not in text:
            raise
        raise ConfigError(
            f"deterministic: got true, but {text.partition(REFUSED)[0].split(':')[-1].strip()} {REFUSED} in torch; "
            "leave deterministic=false, or train with device=cpu"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = before_cudnn


def _fix_cublas() -> None:
    """cuBLAS reads its setting when CUDA starts. Raises ConfigError for another one, and when it is too late."""
    value = os.environ.get(CUBLAS)
    if value is None and torch.cuda.is_initialized():
        raise ConfigError(
            f"deterministic: got true, but CUDA has started in this process without {CUBLAS}, as in a job of a sweep "
            f"after one without it; set {CUBLAS}={FIXED[0]} in the environment, or deterministic=true for all jobs"
        )
    if value is not None and value not in FIXED:
        raise ConfigError(
            f"deterministic: got true with {CUBLAS}='{value}' in the environment; accepted: {', '.join(FIXED)}, or "
            "unset it"
        )
    os.environ.setdefault(CUBLAS, FIXED[0])
