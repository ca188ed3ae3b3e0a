"""A schedule written by hand: ops go where they are clicked or dropped, and what runs is what labkit says runs."""

import pytest

from course.explorers.schedule_builder import STUCK, schedule_builder
from course.sizing import simulate
from labkit.schedules import ScheduleDeadlock, check, gpipe, one_f_one_b, v_min, v_shape, zero_bubble, zero_bubble_v
from tests.support.schedules import folded

STUCK_ROWS = ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 F1 B0 B1 F2 B2"]


def texts(schedule):
    return [" ".join(map(str, row)) for row in schedule.ranks]


def scene(builder):
    return builder.steps[0]


def click(builder, *keys):
    for key in keys:
        builder.click(key)


def drop(builder, key, zone):
    builder.drop(key, zone)


def options_of(schedule):
    """Where its stages are, and whether its backward is split."""
    return "V" if schedule.num_chunks == 2 else "in turn", len(schedule.kinds) == 3


def test_a_click_puts_an_op_at_the_end_of_its_row_and_takes_it_back():
    builder = schedule_builder(2, 2)
    assert "click an op, or drag it" in builder.says
    click(builder, "op.0.F0", "op.0.F1", "op.1.F0", "row.1", "tray.0")
    assert texts(builder.shown) == ["F0 F1", "F0"]
    click(builder, "op.0.F0")
    assert texts(builder.shown) == ["F1", "F0"]
    click(builder, "clear")
    assert texts(builder.shown) == ["", ""]


def test_an_op_goes_where_it_is_dropped():
    builder = schedule_builder(2, 2, ["F0 F1", ""])
    drop(builder, "op.0.B0", "row.0")
    assert texts(builder.shown) == ["F0 F1 B0", ""]
    drop(builder, "op.0.B0", "op.0.F1")
    assert texts(builder.shown) == ["F0 B0 F1", ""]
    drop(builder, "op.0.F0", "op.0.F0")
    assert texts(builder.shown) == ["F0 B0 F1", ""]
    drop(builder, "op.0.F0", "row.0")
    assert texts(builder.shown) == ["B0 F1 F0", ""]
    drop(builder, "op.0.F0", "tray.0")
    drop(builder, "op.0.F0", "row.1")  # each rank has the same ops
    assert texts(builder.shown) == ["B0 F1", "F0"]


def test_every_op_can_be_dragged_dropped_on_and_clicked_in_row_and_tray():
    builder = schedule_builder(2, 2, ["F0", ""])
    marks = scene(builder).by_key
    for key in ("op.0.F0", "op.0.B1", "op.1.F0"):
        assert marks[key].drag
        assert marks[key].drop
        assert marks[key].fact
    assert marks["tray.0"].y < marks["op.0.B1"].y < marks["row.0"].y < marks["op.0.F0"].y
    assert all(marks[f"{zone}.1"].drop and marks[f"{zone}.1"].fact for zone in ("tray", "row"))


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 4), one_f_one_b(4, 3), zero_bubble(3, 4), zero_bubble_v(4, 8), v_min(3, 5), folded(2, 3)[1]]
)
def test_times_are_those_of_the_simulation(schedule):
    p, m, expected = schedule.pp_size, schedule.num_micro_batches, simulate(schedule)
    builder = schedule_builder(p, m, texts(schedule), *options_of(schedule))
    assert builder.shown.ranks == schedule.ranks
    held = ", ".join(f"{schedule.peak_in_flight(rank) / schedule.num_chunks:g}" for rank in range(p))
    assert builder.says.split("rank by rank: ")[1].startswith(f"{held}.<")
    assert f"All ranks finish after {expected.makespan_seconds:g} time units" in builder.says
    assert f"{expected.bubble_over_ideal:.3f}" in builder.says
    for span in expected.spans:
        assert (
            scene(builder).by_key[f"op.{span.rank}.{span.label}"].fact
            == f"{span.op} of rank {span.rank} runs at {span.start:g}"
        )
        assert f"{span.op} at {span.start:g}" in scene(builder).table.rows[span.rank][1]


def test_a_deadlock_is_a_circle_of_red_arrows():
    builder = schedule_builder(3, 3, STUCK_ROWS)
    with pytest.raises(ScheduleDeadlock):
        check(builder.shown)
    assert "Deadlock: rank 1 waits at B0 for B0 of rank 2; rank 2 waits at F1 for F1 of rank 1." in builder.says
    assert "moved" in builder.says
    marks = scene(builder).by_key
    arrows = {key: mark for key, mark in marks.items() if mark.heads}
    assert list(arrows) == ["op.1.B0.waits", "op.2.B0.after", "op.2.F1.waits", "op.1.F1.after"]
    assert {mark.edge for mark in arrows.values()} == {STUCK}
    ends = [(mark.x + x, mark.y + y) for mark in arrows.values() for x, y in (mark.points[0], mark.points[-1])]
    closed = [
        marks[key] for key in ("op.1.B0", "op.2.B0", "op.2.B0", "op.2.F1", "op.2.F1", "op.1.F1", "op.1.F1", "op.1.B0")
    ]
    for (x, y), mark in zip(ends, closed):
        assert x == pytest.approx(mark.x + mark.width / 2)
        assert y in (pytest.approx(mark.y), pytest.approx(mark.y + mark.height))
    assert marks["op.1.B2"].edge == STUCK
    assert marks["op.0.B0"].edge != STUCK  # it waits, and nobody waits for it
    assert marks["op.0.B0"].dashed
    assert marks["op.1.F1"].fact == "F1 of rank 1 comes after B0, which waits"
    drop(builder, "op.1.F1", "op.1.B0")
    assert "All ranks finish" in builder.says
    assert not any(mark.heads for mark in scene(builder).marks)
    assert "moved" not in builder.says


def test_a_wait_for_an_op_without_a_place_is_no_deadlock():
    builder = schedule_builder(2, 1, ["F0 B0", "F0"])
    assert "1 op to place; rank 0 waits at B0 for B0 of rank 1." in builder.says
    assert not any(mark.heads for mark in scene(builder).marks)


def test_a_rank_can_wait_for_itself():
    builder = schedule_builder(1, 1, ["B0 F0"])
    assert "Deadlock: rank 0 waits at B0 for F0 of rank 0." in builder.says
    assert [mark.key for mark in scene(builder).marks if mark.heads] == ["op.0.F0.after"]


def test_fewer_ranks_and_micro_batches_keep_what_is_left_of_the_rows():
    builder = schedule_builder(3, 3, STUCK_ROWS)
    builder.choose(num_micro_batches=2)
    assert texts(builder.shown) == ["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B0 B1"]
    builder.choose(pp_size=2)
    assert texts(builder.shown) == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert "All ranks finish" in builder.says


@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 8), (4, 1), (2, 8)])
@pytest.mark.parametrize("make", [gpipe, zero_bubble, zero_bubble_v])
def test_everything_stays_in_the_picture(make, p, m):
    schedule = make(p, m)
    for rows in ([], texts(schedule)):
        picture = scene(schedule_builder(p, m, rows, *options_of(schedule)))
        assert all(0 <= mark.x <= mark.x + mark.width <= 941 for mark in picture.marks)
        assert all(mark.y + mark.height <= picture.height for mark in picture.marks)
        assert all(mark.text for mark in picture.marks if mark.key.startswith("op."))


def test_a_v_is_built_by_hand_from_both_chunks_of_a_rank():
    builder = schedule_builder(2, 1, placement="V")
    assert builder.shown.stages == v_shape(2)
    assert [scene(builder).by_key[f"stage{rank}.{chunk}"].text for rank in (0, 1) for chunk in (0, 1)] == [
        "stage 0", "stage 3", "stage 1", "stage 2",
    ]  # fmt: skip
    ops = scene(builder).by_key
    assert ops["op.0.F0"].y < ops["op.0.F0.1"].y and ops["op.0.F0"].fill != ops["op.0.F0.1"].fill
    click(builder, "op.1.F0", "op.1.F0.1", "op.1.B0.1", "op.1.B0", "op.0.F0")
    assert texts(builder.shown) == ["F0", "F0 F0.1 B0.1 B0"]
    assert "3 ops to place; rank 1 waits at B0.1 for B0.1 of rank 0." in builder.says
    drop(builder, "op.0.B0", "row.0")
    drop(builder, "op.0.F0.1", "op.0.B0")
    drop(builder, "op.0.B0.1", "op.0.B0")
    assert texts(builder.shown)[0] == "F0 F0.1 B0.1 B0"
    assert "All ranks finish after 6 time units" in builder.says


def test_a_deadlock_of_a_v_is_a_circle_too():
    builder = schedule_builder(2, 1, ["F0 F0.1 B0.1 B0", "F0 B0.1 F0.1 B0"], "V")
    assert "Deadlock: rank 0 waits at F0.1 for F0.1 of rank 1; rank 1 waits at B0.1 for B0.1 of rank 0." in (
        builder.says
    )
    assert [key for key, mark in scene(builder).by_key.items() if mark.heads] == [
        "op.0.F0.1.waits", "op.1.F0.1.after", "op.1.B0.1.waits", "op.0.B0.1.after",
    ]  # fmt: skip


def test_in_turn_again_a_v_keeps_what_a_rank_still_has():
    builder = schedule_builder(2, 2, texts(zero_bubble_v(2, 2)), "V", True)
    assert "All ranks finish" in builder.says
    assert eval(repr(builder), {"schedule_builder": schedule_builder}).shown == builder.shown
    builder.choose(split=False)
    assert not any(op.kind == "weight_gradient" for row in builder.shown.ranks for op in row)
    builder.choose(placement="in turn")
    assert texts(builder.shown) == ["F0 F1 B0 B1", "F0 F1 B0 B1"]
    assert repr(builder) == "schedule_builder(2, 2, ['F0 F1 B0 B1', 'F0 F1 B0 B1'])"


@pytest.mark.parametrize(
    "choice",
    [(), (4, 8), (3, 4, ["F0 F1 B0", "F0 B0", "F0"]), (2, 3, ["B0 F0", "F0 B0"], "V"), (1, 8, [], "V", True)],
    ids=str,
)
def test_on_a_phone_all_is_in_view_in_letters_of_16_pixels(choice):
    wide = schedule_builder(*choice)
    [narrow] = wide.narrow_steps
    assert narrow.by_key.keys() == wide.steps[0].by_key.keys()
    assert max(mark.right for mark in narrow.marks) <= narrow.width + 1 < 330
    assert {mark.size for mark in narrow.marks if mark.text} == {16}
    assert [mark.fact for mark in narrow.marks] == [mark.fact for mark in wide.steps[0].marks]
    assert narrow.says == wide.steps[0].says
