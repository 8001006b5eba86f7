# A drafter's confidence made honest: one curve a draft, of a temperature, a bias and a skew, fitted so that the product
# of confidences is the probability that the target accepts the drafts so far. Fitted at one sampling, for one drafter
# of one target.

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.checkpoint import write_whole
from drafters.errors import CheckpointError, ConfigError
from drafters.plain_json import parse, sealed, unsealed
from drafters.scheduling.observations import Observations
from drafters.types import SIGNALS, Sampling

__all__ = [
    "METHODS",
    "NUM_BINS",
    "Calibration",
    "Curves",
    "bins_of",
    "calibrate",
    "calibration_error",
    "confidence_logit",
    "fit",
    "identity",
]

SCHEMA = 3
FILE = "calibration.json"
IDENTITY = "identity"
NUM_BINS = 15
# Confidences nearer to 0 or 1 are taken as this near: their logits are finite.
NEAREST = 1e-6
MOST = 20.0  # temperatures are searched from 1 / MOST to MOST
RIDGE = 0.5  # of (log T)^2 + b^2 + s^2, against a sum over rounds
AGAIN = "run task=calibrate for this drafter"

Curve = tuple[float, float, float]  # T, b, s
Fit = Callable[[Tensor, Tensor, Tensor], Curve]


class Curves(NamedTuple):
    """sigmoid((logit(c_k) + s_k log(c_k (1 - c_k))) / T_k + b_k): one temperature T_k > 0, bias b_k and skew s_k, -1 to
    1, a draft. It rises with c_k. Without skew it is Platt's; with it, log c and -log(1 - c) have slopes of their own,
    (1 + s) / T and (1 - s) / T: beta calibration (Kull, Silva Filho and Flach, AISTATS 2017)."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    skews: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `Curves` say of c_k: the order of confidences at a position stays. `method`: "temperature" (biases and skews
    are 0), "affine" (skews are), "beta", or "identity". `signal`: which of SIGNALS c_k is. `sampling`: what it was
    fitted at. `provenance`: any JSON-able facts.

    It reads c_k alone, so what it gives depends on tokens before k only, as the confidence does.
    Raises CheckpointError for values that are no calibration.
    """

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    skews: tuple[float, ...]
    method: str
    sampling: Sampling
    drafter_sha256: str
    target_hash: str
    signal: str = "confidence"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise CheckpointError(f"calibration: {problem}; {AGAIN}")

    def apply(self, confidence_BS: Tensor) -> Tensor:
        """Calibrated conditional confidences [..., S] of raw ones, in float32 or wider; NaN stays NaN. Raises
        CheckpointError when there are more slots than temperatures."""
        num_slots = confidence_BS.shape[-1]
        if num_slots > len(self.temperatures):
            raise CheckpointError(
                f"calibration: fitted for {len(self.temperatures)} drafts, used for {num_slots}; "
                f"draft fewer, or {AGAIN}"
            )
        wide_BS = confidence_BS.to(torch.promote_types(confidence_BS.dtype, torch.float32))
        return wide_BS if self.method == IDENTITY else calibrate(wide_BS, self.curves)

    @property
    def curves(self) -> Curves:
        return Curves(self.temperatures, self.biases, self.skews)

    def survival(self, confidence_BS: Tensor) -> Tensor:
        """The probability that drafts 1..k all stand, [..., S]: cumulative products of `apply`."""
        return self.apply(confidence_BS).cumprod(-1)

    def check(self, sampling: Sampling, *, drafter_sha256: str, target_hash: str) -> None:
        """Raises CheckpointError when it was fitted for other weights of the drafter or target; warns when it was
        fitted at another sampling, where other shares of drafts survive."""
        for name, mine, given in (
            ("drafter", self.drafter_sha256, drafter_sha256),
            ("target", self.target_hash, target_hash),
        ):
            if mine != given:
                raise CheckpointError(
                    f"calibration: fitted for a {name} with weights {mine[:12]}, this one has {given[:12]}; {AGAIN}"
                )
        fitted, used = asdict(self.sampling), asdict(sampling)
        if names := [name for name in fitted if fitted[name] != used[name]]:
            before, now = (", ".join(f"{name}={values[name]:g}" for name in names) for values in (fitted, used))
            warnings.warn(
                f"calibration: fitted at {before}, used at {now}; survival differs there, and lengths will not be the "
                "best: calibrate at the sampling that is used",
                stacklevel=2,
            )

    def save(self, folder: Path) -> Path:
        """Write calibration.json into the `drafter` folder, replacing it atomically. Raises CheckpointError when it
        cannot be written."""
        text = json.dumps(sealed({"schema": SCHEMA, **asdict(self)}), indent=1, allow_nan=False) + "\n"
        return write_whole(folder / FILE, lambda path: path.write_text(text), make_folder=False)

    @classmethod
    def load(cls, folder: Path) -> "Calibration":
        """The calibration of a `drafter` folder. Raises CheckpointError when there is none, or it is damaged."""
        path = folder / FILE
        try:
            values = parse(path.read_text())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file; {AGAIN}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; {AGAIN}") from error
        schema = values.get("schema") if isinstance(values, dict) else None
        if schema != SCHEMA:
            raise CheckpointError(f"{path}: schema is {schema!r}; this version reads {SCHEMA}; {AGAIN}")
        try:
            values = unsealed(values)
            numbers = {name: tuple(map(float, values[name])) for name in Curves._fields}
            del values["schema"]
            return cls(**{**values, **numbers, "sampling": Sampling(**values["sampling"])})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path}: damaged: {type(error).__name__} {error}; {AGAIN}") from error


def identity(num_slots: int, *, sampling: Sampling, drafter_sha256: str, target_hash: str) -> Calibration:
    """No calibration: confidences as the drafter gives them."""
    return Calibration(
        temperatures=(1.0,) * num_slots,
        biases=(0.0,) * num_slots,
        skews=(0.0,) * num_slots,
        method=IDENTITY,
        sampling=sampling,
        drafter_sha256=drafter_sha256,
        target_hash=target_hash,
    )


def calibrate(confidence_BS: Tensor, curves: Curves) -> Tensor:
    """What the first S of `curves` say of confidences [..., S], the same shape."""
    temperatures_S, biases_S, skews_S = (confidence_BS.new_tensor(one[: confidence_BS.shape[-1]]) for one in curves)
    bent_BS = confidence_logit(confidence_BS) + skews_S * _log_spread(confidence_BS)
    return torch.sigmoid(bent_BS / temperatures_S + biases_S)


def confidence_logit(confidence: Tensor) -> Tensor:
    """log(c / (1 - c)), finite: c is taken to be at least 1e-6 away from 0 and 1."""
    return torch.logit(confidence.clamp(NEAREST, 1 - NEAREST))


def _log_spread(confidence: Tensor) -> Tensor:
    """log(c (1 - c)), finite as `confidence_logit` is."""
    kept = confidence.clamp(NEAREST, 1 - NEAREST)
    return kept.log() + torch.log1p(-kept)


def bins_of(probability_N: Tensor) -> Tensor:
    """The number, 0..14, of the equal-width bin that each probability falls into; 1 is in the last."""
    return (probability_N * NUM_BINS).long().clamp(0, NUM_BINS - 1)


def calibration_error(probability_N: Tensor, label_N: Tensor) -> float:
    """Expected calibration error, a share: the mean over rounds of |share accepted - mean probability| of the round's
    bin, 15 equal-width bins (1706.04599). `label_N`: bool, or rates. NaN of nothing."""
    if not len(probability_N):
        return float("nan")
    gap_N = label_N.to(probability_N.dtype) - probability_N
    return float(torch.bincount(bins_of(probability_N), weights=gap_N).abs().sum()) / len(probability_N)


def fit(observations: Observations, *, method: str) -> Curves:
    """A curve a draft, fitted left to right with the earlier ones fixed.

    All judge the cumulative product prod_{i<=k} c_i against whether drafts 1..k were accepted, on the rounds that
    proposed k drafts; T_k is from 1/20 to 20. "temperature": sequential temperature scaling (2607.05147), the T_k of
    the least expected calibration error, searched on a grid (the error has steps: no gradient), the nearest to 1 of
    equal ones. "affine": T_k and b_k of the least log loss, with a ridge that matters where rounds are few or all
    alike; "beta": s_k too. A position that no round reached has the values of the one before. Raises ConfigError for
    another method.
    """
    if method not in METHODS:
        raise ConfigError(f"method: got '{method}'; accepted: {', '.join(METHODS)}")
    confidence_NG = observations.confidence_NG
    log_before_N = confidence_NG.new_zeros(observations.num_rounds)
    counted_NG, survived_NG, reached_NG = observations.counted_NG, observations.survived_NG, observations.reached_NG
    found: list[Curve] = []
    for k in range(observations.num_slots):
        last = found[-1] if found else (1.0, 0.0, 0.0)
        if reached_NG[:, k].any():
            kept_N = counted_NG[:, k]
            last = METHODS[method](confidence_NG[kept_N, k], log_before_N[kept_N], survived_NG[kept_N, k])
        found.append(last)
        # NaN where k was not proposed, nor is anything after it.
        log_before_N = log_before_N + calibrate(confidence_NG[:, k, None], Curves(*zip(last, strict=True)))[:, 0].log()
    return Curves(*zip(*found, strict=True))


def _fit_temperature(confidence_N: Tensor, log_before_N: Tensor, survived_N: Tensor) -> Curve:
    before_N, logit_N = log_before_N.exp(), confidence_logit(confidence_N)

    def error(log_t: float) -> tuple[float, float]:
        probability_N = before_N * torch.sigmoid(logit_N / math.exp(log_t))
        # Sums of the same bins may differ in their last digits.
        return round(calibration_error(probability_N, survived_N), 12), abs(log_t)

    centre, reach, steps = 0.0, math.log(MOST), 60
    for _ in range(3):
        grid = [centre + reach * i / steps for i in range(-steps, steps + 1)]
        centre = min((x for x in grid if abs(x) <= math.log(MOST) + 1e-9), key=error)
        reach, steps = reach / steps, 10
    return math.exp(centre), 0.0, 0.0


def _fit_curve(confidence_N: Tensor, log_before_N: Tensor, survived_N: Tensor, *, most_skew: float) -> Curve:
    from scipy.optimize import minimize

    log_lost_N = torch.log1p(-log_before_N.exp())
    logit_N, spread_N = confidence_logit(confidence_N), _log_spread(confidence_N)

    def loss(log_t_b_s: Sequence[float]) -> tuple[float, list[float]]:
        """Value, and gradient in log T, b and s."""
        log_t, bias, skew = map(float, log_t_b_s)
        scaled_N = (logit_N + skew * spread_N) / math.exp(log_t)
        z_N = scaled_N + bias
        survives_N = log_before_N + F.logsigmoid(z_N)
        # 1 - P c = (1 - P) + P (1 - c), with no difference of near numbers.
        fails_N = torch.logaddexp(log_lost_N, log_before_N + F.logsigmoid(-z_N))
        value = RIDGE * (log_t**2 + bias**2 + skew**2) - float(torch.where(survived_N, survives_N, fails_N).sum())
        slope_N = torch.sigmoid(-z_N) * torch.where(survived_N, -1.0, (survives_N - fails_N).exp())
        slopes = [-float((slope_N * scaled_N).sum()), float(slope_N.sum())]
        slopes.append(float((slope_N * spread_N).sum()) / math.exp(log_t))
        return value, [a + 2 * RIDGE * b for a, b in zip(slopes, (log_t, bias, skew), strict=True)]

    limits = [(-math.log(MOST), math.log(MOST)), (None, None), (-most_skew, most_skew)]
    log_t, bias, skew = minimize(loss, [0.0, 0.0, 0.0], jac=True, method="L-BFGS-B", bounds=limits).x.tolist()
    return math.exp(log_t), bias, skew


METHODS: dict[str, Fit] = {
    "temperature": _fit_temperature,
    "affine": partial(_fit_curve, most_skew=0.0),
    "beta": partial(_fit_curve, most_skew=1.0),
}


def _problem(calibration: Calibration) -> str | None:
    """What is wrong with its values, if anything."""
    (temperatures, biases, skews), method = calibration.curves, calibration.method
    accepted = (IDENTITY, *METHODS)
    if calibration.signal not in SIGNALS:
        return f"signal is {calibration.signal!r}, accepted: {', '.join(SIGNALS)}"
    for name in ("drafter_sha256", "target_hash"):
        if not isinstance(getattr(calibration, name), str):
            return f"{name} is {getattr(calibration, name)!r}, accepted: a text"
    for name, value in asdict(calibration.sampling).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"sampling.{name} is {value!r}, accepted: a finite number"
    if method not in accepted:
        return f"method is {method!r}, accepted: {', '.join(accepted)}"
    if not temperatures or len({len(temperatures), len(biases), len(skews)}) != 1:
        return (
            f"{len(temperatures)} temperatures, {len(biases)} biases and {len(skews)} skews, accepted: one of each a "
            "draft"
        )
    if not all(math.isfinite(t) and t > 0 for t in temperatures):
        return f"temperatures are {temperatures}, accepted: numbers above 0"
    if not all(math.isfinite(b) for b in biases):
        return f"biases are {biases}, accepted: finite numbers"
    if not all(-1 <= s <= 1 for s in skews):
        return f"skews are {skews}, accepted: numbers from -1 to 1"
    for name, values, having in (("biases", biases, ("affine", "beta")), ("skews", skews, ("beta",))):
        if method not in having and any(values):
            return f"{name} are {values}, accepted: 0 with method '{method}'"
    if method == IDENTITY and set(temperatures) != {1.0}:
        return f"temperatures are {temperatures}, accepted: 1 with method '{IDENTITY}'"
    return None
