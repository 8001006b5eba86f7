# Pictures of costs and of simulated load show the numbers that they are given and hold no texts that overlap.

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from drafters.scheduling.pictures import draw_frontier, draw_profile
from drafters.scheduling.profile import CostProfile
from drafters.scheduling.simulate import NO_DRAFTER, Estimate, Simulation
from tests.test_pictures import check_texts
from tests.test_profile import LEAST, grid


def spread(profile):
    points = [replace(p, low=0.8 * p.seconds, high=1.2 * p.seconds, count=5) for p in profile.verify]
    return replace(profile, verify=tuple(points))


@pytest.mark.parametrize("rows", [(1,), (1, 2), (1, 2, 4, 8, 16, 32)])
def test_pictures_of_profiles_hold_no_texts_that_overlap(rows):
    check_texts(draw_profile(spread(grid(random.Random(7), rows=rows, widths=range(1, 9)))))
    check_texts(draw_profile(CostProfile.from_dict(LEAST)))


def test_the_picture_shows_the_points_and_the_fit():
    profile = spread(grid(random.Random(8), rows=(1, 2), widths=range(1, 5)))
    left, right = draw_profile(profile).axes
    lines = {line.get_label(): line for line in left.lines}
    fit = profile.fit()
    for rows, name in ((1, "1 row"), (2, "2 rows")):
        raw = [[p.tokens, 1000 * p.seconds] for p in profile.verify if p.rows == rows]
        assert lines[name].get_xydata().tolist() == raw
        smooth = [[p.tokens, 1 / p.seconds] for p in fit.verify if p.rows == rows]
        assert smooth in [line.get_xydata().tolist() for line in right.lines]


def result(name, concurrency, total):
    same = {field: Estimate(1.0, 0.9, 1.1) for field in Simulation.__dataclass_fields__ if field not in {"name"}}
    known = {
        "name": name,
        "concurrency": concurrency,
        "tokens_per_second": Estimate(total, 0.9 * total, 1.1 * total),
        "tokens_per_second_per_user": Estimate(total / concurrency, 0.0, total),
        "drafts_per_row": Estimate(4 / concurrency**0.5, 0.0, 4.0),
    }
    return Simulation(**{**same, **known})


def cases():
    counts = (1, 2, 4, 8, 16, 32, 64)
    several = {NO_DRAFTER: 30, "off": 28, "fixed": 60, "prefix": 65, "a scheduler of a very long name indeed": 62}
    yield [result(name, count, rate * count**0.7) for name, rate in several.items() for count in counts]
    yield [result(NO_DRAFTER, 1, 30), result("prefix", 1, 50)]
    yield [replace(result("prefix", 1, 50), tokens_per_second_per_user=Estimate(math.nan, math.nan, math.nan))]


def test_the_picture_shows_every_line_and_no_texts_that_overlap():
    for found in cases():
        figure = draw_frontier(found)
        check_texts(figure)
        left, right = figure.axes
        names = {one.name for one in found}
        assert len(left.lines) == len(names)
        assert len(right.lines) == len(names - {NO_DRAFTER})
        for line, name in zip(left.lines, dict.fromkeys(one.name for one in found), strict=True):
            points = [(p.tokens_per_second_per_user.value, p.tokens_per_second.value) for p in found if p.name == name]
            assert np.array_equal(line.get_xydata(), np.array(points), equal_nan=True)
