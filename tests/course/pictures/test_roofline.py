"""Operations below a roof: where their points are, what they say, and numbers that do not cover each other."""

import pytest

from course.pictures.roofline import draw_roofline
from course.sizing import DGX_H100, Plan, operations, ridge
from course.sizing.runs import LLAMA_70B

OPERATIONS = operations(Plan(LLAMA_70B, 4, 1, 4, fused_attention=True, recompute="none"))


def middle(mark):
    return mark.x + mark.width / 2, mark.y + mark.height / 2


def test_without_times_all_are_on_the_roof_and_with_times_as_far_below_as_they_were_slower():
    on, below = (
        draw_roofline(OPERATIONS, DGX_H100, seconds)
        for seconds in (None, {each.name: 3 * each.seconds(DGX_H100) for each in OPERATIONS})
    )
    peak = on.by_key["peak"]
    for number, each in enumerate(OPERATIONS, start=1):
        (x, y), mark = middle(on.by_key[f"op{number}"]), below.by_key[f"op{number}"]
        if each.intensity > ridge(DGX_H100):
            assert y == pytest.approx(peak.y + peak.points[0][1], abs=1)
        assert middle(mark)[0] == pytest.approx(x) and "33% of the roof" in mark.fact and each.name in mark.fact
        assert middle(mark)[1] > y + 10
    assert len(on.table.rows) == len(OPERATIONS) and "4 of 10 operations are limited by the memory" in on.alt


def test_numbers_do_not_cover_each_other():
    scene = draw_roofline(OPERATIONS, DGX_H100)
    spots = [scene.by_key[f"op{number}.number"] for number in range(1, len(OPERATIONS) + 1)]
    for one in spots:
        assert [each for each in spots if abs(each.x - one.x) < 14 and abs(each.y - one.y) < 12] == [one]
