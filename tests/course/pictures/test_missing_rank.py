"""The picture of a collective that stands still: an arrow for each wait, and the report."""

import pytest

from course.pictures.collectives import ROW, TOP, flow_steps
from course.pictures.missing_rank import EXIT, draw_missing_rank, with_exit
from course.sizing.flow import WITH_ROOT, WITHOUT_ROOT, numbered, simulate_flow
from course.sizing.missing_rank import without_rank
from tests.support.pictures import faults, marks


def drawn(operation, world_size, away):
    missing = without_rank(operation, numbered(world_size, world_size), away, root=0)
    return missing, draw_missing_rank(missing)


@pytest.mark.parametrize("operation", [*WITH_ROOT, *WITHOUT_ROOT])
@pytest.mark.parametrize(("world_size", "away"), [(2, 0), (4, 2), (8, 7)])
def test_an_arrow_leads_from_each_rank_that_waits_to_the_one_that_it_waits_for(operation, world_size, away):
    missing, scene = drawn(operation, world_size, away)
    row = lambda y: int((y - TOP) // ROW)  # noqa: E731
    arrows = {row(mark.y): row(mark.y + mark.points[-1][1]) for mark in marks(scene, "wait")}
    assert arrows == {rank: peer for rank, (peer, _) in missing.waits.items()}
    assert not faults(scene) and scene.by_key[f"0.rank{away}"].x > scene.by_key[EXIT].x


def test_the_report_stands_below_and_in_the_table():
    missing, scene = drawn("broadcast", 8, 5)
    lines = [mark.text for mark in marks(scene, "report")]
    assert " ".join(lines[1:]).split() == missing.report.split()
    assert missing.report in scene.table.caption and "simulated" in lines[0]


def test_ranks_are_buttons_where_somebody_listens_and_a_still_picture_is_as_it_was():
    steps = flow_steps(simulate_flow("gather", numbered(4, 2)), "gather")
    with_buttons = with_exit(steps)
    assert [scene.svg() for scene in with_buttons] == [scene.svg() for scene in steps]
    buttons = [mark.key for mark in with_buttons[0].marks if mark.click]
    assert buttons == [*(f"0.rank{rank}" for rank in range(4)), EXIT]
