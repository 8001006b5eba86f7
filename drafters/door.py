# What every door (script that a person runs) shares: errors as one line, a quiet screen, the device, the target, a
# progress bar, the measurement with its tables.

import hashlib
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from drafters import progress
from drafters.errors import CheckpointError, ConfigError, DraftersError
from drafters.stopping import INTERRUPTED, keeping, stoppable
from drafters.system_errors import KEPT, leave_pipe, what_to_do

if TYPE_CHECKING:
    from rich.console import Console

    from drafters.decoding.dialogue import Dialogue
    from drafters.decoding.measure import Contestant, MeasureConfig
    from drafters.decoding.report import Report
    from drafters.decoding.runner import Execution
    from drafters.distributed import Ranks
    from drafters.target import FrozenTarget

__all__ = [
    "Place",
    "check_target",
    "command_facts",
    "decoding_into",
    "door",
    "load_target",
    "measure_and_write",
    "only_first_speaks",
    "pick_device",
    "say",
    "screen",
    "start",
]

TARGET_KEYS = (
    "name",
    "weights",
    "sha256",
    "dtype",
    "trust_remote_code",
    "mask_token",
    "layer_ids",
    "device_map",
    "tp_plan",
)
PLACED = ("device_map", "tp_plan", "trust_remote_code")
PIPE_WIDTH = 120  # columns where the output is no terminal
# Through these Lightning tells everybody of products, absent devices and tips. Its warnings use `warnings` and stay.
CHATTER = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")
# Warnings that ask nothing of a user: our batches need no worker processes, and we log by steps across epochs.
NOISE = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    (r"The '\w+_dataloader' does not have many workers", UserWarning),
    (r"The number of training batches \(\d+\) is smaller than the logging interval", UserWarning),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a measurement goes and what reports say of it. `resume` takes over what a half-done one in `out` has;
    `ranks` are the processes that share it; `kept` is what to say where it is interrupted. `environment`: the file in
    `out` that has this process's environment already; None: one is written."""

    out: Path
    facts: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    ranks: "Ranks | None" = None
    kept: str | None = None
    environment: str | None = None

    def provenance(self, target: "FrozenTarget") -> dict[str, Any]:
        """What results here say of where they come from."""
        from drafters.environment import ENVIRONMENT

        return {**command_facts(target), "environment": self.environment or ENVIRONMENT, **self.facts}

    def record(self) -> None:
        """Keep this process's environment in `out`, where none of this command is there yet; on the first rank. Raises
        CheckpointError."""
        from drafters.environment import ENVIRONMENT, record_environment

        if self.environment is None and (self.ranks is None or self.ranks.is_first):
            record_environment(self.out / ENVIRONMENT, {"processes": 1 if self.ranks is None else self.ranks.size})


@contextmanager
def door() -> Iterator[None]:
    """Turns a DraftersError and what the system refuses into one line on stderr and exit code 1; Ctrl-C, SIGTERM and a
    closed terminal into exit code INTERRUPTED and one line that says what is kept. Inside, work shows its progress.

    `DRAFTERS_DEBUG=1` shows tracebacks instead.
    """
    _quiet_screen()
    is_debug = bool(os.environ.get("DRAFTERS_DEBUG"))
    progress.show(True)
    try:
        with stoppable():
            yield
    except DraftersError as error:
        if is_debug:
            raise
        _fail(str(error))
    except BrokenPipeError:
        leave_pipe()
        _fail(f"nobody reads the output any more; {KEPT}")
    except OSError as error:
        if is_debug or error.errno is None:
            raise
        _fail(f"{error}; {what_to_do(error)}")
    except KeyboardInterrupt as stop:
        with suppress(OSError):
            sys.stderr.write(f"interrupted: {str(stop) or KEPT}\n")
        raise SystemExit(INTERRUPTED) from None
    finally:
        progress.show(False)


def start(main: Callable[[], Any]) -> None:
    """Run the main function of a door, from the first moment on inside `door`. Hydra's own, which it is, knows neither
    signals nor folders that are gone."""
    with door():
        try:
            Path.cwd()
        except OSError as error:
            raise ConfigError(
                f"the working directory cannot be read ({error.strerror}); change into a folder that exists"
            ) from error
        main()


def only_first_speaks(ranks: "Ranks") -> None:
    """Of several processes the first one alone prints and warns; errors are told by all that have one."""
    if not ranks.is_first:
        progress.show(False)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the rest of the process)
        warnings.simplefilter("ignore")
        logging.getLogger("drafters").setLevel(logging.ERROR)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(1) from None


class _Notes(logging.Handler):
    """Looks `sys.stderr` up each time, since a progress bar replaces it to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a note is worth no failure
            sys.stderr.write(self.format(record) + "\n")


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    with suppress(OSError):
        sys.stderr.write(f"warning: {message}\n")


def _quiet_screen() -> None:
    """Our own notes on stderr, and none of CHATTER and NOISE."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a sign of a table or of a text gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    warnings.showwarning = _show_warning  # not formatwarning: Lightning replaces that when it is imported
    for name in CHATTER:
        logging.getLogger(name).setLevel(logging.WARNING)
    for message, category in NOISE:
        warnings.filterwarnings("ignore", message, category)
    ours = logging.getLogger("drafters")
    if not ours.handlers:
        ours.addHandler(_Notes())
        ours.setLevel(logging.INFO)


def pick_device(name: str | None) -> str:
    """`name`, or a GPU if there is one, else the CPU. Raises ConfigError for a device that is absent."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: got '{name}': {reason}; accepted: null, cpu, cuda, cuda:N") from error
    return name


def screen() -> "Console":
    """A console on stdout, wide where nobody's terminal sets the width."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the process here, without a word."""
            raise BrokenPipeError

    return Screen(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def say(text: Any) -> None:
    """Print a text as it is, or any rich renderable, on stdout."""
    screen().print(text, highlight=False, markup=False, soft_wrap=isinstance(text, str))


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What a node of conf/target may say; see there."""

    name: str | None = None
    weights: str | None = None
    sha256: str | None = None
    dtype: str | None = "bfloat16"
    trust_remote_code: bool = False
    mask_token: Any = None
    layer_ids: tuple[int, ...] = ()
    device_map: Any = None
    tp_plan: str | None = None

    def __post_init__(self) -> None:
        from drafters.target import dtype_of
        from drafters.target_loading import check_placement

        dtype_of(str(self.dtype))
        check_placement(self.device_map, self.tp_plan)
        if self.sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", self.sha256):
            raise ValueError(f"sha256: got '{self.sha256}'; accepted: 64 hexadecimal digits, or null")
        if self.mask_token is not None and type(self.mask_token) not in (str, int):
            raise ValueError(f"mask_token: got {self.mask_token!r}; accepted: a token, its id, or null")


def check_target(node: Any) -> None:
    """Raises ConfigError for a setting of a node of conf/target that is unknown, or wrong for every target."""
    from drafters.config import typed

    typed(TargetConfig, node, key="target")


def load_target(
    node: Mapping[str, Any], *, device: str | None, is_split: bool = False, is_outline: bool = False
) -> "FrozenTarget":
    """The target that a node of conf/target describes, checked. `is_split`: whether the caller leads the processes of a
    `tp_plan`; `is_outline`: without weights. Raises ConfigError for an unknown setting, and for two that contradict
    each other."""
    from drafters.target import FrozenTarget
    from drafters.target_loading import Placement
    from drafters.weights import fingerprint, resolve

    check_target(node)
    device_map, tp_plan, trusted = (node.get(name) for name in PLACED)
    if tp_plan is not None and not is_split:
        raise ConfigError(
            f"target.tp_plan: got '{tp_plan}', which only python -m data.capture (under torchrun) works with; "
            "accepted here: null; target.device_map=auto spreads the layers"
        )
    if device is not None and (device_map is not None or tp_plan is not None):
        name = "device_map" if tp_plan is None else "tp_plan"
        raise ConfigError(
            f"device: got '{device}', but target.{name} says where the weights lie; leave one of them null"
        )
    trust = bool(trusted)
    placement = Placement(pick_device(device), device_map=device_map, tp_plan=tp_plan, trust_remote_code=trust)
    chosen = {name: node[name] for name in TARGET_KEYS if name in node and name not in ("layer_ids", *PLACED)}
    if is_outline:
        folder = resolve(chosen["weights"], sha256=chosen.get("sha256"))
        facts = {"weights_hash": fingerprint(folder), "trust_remote_code": trust}
        return FrozenTarget.outline(**{"dtype": "bfloat16", **chosen, **facts})
    return FrozenTarget.load(**chosen, device=placement)


def measure_and_write(
    target: "FrozenTarget",
    contestants: Mapping[str, "Contestant"],
    dialogues: Sequence["Dialogue"],
    config: "MeasureConfig",
    place: Place,
) -> dict[str, "Report"]:
    """Measure with a progress bar, print the tables, write reports and pictures into `place.out`: report.json of one
    contestant, comparison.json of several.

    Returns the reports (on the first rank). Raises CheckpointError when `out` cannot be made (before anything is
    measured) or written (the tables are on the screen then).
    """
    from drafters.checkpoint import write_error
    from drafters.decoding.comparison import Comparison
    from drafters.decoding.measure import measure
    from drafters.decoding.render import render

    facts = place.provenance(target)
    named = {name: replace(one, provenance={**facts, "drafter": one.provenance}) for name, one in contestants.items()}
    out = place.out
    with decoding_into(place, target, contestants, [[one.key for one in dialogues], asdict(config)]) as execution:
        place.record()
        with progress.phase_bars(execution.ranks.is_first) as phases:
            reports = measure(target, named, dialogues, config, replace(execution, progress=phases))
        if not execution.ranks.is_first:
            return {}
        several = Comparison(reports) if len(reports) > 1 else None
        (first, *_) = reports.values()
        say(render(first) if several is None else several.render())
        try:
            (first if several is None else several).save(out)
        except OSError as error:
            raise write_error(out, error) from error
    say(f"Written: {out / ('report.md' if several is None else 'comparison.md')}")
    return reports


@contextmanager
def decoding_into(
    place: Place, target: "FrozenTarget", contestants: Mapping[str, "Contestant"], what: Sequence[Any]
) -> Iterator["Execution"]:
    """Hold the folder of `place`, with a journal of what was decoded, until its results are written; then the journal
    goes. `what`: all that the results depend on beside target and contestants. Raises CheckpointError when the folder
    cannot be made."""
    from drafters.decoding.journal import Journal
    from drafters.decoding.runner import Execution
    from drafters.distributed import Ranks

    out, ranks = place.out, place.ranks or Ranks()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"out: {out} cannot be made: {error.strerror}; choose another folder") from error
    kept = place.kept or f"finished parts are kept in {out}; the same command with resume=true goes on"
    fingerprint = _fingerprint(target, contestants, what)
    with keeping(kept), Journal(out, fingerprint, resume=place.resume, ranks=ranks) as journal:
        if len(journal) and ranks.is_first:
            say(f"{len(journal)} finished parts of the measurement are taken from {out}")
        yield Execution(journal=journal, ranks=ranks)
        if ranks.is_first:
            journal.remove()


def command_facts(target: "FrozenTarget") -> dict[str, Any]:
    """The command that was given, without secrets, and the target."""
    from drafters.environment import command_line

    return {"command": command_line(), "target": _named(target)}


def _fingerprint(target: "FrozenTarget", contestants: Mapping[str, "Contestant"], what: Sequence[Any]) -> str:
    """A hash of all that a measurement depends on."""
    import torch

    from drafters import __version__

    everything = [
        _named(target),
        target.spec.dtype,
        str(target.device),
        {name: one.provenance for name, one in contestants.items()},
        *what,
        [__version__, torch.__version__],
    ]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


def _named(target: "FrozenTarget") -> dict[str, str]:
    spec = target.spec
    return {"name": spec.name, "weights_hash": spec.weights_hash, "template_hash": spec.template_hash}
