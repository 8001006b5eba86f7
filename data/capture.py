# Door: keeps the target's hidden states for the conversations of a source. Killed at any moment, the same command goes
# on where it was; finished, it says where the states are. train.py calls the same functions.
#
#     python -m data.capture source=jsonl source.path=FILE
#     torchrun --nproc-per-node=8 -m data.capture source=jsonl source.path=FILE      (see docs/cache.md)
#     python -m data.capture source=jsonl source.path=FILE plan=true    says what it would cost, and loads no weights

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from data.command import begin, check_settings

if TYPE_CHECKING:
    from data.sources import DataConfig, SourceConfig
    from drafters.cache import HiddenCache
    from drafters.cache_writer import CaptureConfig, Estimate
    from drafters.chat import ChatEncoder
    from drafters.distributed import Ranks
    from drafters.target import FrozenTarget
    from drafters.types import Example

__all__ = ["CaptureBar", "capture_states"]

RATED_TOKENS = 8192  # a rate of fewer says little
CONF = str(Path(__file__).resolve().parents[1] / "conf")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The settings of this door that belong to no group."""

    plan: bool
    device: str | None


def capture_states(
    target: "FrozenTarget",
    splits: Mapping[str, Sequence["Example"]],
    config: "CaptureConfig",
    *,
    encoder: "ChatEncoder",
    ranks: "Ranks | None" = None,
) -> "HiddenCache":
    """The cache of these examples under this target, captured now as far as it is not there yet, with a progress bar
    on stderr. All `ranks` (None: this process alone) call it alike and share the work. Raises what
    `drafters.cache_writer.capture` raises."""
    from drafters.cache_writer import Crew, capture
    from drafters.distributed import Ranks
    from drafters.splits import states_place
    from drafters.stopping import keeping
    from drafters.storage import LocalFolder

    ranks = ranks or Ranks()
    key, folder = states_place(target.spec, splits, config, encoder=encoder)
    kept = f"finished shards are kept in {folder}; the same command goes on with the others"
    with keeping(kept), CaptureBar() as bar:
        crew = Crew(ranks=ranks, watcher=bar if ranks.is_first else None)
        cache = capture(target, splits, folder, key=key, config=config, crew=crew)
    if (rate := bar.rate()) is not None and isinstance(folder, LocalFolder):
        _remember(rate / ranks.size, target, folder.path.parent)
    return cache


def _remember(rate: float, target: "FrozenTarget", root: Path) -> None:
    """For the next plan; a capture does not fail for it."""
    from drafters.planning import Rates

    try:
        Rates(root).add(target.spec, target.device, rate)
    except OSError as error:
        warnings.warn(f"cache: the rate of this capture was not kept in {root}: {error.strerror}", stacklevel=3)


class CaptureBar:
    """Says what a capture will cost, then shows a bar; silent when there is nothing to capture."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._bar: Any = None
        self._started = 0.0
        self._laps: list[tuple[float, int]] = []  # seconds since the start, tokens done

    def __enter__(self) -> "CaptureBar":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def begin(self, estimate: "Estimate") -> None:
        from drafters.progress import progress_bar

        free = "" if estimate.free_bytes is None else f" ({estimate.free_bytes / 1e9:.0f} GB free)"
        crew = f", {estimate.num_processes} processes" if estimate.num_processes > 1 else ""
        sys.stderr.write(
            f"capture: {estimate.num_samples:,} conversations, {estimate.num_tokens:,} tokens -> {estimate.folder}; "
            f"{estimate.num_bytes / 1e9:.2f} GB{free}, about {max(1, round(estimate.seconds / 60))} min{crew}\n"
        )
        self._bar = self._open.enter_context(progress_bar("capture", unit="tokens"))
        self._started = time.perf_counter()

    def advance(self, done: int, total: int, tokens: int) -> None:
        self._bar(done, total, tokens)
        self._laps.append((time.perf_counter() - self._started, done))

    def rate(self) -> float | None:
        """Tokens a second, writing included, of all batches but the first, which was made before the estimate; None
        of a capture too small to tell."""
        if len(self._laps) < 2 or self._laps[-1][1] < RATED_TOKENS:
            return None
        (_, first), (seconds, done) = self._laps[0], self._laps[-1]
        return (done - first) / seconds


def run(cfg: DictConfig) -> None:
    """Load the target, encode the source, capture, and say what there is: one process, as many as share the work, or
    as many as share the target's layers, of which the first one does it and the others help."""
    from data.sources import DataConfig
    from drafters.cache_writer import CaptureConfig
    from drafters.config import build_config, to_plain, typed
    from drafters.distributed import Ranks, leave
    from drafters.door import check_target, load_target, only_first_speaks
    from drafters.tensor_parallel import follow, leading
    from drafters.weights import resolve

    node = to_plain(cfg.target)
    check_target(node)
    config, data = typed(CaptureConfig, cfg.cache, key="cache"), typed(DataConfig, cfg.data, key="data")
    _, source = build_config(cfg.source, key="source")
    with Ranks.from_environment() as ranks:
        only_first_speaks(ranks)
        with ranks.first_goes_first():
            resolve(node["weights"], sha256=node.get("sha256"))
        is_split, device = node.get("tp_plan") is not None, ranks.device(cfg.device)
        target = load_target(node, device=cfg.device if is_split else device, is_split=True)
        if not is_split or ranks.size == 1:
            keep_states(target, source, data, config, ranks)
        elif ranks.is_first:
            with leading(target, ranks):
                keep_states(target, source, data, config, Ranks())
        else:
            follow(target, ranks)
    if ranks.size > 1:
        leave()


def keep_states(
    target: "FrozenTarget", source: "SourceConfig", data: "DataConfig", config: "CaptureConfig", ranks: "Ranks"
) -> None:
    """Encode the source, capture, and say what there is."""
    from data.sources import load_splits
    from drafters.chat import ChatEncoder
    from drafters.door import say
    from drafters.splits import encode_splits

    with ranks.first_goes_first():
        parts = load_splits(source, validation=data.validation, seed=data.seed)
    encoder = ChatEncoder(target.tokenizer, max_length=data.max_length, template_kwargs=data.template_kwargs)
    splits, reports = encode_splits(parts, encoder, weights_hash=target.spec.weights_hash)
    for name, report in reports.items():
        say(f"{name}: {report.summary()}")
    cache = capture_states(target, splits, config, encoder=encoder, ranks=ranks)
    say(f"states of {len(cache):,} conversations, layers {list(cache.layer_ids)}: {cache.folder}")


@hydra.main(version_base="1.3", config_path=CONF, config_name="capture")
def main(cfg: DictConfig) -> None:
    from drafters.config import typed
    from drafters.door import door

    with door():
        check_settings(cfg, "capture")
        if typed(Choice, {"plan": cfg.plan, "device": cfg.device}, key="").plan:
            from data.plan import plan_capture

            plan_capture(cfg)
        else:
            run(cfg)


if __name__ == "__main__":
    begin(main)
