# What every threshold would do, against a plain loop over the rounds, and what is recommended from it.

import math

import pytest
import torch

from drafters.errors import ConfigError
from drafters.scheduling.observations import Observations
from drafters.scheduling.profile import CostProfile, DraftPoint, OverheadPoint, VerifyPoint
from drafters.scheduling.sweep import recommended, sweep, sweep_section

THRESHOLDS = [0.0, 0.3, 0.6, 1.0]
COSTS = CostProfile(
    layout="padded",
    verify=tuple(VerifyPoint(tokens=n, seconds=0.5 + 0.25 * n) for n in range(1, 5)),
    draft=(DraftPoint(length=3, seconds=0.25),),
    overhead=(OverheadPoint(seconds=0.125),),
)


def recorded(num_rounds=200, seed=0):
    """Rounds of up to three drafts, fewer at times."""
    generator = torch.Generator().manual_seed(seed)
    confidence_NG = torch.rand(num_rounds, 3, generator=generator, dtype=torch.float64)
    proposed_N = torch.randint(0, 4, (num_rounds,), generator=generator)
    stands_NG = (torch.rand(num_rounds, 3, generator=generator) < confidence_NG) & (
        proposed_N[:, None] > torch.arange(3)
    )
    said_NG = confidence_NG.masked_fill(torch.arange(3) >= proposed_N[:, None], math.nan)
    return Observations(
        confidence_NG=said_NG,
        likeliest_NG=said_NG,
        accepted_N=stands_NG.long().cumprod(1).sum(1),
        proposed_N=proposed_N,
        prompt_N=torch.zeros(num_rounds, dtype=torch.int64),
        context_N=torch.arange(num_rounds),
    )


def test_rows_are_those_of_a_loop():
    observations = recorded()
    rows = sweep(observations, observations.confidence_NG, THRESHOLDS, COSTS)
    for threshold, row in zip(THRESHOLDS, rows, strict=True):
        verified, accepted, seconds = [], [], 0.0
        for confidence, stood in zip(
            observations.confidence_NG.tolist(), observations.accepted_N.tolist(), strict=True
        ):
            count = 0
            while count < 3 and confidence[count] >= threshold:
                count += 1
            verified.append(count)
            accepted.append(min(count, stood))
            seconds += 0.5 + 0.25 * (1 + count) + 0.25 + 0.125
        assert row.verified == pytest.approx(sum(verified) / 200)
        assert row.accepted == pytest.approx(sum(accepted) / 200)
        assert row.rejected == pytest.approx(row.verified - row.accepted)
        rate = sum(accepted) / sum(verified) if any(verified) else math.nan
        assert row.acceptance_rate == pytest.approx(rate, nan_ok=True)
        assert row.accepted_length == pytest.approx(1 + sum(accepted) / 200)
        assert row.tokens_per_second == pytest.approx((200 + sum(accepted)) / seconds)


def test_engines_are_told_a_threshold_on_the_confidence_as_it_is():
    """Corrected to half of what it was, the same drafts are at half the threshold."""
    observations = recorded()
    raw = sweep(observations, observations.confidence_NG, [0.2, 0.4, 0.8], COSTS)
    corrected = sweep(observations, observations.confidence_NG / 2, [0.1, 0.2, 0.4], COSTS)
    found = recommended(corrected, raw)
    assert found["llama.cpp --spec-draft-p-min"] == 2 * found["schedule=threshold"]
    notes = sweep_section(corrected, found=found, calibrated=True).notes
    assert "calibrated confidence" in notes[0]
    assert f"{found['llama.cpp --spec-draft-p-min']:g} for llama.cpp --spec-draft-p-min" in notes[1]


def test_without_costs_nothing_is_recommended():
    observations = recorded()
    rows = sweep(observations, observations.confidence_NG, THRESHOLDS)
    assert all(math.isnan(row.tokens_per_second) for row in rows)
    assert recommended(rows, rows) == {}
    assert len(sweep_section(rows, found={}, calibrated=False).notes) == 1


@pytest.mark.parametrize("wrong", [[], [-0.1], [0.5, 1.5]])
def test_thresholds_out_of_range_are_refused(wrong):
    observations = recorded(5)
    with pytest.raises(ConfigError, match=r"^task\.thresholds: got"):
        sweep(observations, observations.confidence_NG, wrong)
