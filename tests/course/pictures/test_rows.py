"""Labels in boxes: shortened where they do not fit, left out where they cannot be read, and all of one size."""

from matplotlib.figure import Figure

from course.pictures import rows
from course.pictures.timeline import draw_timeline
from labkit.schedules import interleaved, one_f_one_b
from labkit.timeline import Span, Timeline, simulate


def labels_in(inches, timeline, written):
    written.clear()
    ax = Figure(figsize=(inches, 2)).add_axes((0, 0, 1, 1))
    draw_timeline(timeline, ax, legend=False)
    return [label.text for label in written]


def test_narrow_boxes_shorten_their_labels_and_then_lose_them(written):
    timeline = simulate(interleaved(2, 4, 2))
    whole = [span.label for span in timeline.spans]
    assert labels_in(20, timeline, written) == whole
    assert labels_in(5, timeline, written) == [label.split(".")[0] for label in whole]
    stacked = labels_in(4, timeline, written)
    assert stacked == [label[0] for label in whole] + [label[1] for label in whole]
    letters, numbers = written[: len(whole)], written[len(whole) :]
    assert all(letter.x == number.x and letter.y < number.y for letter, number in zip(letters, numbers))
    assert set(labels_in(1.4, timeline, written)) == {"B", "0", "1", "2", "3"}  # a backward is twice as wide
    assert labels_in(0.5, timeline, written) == []


def test_one_hairline_takes_no_labels_from_the_others(written):
    spans = [Span(0, "forward", f"F{i}", i, i + 1) for i in range(12)] + [Span(0, "backward", "B0", 12, 12.001)]
    assert labels_in(8, Timeline(spans, "measured"), written) == [f"F{i}" for i in range(12)]


def test_labels_in_a_picture_have_one_size(written):
    draw_timeline(simulate(one_f_one_b(4, 16)))
    assert len({label.em_inches for label in written}) == 1
    assert written[0].em_inches >= rows.SMALLEST
