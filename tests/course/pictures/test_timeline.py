"""Timelines drawn: every op in its place and colour with its name, messages below, one scale, and always the source."""

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from course.pictures import rows
from course.pictures import timeline as drawing
from course.pictures.style import BACKWARD, FORWARD, IDLE, MUTED, WEIGHT_GRADIENT, tint
from course.pictures.timeline import draw_timeline, draw_timelines
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.timeline import Span, Timeline, simulate

WRITER = rows  # of the labels in boxes


def boxes(ax, number):
    """The boxes drawn as ``number``: 0 is the ranks' background, 1 the work; left, top, right, bottom, and colours."""
    collection = [artist for artist in ax.collections if isinstance(artist, PolyCollection)][number]
    corners = [path.get_extents().extents for path in collection.get_paths()]
    colors = [to_hex(color).upper() for color in collection.get_facecolors()]
    return np.array(corners), colors * (len(corners) if len(colors) == 1 else 1)


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
def test_every_op_is_a_box_at_its_time_in_its_ranks_row(schedule):
    timeline = simulate(schedule, 0.7, 1.9)
    corners, colors = boxes(draw_timeline(timeline), 1)
    base = {"forward": FORWARD, "backward": BACKWARD, "weight_gradient": WEIGHT_GRADIENT}
    assert len(corners) == len(timeline.spans)
    for span, (left, top, right, bottom), color in zip(timeline.spans, corners, colors):
        assert (left, right) == pytest.approx((span.start, span.end))
        assert span.rank < top < bottom < span.rank + 1
        strength = drawing.CHUNK_STRENGTHS[1] if span.label.endswith(".1") else 1.0
        assert color == to_hex(tint(base[span.kind], strength)).upper()


def test_every_label_stands_in_its_box(written):
    timeline = simulate(one_f_one_b(4, 8))
    draw_timeline(timeline)
    assert [label.text for label in written] == [span.label for span in timeline.spans]
    for span, label in zip(timeline.spans, written):
        assert span.start < label.x < span.end
        assert span.rank < label.y < span.rank + 1


def test_grey_lies_behind_until_the_makespan_and_the_axis_goes_on_to_the_given_end():
    ax = draw_timeline(simulate(gpipe(2, 4)), end_seconds=20)
    corners, colors = boxes(ax, 0)
    assert colors == [IDLE, IDLE]
    assert [(left, right) for left, _, right, _ in corners] == [(0, 15), (0, 15)]
    assert ax.get_xlim() == (0, 20)
    assert ax.get_ylim() == (2, 0)  # ranks go down


@pytest.mark.parametrize(
    ("timeline", "facts", "unit"),
    [
        (simulate(gpipe(4, 8)), "simulated:  33 time units,  27.3% idle", "time units"),
        (simulate(gpipe(4, 8), 0.02, 0.04), "simulated:  660 ms,  27.3% idle", "ms"),
        (data_parallel(), "measured:  22 ms,  ", "ms"),
        (data_parallel("paced: ranks sleep 20 ms"), "paced: ranks sleep 20 ms:  22 ms,  ", "ms"),
        (Timeline([Span(0, "forward", "F0", 0, 30)], "measured"), "measured:  30 s,  0.0% idle", "s"),
        (Timeline([], "measured"), "measured", "ms"),
    ],
)
def test_the_source_stands_in_every_picture(timeline, facts, unit):
    ax = draw_timeline(timeline, title="mine")
    assert ax.get_title("left") == "mine"
    assert ax.get_title("right").startswith(facts)
    assert ax.get_xlabel() == unit
    ax.figure.canvas.draw()


def test_ticks_are_in_the_unit_of_the_axis():
    ax = draw_timeline(simulate(gpipe(4, 8), 0.02, 0.04))
    ax.figure.canvas.draw()
    ticks = [(place, label.get_text()) for place, label in zip(ax.get_xticks(), ax.get_xticklabels())]
    assert all(float(text) == pytest.approx(place * 1e3) for place, text in ticks)
    assert ("ms", "500") in [(ax.get_xlabel(), text) for _, text in ticks]


def test_a_measured_step_starts_at_zero_and_shows_waits_and_messages(written):
    timeline = data_parallel()
    ax = draw_timeline(timeline)
    work, colors = boxes(ax, 1)
    assert work[0][[0, 2]] == pytest.approx([0, 0.006])
    assert colors[:3] == [FORWARD, BACKWARD, MUTED]
    assert sorted({int(top) for _, top, _, _ in work}) == [0, 1]  # ranks 0 and 3 are the rows
    assert (to_rgb("white") == ax.collections[1].get_edgecolors()[0][:3]).all()
    waits, _ = boxes(ax, 2)
    assert waits[0][[0, 2]] == pytest.approx([0.016, 0.0195])
    assert ax.collections[2].get_hatch()
    assert waits[0][[1, 3]] == pytest.approx(work[0][[1, 3]])  # on top of the work
    messages, _ = boxes(ax, 3)
    assert len(messages) == 6
    first, second, third = messages[:3]
    assert first[1] > work[0][3]  # below the work
    assert second[1] > first[3]  # under way at the same time: below
    assert third[1] == first[1]  # the first lane is free again
    assert [label.text for label in written].count("all_reduce") == 6


def test_more_messages_at_once_than_lanes_stay_in_their_row():
    spans = [Span(0, "communication", "all_reduce", 0.1 * i, 9) for i in range(8)]
    messages, _ = boxes(draw_timeline(Timeline([*spans, Span(0, "forward", "F0", 0, 1)], "measured")), 2)
    assert messages[:, 3].max() < 1
    assert len(set(messages[:, 1])) == drawing.MOST_LANES


def test_a_prediction_and_a_measurement_have_one_scale_and_one_unit():
    predicted, paced = simulate(gpipe(2, 2), 1.0, 2.0), Timeline(simulate(gpipe(2, 2), 1.1, 2.1).spans, "paced: 1 s")
    first, second = draw_timelines([predicted, paced], ["predicted", "on 2 ranks"])
    assert first.get_xlim() == second.get_xlim() == (0, paced.makespan_seconds)
    assert first.get_position().x0 == second.get_position().x0
    assert first.get_position().width == second.get_position().width
    assert first.get_position().y0 > second.get_position().y1
    assert second.get_xlabel() == "ms"  # not time units, which a measurement has none of
    assert [ax.get_title("right").split(":")[0] for ax in (first, second)] == ["simulated", "paced"]


def test_timelines_fill_a_given_figure():
    figure = Figure(figsize=(10, 9))
    axes = draw_timelines([simulate(gpipe(4, 4)), simulate(one_f_one_b(4, 4))], ["a", "b"], figure=figure)
    assert pyplot.get_fignums() == []
    assert axes[0].get_position().height * 9 > 2.5
    assert axes[-1].get_position().y0 * 9 == pytest.approx(drawing.FOOT_INCHES)


def test_in_flight_bars_stand_beside_their_ranks():
    schedules = [gpipe(4, 8), one_f_one_b(4, 8)]
    axes = draw_timelines([simulate(schedule) for schedule in schedules], ["GPipe", "1F1B"], in_flight=True)
    beside = [ax for ax in axes[0].figure.axes if ax not in axes]
    for ax, bars, schedule in zip(axes, beside, schedules):
        assert bars.get_position().y0 == pytest.approx(ax.get_position().y0)
        assert bars.get_ylim() == ax.get_ylim()
        corners, _ = boxes(bars, 0)
        rows_of = [int(top) for _, top, _, _ in corners]
        assert [rows_of.count(rank) for rank in range(4)] == [schedule.peak_in_flight(rank) for rank in range(4)]
    assert beside[0].get_xlim() == beside[1].get_xlim()


def test_the_legend_names_what_occurs_and_nothing_else():
    def words(timeline):
        return [text.get_text() for text in draw_timeline(timeline).get_legend().get_texts()]

    assert words(simulate(gpipe(2, 2))) == ["F forward", "B backward", "idle"]
    assert words(simulate(zero_bubble(2, 2))) == ["F forward", "B backward", "W gradient of the weights", "idle"]
    assert words(simulate(interleaved(2, 2, 3))) == ["F forward", "B backward", "chunk 1", "chunk 2", "idle"]
    expected = ["F forward", "B backward", "optimizer", "idle", "waits", "message under way"]
    assert words(data_parallel()) == expected
    assert draw_timeline(simulate(gpipe(2, 2)), legend=False).get_legend() is None


def test_colours_of_work_differ_in_lightness_too():
    """Whoever sees no colours tells work from idleness, and both halves of a split backward apart."""

    def lightness(color):
        return float(np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)))

    assert abs(lightness(BACKWARD) - lightness(WEIGHT_GRADIENT)) > 0.1
    assert abs(lightness(IDLE) - lightness(FORWARD)) > 0.2


def test_many_ops_take_a_handful_of_artists():
    timeline = simulate(zero_bubble(8, 64), message_seconds=0.1)
    assert len(timeline.spans) > 2000
    assert len(draw_timeline(timeline).get_children()) < 25
