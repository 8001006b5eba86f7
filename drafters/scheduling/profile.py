# What rounds cost on one machine: measured points of the target's step, of drafting and of the loop's rest, and the
# seconds between and beyond them. A profile is a JSON file that a person may write or an engine may export; profiler.py
# measures one.

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from drafters.checkpoint import write_whole
from drafters.errors import ConfigError
from drafters.plain_json import parse
from drafters.scheduling.surface import Surface

__all__ = ["LAYOUTS", "SCHEMA", "CostProfile", "DraftPoint", "OverheadPoint", "VerifyPoint"]

SCHEMA = 1
LAYOUTS = ("padded", "ragged")
MOST = 2**53  # whole numbers up to here are exact as floats


@dataclass(frozen=True, kw_only=True)
class VerifyPoint:
    """One target step over `tokens` tokens in all, the anchors included, of `rows` rows (None: whatever the rows).
    `seconds` is the median of `count` steps, `low` and `high` their quartiles; of one step, all three are the same."""

    rows: int | None = None
    tokens: int
    seconds: float
    low: float | None = None
    high: float | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class DraftPoint:
    """Proposing `length` drafts for each of `rows` rows, and reading what the target verified. Length 0: the reading
    alone, of a drafter that is there but drafts nothing."""

    rows: int | None = None
    length: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OverheadPoint:
    """What a round of `rows` rows costs beside the target's step and the drafter."""

    rows: int | None = None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Seconds by rows and tokens. Only `layout` and `verify` are required; what has no points is free.

    `layout`: "padded", where R rows that verify 1 + l_r tokens each pay for R (1 + max l) of them, or "ragged", where
    they pay for sum (1 + l_r). `hardware`, `dtype`, `versions`, `target`, `drafter` and `conditions` say what was
    measured; nothing is computed from them.

    Between points, seconds are linear in tokens (of draft points: in length) at one number of rows, and linear in rows
    at one number of tokens a row. Below the least point they are that point's; of drafting, lengths below the least go
    linearly down to length 0, which is free where no point says otherwise. Beyond the largest they are linear by the
    last segment (by the whole curve where that one does not rise), with one warning. A curve of a single number of rows
    is taken to hold for all. Raises ConfigError that names the point for what cannot be.
    """

    layout: str
    verify: tuple[VerifyPoint, ...]
    draft: tuple[DraftPoint, ...] = ()
    overhead: tuple[OverheadPoint, ...] = ()
    hardware: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_profile(self)

    @overload
    def step_s(self, rows: int, tokens: float) -> float: ...
    @overload
    def step_s(self, rows: int | Tensor, tokens: Tensor) -> Tensor: ...
    @overload
    def step_s(self, rows: Tensor, tokens: float) -> Tensor: ...
    def step_s(self, rows: int | Tensor, tokens: float | Tensor) -> float | Tensor:
        """Seconds of one target step of `rows` rows over `tokens` tokens in all, anchors included; of tensors, which
        broadcast, a float64 tensor. No rows cost nothing."""
        return self._verify_surface(rows, tokens)

    def sps(self, tokens: float | Tensor, rows: int | Tensor) -> float | Tensor:
        """Target steps per second at `tokens` tokens a step: 1 / `step_s`."""
        seconds: Any = self.step_s(rows, tokens)
        return 1 / seconds

    @overload
    def draft_s(self, rows: int, length: float) -> float: ...
    @overload
    def draft_s(self, rows: int | Tensor, length: Tensor) -> Tensor: ...
    @overload
    def draft_s(self, rows: Tensor, length: float) -> Tensor: ...
    def draft_s(self, rows: int | Tensor, length: float | Tensor) -> float | Tensor:
        """Seconds of drafting `length` tokens for each of `rows` rows and of reading what was verified."""
        return self._draft_surface(rows, length)

    @overload
    def overhead_s(self, rows: int) -> float: ...
    @overload
    def overhead_s(self, rows: Tensor) -> Tensor: ...
    def overhead_s(self, rows: int | Tensor) -> float | Tensor:
        """Seconds of the rest of a round of `rows` rows."""
        return self._overhead_surface(rows, 0.0)

    def tokens_of(self, lengths_R: Tensor) -> int:
        """The tokens that a step pays for when row r verifies `lengths_R[r]` drafts and its anchor."""
        num_rows = len(lengths_R)
        if num_rows == 0:
            return 0
        return num_rows * (1 + int(lengths_R.max())) if self.layout == "padded" else num_rows + int(lengths_R.sum())

    def round_s(self, lengths_R: Tensor, drafted: int) -> float:
        """Seconds of a round that drafted `drafted` tokens for every row and verifies `lengths_R[r]` of them."""
        num_rows = len(lengths_R)
        step_s = self.step_s(num_rows, self.tokens_of(lengths_R))
        return step_s + self.draft_s(num_rows, drafted) + self.overhead_s(num_rows)

    def fit(self) -> "CostProfile":
        """The same profile with steps that never get faster with more tokens: at each number of rows the isotonic
        regression of the medians on tokens, weighted by their counts."""
        from scipy.optimize import isotonic_regression

        points: list[VerifyPoint] = []
        for curve in _by_rows(self.verify, lambda point: point.tokens):
            fitted = isotonic_regression([p.seconds for p in curve], weights=[p.count for p in curve]).x
            for point, seconds in zip(curve, fitted.tolist(), strict=True):
                low, high = (seconds if bound is None else bound for bound in (point.low, point.high))
                points.append(replace(point, seconds=seconds, low=min(low, seconds), high=max(high, seconds)))
        return replace(self, verify=tuple(points))

    def save(self, path: Path) -> None:
        """Write a JSON file, whole or not at all. Raises CheckpointError when the disk does not take it."""
        text = json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"
        write_whole(path, lambda temp: temp.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> "CostProfile":
        """Read a file of `save`, or one written by hand. Raises ConfigError that names the file and the key."""
        try:
            return cls.from_dict(parse(path.read_text(encoding="utf-8")))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give the profile.json of a profile task") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid JSON ({error}); correct it or measure the profile again") from error

    @classmethod
    def from_dict(cls, values: Any) -> "CostProfile":
        """A profile of plain values. Raises ConfigError that names the key, the value and what is accepted."""
        given = _known(cls, values, "profile")
        kinds = (("verify", VerifyPoint), ("draft", DraftPoint), ("overhead", OverheadPoint))
        for name, kind in kinds:
            if name in given:
                _check(isinstance(given[name], list | tuple), name, given[name], "a list of points")
                given[name] = tuple(kind(**_known(kind, point, f"{name}[{i}]")) for i, point in enumerate(given[name]))
        return cls(**given)

    @cached_property
    def _verify_surface(self) -> Surface:
        points = _by_rows(self.verify, lambda point: point.tokens)
        curves = [([p.tokens for p in curve], [p.seconds for p in curve]) for curve in points]
        return Surface("verify", [curve[0].rows for curve in points], curves, per_row=len(points) > 1)

    @cached_property
    def _draft_surface(self) -> Surface:
        points = _by_rows(self.draft, lambda point: point.length)
        curves = []
        for curve in points:
            free = [] if curve[0].length == 0 else [(0, 0.0)]
            pairs = [*free, *((p.length, p.seconds) for p in curve)]
            curves.append(([x for x, _ in pairs], [y for _, y in pairs]))
        return Surface("draft", [curve[0].rows for curve in points], curves)

    @cached_property
    def _overhead_surface(self) -> Surface:
        points = [point for (point,) in _by_rows(self.overhead, lambda point: 0)]
        return Surface("overhead", [p.rows for p in points], [([0], [p.seconds]) for p in points])


def _by_rows(points: Iterable[Any], place: Callable[[Any], int]) -> list[list[Any]]:
    """The points of each number of rows, fewest rows first, in the order of `place`."""
    groups: dict[int, list[Any]] = {}
    for point in sorted(points, key=lambda point: (point.rows or 0, place(point))):
        groups.setdefault(point.rows or 0, []).append(point)
    return list(groups.values())


def _known(kind: type, values: Any, key: str) -> dict[str, Any]:
    """`values` by the names of the fields of `kind`, none unknown and none that is required missing."""
    names = [f.name for f in fields(kind)]
    _check(isinstance(values, Mapping), key, values, f"values by name: {', '.join(names)}")
    for name in values:
        if name not in names:
            raise ConfigError(f"{key}.{name}: unknown; accepted: {', '.join(names)}")
    required = {VerifyPoint: ("tokens", "seconds"), DraftPoint: ("length", "seconds"), OverheadPoint: ("seconds",)}
    for name in required.get(kind, ("layout", "verify")):
        if name not in values:
            raise ConfigError(f"{key}.{name}: missing; it has no default")
    return dict(values)


def _check_profile(profile: CostProfile) -> None:
    _check(_is_int(profile.schema) and profile.schema == SCHEMA, "schema", profile.schema, f"{SCHEMA}")
    _check(profile.layout in LAYOUTS, "layout", profile.layout, " or ".join(LAYOUTS))
    _check(isinstance(profile.dtype, str), "dtype", profile.dtype, "a text")
    for name in ("hardware", "versions", "target", "drafter", "conditions"):
        _check(isinstance(getattr(profile, name), Mapping), name, getattr(profile, name), "values by name")
    _check(len(profile.verify) > 0, "verify", [], "one point or more")
    for i, point in enumerate(profile.verify):
        _check_verify(point, f"verify[{i}]")
    for i, drafted in enumerate(profile.draft):
        _check_rows(drafted.rows, f"draft[{i}]")
        _check(_is_int(drafted.length, 0), f"draft[{i}].length", drafted.length, "a whole number, 0 or more")
        _check_seconds(drafted.seconds, f"draft[{i}].seconds")
    for i, rest in enumerate(profile.overhead):
        _check_rows(rest.rows, f"overhead[{i}]")
        _check_seconds(rest.seconds, f"overhead[{i}].seconds")
    _check_places("verify", [(p.rows, p.tokens) for p in profile.verify], "tokens")
    _check_places("draft", [(p.rows, p.length) for p in profile.draft], "length")
    _check_places("overhead", [(p.rows, 0) for p in profile.overhead], "")


def _check_verify(point: VerifyPoint, key: str) -> None:
    _check_rows(point.rows, key)
    least = point.rows or 1
    accepted = f"a whole number, {least} or more, since every row has an anchor"
    _check(_is_int(point.tokens, least), f"{key}.tokens", point.tokens, accepted)
    _check_seconds(point.seconds, f"{key}.seconds")
    _check(point.seconds > 0, f"{key}.seconds", point.seconds, "more than 0")
    for name, bound, sign in (("low", point.low, 1), ("high", point.high, -1)):
        if bound is not None:
            _check_seconds(bound, f"{key}.{name}")
            side = "at most" if sign == 1 else "at least"
            _check(sign * (point.seconds - bound) >= 0, f"{key}.{name}", bound, f"{side} its seconds, {point.seconds}")
    _check(_is_int(point.count, 1), f"{key}.count", point.count, "a whole number, 1 or more")


def _check_rows(rows: Any, key: str) -> None:
    _check(rows is None or _is_int(rows, 1), f"{key}.rows", rows, "a whole number, 1 or more, or null")


def _check_seconds(seconds: Any, key: str) -> None:
    is_number = isinstance(seconds, float | int) and not isinstance(seconds, bool)
    _check(is_number and 0 <= seconds <= sys.float_info.max, key, seconds, "a finite number of seconds, not negative")


def _check_places(name: str, places: Sequence[tuple[int | None, int]], axis: str) -> None:
    """No two points of one place, and rows on all of them or on none."""
    if len({rows is None for rows, _ in places}) > 1:
        raise ConfigError(f"{name}: some points have rows, some have none; accepted: rows in all of them, or in none")
    for one, other in pairwise(sorted((rows or 0, place) for rows, place in places)):
        if one == other:
            at = f"{one[0]} rows" + (f" and {axis} {one[1]}" if axis else "")
            raise ConfigError(f"{name}: two points for {at}; accepted: one; put their median there")


def _is_int(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _check(is_right: bool, key: str, value: Any, accepted: str) -> None:
    if not is_right:
        raise ConfigError(f"{key}: got {json.dumps(value, default=str)[:60]}; accepted: {accepted}")
