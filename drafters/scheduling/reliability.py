# How far a confidence can be believed, by draft position: calibration error with its interval and what chance alone
# would show, Brier score, ROC-AUC; as values, tables and reliability diagrams. Raw beside calibrated, and conditional
# (draft k, given the ones before) beside cumulative (all drafts up to k, which is what schedulers read).

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.decoding.metrics import bootstrap_ci
from drafters.decoding.pictures import BLUE, GREY, TEXT, tidy
from drafters.decoding.render import Section, markdown, number, tables
from drafters.errors import ConfigError, DataError
from drafters.scheduling.calibration import NUM_BINS, bins_of, calibrate, calibration_error, fit
from drafters.scheduling.observations import Observations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group

__all__ = [
    "calibration_error_ci",
    "chance_errors",
    "cross_validated",
    "draw_reliability",
    "measure_reliability",
    "reliability_sections",
    "reliability_tables",
    "reliability_to_markdown",
]

KINDS = {
    "cumulative": "Confidence that all drafts up to one are accepted",
    "conditional": "Confidence in a draft, when all before it were accepted",
}
SHARES = ("draft", "rounds", "accepted", "said")
NUM_DRAWS = 200
SIGNAL_NAMES = {"confidence": "the drafter's own confidence", "likeliest": "its likeliest token's probability"}
NUM_RESAMPLES = 1000

# (probability, label, prompt), [N] each.
Judged = tuple[Tensor, Tensor, Tensor]


def cross_validated(observations: Observations, *, method: str, folds: int = 5, seed: int = 0) -> Tensor:
    """Calibrated conditional confidences [N, G], each by a fit (`calibration.fit`) to the rounds of other prompts.

    Prompts, not rounds, are dealt to `folds` parts, at random by `seed`; as many parts as prompts where there are
    fewer. Raises ConfigError for fewer than 2 folds, DataError for fewer than 2 prompts.
    """
    if folds < 2:
        raise ConfigError(f"folds: got {folds}; accepted: 2 or more")
    prompts_P, number_N = observations.prompt_N.unique(return_inverse=True)
    if len(prompts_P) < 2:
        raise DataError(
            "observations: all rounds are of one prompt; accepted: 2 or more, to fit on some and judge others"
        )
    order_P = torch.randperm(len(prompts_P), generator=torch.Generator().manual_seed(seed))
    fold_N = order_P[number_N] % folds
    found_NG = observations.confidence_NG.clone()
    for fold in fold_N.unique().tolist():
        judged_N = fold_N == fold
        found_NG[judged_N] = calibrate(found_NG[judged_N], fit(observations.where(~judged_N), method=method))
    return found_NG


def squared_error(observations: Observations, calibrated_NG: Tensor) -> float:
    """Mean squared error of cumulative confidences, over all drafts that were proposed: what tells signals apart, since
    both an error of calibration and one of telling drafts apart add to it."""
    error_NG = (calibrated_NG.cumprod(1) - observations.survived_NG.double()) ** 2
    return float(error_NG[observations.counted_NG].mean())


def measure_reliability(observations: Observations, calibrated_NG: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Every figure by kind, confidence and position, JSON-able: found["cumulative"]["calibrated"][k - 1]["ece"].

    `calibrated_NG`: conditional, in the order of the rounds: of `cross_validated`, or `Calibration.apply` where the
    fit saw other rounds. Cumulative figures count rounds that proposed draft k, conditional ones those of them where
    drafts 1..k-1 were accepted. Shares and scores, not percents; None where nothing, or one outcome only, was seen.
    `ece`, `ece_ci95`, `ece_floor`: `calibration_error`, `calibration_error_ci`, mean of `chance_errors`. `brier`: mean
    squared error; `brier_skill`: 1 - brier / that of the base rate. `auc`: ROC-AUC of telling accepted from not.
    """
    found: dict[str, Any] = {
        "rounds": observations.num_rounds,
        "prompts": len(observations.prompt_N.unique()),
        "num_bins": NUM_BINS,
    }
    for kind in KINDS:
        found[kind] = {
            name: [_figures(_judged(observations, values, kind, k), seed) for k in range(observations.num_slots)]
            for name, values in (("raw", observations.confidence_NG), ("calibrated", calibrated_NG))
        }
    return found


def calibration_error_ci(
    probability_N: Tensor, label_N: Tensor, prompt_N: Tensor, *, chance_C: Tensor, seed: int
) -> tuple[float, float]:
    """95 % interval of `calibration_error`, by resampling prompts; `chance_C` are its `chance_errors`. NaN for one
    prompt.

    With e the error and low to high the interval of resamples: 2 e - high to 2 e - low, not below 0 (reverse
    percentile), since chance makes an error larger, never smaller, and resampling adds chance: resamples lie above e
    as e lies above the true error. It may end below e. It begins at 0 where true confidences show such an error, too,
    more often than one time in 40.
    """
    prompts_P, number_N = prompt_N.unique(return_inverse=True)
    sums_PC = torch.zeros((len(prompts_P), NUM_BINS + 1), dtype=torch.float64)
    sums_PC.index_put_((number_N, bins_of(probability_N)), label_N.double() - probability_N, accumulate=True)
    sums_PC[:, NUM_BINS] = torch.bincount(number_N, minlength=len(prompts_P)).double()

    def error(sums_RC: Tensor) -> Tensor:
        return sums_RC[:, :NUM_BINS].abs().sum(1) / sums_RC[:, NUM_BINS]

    low, high = bootstrap_ci(sums_PC.tolist(), error, seed=seed, num_resamples=NUM_RESAMPLES)
    found = calibration_error(probability_N, label_N)
    if math.isnan(low):
        return low, high
    is_chance = (chance_C >= found).double().mean() > 1 / 40
    return 0.0 if is_chance else max(0.0, 2 * found - high), max(0.0, 2 * found - low)


def chance_errors(probability_N: Tensor, *, seed: int) -> Tensor:
    """The `calibration_error` of 200 draws [C] of labels from the probabilities, each round on its own: what a
    perfectly calibrated confidence would show with so few rounds. Their mean is the noise floor. NaN of nothing."""
    generator = torch.Generator().manual_seed(seed)
    errors = []
    for _ in range(NUM_DRAWS):
        drawn_N = torch.rand(probability_N.shape, generator=generator, dtype=torch.float64) < probability_N
        errors.append(calibration_error(probability_N, drawn_N))
    return torch.tensor(errors, dtype=torch.float64)


def reliability_sections(found: Mapping[str, Any]) -> list[Section]:
    """One table a kind of confidence, of what `measure_reliability` found, and what was found of signals."""
    notes = [
        *_signals(found),
        "In percent, but skill and AUC. Said: the mean confidence, raw. Error: the mean distance of confidence from "
        "the share accepted, 15 bins; its 95 % interval by prompt, mirrored, since chance only adds to an error: it "
        "may end below the figure. By chance: what true confidences would show with so few rounds. Skill: how much of "
        "the squared error of always saying the base rate is gone.",
    ]
    return [
        Section(
            title=title,
            header=[*SHARES, "error,\nraw", "error, calibrated\n[95 %]", "by\nchance", "skill", "AUC"],
            rows=[
                _row(k, *pair)
                for k, pair in enumerate(zip(found[kind]["raw"], found[kind]["calibrated"], strict=True), start=1)
            ],
            notes=notes if kind == list(KINDS)[-1] else (),
        )
        for kind, title in KINDS.items()
    ]


def reliability_tables(found: Mapping[str, Any]) -> "Group":
    """The tables for a terminal of 80 columns."""
    return tables(reliability_sections(found), width=80)


def reliability_to_markdown(found: Mapping[str, Any]) -> str:
    """The tables as Markdown, each under a heading of second level."""
    return "\n".join(markdown(section) for section in reliability_sections(found))


def draw_reliability(observations: Observations, calibrated_NG: Tensor) -> "Figure":
    """Reliability diagrams of the cumulative confidence at positions 1..3 (at most G): the share accepted in each bin
    against its mean confidence, raw and calibrated, above the number of rounds in the bin."""
    from matplotlib.figure import Figure

    shown = min(3, observations.num_slots)
    figure = Figure(figsize=(max(4.4, 3.3 * shown), 4.9), layout="constrained")
    panels = figure.subplots(2, shown, sharex=True, squeeze=False, height_ratios=(3, 1))
    for k in range(shown):
        sides = [
            ("raw", GREY, "s", _judged(observations, observations.confidence_NG, "cumulative", k)),
            ("calibrated", BLUE, "o", _judged(observations, calibrated_NG, "cumulative", k)),
        ]
        _draw_diagram(panels[0][k], sides, title="Draft 1 accepted" if k == 0 else f"Drafts 1 to {k + 1} accepted")
        _draw_counts(panels[1][k], sides)
    panels[0][0].set_ylabel("share accepted", fontsize=10, color=TEXT)
    panels[1][0].set_ylabel("rounds", fontsize=10, color=TEXT)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _judged(observations: Observations, confidence_NG: Tensor, kind: str, k: int) -> Judged:
    """The rounds that judge position k (from 0) of a conditional confidence."""
    is_kept_NG = observations.counted_NG if kind == "cumulative" else observations.reached_NG
    probability_NG = confidence_NG.cumprod(1) if kind == "cumulative" else confidence_NG
    kept_N = is_kept_NG[:, k]
    return probability_NG[kept_N, k], observations.survived_NG[kept_N, k], observations.prompt_N[kept_N]


def _figures(judged: Judged, seed: int) -> dict[str, Any]:
    probability_N, label_N, prompt_N = judged
    if not len(probability_N):
        names = ("base_rate", "mean_confidence", "ece", "ece_ci95", "ece_floor", "brier", "brier_skill", "auc")
        return {"rounds": 0, **dict.fromkeys(names)}
    base = float(label_N.double().mean())
    brier = float((probability_N - label_N.double()).square().mean())
    chance_C = chance_errors(probability_N, seed=seed)
    bounds = calibration_error_ci(probability_N, label_N, prompt_N, chance_C=chance_C, seed=seed)
    return {
        "rounds": len(probability_N),
        "base_rate": base,
        "mean_confidence": float(probability_N.mean()),
        "ece": calibration_error(probability_N, label_N),
        "ece_ci95": None if math.isnan(bounds[0]) else list(bounds),
        "ece_floor": float(chance_C.mean()),
        "brier": brier,
        "brier_skill": 1 - brier / (base * (1 - base)) if 0 < base < 1 else None,
        "auc": _auc(probability_N, label_N) if 0 < base < 1 else None,
    }


def _auc(probability_N: Tensor, label_N: Tensor) -> float:
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(probability_N, label_N.long()))


def _row(k: int, raw: Mapping[str, Any], calibrated: Mapping[str, Any]) -> list[str]:
    shares = [_percent(raw[name]) for name in ("base_rate", "mean_confidence", "ece")]
    error = _percent(calibrated["ece"])
    if calibrated["ece_ci95"] is not None:
        low, high = (number(100 * bound, ".1f") for bound in calibrated["ece_ci95"])
        error += f" [{low}, {high}]"
    scores = [_number(calibrated[name]) for name in ("brier_skill", "auc")]
    return [str(k), f"{raw['rounds']:,}", *shares, error, _percent(calibrated["ece_floor"]), *scores]


def _signals(found: Mapping[str, Any]) -> list[str]:
    """What is said of the signal, where it was chosen."""
    if "signal" not in found:
        return []
    told = ", ".join(f"{1000 * error:.1f} of {SIGNAL_NAMES[name]}" for name, error in found["squared_errors"].items())
    errors = f" Squared errors of all drafts up to one, calibrated, in thousandths: {told}." if told else ""
    return [f"Signal: {SIGNAL_NAMES[found['signal']]}.{errors}"]


def _percent(share: float | None) -> str:
    return "-" if share is None else number(100 * share, ".1f")


def _number(value: float | None) -> str:
    return "-" if value is None else number(value, ".2f")


def _draw_diagram(axes: "Axes", sides: Sequence[tuple[str, str, str, Judged]], *, title: str) -> None:
    from matplotlib.ticker import PercentFormatter

    tidy(axes, title=title)
    axes.plot([0, 1], [0, 1], color=TEXT, lw=1, ls=(0, (4, 2)), label="perfectly calibrated")
    for name, colour, marker, (probability_N, label_N, _) in sides:
        count_B, mean_B, share_B = _by_bin(probability_N, label_N)
        low, high = _share_ci(share_B, count_B)
        axes.vlines(mean_B.tolist(), low.tolist(), high.tolist(), color=colour, alpha=0.5, lw=1.2)
        axes.plot(mean_B.tolist(), share_B.tolist(), color=colour, marker=marker, ms=4.5, lw=1.7, label=name)
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw_counts(axes: "Axes", sides: Sequence[tuple[str, str, str, Judged]]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    tidy(axes, title="")
    width, most = 0.4 / NUM_BINS, 1
    for shift, (_, colour, _, (probability_N, _, _)) in zip((-0.5, 0.5), sides, strict=True):
        counts = torch.bincount(bins_of(probability_N), minlength=NUM_BINS).tolist()
        axes.bar([(b + 0.5) / NUM_BINS + shift * width for b in range(NUM_BINS)], counts, width=width, color=colour)
        most = max(most, *counts)
    axes.set_xlabel("confidence")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ticks = MaxNLocator(integer=True, nbins=3, min_n_ticks=1).tick_values(0, most)
    axes.set_yticks([tick for tick in ticks if 0 <= tick <= most])
    axes.set_ylim(0, most * 1.08)


def _by_bin(probability_N: Tensor, label_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rounds, mean probability, share accepted) of the bins that hold a round."""
    bin_N = bins_of(probability_N)
    count_B, sum_B, stood_B = (
        torch.bincount(bin_N, weights=values_N, minlength=NUM_BINS)
        for values_N in (torch.ones_like(probability_N), probability_N, label_N.to(probability_N.dtype))
    )
    used_B = count_B > 0
    return count_B[used_B], sum_B[used_B] / count_B[used_B], stood_B[used_B] / count_B[used_B]


def _share_ci(share_B: Tensor, count_B: Tensor, z: float = 1.96) -> tuple[Tensor, Tensor]:
    """95 % intervals of shares, after Wilson (1927): of one round too, and of a share of 0 or 1."""
    centre_B = (share_B + z**2 / (2 * count_B)) / (1 + z**2 / count_B)
    half_B = z * (share_B * (1 - share_B) / count_B + (z / (2 * count_B)) ** 2).sqrt() / (1 + z**2 / count_B)
    return centre_B - half_B, centre_B + half_B
