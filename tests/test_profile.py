# Costs between measured points and beyond them, against plain arithmetic; profiles that are written by hand, and what
# is refused in them; the monotone fit.

import json
import math
import random
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from drafters.errors import CheckpointError, ConfigError
from drafters.scheduling.profile import CostProfile, DraftPoint, OverheadPoint, VerifyPoint

LEAST = {"layout": "ragged", "verify": [{"tokens": 1, "seconds": 0.02}, {"tokens": 9, "seconds": 0.04}]}


def grid(rng, *, rows, widths, layout="padded"):
    """A profile with points at every number of rows and tokens a row, of random seconds."""
    return CostProfile(
        layout=layout,
        verify=tuple(VerifyPoint(rows=r, tokens=r * w, seconds=rng.uniform(1, 2)) for r in rows for w in widths),
        draft=tuple(DraftPoint(rows=r, length=w - 1, seconds=rng.uniform(0, 1)) for r in rows for w in widths),
        overhead=tuple(OverheadPoint(rows=r, seconds=rng.uniform(0, 1)) for r in rows),
    )


def naive_line(points, x):
    """Linear between the two nearest points; the last rising trend beyond them, the first value before."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1), (first_x, first_y) = points[-2], points[-1], points[0]
    slope = (y1 - y0) / (x1 - x0)
    slope = slope if slope > 0 else max((y1 - first_y) / (x1 - first_x), 0)
    return y1 + slope * (x - x1)


def naive_step(profile, rows, tokens):
    """Every curve at the same tokens a row, then a line through the rows."""
    width = tokens / rows
    known = sorted({p.rows for p in profile.verify})
    at_rows = []
    for count in known:
        curve = [(p.tokens / count, p.seconds) for p in profile.verify if p.rows == count]
        at_rows.append((count, naive_line(curve, width)))
    if rows <= known[-1]:
        return naive_line(at_rows, rows)
    (r0, y0), (r1, y1) = at_rows[-2:]
    return y1 + max(y1 - y0, 0) * (rows - r1) / (r1 - r0)


def test_seconds_are_those_of_the_naive_interpolation():
    rng = random.Random(0)
    for _ in range(300):
        rows = sorted(rng.sample(range(1, 20), rng.randint(2, 4)))
        widths = sorted(rng.sample(range(1, 12), rng.randint(1, 5)))
        profile = grid(rng, rows=rows, widths=widths)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                count = rng.randint(1, 24)
                tokens = rng.randint(count, 14 * count)
                assert profile.step_s(count, tokens) == pytest.approx(naive_step(profile, count, tokens), rel=1e-12)


def test_measured_points_are_given_back_to_the_bit():
    profile = grid(random.Random(1), rows=(1, 3, 7), widths=(1, 2, 6))
    for point in profile.verify:
        assert profile.step_s(point.rows, point.tokens) == point.seconds
    for drafted in profile.draft:
        assert profile.draft_s(drafted.rows, drafted.length) == drafted.seconds
    for rest in profile.overhead:
        assert profile.overhead_s(rest.rows) == rest.seconds


def test_tensors_give_what_numbers_give():
    profile = grid(random.Random(2), rows=(1, 2, 8), widths=(1, 2, 5))
    rows_N1, widths_W = torch.tensor([[1], [2], [5], [8]]), torch.tensor([1, 2, 3, 5])
    tokens_NW = rows_N1 * widths_W
    found_NW = profile.step_s(rows_N1, tokens_NW)
    assert found_NW.shape == (4, 4)
    assert found_NW.dtype == torch.float64
    for i, row in enumerate(tokens_NW.tolist()):
        count = int(rows_N1[i])
        assert found_NW[i].tolist() == [profile.step_s(count, tokens) for tokens in row]
        assert profile.step_s(count, tokens_NW[i]).tolist() == found_NW[i].tolist()
        assert profile.sps(tokens_NW[i], count).tolist() == (1 / found_NW[i]).tolist()
        lengths = profile.draft_s(rows_N1[:, 0], 2)[i], profile.draft_s(count, torch.tensor([2]))[0]
        assert lengths == (profile.draft_s(count, 2), profile.draft_s(count, 2))
        assert profile.overhead_s(rows_N1[:, 0])[i] == profile.overhead_s(count)
    assert profile.step_s(2, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_no_rows_cost_nothing():
    profile = grid(random.Random(3), rows=(2, 4), widths=(1, 2))
    none = torch.zeros(0, dtype=torch.int64)
    assert profile.tokens_of(none) == 0
    assert profile.round_s(none, 3) == 0
    assert profile.step_s(torch.tensor([0, 2]), torch.tensor([0, 2])).tolist() == [0, profile.step_s(2, 2)]


def test_tokens_follow_the_layout():
    lengths_R = torch.tensor([3, 0, 1, 1])
    profile = grid(random.Random(4), rows=(4, 5), widths=(1, 4))
    assert profile.tokens_of(lengths_R) == 4 * (1 + 3)
    ragged = replace(profile, layout="ragged")
    assert ragged.tokens_of(lengths_R) == 4 + 5
    for one, tokens in ((profile, 16), (ragged, 9)):
        assert one.round_s(lengths_R, 3) == one.step_s(4, tokens) + one.draft_s(4, 3) + one.overhead_s(4)


def test_what_lies_beyond_is_linear_with_one_warning():
    verify = tuple(VerifyPoint(rows=r, tokens=r * w, seconds=r + 0.1 * r * w) for r in (1, 2) for w in (1, 2))
    profile = CostProfile(layout="padded", verify=verify)
    with pytest.warns(UserWarning, match="beyond the largest measured `verify` point") as caught:
        found = [profile.step_s(2, 8), profile.step_s(6, 12)]
    assert found == pytest.approx([2 + 0.8, 6 + 1.2])
    assert len(caught) == 1


def test_more_work_is_never_cheaper_beyond_the_points():
    dip = (VerifyPoint(tokens=1, seconds=1), VerifyPoint(tokens=3, seconds=3), VerifyPoint(tokens=4, seconds=2.5))
    falling = (VerifyPoint(tokens=1, seconds=2), VerifyPoint(tokens=2, seconds=1))
    single = (VerifyPoint(tokens=2, seconds=1),)
    for points, want in ((dip, 2.5 + 4 * 0.5), (falling, 1.0), (single, 1.0)):
        with pytest.warns(UserWarning, match="beyond"):
            assert CostProfile(layout="ragged", verify=points).step_s(1, 8) == pytest.approx(want)


def test_points_without_rows_hold_for_all_rows():
    profile = CostProfile.from_dict(LEAST)
    assert [profile.step_s(rows, 5) for rows in (1, 3, 5)] == pytest.approx([0.03] * 3)
    assert profile.draft_s(3, 4) == profile.overhead_s(3) == 0
    assert profile.round_s(torch.tensor([4, 2]), 4) == pytest.approx(0.02 + 0.02 * 7 / 8)


def test_reading_is_free_only_where_it_was_not_measured():
    known = (DraftPoint(length=2, seconds=0.4), DraftPoint(length=4, seconds=0.6))
    profile = replace(CostProfile.from_dict(LEAST), draft=known)
    assert [profile.draft_s(1, n) for n in range(5)] == pytest.approx([0, 0.2, 0.4, 0.5, 0.6])
    read = replace(profile, draft=(DraftPoint(length=0, seconds=0.3), *known))
    assert [read.draft_s(1, n) for n in range(3)] == pytest.approx([0.3, 0.35, 0.4])


def test_fit_is_the_nearest_monotone_curve():
    rng = random.Random(5)
    for _ in range(30):
        profile = grid(rng, rows=(1, 4), widths=range(1, 8))
        counts = [rng.randint(1, 5) for _ in profile.verify]
        noisy = tuple(replace(p, count=n) for p, n in zip(profile.verify, counts, strict=True))
        fit = replace(profile, verify=noisy).fit()
        for rows in (1, 4):
            got = [p.seconds for p in fit.verify if p.rows == rows]
            assert got == sorted(got)
            raw = [(p.seconds, p.count) for p in noisy if p.rows == rows]
            assert got == pytest.approx(naive_isotonic(raw))
        assert all(p.low <= p.seconds <= p.high for p in fit.verify)
        assert fit.draft == profile.draft


def naive_isotonic(points):
    """The max-min formula: the largest, over beginnings, of the least mean of any stretch around a point."""

    def mean(i, j):
        part = points[i : j + 1]
        return sum(y * n for y, n in part) / sum(n for _, n in part)

    size = len(points)
    return [max(min(mean(i, j) for j in range(k, size)) for i in range(k + 1)) for k in range(size)]


def test_a_profile_survives_the_disk(tmp_path):
    profile = replace(
        grid(random.Random(6), rows=(1, 2), widths=(1, 3)),
        hardware={"device": "a machine", "num_threads": 2},
        dtype="bfloat16",
        target={"name": "a target"},
    )
    profile.save(tmp_path / "new" / "profile.json")
    assert CostProfile.load(tmp_path / "new" / "profile.json") == profile
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["profile.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        profile.save(tmp_path / "file" / "profile.json")


def test_the_least_that_a_person_writes_is_enough(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(LEAST))
    assert CostProfile.load(path) == CostProfile(
        layout="ragged", verify=(VerifyPoint(tokens=1, seconds=0.02), VerifyPoint(tokens=9, seconds=0.04))
    )


POINT = {"rows": 2, "tokens": 4, "seconds": 0.1}
WRONG = {
    "no layout": ({"verify": [POINT]}, r"profile\.layout: missing"),
    "no verify": ({"layout": "padded"}, r"profile\.verify: missing"),
    "a list": ([POINT], r"profile: got \[.*accepted: values by name"),
    "a word for a list": ({**LEAST, "verify": "none"}, r'verify: got "none"; accepted: a list of points'),
    "a number for a point": ({**LEAST, "verify": [3]}, r"verify\[0\]: got 3; accepted: values by name"),
    "no points": ({**LEAST, "verify": []}, r"verify: got \[\]; accepted: one point or more"),
    "layout": ({**LEAST, "layout": "flat"}, r'layout: got "flat"; accepted: padded or ragged'),
    "layout of a list": ({**LEAST, "layout": ["padded"]}, r"layout: got"),
    "schema": ({**LEAST, "schema": 2}, r"schema: got 2; accepted: 1"),
    "a typo": ({**LEAST, "verified": []}, r"profile\.verified: unknown; accepted: .*verify"),
    "a typo in a point": ({**LEAST, "verify": [{**POINT, "token": 1}]}, r"verify\[0\]\.token: unknown"),
    "no seconds": ({**LEAST, "verify": [{"tokens": 1}]}, r"verify\[0\]\.seconds: missing"),
    "fewer tokens than rows": ({**LEAST, "verify": [{**POINT, "tokens": 1}]}, r"tokens: got 1; accepted: .*2 or more"),
    "zero seconds": ({**LEAST, "verify": [{**POINT, "seconds": 0}]}, r"verify\[0\]\.seconds: got 0; .* more than 0"),
    "infinite": ({**LEAST, "verify": [{**POINT, "seconds": math.inf}]}, r"seconds: got Infinity; accepted: a finite"),
    "huge": ({**LEAST, "verify": [{**POINT, "seconds": 10**400}]}, r"seconds: got 1000.*; accepted: a finite"),
    "huge tokens": ({**LEAST, "verify": [{**POINT, "tokens": 10**400}]}, r"verify\[0\]\.tokens: got 1000"),
    "text": ({**LEAST, "verify": [{**POINT, "seconds": "1 ms"}]}, r'seconds: got "1 ms"; accepted: a finite'),
    "a flag": ({**LEAST, "verify": [{**POINT, "rows": True}]}, r"verify\[0\]\.rows: got true"),
    "half a token": ({**LEAST, "verify": [{**POINT, "tokens": 4.5}]}, r"verify\[0\]\.tokens: got 4.5"),
    "low above": ({**LEAST, "verify": [{**POINT, "low": 0.2}]}, r"verify\[0\]\.low: got 0.2; accepted: at most"),
    "high below": ({**LEAST, "verify": [{**POINT, "high": 0.05}]}, r"verify\[0\]\.high: got 0.05; accepted: at least"),
    "count": ({**LEAST, "verify": [{**POINT, "count": 0}]}, r"verify\[0\]\.count: got 0"),
    "twice": ({**LEAST, "verify": [POINT, POINT]}, r"verify: two points for 2 rows and tokens 4"),
    "some rows": ({**LEAST, "verify": [POINT, {"tokens": 1, "seconds": 1}]}, r"verify: some points have rows"),
    "length": ({**LEAST, "draft": [{"length": -1, "seconds": 0}]}, r"draft\[0\]\.length: got -1"),
    "draft seconds": ({**LEAST, "draft": [{"length": 1, "seconds": -1}]}, r"draft\[0\]\.seconds: got -1"),
    "overhead twice": ({**LEAST, "overhead": [{"seconds": 0}, {"seconds": 1}]}, r"overhead: two points for 0 rows"),
    "hardware": ({**LEAST, "hardware": "mine"}, r'hardware: got "mine"; accepted: values by name'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case, tmp_path):
    values, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        CostProfile.from_dict(values)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"profile.json: .*{message}"):
        CostProfile.load(path)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json: No such file"):
        CostProfile.load(tmp_path / "nowhere.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"deep\.json: not valid JSON"):
        CostProfile.load(tmp_path / "deep.json")
    (tmp_path / "cut.json").write_text('{"layout": "pad')
    with pytest.raises(ConfigError, match=r"cut\.json: not valid JSON"):
        CostProfile.load(tmp_path / "cut.json")
