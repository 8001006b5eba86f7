# train.py's training for a program, which brings the target and the conversations: the same steps with the same
# settings, in one process. The run's folder is the same too, so what was begun goes on, and evaluate.py can measure it.

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drafters.cache import HiddenCache
from drafters.cache_config import Crew, Estimate
from drafters.cache_writer import capture
from drafters.chat import ChatEncoder, EncodeError
from drafters.checkpoint import load_drafter
from drafters.decoding.probe import acceptance_probe
from drafters.distributed import Ranks
from drafters.door import CHATTER, NOISE, pick_device
from drafters.errors import ConfigError, DataError
from drafters.given import Given, to_conversations
from drafters.heads.base import Drafter
from drafters.heads.start import Start, check_block_size
from drafters.library import plain_settings
from drafters.online import OnlineStates
from drafters.progress import progress_bar
from drafters.rerun import record
from drafters.runs import claim
from drafters.splits import ONLINE, DataConfig, encode_splits, split_conversations, states_place
from drafters.target import FrozenTarget
from drafters.training.building import build_logger, build_trainer, check_alone
from drafters.training.determinism import reproducible
from drafters.training.fit import begin_logging, check_fits, measured_as, start_drafter
from drafters.training.fit import fit as train
from drafters.training.module import DistillModule
from drafters.training.plan import Plan, how_computed, read_plan
from drafters.training.probing import Probe
from drafters.training.strategies import check_strategy, placement
from drafters.types import Conversation, Example, Message, Needs
from drafters.warm_start import load_warm_start
from drafters.weights import fingerprint_on_disk

__all__ = ["fit"]

logger = logging.getLogger(__name__)

NUM_PROBED = 8  # prompts of a probe in the middle of training
NEEDED = ("name", "outputs", "run_dir", "target", "data", "cache", "drafter", "optim", "trainer", "callbacks", "report")


def fit(settings: Mapping[str, Any], target: FrozenTarget, conversations: Iterable[Any]) -> Drafter:
    """Train a drafter for `target` on `conversations` and return the best weights, those of `<run_dir>/drafter`.

    `settings` are those of train.py without a source: `compose("fit", [...])` of `drafters.conf`. A conversation is a
    `Conversation`, `{"messages": [...]}`, or a list of messages `{"role": ..., "content": text}`; the share
    `data.validation` of them is held out and chooses the weights. Ctrl-C saves and raises KeyboardInterrupt; the same
    call goes on, and gives a finished run's drafter at once.

    Raises ConfigError, DataError or CheckpointError for what does not fit, before anything is computed where possible.
    """
    plain = plain_settings(settings, *NEEDED)
    if plain.get("source") is not None:
        raise ConfigError("source: the conversations are given, so none is read; leave it out: compose('fit', [...])")
    found = to_conversations(conversations)
    given = Given.of(found)
    plan = _read(plain, given)
    _check_target(plain["target"], target)
    folder = Path(plain["run_dir"])
    kept = {**plain, "source": given.source(folder), "cwd": os.getcwd()}
    repeated = reproducible(deterministic=plan.deterministic, seed=plan.seed)
    with claim(folder, kept, resume=plan.resume) as run, repeated:
        given.keep(found, run.folder)
        record(plan, run, kept, None, processes=1)
        check_strategy(plain["trainer"], run.checkpoint, averages=plan.optim.ema_decay is not None, size=1)
        outline = check_fits(*plan.drafter, target)
        warm = None
        if plan.warm_start is not None and run.checkpoint is None:
            warm = load_warm_start(plan.warm_start, *plan.drafter, target.spec)
        encoder = ChatEncoder(
            target.tokenizer, max_length=plan.data.max_length, template_kwargs=plan.data.template_kwargs
        )
        parts = split_conversations(found, validation=plan.data.validation, seed=plan.data.seed)
        splits = _encode(parts, encoder, target)
        check_block_size(splits["train"], outline.block_size)
        states = _states(plan, target, splits, encoder, outline.needs)
        start = Start(target=target, examples=splits["train"], states=states, indices=states.split("train"), warm=warm)
        drafter = start_drafter(plan, run, start)
        how = how_computed(plain["trainer"])
        module = DistillModule(drafter, target.head, plan.optim, sample_names=states.ids, how=how)
        begin_logging(plan, run, module, Ranks())
        device = target.device if plan.data.target_device is None else torch.device(pick_device(plain.get("device")))
        place = placement(plain["trainer"], Ranks(), device)
        probe = _probe(plan, target, parts[1], encoder)
        with _without_chatter():
            train(plan, run, module, states, probe=probe, trainer=partial(build_trainer, plain["trainer"], **place))
        return load_drafter(run.drafter, spec=target.spec).to(target.device)


def _read(plain: Mapping[str, Any], given: Given) -> Plan:
    """The typed plan. Raises ConfigError for the first setting that is unknown, wrong, or not for a program."""
    check_alone(plain["trainer"])
    alone = placement(plain["trainer"], Ranks(), torch.device("cpu"))
    with _without_chatter():
        build_trainer(plain["trainer"], logger=False, enable_checkpointing=False, **alone)
    source = {"_target_": f"{Given.__module__}.{Given.__qualname__}", **asdict(given)}
    plan = read_plan({**plain, "source": source}, data=DataConfig, logger=build_logger(plain.get("logger")))
    if plan.num_prompts:
        raise ConfigError(
            f"report.num_prompts: got {plan.num_prompts}; accepted here: 0 (report=none), since a program's training "
            "ends with the weights; evaluate.py measures its folder"
        )
    return plan


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Within it, Lightning is as quiet as behind a door."""
    levels = {name: logging.getLogger(name).level for name in CHATTER}
    for name in CHATTER:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message, category in NOISE:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _check_target(node: Mapping[str, Any], target: FrozenTarget) -> None:
    """Raises ConfigError where the settings describe other weights than those of `target`; without `weights` they
    describe none."""
    weights = node.get("weights")
    known = None if weights is None else fingerprint_on_disk(weights, sha256=node.get("sha256"))
    if known is not None and known != target.spec.weights_hash:
        raise ConfigError(
            f"target.weights: {weights} has the hash {known[:12]}, but the target that was given "
            f"{target.spec.weights_hash[:12]}; give drafters.load_target(settings), or set target.weights to null"
        )


def _encode(
    parts: tuple[list[Conversation], list[Conversation]], encoder: ChatEncoder, target: FrozenTarget
) -> dict[str, list[Example]]:
    if not parts[1]:
        raise DataError(
            "data.validation: no conversation is held out, but the best weights are chosen on such; give a share above "
            "0"
        )
    splits, reports = encode_splits(parts, encoder, weights_hash=target.spec.weights_hash)
    for name, report in reports.items():
        logger.info("%s: %s", name, report.summary())
    return splits


def _states(
    plan: Plan,
    target: FrozenTarget,
    splits: Mapping[str, Sequence[Example]],
    encoder: ChatEncoder,
    needs: Needs,
) -> HiddenCache | OnlineStates:
    """The target's states of the conversations: a cache, captured as far as it is not there, or the target itself."""
    if plan.data.states == ONLINE:
        return OnlineStates(target, splits, plan.cache)
    config = replace(plan.cache, layer_ids=tuple(sorted({*plan.cache.layer_ids, *needs.layer_ids})))
    key, folder = states_place(target.spec, splits, config, encoder=encoder)
    with ExitStack() as stack:
        return capture(target, splits, folder, key=key, config=config, crew=Crew(watcher=_Bar(stack)))


class _Bar:
    """Shows how a capture goes, where there is something to capture."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._bar: Any = None

    def begin(self, estimate: Estimate) -> None:
        self._bar = self._stack.enter_context(progress_bar("capture", unit="tokens"))

    def advance(self, done: int, total: int, tokens: int) -> None:
        self._bar(done, total, tokens)


def _probe(plan: Plan, target: FrozenTarget, held_out: Sequence[Conversation], encoder: ChatEncoder) -> Probe | None:
    """Real decoding of a few held-out first turns in the middle of training, if the settings ask for it."""
    if plan.callbacks.probe_every_n_steps is None:
        return None
    asked = [first for one in held_out if (first := _first_turn(one))]
    chosen = [asked[i * len(asked) // NUM_PROBED] for i in range(NUM_PROBED)] if len(asked) > NUM_PROBED else asked
    prompts = []
    for messages in chosen:
        with suppress(EncodeError):  # the template refuses it
            prompts.append(encoder.prompt(messages))
    prompts = [prompt for prompt in prompts if len(prompt) < target.spec.max_position]
    if not prompts:
        raise DataError(
            "callbacks.probe_every_n_steps: no held-out conversation begins with a user's message that the target "
            "has positions for, so none is decoded; give null, or other conversations"
        )
    return acceptance_probe(target, prompts, sampling=measured_as(plan, target).sampling)


def _first_turn(conversation: Conversation) -> tuple[Message, ...]:
    """All up to and with the first user's message; nothing where there is none."""
    roles = [message.role for message in conversation.messages]
    return conversation.messages[: roles.index("user") + 1] if "user" in roles else ()
