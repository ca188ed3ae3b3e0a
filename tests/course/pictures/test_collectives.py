"""Pictures of collectives: every number, every origin, whole tensors on each rank."""

from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from course.measure.flow import Flow
from course.pictures import collectives
from course.pictures.collectives import RANK_COLOR, draw_flow, draw_flows

ALL_REDUCE = Flow([[0, 1], [1, 2]], [[1, 3], [1, 3]], [[(0, 1), (0, 1)]] * 2)
GATHER = Flow([[0], [1]], [[0, 1], None], [[(0,), (1,)], None])


def boxes(ax):
    fills, frames = [artist for artist in ax.collections if isinstance(artist, PolyCollection)][-2:]
    return [to_hex(color).upper() for color in fills.get_facecolors()], len(frames.get_paths())


def test_whole_tensors_are_written_on_every_rank_before_and_after(written):
    draw_flow(ALL_REDUCE)
    numbers = [(label.text, round(label.y - 0.3 - collectives.HEAD)) for label in written if label.text.isdigit()]
    assert numbers == [("0", 0), ("1", 0), ("1", 1), ("2", 1), ("1", 0), ("3", 0), ("1", 1), ("3", 1)]
    assert [label.text for label in written if "rank" in label.text] == ["rank 0", "rank 1"]


def test_without_the_tensors_before_there_is_room_for_larger_boxes(written):
    draw_flow(ALL_REDUCE, before=False)
    numbers = [(label.text, round(label.y - 0.3 - collectives.HEAD)) for label in written if label.text.isdigit()]
    assert numbers == [("1", 0), ("3", 0), ("1", 1), ("3", 1)]
    assert "before" not in [label.text for label in written]
    assert collectives.flow_size(ALL_REDUCE, before=False)[0] < collectives.flow_size(ALL_REDUCE)[0] / 1.5


def test_a_sum_has_a_stripe_and_a_word_for_each_rank(written):
    colors, num_frames = boxes(draw_flow(ALL_REDUCE))
    assert colors == list(RANK_COLOR[:2]) * 4  # four boxes, each of two ranks
    assert num_frames == 4
    assert [label.text for label in written].count("0 + 1") == 4


def test_a_rank_without_a_result_says_nothing(written):
    colors, num_frames = boxes(draw_flow(GATHER))
    assert colors == list(RANK_COLOR[:2])
    assert num_frames == 2
    assert [label.text for label in written].count("nothing") == 1
    assert {"from 0", "from 1"} <= {label.text for label in written}


def test_ranks_go_down_and_elements_right(written):
    draw_flow(GATHER)
    places = {label.text: label for label in written}
    assert places["rank 0"].y < places["rank 1"].y
    assert places["from 0"].x < places["from 1"].x


def test_draws_into_the_axes_it_is_given():
    ax = pyplot.figure().add_subplot()
    assert draw_flow(GATHER, "gather", ax) is ax
    assert ax.get_title(loc="left") == "gather"
    assert len(pyplot.get_fignums()) == 1


def test_several_flows_stay_inside_the_figure_and_apart():
    axes = draw_flows({"all-reduce": ALL_REDUCE, "gather": GATHER, "again": GATHER})
    assert [ax.get_title(loc="left") for ax in axes] == ["all-reduce", "gather", "again"]
    boxes = [ax.get_position(original=True) for ax in axes]
    assert min(min(box.x0, box.y0) for box in boxes) >= 0
    assert max(max(box.x1, box.y1) for box in boxes) <= 1
    assert boxes[0].x1 <= boxes[1].x0
    assert boxes[2].y1 <= boxes[0].y0
