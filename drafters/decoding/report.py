# The report of a measurement: what stands in report.json, and how it is read back. How people see it is in render.py
# (tables) and pictures.py.

import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch

from drafters import __version__
from drafters.decoding.pictures import draw_acceptance, draw_speed
from drafters.decoding.render import to_markdown
from drafters.errors import DataError
from drafters.plain_json import parse

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = [
    "CONTRACT_KEYS",
    "SCHEMA",
    "LengthCost",
    "Part",
    "Prediction",
    "PromptCounts",
    "Report",
    "UnitSpeed",
    "check_schema",
    "plain",
    "read_json",
    "with_versions",
    "write_json",
]

SCHEMA = 2
Read = TypeVar("Read")
AGAIN = "run the evaluation again"
# What report.json promises to the tools that read it; it may hold more.
CONTRACT_KEYS = frozenset(
    {
        "schema",
        "accepted_length",
        "accepted_length_ci95",
        "acceptance_by_position",
        "rounds",
        "tokens",
        "draft_length",
        "accepted_length_at_draft_length",
        "tokens_per_second",
        "baseline_tokens_per_second",
        "speedup",
        "draft_ms",
        "verify_ms",
        "baseline_step_ms",
        "predicted_speedup",
        "temperature",
        "batch_size",
        "by_source",
        "divergences",
        "provenance",
    }
)


@dataclass(frozen=True, kw_only=True)
class LengthCost:
    """A row of the cost table: measured at one draft length, and what they predict. `accepted_length` comes
    from the acceptances of the full block; `single_steps_ms` is what the baseline needs for as many tokens."""

    length: int
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    accepted_length: float
    single_steps_ms: float
    predicted_speedup: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The speed-up foretold from a profile taken before and the acceptances of `prompts` other prompts than those of
    the speed runs. `error` = speedup / measured speed-up - 1."""

    speedup: float
    accepted_length: float
    prompts: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """The share of one source, turn or range of context lengths; the fields mean what they mean in `Report`."""

    prompts: int
    rounds: int
    tokens: int
    accepted_length: float
    accepted_length_ci95: tuple[float, float]
    acceptance_by_position: list[float]
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """What prompt number `prompt` adds to the accepted length: `tokens` gained in `rounds` full rounds at the full
    block. `turn` counts from 0."""

    prompt: int
    source: str
    turn: int
    tokens: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class UnitSpeed:
    """What unit number `unit`, the prompts that were timed together, adds to the speed-up: tokens and seconds after
    prefill, with the drafter and without."""

    unit: int
    tokens: int
    seconds: float
    baseline_tokens: int
    baseline_seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """One measurement. NaN (null in JSON) where nothing was there to measure; intervals are bootstrapped by prompt, and
    NaN where fewer than two count.

    Acceptance, at the full block, over full rounds (see metrics.full_rounds): `accepted_length` = `tokens` / `rounds`,
    bonus included; `acceptance_by_position` conditional, `survival_by_position` marginal; `accepted_histogram[n]`
    rounds with n accepted drafts; `verify_rate` = accepted / proposed drafts. With a `tree` ({"parents", "ranks"}, see
    tree.Tree) positions are depths, `block_size` is its depth and `draft_length` its size. With a `schedule` (its
    settings, drafts verified and accepted a row and round, the share of rounds without drafts) `draft_length` is the
    most that are made.
    Speed, at `draft_length`, of both loops interleaved: tokens per second exclude prefill and the token it gives;
    `end_to_end_speedup` includes both. `draft_ms` (propose and extend), `verify_ms`, `overhead_ms` are means per
    round, `baseline_step_ms` that of a baseline round; `overhead_share` is the loop's share of all decode seconds;
    `verify_to_step` = verify_ms / baseline_step_ms. `predicted_speedup` comes from `costs`, measured before, and the
    acceptances above; `prediction` from other prompts.
    `dispatch_share`: of a single-token target step, the share that is Python, dispatch and small operators instead
    of matrix products and attention (see dispatch.dispatch_share).
    `by_context`: by tokens of text before a round; what speed is there was not measured.
    `per_prompt`, `per_unit`: what each prompt, in the order of numbers, and each timed unit adds to the accepted length
    and the speed-up: they show which prompts are hard, and pair the drafters of a comparison.
    `divergences`: at temperature 0, prompts whose text differs from the baseline's; else None.
    """

    schema: int = SCHEMA
    name: str = ""
    accepted_length: float
    accepted_length_ci95: tuple[float, float]
    acceptance_by_position: list[float]
    acceptance_by_position_ci95: list[tuple[float, float]]
    survival_by_position: list[float]
    accepted_histogram: list[int]
    verify_rate: float
    block_size: int
    prompts: int
    rounds: int
    tokens: int
    tree: dict[str, list[int]] | None
    schedule: dict[str, Any] | None = None
    draft_length: int
    accepted_length_at_draft_length: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    speedup_ci95: tuple[float, float]
    end_to_end_speedup: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    overhead_share: float
    baseline_step_ms: float
    verify_to_step: float
    predicted_speedup: float
    prediction: Prediction
    costs: list[LengthCost]
    dispatch_share: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    batch_size: int
    processes: int
    seed: int
    drafter_parameters: int
    drafter_bytes: int
    by_source: dict[str, Part]
    by_turn: dict[str, Part]
    by_context: dict[str, Part]
    per_prompt: list[PromptCounts]
    per_unit: list[UnitSpeed]
    divergences: dict[str, Any] | None
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values; NaN becomes None."""
        return cast(dict[str, Any], plain(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        """Inverse of `to_dict`. Raises DataError for another schema, other fields, or values of another type."""
        check_schema(values, SCHEMA, what="report")
        return cast(Report, _read(cls, values, "report"))

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read report.json. Raises DataError when it is missing, damaged, or of another schema."""
        return read_json(cls.from_dict, path)

    def save(self, folder: Path) -> None:
        """Write acceptance.png, speed.png, report.md and, last, report.json into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        draw_acceptance(self).savefig(folder / "acceptance.png", dpi=150)
        draw_speed(self).savefig(folder / "speed.png", dpi=150)
        (folder / "report.md").write_text(to_markdown(self, folder=folder), encoding="utf-8")
        write_json(self.to_dict(), folder / "report.json")


def with_versions(provenance: Mapping[str, Any], target: "FrozenTarget") -> dict[str, Any]:
    """`provenance` with the device and the versions that this process runs."""
    cuda = target.device.type == "cuda"
    return {
        **provenance,
        "device": torch.cuda.get_device_name(target.device) if cuda else f"{platform.machine()} cpu",
        "num_threads": torch.get_num_threads(),
        "dtype": target.spec.dtype,
        "versions": {
            "python": platform.python_version(),
            "drafters": __version__,
            **{name: version(name) for name in ("torch", "transformers")},
        },
    }


def write_json(values: Mapping[str, Any], path: Path) -> None:
    """Write by rename: where the file stands, it is whole, and so is what was written before it."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def read_json(read: Callable[[Any], Read], path: Path) -> Read:
    """What `read` makes of a file of `write_json`. Raises DataError that names the file."""
    try:
        return read(parse(path.read_text()))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; {AGAIN}") from error


def plain(value: Any) -> Any:
    """What JSON can say: tuples become lists, NaN and infinities None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def check_schema(values: Any, schema: int, *, what: str) -> None:
    """Raises DataError for values of another schema, or of none."""
    got = values.get("schema") if isinstance(values, Mapping) else None
    if got != schema:
        reason = "written by an earlier version" if isinstance(got, int) and got < schema else "not known here"
        raise DataError(f"{what}: schema {got} is {reason}; accepted: schema {schema}; {AGAIN}")


def _read(kind: Any, value: Any, key: str) -> Any:
    """`value`, as JSON gave it, as what the annotation `kind` says; null is NaN where a float stands."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _read(inner[0], value, key)
    if is_dataclass(kind):
        return _read_fields(kind, value, key)
    if kind is float:
        _check(value is None or isinstance(value, float | int), key, value, "a number or null")
        return math.nan if value is None else float(value)
    if origin is dict:
        _check(isinstance(value, Mapping), key, value, "a mapping")
        return {name: _read(inner[1], item, f"{key}.{name}") for name, item in value.items()}
    if origin is list:
        _check(isinstance(value, list), key, value, "a list")
        return [_read(inner[0], item, f"{key}.{i}") for i, item in enumerate(value)]
    if origin is tuple:
        _check(isinstance(value, list) and len(value) == len(inner), key, value, f"a list of {len(inner)}")
        return tuple(_read(of, item, f"{key}.{i}") for i, (of, item) in enumerate(zip(inner, value, strict=True)))
    _check(isinstance(value, kind), key, value, kind.__name__)
    return value


def _read_fields(kind: Any, value: Any, key: str) -> Any:
    _check(isinstance(value, Mapping), key, value, "a mapping")
    wrong = sorted(set(value) ^ {f.name for f in fields(kind)})
    if wrong:
        raise DataError(f"{key}: missing or unknown fields {wrong}; {AGAIN}")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], item, f"{key}.{name}") for name, item in value.items()})


def _check(is_right: bool, key: str, value: Any, accepted: str) -> None:
    if not is_right:
        raise DataError(f"{key}: got {json.dumps(value, default=str)[:60]}; accepted: {accepted}; {AGAIN}")
