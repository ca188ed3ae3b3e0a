"""Scenes of collectives: every number, every origin, whole tensors on each rank."""

from functools import partial
from itertools import pairwise

import pytest

from course.measure.flow import trace_flow
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.pictures.collectives import draw_flows, flow_steps, numbers_text
from course.pictures.style import RANK_COLOR, rank_color
from course.sizing.flow import Flow, row_and_column
from tests.support.pictures import faults, lit, marks, texts

SUMS = [[[(0, 0), (1, 0)], [(0, 1), (1, 1)]]] * 2
ALL_REDUCE = Flow([[0, 1], [1, 2]], [[1, 3], [1, 3]], SUMS)
SCATTERED = [[[(0, 0), (1, 0)]], [[(0, 1), (1, 1)]]]
GATHER = Flow([[5], [6]], [[5, 6], None], [[[(0, 0)], [(1, 0)]], None])


def draw_flow(flow, title=""):
    return draw_flows({title: flow}, 1)


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
    assert {"all-reduce", "rank 0", "rank 1", "before", "after"} <= {*texts(draw_flow(ALL_REDUCE, "all-reduce"), "")}


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
    assert texts(draw_flow(GATHER), "").count("nothing") == 1
    assert draw_flow(GATHER).table.rows[1] == ["rank 1", "6", "nothing", ""]


def test_pointing_at_a_number_lights_all_its_copies():
    copies = lit(draw_flow(ALL_REDUCE), "0.start1.0")
    assert copies == {"0.start1.0", "0.0.0", "0.1.0", "0.0.0<0.1.0", "0.1.0<0.1.0"}


def spot(mark):
    return mark.x, mark.y


def test_what_one_rank_gets_travels_from_where_it_was():
    whole, before, after = flow_steps(GATHER, "gather")
    assert whole == after == draw_flow(GATHER, "gather")
    assert spot(before.by_key["0.0.1"]) == spot(before.by_key["0.start1.0"])
    assert before.table.rows[0] == ["rank 0", "5", "", ""]
    keys = list(before.by_key)
    assert keys.index("0.0.1") < keys.index("0.start1.0")  # below it, so that its number can be read


def test_a_sum_goes_from_rank_to_rank_and_parts_join_it():
    """The sum of three ranks for rank 0 begins on rank 1, adds up on rank 2, and ends on rank 0."""
    parts = [(0, 0), (1, 0), (2, 0)]
    flow = Flow([[1], [20], [300]], [[321], None, None], [[parts], None, None])
    _, start, second, end = flow_steps(flow)
    assert "0.0.0" not in start.by_key and spot(start.by_key["0.0.0<0.1.0"]) == spot(start.by_key["0.start1.0"])
    rows = [scene.by_key["0.rank2"].y for scene in (second, end)]
    assert second.by_key["0.0.0"].y == rows[0] and second.by_key["0.0.0"].text == "320\n1 + 2"
    assert spot(second.by_key["0.0.0<0.0.0"]) == spot(second.by_key["0.start0.0"])  # has not joined
    assert second.by_key["0.0.0"].fact.startswith("Rank 2 has 320 in element 0 so far: 20 (element 0 of rank 1) + 300")
    assert second.table.rows[2] == ["rank 2", "300", "320", "1 + 2"] and second.table.rows[0][2] == "nothing"
    assert end.by_key["0.0.0"].y == end.by_key["0.rank0"].y and end.by_key["0.0.0"].text == "321\nsum of 3"


def test_a_copy_leaves_from_the_rank_that_got_it_before():
    """Rank 0 gives to 1, and 1 to 2: what is for 2 lies below what has just come to 1."""
    flow = Flow([[7], [8], [9]], [[7]] * 3, [[[(0, 0)]]] * 3)
    _, start, second, end = flow_steps(flow)
    assert "0.2.0" not in start.by_key and spot(start.by_key["0.1.0"]) == spot(start.by_key["0.start0.0"])
    assert spot(second.by_key["0.2.0"]) == spot(second.by_key["0.1.0"]) and second.by_key["0.1.0"].edge_width == 2.5
    assert list(second.by_key).index("0.2.0") < list(second.by_key).index("0.1.0")
    assert end.by_key["0.2.0"].y > end.by_key["0.1.0"].y
    assert [row[2] for row in second.table.rows] == ["7", "7", "nothing"]


@pytest.mark.parametrize(
    "name", ["broadcast", "scatter", "gather", "reduce", "all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
)
def test_every_collective_travels_one_message_of_a_rank_at_a_time(name):
    function, root = {**WITH_ROOT, **WITHOUT_ROOT}[name], {"root": 2} if name in WITH_ROOT else {}
    flow = trace_flow(partial(function, **root), row_and_column(4, 4))
    steps = flow_steps(flow, name)[1:]
    assert flow.num_messages == len(steps) - 1 == (6 if name == "all-reduce" else 3)
    assert [numbers_text(row) if row else "nothing" for row in flow.after] == [row[2] for row in steps[-1].table.rows]
    for message in range(1, flow.num_messages + 1):
        sent = set()  # from which rank to which
        for way in flow.ways.values():
            if message < len(way.stops) and way.stops[message] != way.stops[message - 1]:
                here = way.stops[message - 1]
                starts = [part[0] for part, at in way.joins.items() if at <= message]
                sent |= {(here[0] if here else start, way.stops[message][0]) for start in starts}
        between = {(source, target) for source, target in sent if source != target}
        assert len({source for source, _ in between}) == len({target for _, target in between}) == len(between) > 0
    moving = [sum(old.by_key.get(key) not in (None, mark) for key, mark in new.by_key.items())
              for old, new in pairwise(steps)]  # fmt: skip
    assert all(moving)


@pytest.mark.parametrize("num_columns", [1, 2])
def test_several_flows_stay_on_the_paper_and_apart(num_columns):
    scene = draw_flows({"all-reduce": ALL_REDUCE, "gather": GATHER, "again": GATHER}, num_columns)
    assert scene.title == "all-reduce, gather, again"
    spans = []
    for number in range(3):
        flow = marks(scene, f"{number}.")
        right, bottom = max(mark.right for mark in flow), max(mark.bottom for mark in flow)
        spans.append((min(mark.x for mark in flow), right, min(mark.y for mark in flow), bottom))
    assert faults(scene) == []
    if num_columns == 2:
        assert spans[0][1] < spans[1][0]
        assert spans[0][3] < spans[2][2]
    assert [row[0] for row in scene.table.rows] == ["all-reduce"] * 2 + ["gather"] * 2 + ["again"] * 2


def test_no_two_ranks_have_the_same_colour():
    colors = [rank_color(rank) for rank in range(24)]
    assert len(set(colors)) == 24 and colors[:8] == list(RANK_COLOR)


def test_before_a_result_is_there_its_places_are_empty_and_the_picture_is_as_wide():
    _, *steps = flow_steps(ALL_REDUCE, "all-reduce")
    empty = [{mark.key for mark in marks(scene, "0.empty")} for scene in steps]
    assert empty[0] == {f"0.empty{rank}.{element}" for rank in (0, 1) for element in (0, 1)}
    assert empty[-1] == set() and len(empty[0]) > len(empty[1]) > 0
    assert len({scene.width for scene in steps}) == 1
    for scene in steps:
        assert faults(scene) == []


def test_what_ends_first_has_its_results_after_it_and_not_now():
    scene = draw_flows({"all-reduce": ALL_REDUCE, "reduce-scatter": Flow([[0, 1], [1, 2]], [[1], [3]], SCATTERED)})
    assert [mark.text for mark in scene.marks if mark.key.endswith("after")] == ["after", "after"]
