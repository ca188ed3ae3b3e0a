"""Timelines drawn: every op in its place and colour with its name, messages below, one scale, and always the source."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from course.pictures import timeline as drawing
from course.pictures.style import BACKWARD, FORWARD, IDLE, KIND_COLOR, MUTED, WEIGHT_GRADIENT, tint
from course.pictures.timeline import draw_timelines, in_lanes, links, peaks_in_flight
from course.sizing import simulate
from course.timeline import Timeline
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from labkit.timeline.spans import Span
from tests.support.pictures import lit, marks, texts
from tests.support.schedules import folded


def draw(timeline, title="", **options):
    return draw_timelines([timeline], [title], **options)


def seconds(scene, mark, end):
    """When a box begins and ends."""
    axis = scene.by_key["axis"]
    width = axis.points[-1][0]
    return (mark.x - axis.x) / width * end, (mark.x + mark.width - axis.x) / width * end


def data_parallel(source="measured"):
    spans = []
    for rank, late in ((0, 0.0), (3, 0.001)):
        spans += [
            Span(rank, "forward", "forward", 5 + late, 5.006), Span(rank, "backward", "backward", 5.006, 5.017),
            Span(rank, "wait", "wait", 5.016, 5.0195), Span(rank, "optimizer", "step", 5.0195, 5.022),
        ]  # fmt: skip
        begins = [5.008, 5.0095, 5.0115]
        spans += [Span(rank, "communication", "all_reduce", start, start + 0.003) for start in begins]
    return Timeline(spans, source)


@pytest.mark.parametrize("schedule", [gpipe(3, 4), interleaved(2, 4, 2), zero_bubble(4, 5)])
def test_every_op_is_a_box_at_its_time_in_its_ranks_row_with_its_name(schedule):
    timeline = simulate(schedule, 0.7, 1.9)
    scene = draw(timeline)
    for span in timeline.spans:
        mark, row = scene.by_key[f"{span.rank}.{span.label}"], scene.by_key[f"idle{span.rank}"]
        assert seconds(scene, mark, timeline.makespan_seconds) == pytest.approx((span.start, span.end))
        assert (mark.y, mark.height) == (row.y, row.height)
        assert mark.fill == tint(KIND_COLOR[span.kind], drawing.CHUNK_STRENGTHS[span.op.chunk])
        assert mark.text.replace("\n", "") == span.label.split(".")[0] or mark.text == span.label
        assert mark.size >= 11
    assert [*drawing.CHUNK_STRENGTHS] == sorted(drawing.CHUNK_STRENGTHS, reverse=True)  # a later chunk is paler
    rows = [scene.by_key[f"idle{rank}"] for rank in timeline.ranks]
    assert all(upper.y + upper.height < lower.y for upper, lower in pairwise(rows))


@pytest.mark.parametrize(("m", "words"), [(8, "{}"), (4, "{letter}{}")])
def test_the_chunks_of_a_v_differ_in_their_colour_and_where_there_is_room_in_their_letter(m, words):
    scene = draw(simulate(zero_bubble_v(4, m)), in_flight=True)
    for kind, letter in (("forward", "F"), ("backward", "B"), ("weight_gradient", "W")):
        marks = [scene.by_key[f"2.{letter}3"], scene.by_key[f"2.{letter}3.1"]]
        assert [mark.fill for mark in marks] == [tint(KIND_COLOR[kind], each) for each in drawing.FOLDED_STRENGTHS]
        assert [mark.text for mark in marks] == [words.format(3, letter=each) for each in (letter, letter.lower())]
    assert "chunk 1 (f0 is F0.1)" in texts(scene, "legend")


def test_grey_goes_on_until_the_makespan_and_all_have_one_scale():
    long, short = simulate(gpipe(2, 4)), simulate(gpipe(2, 2))
    scene = draw_timelines([long, short], ["long", "short"])
    assert scene.by_key["idle0"].fill == scene.by_key["1.idle0"].fill == IDLE
    assert seconds(scene, scene.by_key["idle1"], 15) == pytest.approx((0, 15))
    assert seconds(scene, scene.by_key["1.idle1"], 15) == pytest.approx((0, 9))


@pytest.mark.parametrize(
    ("timeline", "facts", "unit"),
    [
        (simulate(gpipe(4, 8)), "simulated: 33 time units, 27.3% idle", "time units"),
        (simulate(gpipe(4, 8), 0.02, 0.04), "simulated: 660 ms, 27.3% idle", "ms"),
        (data_parallel(), "measured: 22 ms, ", "ms"),
        (data_parallel("paced: ranks sleep 20 ms"), "paced: ranks sleep 20 ms: 22 ms, ", "ms"),
        (Timeline([Span(0, "forward", "F0", 0, 30)], "measured"), "measured: 30 s, 0.0% idle", "s"),
        (Timeline([], "measured"), "measured", "ms"),
    ],
)
def test_the_source_stands_in_every_picture(timeline, facts, unit):
    scene = draw(timeline, "mine")
    assert scene.by_key["title"].text == "mine"
    assert scene.by_key["facts"].text.startswith(facts)
    assert scene.says.startswith(f"mine: {facts}")
    assert scene.by_key["axis.unit"].text == unit


def test_ticks_are_in_the_unit_of_the_axis():
    scene = draw(simulate(gpipe(4, 8), 0.02, 0.04))
    ticks = [mark for mark in marks(scene, "tick") if mark.text]
    assert [mark.text for mark in ticks] == ["0", "100", "200", "300", "400", "500", "600"]
    for mark in ticks:
        assert seconds(scene, mark, 660)[0] == pytest.approx(float(mark.text))


def test_what_an_op_waits_for_lights_up_and_so_does_what_waits_for_it():
    scene = draw(simulate(one_f_one_b(4, 8)))
    mark = scene.by_key["1.B2"]
    assert (
        mark.fact
        == "B2 on rank 1: 14 to 16 time units; needs B2 of rank 2 and F2 of rank 1; micro-batches held then: 3"
    )
    assert lit(scene, "1.B2") == {"2.B2", "1.F2", "0.B2", "2.B2>1.B2", "1.B2>0.B2"}
    need = scene.by_key["2.B2>1.B2"]
    assert need.shy
    assert need.heads == 1
    assert scene.by_key["0.F0"].fact.startswith("F0 on rank 0: 0 to 1 time units; needs no other op")


def test_ranks_that_are_not_the_stages_of_one_pipeline_need_nothing():
    twice = [
        Span(rank, kind, f"{kind[0].upper()}0", start, start + 1, op) for rank in (0, 1) for kind, start, op in ONE
    ]
    assert links(Timeline(twice, "measured")) == {}
    assert links(data_parallel()) == {}
    pipeline = simulate(interleaved(2, 2, 2))
    assert [[need.label for need in needs] for span, needs in links(pipeline).items() if span.label == "F1.1"] == [
        ["F1"],
        ["F1.1"],
    ]


def test_a_v_is_recognised_by_the_order_of_its_ops():
    found = links(simulate(folded(2, 2)[1]))
    needed = {f"{span.rank}.{span.label}": {f"{need.rank}.{need.label}" for need in found[span]} for span in found}
    assert needed["1.F1.1"] == {"1.F1"}
    assert needed["0.F1.1"] == {"1.F1.1"}
    assert needed["1.B1"] == {"1.B1.1", "1.F1"}


ONE = [(span.kind, span.start, span.op) for span in simulate(gpipe(1, 1)).spans]


def test_a_measured_step_starts_at_zero_and_shows_waits_and_messages():
    scene = draw(data_parallel())
    work = marks(scene, "work")
    assert seconds(scene, work[0], 22) == pytest.approx((0, 6))
    assert [mark.fill.upper() for mark in work[:3]] == [FORWARD, BACKWARD, MUTED]
    assert {mark.y for mark in work} == {scene.by_key["idle0"].y, scene.by_key["idle3"].y}
    wait = scene.by_key["wait0.0"]
    assert seconds(scene, wait, 22) == pytest.approx((16, 19.5))
    assert wait.dashed
    assert scene.marks.index(wait) > scene.marks.index(work[1])  # on top of the work
    first, second, third = (scene.by_key[f"message0.{place}"] for place in ("0.0", "1.0", "0.1"))
    assert first.y > wait.y + wait.height
    assert second.y > first.y + first.height - 1  # under way at the same time: below
    assert third.y == first.y  # the first lane is free again
    assert "all_reduce" in first.fact


def test_each_message_under_way_has_a_lane_and_many_lanes_are_lower():
    spans = [Span(0, "communication", "all_reduce", 0.1 * i, 9 + i) for i in range(8)]
    assert [len(lane) for lane in in_lanes(spans)] == [1] * 8
    boxes = marks(draw(Timeline(spans, "measured")), "message")
    assert all(upper.bottom <= lower.y for upper, lower in pairwise(boxes))
    assert boxes[-1].bottom - boxes[0].y <= drawing.LANE * drawing.FULL_LANES


def test_a_wait_stands_below_the_label_of_the_work_that_it_interrupts():
    scene = draw(data_parallel())
    work, wait = scene.by_key["work1"], scene.by_key["wait0.0"]
    assert work.text == "backward" and wait.x < work.x + work.width
    assert work.y + work.height / 2 + work.size / 2 <= wait.y and wait.bottom == work.bottom


def test_lanes_are_used_again():
    spans = [Span(0, "communication", "all_reduce", start, end) for start, end in ((0, 9), (9, 10))]
    assert len(in_lanes(spans)) == 1


def test_a_measurement_has_no_time_units():
    predicted, paced = simulate(gpipe(2, 2), 1.0, 2.0), Timeline(simulate(gpipe(2, 2), 1.1, 2.1).spans, "paced: 1 s")
    scene = draw_timelines([predicted, paced], ["predicted", "on 2 ranks"])
    assert scene.by_key["axis.unit"].text == "ms"
    assert scene.by_key["facts"].text.startswith("simulated: 9,000 ms")
    assert scene.by_key["1.facts"].text.startswith("paced: 1 s: 9,600 ms")


def test_bars_of_what_is_held_stand_beside_their_ranks():
    schedules = [gpipe(4, 8), one_f_one_b(4, 8)]
    scene = draw_timelines([simulate(schedule) for schedule in schedules], ["GPipe", "1F1B"], in_flight=True)
    unit = scene.by_key["held0.now"].width / 8
    for key, schedule in zip(("", "1."), schedules):
        for rank in range(4):
            bar, row = scene.by_key[f"{key}held{rank}.now"], scene.by_key[f"{key}idle{rank}"]
            assert bar.width / unit == pytest.approx(schedule.peak_in_flight(rank))
            assert row.y < bar.y < bar.y + bar.height <= row.y + row.height
            assert row.x + row.width < bar.x
            assert scene.by_key[f"{key}held{rank}.number"].text == str(schedule.peak_in_flight(rank))


def test_peaks_count_a_chunks_pass_as_a_part():
    schedule = interleaved(4, 8, 2)
    assert peaks_in_flight(simulate(schedule)) == [schedule.peak_in_flight(rank) / 2 for rank in range(4)]


def test_the_legend_names_what_occurs_and_nothing_else():
    def words(timeline):
        return texts(draw(timeline), "legend.")

    assert words(simulate(gpipe(2, 2))) == ["idle", "F forward", "B backward"]
    assert words(simulate(zero_bubble(2, 2))) == ["idle", "F forward", "B backward", "W gradient of the weights"]
    chunks = ["B backward, chunk 0", "F forward, chunk 0", "chunk 1", "chunk 2", "idle"]
    assert sorted(words(simulate(interleaved(2, 2, 3)))) == chunks
    assert words(data_parallel()) == ["idle", "F forward", "B backward", "optimizer", "waits", "message under way"]


def test_the_table_has_when_each_op_starts_and_what_is_held():
    table = draw(simulate(one_f_one_b(2, 2)), "1F1B", in_flight=True).table
    assert table.heads[-1] == "ops, and when each starts (time units)"
    first, last = (["1F1B", str(rank), "6 time units", "0 time units", "0 time units"] for rank in (0, 1))
    assert list(map(list, table.rows)) == [
        [*first, "2", "F0 0, F1 1, B0 4, B1 7"],
        [*last, "1", "F0 1, B0 2, F1 4, B1 5"],
    ]


def test_narrow_boxes_shorten_their_labels_and_then_lose_them_all_of_a_row_or_none():
    def texts(m):
        marks = draw(simulate(interleaved(2, m, 2))).by_key
        row = [mark for key, mark in marks.items() if key.startswith(("0.F", "0.B")) and mark.shape == "box"]
        assert len({mark.size for mark in row}) == 1
        assert all(mark.text for mark in row) or not any(mark.text for mark in row)
        return [marks[key].text for key in ("0.F1.1", "0.B1.1")]

    assert texts(4) == ["F1.1", "B1.1"]
    assert texts(6) == ["F1", "B1"]
    assert texts(10) == ["1", "1"]  # the colour is the letter
    assert texts(24) == ["", ""]


def reasons(scene, rank):
    """The name of each idle stretch of a rank, and what it awaits."""
    gaps = marks(scene, f"gap{rank}.")
    return [(mark.name, [scene.by_key[key].name for key in mark.awaits], mark.level) for mark in gaps]


def test_an_idle_stretch_says_what_the_next_op_waits_for():
    assert reasons(draw(simulate(gpipe(2, 2))), 0) == [
        ("idle: B0 waits for B0 of rank 1 until 5 time units", ["B0"], 2),
    ]
    assert reasons(draw(simulate(gpipe(2, 2))), 1)[0][0] == "idle: F0 waits for F0 of rank 0 until 1 time unit"
    assert reasons(draw(simulate(gpipe(2, 2), message_seconds=0.5)), 1) == [
        ("idle: F0 waits for F0 of rank 0 until 1.5 time units", ["send F0 under way"], 0),
        ("idle: it has done all its work", [], 0),
    ]


def test_an_op_that_starts_late_although_all_is_there_waits_for_nobody():
    spans = [replace(span, end=span.end + 4, start=span.start + 4) if span.label == "B0" else span
             for span in simulate(gpipe(1, 1)).spans]  # fmt: skip
    assert reasons(draw(Timeline(spans, "measured")), 0) == [
        ("idle: B0 has all that it needs, and starts later", [], 1)
    ]


def test_a_wait_between_ops_without_a_schedule_is_for_the_message_that_ends_with_it():
    spans = [
        Span(0, "forward", "forward", 0, 1), Span(0, "communication", "all_reduce", 0.5, 2),
        Span(0, "communication", "all_gather", 0.6, 3), Span(0, "optimizer", "step", 3, 4),
    ]  # fmt: skip
    idle = ("idle: waits for all_gather until 3,000 ms", ["all_gather under way"], None)
    assert reasons(draw(Timeline(spans, "measured")), 0) == [idle]
    scene = draw(Timeline([*spans, Span(0, "wait", "wait", 1, 3)], "measured"))
    assert reasons(scene, 0) == [("idle", [], None)]
    wait = scene.by_key["wait0.0"]
    assert (wait.name, [scene.by_key[key].name for key in wait.awaits]) == (idle[0].removeprefix("idle: "), idle[1])


def test_colours_of_work_differ_in_lightness_too():
    """Whoever sees no colours tells work from idleness, and both halves of a split backward apart."""

    def lightness(color):
        return float(np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)))

    assert abs(lightness(BACKWARD) - lightness(WEIGHT_GRADIENT)) > 0.1
    assert abs(lightness(IDLE) - lightness(FORWARD)) > 0.2


def test_a_micro_batch_is_followed_over_all_ranks():
    """GPipe, 2 ranks, 2 micro-batches, forward 1 and backward 2: F0 at 0 and 1, B0 from 3 to 5 on rank 1 and to 7."""
    timeline = simulate(gpipe(2, 2), 1, 2)
    scene = draw_timelines([timeline], ["GPipe"])
    spans = [[s for s in timeline.of(rank) if s.op and s.op.micro_batch == 0] for rank in (0, 1)]
    ends = [f"rank {rank} from {own[0].start:g} to {own[-1].end:g} time units" for rank, own in enumerate(spans)]
    says = f"GPipe: micro-batch 0 is kept on {', '.join(ends)}; it travels 2 times between ranks."
    assert scene.journeys["micro-batch0"] == says
    lit = [mark for mark in scene.marks if "micro-batch0" in mark.tags]
    assert len([mark for mark in lit if mark.shape == "box"]) == 4 and len([m for m in lit if m.shy]) == 2


def there(scene, moment):
    """The travellers that are seen at a moment, a share of the whole time."""
    return [each for each in scene.travellers if each.frames[0][0] <= moment < each.frames[-1][0]]


@pytest.mark.parametrize("schedule", [gpipe(3, 4), one_f_one_b(4, 8), interleaved(2, 4, 2), zero_bubble_v(3, 6)])
def test_micro_batches_pile_up_on_the_bar_of_what_is_held(schedule):
    """After each start there are as many boxes on a rank's bar as passes that it holds, none on top of another."""
    timeline = simulate(schedule)
    scene = draw(timeline, in_flight=True)
    for rank in timeline.ranks:
        bar = scene.by_key[f"held{rank}.peak"]
        for seconds, held in timeline.in_flight(rank):
            now = there(scene, seconds / timeline.makespan_seconds + 1e-6)
            slots = [each.frames[1][1] for each in now if each.frames[1][2] == bar.y + bar.height / 2]
            assert len(slots) == len({*slots}) == held
            assert all(bar.x < slot < bar.right for slot in slots)


def test_messages_fly_from_the_op_that_makes_them_to_the_rank_that_needs_them():
    timeline = simulate(gpipe(2, 2), message_seconds=1.5)
    scene = draw(timeline)
    end, rows = timeline.makespan_seconds, [scene.by_key[f"idle{rank}"] for rank in (0, 1)]
    flights = [(each.text, each.fill, *(frame[0] * end for frame in each.frames)) for each in scene.travellers]
    assert flights == [
        ("0", BACKWARD, *map(pytest.approx, (6.5, 8))), ("1", BACKWARD, *map(pytest.approx, (8.5, 10))),
        ("0", FORWARD, *map(pytest.approx, (1, 2.5))), ("1", FORWARD, *map(pytest.approx, (2, 3.5))),
    ]  # fmt: skip
    for each in scene.travellers:
        ways = [y for _, _, y in each.frames]
        middles = [row.y + row.height / 2 for row in rows]
        assert ways == (middles if each.fill == FORWARD else middles[::-1])


def test_a_message_that_takes_no_time_flies_so_long_that_it_is_seen():
    timeline = simulate(gpipe(2, 1), 1, 2)
    first = next(each for each in draw(timeline).travellers if each.fill == FORWARD)
    leaves, arrives = (moment * timeline.makespan_seconds for moment, *_ in first.frames)
    assert (leaves + arrives) / 2 == pytest.approx(1) and arrives - leaves == pytest.approx(0.8)


def test_what_stands_at_the_end_of_a_row_is_short():
    scene = draw(simulate(gpipe(2, 2)), in_flight=True)
    short = {mark.name: mark.short for mark in marks(scene, "gap")}
    assert short["idle: B0 waits for B0 of rank 1 until 5 time units"] == "B0 waits for B0 of rank 1"
    assert short["idle: it has done all its work"] == "done"
    assert scene.clock[6:] == (scene.by_key["held0.peak"].x, drawing.WIDTH)
