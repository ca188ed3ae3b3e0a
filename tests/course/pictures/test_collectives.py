"""Scenes of collectives: every number, every origin, whole tensors on each rank."""

import pytest

from course.measure.flow import Flow
from course.pictures.collectives import RANK_COLOR, draw_flow, draw_flows, flow_steps, rank_color

SUMS = [[[(0, 0), (1, 0)], [(0, 1), (1, 1)]]] * 2
ALL_REDUCE = Flow([[0, 1], [1, 2]], [[1, 3], [1, 3]], SUMS)
GATHER = Flow([[5], [6]], [[5, 6], None], [[[(0, 0)], [(1, 0)]], None])


def words(scene):
    return [mark.text for mark in scene.marks if mark.text]


def test_whole_tensors_are_written_on_every_rank_before_and_after():
    marks = draw_flow(ALL_REDUCE, "all-reduce").by_key
    assert [[marks[f"0.start{rank}.{element}"].text for element in (0, 1)] for rank in (0, 1)] == [
        ["0", "1"],
        ["1", "2"],
    ]
    assert [[marks[f"0.{rank}.{element}"].text for element in (0, 1)] for rank in (0, 1)] == [
        ["1\n0 + 1", "3\n0 + 1"]
    ] * 2
    assert marks["0.start1.0"].x < marks["0.start1.1"].x < marks["0.1.0"].x
    assert marks["0.rank0"].y < marks["0.rank1"].y
    assert {"all-reduce", "rank 0", "rank 1", "before", "after"} <= set(words(draw_flow(ALL_REDUCE, "all-reduce")))


def test_a_sum_has_a_stripe_for_each_rank_and_says_what_is_in_it():
    scene = draw_flow(ALL_REDUCE)
    stripes = [mark for mark in scene.marks if "<" in mark.key]
    assert [mark.fill for mark in stripes] == list(RANK_COLOR[:2]) * 4
    assert scene.by_key["0.1.1"].fact == "Rank 1 has 3 in element 1: 1 (element 1 of rank 0) + 2 (element 1 of rank 1)"


def test_a_copy_has_the_colour_of_its_rank_and_names_it():
    marks = draw_flow(GATHER).by_key
    assert [marks[f"0.0.{element}"].fill for element in (0, 1)] == list(RANK_COLOR[:2])
    assert [marks[f"0.0.{element}"].text for element in (0, 1)] == ["5\nfrom 0", "6\nfrom 1"]


def test_a_rank_without_a_result_says_nothing():
    assert words(draw_flow(GATHER)).count("nothing") == 1
    assert draw_flow(GATHER).table.rows[1] == ["rank 1", "6", "nothing", ""]


def test_pointing_at_a_number_lights_all_its_copies():
    scene = draw_flow(ALL_REDUCE)
    lights = set(scene.by_key["0.start1.0"].lights)
    lit = {mark.key for mark in scene.marks if lights & set(mark.tags)}
    assert lit == {"0.start1.0", "0.0.0", "0.1.0", "0.0.0<0.1.0", "0.1.0<0.1.0"}


def test_elements_travel_from_where_they_were():
    before, after = flow_steps(GATHER, "gather")
    assert (before.by_key["0.0.1"].x, before.by_key["0.0.1"].y) == (
        before.by_key["0.start1.0"].x,
        before.by_key["0.start1.0"].y,
    )
    assert after.by_key["0.0.1"] == draw_flow(GATHER, "gather").by_key["0.0.1"]
    assert before.table.rows[0] == ["rank 0", "5", "", ""]

    before, after = flow_steps(ALL_REDUCE)
    part = "0.0.1<0.1.1"  # of element 1 of rank 1, in that of rank 0
    assert before.by_key[part].width == before.by_key["0.start1.1"].width == 2 * after.by_key[part].width
    assert before.by_key[part].y == before.by_key["0.start1.1"].y
    assert before.by_key[part].x == before.by_key["0.start1.1"].x < after.by_key[part].x
    assert "0.0.1" not in before.by_key  # the sum is not there yet
    keys = list(before.by_key)
    assert keys.index(part) < keys.index("0.start1.1")  # below it, so that its number can be read


@pytest.mark.parametrize("num_columns", [1, 2])
def test_several_flows_stay_on_the_paper_and_apart(num_columns):
    scene = draw_flows({"all-reduce": ALL_REDUCE, "gather": GATHER, "again": GATHER}, num_columns)
    assert scene.title == "all-reduce, gather, again"
    spans = []
    for number in range(3):
        marks = [mark for mark in scene.marks if mark.key.startswith(f"{number}.")]
        right, bottom = max(mark.x + mark.width for mark in marks), max(mark.y + mark.height for mark in marks)
        spans.append((min(mark.x for mark in marks), right, min(mark.y for mark in marks), bottom))
    assert max(right for _, right, _, _ in spans) <= scene.width
    assert max(bottom for _, _, _, bottom in spans) <= scene.height
    if num_columns == 2:
        assert spans[0][1] < spans[1][0]
        assert spans[0][3] < spans[2][2]
    assert [row[0] for row in scene.table.rows] == ["all-reduce"] * 2 + ["gather"] * 2 + ["again"] * 2


def test_no_two_ranks_have_the_same_colour():
    colors = [rank_color(rank) for rank in range(24)]
    assert len(set(colors)) == 24 and colors[:8] == list(RANK_COLOR)
