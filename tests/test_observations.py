# Observations count what the rounds hold, survive a file, and refuse what does not fit.

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.decoding.metrics import conditional_acceptance
from drafters.decoding.records import Round
from drafters.errors import CheckpointError, DataError
from drafters.scheduling.observations import Observations


def made(accepted, confidences=(0.9, 0.5, 0.25), *, full=True):
    return Round(
        len(confidences), accepted, accepted + 1, full, 10, (), tuple(confidences), tuple(c / 2 for c in confidences)
    )


PROMPTS = [
    [made(2), made(3), made(1, full=False)],
    [made(0, full=False)],
    [made(0, ()), made(1, (0.75, 0.125))],
]


def random_prompts(*, seed, num_slots=4):
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(6):
        rounds = []
        for _ in range(int(torch.randint(0, 9, (), generator=generator))):
            proposed = int(torch.randint(0, num_slots + 1, (), generator=generator))
            accepted = int(torch.randint(0, proposed + 1, (), generator=generator))
            full = bool(torch.rand((), generator=generator) < 0.8)
            rounds.append(made(accepted, torch.rand(proposed, generator=generator).tolist(), full=full))
        prompts.append(rounds)
    return prompts


def test_full_rounds_become_rows_in_order():
    seen = Observations.of_rounds(PROMPTS, 3)
    assert (seen.num_rounds, seen.num_slots) == (4, 3)
    assert seen.accepted_N.tolist() == [2, 3, 0, 1]
    assert seen.proposed_N.tolist() == [3, 3, 0, 2]
    assert seen.prompt_N.tolist() == [0, 0, 2, 2]
    assert seen.context_N.tolist() == [10] * 4
    nan = math.nan
    expected = [[0.9, 0.5, 0.25], [0.9, 0.5, 0.25], [nan] * 3, [0.75, 0.125, nan]]
    torch.testing.assert_close(seen.confidence_NG, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    torch.testing.assert_close(seen.likeliest_NG, seen.confidence_NG / 2, equal_nan=True)
    assert seen.by("confidence") is seen
    assert seen.by("likeliest").confidence_NG is seen.likeliest_NG
    assert seen.counted_NG.tolist() == [[True] * 3, [True] * 3, [False] * 3, [True, True, False]]
    assert seen.survived_NG.tolist() == [[True, True, False], [True] * 3, [False] * 3, [True, False, False]]
    assert seen.reached_NG.tolist() == [[True] * 3, [True] * 3, [False] * 3, [True, True, False]]


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_those_of_the_formulas_on_rounds(seed):
    prompts = random_prompts(seed=seed)
    seen = Observations.of_rounds(prompts, 6)
    rounds = [r for of_prompt in prompts for r in of_prompt if r.full]
    for k in range(1, 7):
        assert seen.counted_NG[:, k - 1].tolist() == [r.proposed >= k for r in rounds]
        assert seen.survived_NG[:, k - 1].tolist() == [r.accepted >= k for r in rounds]
        assert seen.reached_NG[:, k - 1].tolist() == [r.proposed >= k and r.accepted >= k - 1 for r in rounds]
    shares = (seen.survived_NG.sum(0) / seen.reached_NG.sum(0)).tolist()
    assert shares == pytest.approx(conditional_acceptance(rounds, 6), nan_ok=True)


def test_some_rounds_can_be_taken():
    seen = Observations.of_rounds(PROMPTS, 3)
    kept = seen.where(seen.prompt_N == 2)
    assert kept.accepted_N.tolist() == [0, 1]
    with pytest.raises(DataError, match="0 rounds"):
        seen.where(seen.prompt_N == 1)


def test_a_file_gives_back_the_same(tmp_path):
    seen = Observations.of_rounds(random_prompts(seed=1), 5)
    path = tmp_path / "new" / "observations.safetensors"
    assert seen.save(path) == path
    seen.save(path)
    loaded = Observations.load(path)
    for name, values in vars(seen).items():
        torch.testing.assert_close(getattr(loaded, name), values, rtol=0, atol=0, equal_nan=True)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def damaged(name, change):
    def write(path):
        tensors = load_file(path)
        tensors[name] = change(tensors[name])
        save_file(tensors, path)

    return write


def without_prompts(path):
    tensors = load_file(path)
    del tensors["prompt_N"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
        (damaged("schema", lambda t: t + 1), "schema is 4; this version reads 3"),
        (damaged("schema", lambda t: t * math.nan), "schema is nan; this version reads 3"),
        (damaged("prompt_N", lambda t: t - 3), "negative numbers, accepted: 0 or more"),
        (damaged("context_N", lambda t: t - 100), "negative numbers, accepted: 0 or more"),
        (without_prompts, "accepted: .*prompt_N"),
        (damaged("accepted_N", lambda t: t + 4), "0 <= accepted <= proposed <= 3"),
        (damaged("accepted_N", lambda t: t[1:].clone()), "another tensor has not"),
        (damaged("proposed_N", lambda t: t.double()), "proposed_N is torch.float64"),
        (damaged("prompt_N", lambda t: t[:, None].clone()), "prompt_N has shape"),
        (damaged("confidence_NG", lambda t: t + 0.2), "not in 0..1"),
        (damaged("confidence_NG", lambda t: t.nan_to_num(0.5)), "not NaN where none was"),
        (damaged("confidence_NG", lambda t: t.masked_fill(t == 0.25, math.nan)), "not in 0..1"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage, said):
    path = tmp_path / "observations.safetensors"
    Observations.of_rounds(PROMPTS, 3).save(path)
    damage(path)
    with pytest.raises(DataError, match=said) as caught:
        Observations.load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Observations.of_rounds(PROMPTS, 3).save(tmp_path / "file" / "observations.safetensors")


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "no full round"),
        ([[made(1, full=False)]], "no full round"),
        ([[], [made(1)._replace(confidences=())]], "prompt 1 has 3 drafts and 0 confidences"),
        ([[made(1)._replace(confidences=(0.5, 0.5))]], "3 drafts and 2 confidences"),
        ([[made(1, (0.5,) * 4)]], "4 drafts; accepted: at most 3"),
        ([[made(1, (0.5, 1.5, 0.5))]], "not in 0..1"),
        ([[made(1, (0.5, math.nan, 0.5))]], "not in 0..1"),
    ],
)
def test_rounds_that_do_not_fit_are_refused(prompts, said):
    with pytest.raises(DataError, match=said):
        Observations.of_rounds(prompts, 3)


def test_a_round_cut_short_needs_no_confidences():
    cut = made(1, full=False)._replace(confidences=())
    assert Observations.of_rounds([[cut, made(2)]], 3).num_rounds == 1


def test_wrong_shapes_are_refused_when_made_by_hand():
    seen = Observations.of_rounds(PROMPTS, 3)
    with pytest.raises(DataError, match=r"accepted_N is torch\.int32"):
        replace(seen, accepted_N=seen.accepted_N.int())
