# Schedules in the real decode loop: the text keeps the target's law (chi-square over all texts, see laws.py) and, at
# temperature 0, its very tokens, whatever is verified; a confidence that has seen its draft is found out and refused.

from dataclasses import replace
from functools import cache

import pytest
import torch

from drafters.decoding.loop import DecodeConfig, decode
from drafters.errors import ConfigError
from drafters.scheduling.calibration import Calibration
from drafters.scheduling.check import check_confidence
from drafters.scheduling.gate import Gated
from drafters.scheduling.observations import Observations
from drafters.scheduling.policy import Policy
from drafters.scheduling.schedulers import Asynchronous, Fixed, Off, Prefix, Schedule, Scheduler, Threshold
from drafters.scheduling.simulate import Replay
from drafters.types import Sampling
from tests.copy_drafter import CopyDrafter, CopySession, sharp_target
from tests.laws import ALPHA, GAMMA, chi_square_p, law_of, sample_texts, small_pair
from tests.scheduling_doubles import TableCosts, roofline
from tests.test_lossless import generate

PLAIN = Sampling(temperature=1.0)
SCHEDULERS = [Off(), Fixed(length=1), Threshold(threshold=0.7), Prefix(), Asynchronous(), Gated(inner=Asynchronous())]
pair = cache(small_pair)
law = cache(lambda: law_of(pair()[0], PLAIN))


class SureDrafter(CopyDrafter):
    """Says of each draft how probable the likeliest one was, which it knew before it drew."""

    def session(self, target, batch_size):
        return SureSession(self, self._copy, batch_size)


class SureSession(CopySession):
    def propose(self, length, draws):
        proposal = super().propose(length, draws)
        if proposal.probs_BSV is None:
            return replace(proposal, confidence_BS=torch.full(proposal.tokens_BS.shape, 0.8))
        return replace(proposal, confidence_BS=self.say(proposal))

    def say(self, proposal):
        return proposal.probs_BSV.amax(-1)


class KnowingDrafter(CopyDrafter):
    """Says of each draft how probable it is itself."""

    def session(self, target, batch_size):
        return KnowingSession(self, self._copy, batch_size)


class KnowingSession(SureSession):
    def say(self, proposal):
        return proposal.probs_BSV.gather(2, proposal.tokens_BS[..., None]).squeeze(2)


def costs(layout):
    """Steps that stay cheap for a while: some drafts pay, not all."""
    return TableCosts(steps_s=roofline(4 * 60, flat=60, rise=1.5), layout=layout)


def calibration(sharpness):
    return Calibration(
        temperatures=(1 / sharpness,) * GAMMA,
        biases=(0.0,) * GAMMA,
        skews=(0.0,) * GAMMA,
        method="temperature",
        sampling=PLAIN,
        drafter_sha256="",
        target_hash="",
    )


@pytest.mark.parametrize("layout", [pytest.param("padded", marks=pytest.mark.slow), "ragged"])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda one: type(one).__name__)
def test_texts_keep_the_law_of_the_target(scheduler, layout):
    target, copy = pair()
    policy = Policy(scheduler=scheduler, costs=costs(layout), calibration=calibration(0.8))
    drafter = SureDrafter(copy, block_size=GAMMA)
    counts, _ = sample_texts(target, drafter, sampling=PLAIN, num=3000, batch_size=50, policy=policy)
    assert chi_square_p(counts, law()) > ALPHA


def test_a_confidence_that_saw_its_draft_breaks_the_law_and_is_refused():
    target, copy = pair()
    policy = Policy(scheduler=Threshold(threshold=0.7))
    knowing = KnowingDrafter(copy, block_size=GAMMA)
    counts, _ = sample_texts(target, knowing, sampling=PLAIN, num=3000, batch_size=50, policy=policy)
    assert chi_square_p(counts, law()) < ALPHA
    with pytest.raises(ConfigError, match=r"^schedule: the confidence of KnowingDrafter in draft 1 changes with that"):
        check_confidence(target, knowing, torch.tensor([3, 0, 1]))
    check_confidence(target, SureDrafter(copy, block_size=GAMMA), torch.tensor([3, 0, 1]))
    check_confidence(target, CopyDrafter(copy, block_size=GAMMA), torch.tensor([3, 0, 1]))


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda one: type(one).__name__)
def test_greedy_text_is_the_target_s_own(scheduler):
    target, copy = (sharp_target(vocab_size=64, scale=8, noise=noise) for noise in (0.0, 0.5))
    prompts = [torch.tensor(ids) for ids in ([3, 9, 4], [7], [5, 5, 1, 2], [60, 3])]
    policy = Policy(scheduler=scheduler, costs=costs("padded"))
    config = DecodeConfig(max_new_tokens=20, stop_ids=(), batch_size=3, policy=policy)
    rows = decode(target, SureDrafter(copy, block_size=GAMMA), prompts, config)
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens == generate(target, prompt, 20)


class Told(Scheduler, Schedule):
    """Two drafts for each row; keeps what it was shown, said and told."""

    def __init__(self):
        self.rounds, self.said = [], None

    def begin(self, costs, num_slots):
        return self

    def want(self, num_rows):
        return GAMMA

    def lengths(self, survival_RS):
        self.said = survival_RS, torch.full((len(survival_RS),), 2)
        return self.said[1]

    def observe(self, outcome):
        if outcome.drafted:
            self.rounds.append((*self.said, outcome))


def test_what_is_verified_is_what_the_schedule_says():
    """Row by row, and no more than the drafter proposed or the text has room for."""
    target, copy = pair()
    drafter = SureDrafter(copy, block_size=GAMMA, ragged=True)
    prompts = [torch.tensor(ids) for ids in ([3, 0], [1], [2, 2, 4])]
    told = Told()
    config = DecodeConfig(
        max_new_tokens=9,
        sampling=PLAIN,
        stop_ids=(),
        batch_size=3,
        policy=Policy(scheduler=told, costs=costs("padded")),
    )
    rows = decode(target, drafter, prompts, config)
    assert told.rounds
    for survival_RS, lengths_R, seen in told.rounds:
        has_draft = (survival_RS > 0).sum(1)
        assert (seen.proposed_R <= torch.minimum(lengths_R, has_draft)).all()
        assert (seen.accepted_R <= seen.proposed_R).all()
        assert seen.drafted >= survival_RS.shape[1]
    assert max(r.proposed for row in rows for r in row.rounds) == 2


def test_off_and_a_gate_without_hope_draft_nothing():
    target, copy = pair()
    drafter = SureDrafter(copy, block_size=GAMMA)
    prompts = [torch.tensor([3, 0])] * 2
    hopeless = TableCosts(steps_s=tuple(float(1 + n) for n in range(20)), layout="padded", per_draft_s=1.0)
    for scheduler in (Off(), Gated()):
        policy = Policy(scheduler=scheduler, costs=hopeless)
        rows = decode(
            target, drafter, prompts, DecodeConfig(max_new_tokens=6, stop_ids=(), batch_size=2, policy=policy)
        )
        assert all(r.proposed == 0 for row in rows for r in row.rounds)


def test_confidences_are_recorded_where_asked():
    target, copy = pair()
    prompts = [torch.tensor([3, 0]), torch.tensor([1])]
    for record in (True, False):
        config = DecodeConfig(max_new_tokens=12, sampling=PLAIN, stop_ids=(), batch_size=2, record_confidence=record)
        rows = decode(target, SureDrafter(copy, block_size=GAMMA), prompts, config)
        for r in (r for row in rows for r in row.rounds):
            assert len(r.confidences) == (r.proposed if record else 0)
            assert all(0 < one <= 1 for one in r.confidences)
    config = DecodeConfig(max_new_tokens=12, stop_ids=(), record_confidence=True)
    (row,) = decode(target, CopyDrafter(copy, block_size=GAMMA), prompts[:1], config)
    assert {one for r in row.rounds for one in r.confidences} == {1.0}


@pytest.mark.parametrize("advance", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rounds_from_every_place_keep_the_law(advance):
    target, copy = pair()
    drafter = SureDrafter(copy, block_size=GAMMA)
    counts, _ = sample_texts(target, drafter, sampling=PLAIN, num=3000, batch_size=50, advance=advance)
    assert chi_square_p(counts, law()) > ALPHA


def test_rounds_from_every_place_are_those_that_a_text_begun_there_has():
    """At temperature 0 the text is one, so a round can be had again by decoding from its place."""
    target, copy = (sharp_target(vocab_size=64, scale=8, noise=noise) for noise in (0.0, 0.5))
    drafter = SureDrafter(copy, block_size=GAMMA)
    prompts = [torch.tensor(ids) for ids in ([3, 9, 4], [7], [5, 5, 1, 2])]
    config = DecodeConfig(max_new_tokens=24, stop_ids=(), batch_size=2, advance=1)
    rows = decode(target, drafter, prompts, config)
    counts = set()
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens == generate(target, prompt, 24)
        assert [r.context for r in row.rounds] == list(range(len(prompt) + 1, len(prompt) + 24))
        for place, r in enumerate(row.rounds):
            begun = torch.cat([prompt, torch.tensor(row.tokens[:place], dtype=torch.int64)])
            (again,) = decode(target, drafter, [begun], DecodeConfig(max_new_tokens=GAMMA + 2, stop_ids=()))
            assert r.gained == 1
            assert r.full == (24 - len(row.tokens[: place + 1]) > GAMMA)
            if r.full:
                assert (r.proposed, r.accepted) == again.rounds[0][:2]
                counts.add(r.accepted)
    assert counts == set(range(GAMMA + 1))


def test_a_round_from_every_place_that_a_stop_token_ends_is_not_full():
    target, copy = (sharp_target(vocab_size=64, scale=8, noise=noise) for noise in (0.0, 0.0))
    drafter = SureDrafter(copy, block_size=GAMMA)
    prompt = torch.tensor([3, 9, 4])
    text = generate(target, prompt, 12)
    stop = next(token for place, token in enumerate(text) if place > 4 and token not in text[:place])
    place = text.index(stop)
    (row,) = decode(target, drafter, [prompt], DecodeConfig(max_new_tokens=20, stop_ids=(stop,), advance=1))
    assert row.tokens == text[: place + 1]
    # A round from token i gains i + 1 to i + 4, of which only the last may be the stop token.
    assert [r.full for r in row.rounds] == [i + GAMMA + 1 <= place for i in range(place)]


def test_what_schedules_do_is_what_rounds_from_every_place_say():
    """At temperature 0 a text can be replayed exactly: the same rounds, from the same places, whatever is cut."""
    target, copy = (sharp_target(vocab_size=64, scale=8, noise=noise) for noise in (0.0, 0.5))
    drafter = SureDrafter(copy, block_size=GAMMA)
    prompt = torch.tensor([3, 9, 4])
    config = DecodeConfig(max_new_tokens=60, stop_ids=(), record_confidence=True)
    for scheduler in (Fixed(), Fixed(length=1), Fixed(length=0), Prefix()):
        policy = Policy(scheduler=scheduler, costs=costs("padded"))
        (real,) = decode(target, drafter, [prompt], replace(config, policy=policy))
        recorded = [row.rounds for row in decode(target, drafter, [prompt], replace(config, advance=1))]
        replay, schedule = Replay(Observations.of_rounds(recorded, GAMMA)), policy.begin(GAMMA)
        at, gains = 0, []
        while at or not gains:
            drafted = schedule.want(1)
            length = int(schedule.lengths(replay.survival_NG[at : at + 1, :drafted])[0]) if drafted else 0
            gains.append(1 + min(length, int(replay.accepted_N[at])))
            at = int(replay.next_NJ[at, gains[-1] - 1])
        assert len(gains) > 10
        assert gains == [r.gained for r in real.rounds][: len(gains)]


def test_a_schedule_that_goes_on_remembers_the_runs_before():
    target, copy = pair()
    policy = Policy(scheduler=Asynchronous(), costs=costs("padded"))
    assert policy.begin(GAMMA) is not policy.begin(GAMMA)
    lasting = policy.going_on(GAMMA)
    config = DecodeConfig(max_new_tokens=9, stop_ids=(), policy=lasting)
    decode(target, SureDrafter(copy, block_size=GAMMA), [torch.tensor([3, 0])], config)
    assert lasting.begin(GAMMA) is lasting.begin(GAMMA)
    assert len(lasting.begin(GAMMA)._past) == 2
    assert repr(lasting) == repr(policy)
