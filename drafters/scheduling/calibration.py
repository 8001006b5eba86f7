# A drafter's confidence made honest: one temperature (and bias) a draft, fitted so that the product of confidences is
# the probability that the target accepts the drafts so far. Fitted at one sampling, for one drafter of one target.

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.checkpoint import write_whole
from drafters.errors import CheckpointError, ConfigError
from drafters.scheduling.observations import Observations
from drafters.types import SIGNALS, Sampling

__all__ = [
    "METHODS",
    "NUM_BINS",
    "Calibration",
    "bins_of",
    "calibrate",
    "calibration_error",
    "confidence_logit",
    "fit",
    "identity",
]

SCHEMA = 2
FILE = "calibration.json"
IDENTITY = "identity"
NUM_BINS = 15
# Confidences nearer to 0 or 1 are taken as this near: their logits are finite.
NEAREST = 1e-6
MOST = 20.0  # temperatures are searched from 1 / MOST to MOST
RIDGE = 0.5  # of (log T)^2 + b^2, against a sum over rounds
AGAIN = "run task=calibrate for this drafter"

Fit = Callable[[Tensor, Tensor, Tensor], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """sigmoid(logit(c_k) / T_k + b_k), T_k > 0: the order of confidences at a position stays. `method`: "temperature"
    (biases are 0), "affine", or "identity". `signal`: which of SIGNALS c_k is. `sampling`: what it was fitted at.
    `provenance`: any JSON-able facts.

    It reads c_k alone, so what it gives depends on tokens before k only, as the confidence does.
    Raises CheckpointError for values that are no calibration.
    """

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
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
        if self.method == IDENTITY:
            return wide_BS
        return calibrate(wide_BS, self.temperatures[:num_slots], self.biases[:num_slots])

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
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"
        return write_whole(folder / FILE, lambda path: path.write_text(text), make_folder=False)

    @classmethod
    def load(cls, folder: Path) -> "Calibration":
        """The calibration of a `drafter` folder. Raises CheckpointError when there is none, or it is damaged."""
        path = folder / FILE
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file; {AGAIN}") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; {AGAIN}") from error
        schema = values.pop("schema", None) if isinstance(values, dict) else None
        if schema != SCHEMA:
            raise CheckpointError(f"{path}: schema is {schema!r}; this version reads {SCHEMA}; {AGAIN}")
        try:
            numbers = {name: tuple(map(float, values[name])) for name in ("temperatures", "biases")}
            return cls(**{**values, **numbers, "sampling": Sampling(**values["sampling"])})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged: {type(error).__name__} {error}; {AGAIN}") from error


def identity(num_slots: int, *, sampling: Sampling, drafter_sha256: str, target_hash: str) -> Calibration:
    """No calibration: confidences as the drafter gives them."""
    return Calibration(
        temperatures=(1.0,) * num_slots,
        biases=(0.0,) * num_slots,
        method=IDENTITY,
        sampling=sampling,
        drafter_sha256=drafter_sha256,
        target_hash=target_hash,
    )


def calibrate(confidence_BS: Tensor, temperatures: Sequence[float], biases: Sequence[float]) -> Tensor:
    """sigmoid(logit(c_k) / T_k + b_k), [..., S]: S temperatures and biases, as `fit` gives them."""
    temperatures_S, biases_S = confidence_BS.new_tensor(temperatures), confidence_BS.new_tensor(biases)
    return torch.sigmoid(confidence_logit(confidence_BS) / temperatures_S + biases_S)


def confidence_logit(confidence: Tensor) -> Tensor:
    """log(c / (1 - c)), finite: c is taken to be at least 1e-6 away from 0 and 1."""
    return torch.logit(confidence.clamp(NEAREST, 1 - NEAREST))


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


def fit(observations: Observations, *, method: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(temperatures, biases), one of each a draft, fitted left to right with the earlier ones fixed.

    Both judge the cumulative product prod_{i<=k} c_i against whether drafts 1..k were accepted, on the rounds that
    proposed k drafts; T_k is from 1/20 to 20. "temperature": sequential temperature scaling (2607.05147), the T_k of
    the least expected calibration error, searched on a grid (the error has steps: no gradient), the nearest to 1 of
    equal ones. "affine": T_k and b_k of the least log loss, with a ridge that matters where rounds are few or all
    alike. A position that no round reached has the values of the one before. Raises ConfigError for another method.
    """
    if method not in METHODS:
        raise ConfigError(f"method: got '{method}'; accepted: {', '.join(METHODS)}")
    logit_NG = confidence_logit(observations.confidence_NG)
    log_before_N = logit_NG.new_zeros(observations.num_rounds)
    counted_NG, survived_NG, reached_NG = observations.counted_NG, observations.survived_NG, observations.reached_NG
    found: list[tuple[float, float]] = []
    for k in range(observations.num_slots):
        last = found[-1] if found else (1.0, 0.0)
        if reached_NG[:, k].any():
            kept_N = counted_NG[:, k]
            last = METHODS[method](logit_NG[kept_N, k], log_before_N[kept_N], survived_NG[kept_N, k])
        found.append(last)
        # NaN where k was not proposed, nor is anything after it.
        log_before_N = log_before_N + F.logsigmoid(logit_NG[:, k] / last[0] + last[1])
    return tuple(t for t, _ in found), tuple(b for _, b in found)


def _fit_temperature(logit_N: Tensor, log_before_N: Tensor, survived_N: Tensor) -> tuple[float, float]:
    before_N = log_before_N.exp()

    def error(log_t: float) -> tuple[float, float]:
        probability_N = before_N * torch.sigmoid(logit_N / math.exp(log_t))
        # Sums of the same bins may differ in their last digits.
        return round(calibration_error(probability_N, survived_N), 12), abs(log_t)

    centre, reach, steps = 0.0, math.log(MOST), 60
    for _ in range(3):
        grid = [centre + reach * i / steps for i in range(-steps, steps + 1)]
        centre = min((x for x in grid if abs(x) <= math.log(MOST) + 1e-9), key=error)
        reach, steps = reach / steps, 10
    return math.exp(centre), 0.0


def _fit_affine(logit_N: Tensor, log_before_N: Tensor, survived_N: Tensor) -> tuple[float, float]:
    from scipy.optimize import minimize

    log_lost_N = torch.log1p(-log_before_N.exp())

    def loss(log_t_b: Sequence[float]) -> tuple[float, list[float]]:
        """Value, and gradient in log T and b."""
        log_t, bias = map(float, log_t_b)
        scaled_N = logit_N / math.exp(log_t)
        z_N = scaled_N + bias
        survives_N = log_before_N + F.logsigmoid(z_N)
        # 1 - P c = (1 - P) + P (1 - c), with no difference of near numbers.
        fails_N = torch.logaddexp(log_lost_N, log_before_N + F.logsigmoid(-z_N))
        value = RIDGE * (log_t**2 + bias**2) - float(torch.where(survived_N, survives_N, fails_N).sum())
        slope_N = torch.sigmoid(-z_N) * torch.where(survived_N, -1.0, (survives_N - fails_N).exp())
        by_log_t, by_bias = -float((slope_N * scaled_N).sum()), float(slope_N.sum())
        return value, [by_log_t + 2 * RIDGE * log_t, by_bias + 2 * RIDGE * bias]

    limits = [(-math.log(MOST), math.log(MOST)), (None, None)]
    log_t, bias = minimize(loss, [0.0, 0.0], jac=True, method="L-BFGS-B", bounds=limits).x.tolist()
    return math.exp(log_t), bias


METHODS: dict[str, Fit] = {"temperature": _fit_temperature, "affine": _fit_affine}


def _problem(calibration: Calibration) -> str | None:
    """What is wrong with its values, if anything."""
    temperatures, biases, method = calibration.temperatures, calibration.biases, calibration.method
    accepted = (IDENTITY, *METHODS)
    if calibration.signal not in SIGNALS:
        return f"signal is {calibration.signal!r}, accepted: {', '.join(SIGNALS)}"
    if method not in accepted:
        return f"method is {method!r}, accepted: {', '.join(accepted)}"
    if not temperatures or len(temperatures) != len(biases):
        return f"{len(temperatures)} temperatures and {len(biases)} biases, accepted: one of each a draft"
    if not all(math.isfinite(t) and t > 0 for t in temperatures):
        return f"temperatures are {temperatures}, accepted: numbers above 0"
    if not all(math.isfinite(b) for b in biases):
        return f"biases are {biases}, accepted: finite numbers"
    if method != "affine" and any(biases):
        return f"biases are {biases}, accepted: 0 with method '{method}'"
    if method == IDENTITY and set(temperatures) != {1.0}:
        return f"temperatures are {temperatures}, accepted: 1 with method '{IDENTITY}'"
    return None
