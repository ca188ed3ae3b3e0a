"""The layout explorer, driven as a reader drives it: by changing the values of its controls."""

import gc
import re

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from course.explorers.layout import BATCH_SIZE, MODEL, layout_explorer
from course.pictures.layout import FIGURE_INCHES, THREE_PLACES, draw_layout
from course.pictures.layout_table import bytes_text
from course.pictures.painter import Canvas
from course.sizing import step_traffic
from labkit.layout import ParallelLayout


@pytest.fixture
def explorer():
    return layout_explorer(16, tp_size=2, pp_size=4)


def picture_of(layout, dimmed=False):
    return Canvas(FIGURE_INCHES, THREE_PLACES).png(lambda *axes: draw_layout(layout, 8, axes, dimmed=dimmed))


def groups_in_table(html):
    """The lists of ranks of each axis, read back from the text of the table."""
    rows = re.findall("<tbody>(.*?)</tbody>", html)
    return [
        [[int(rank) for rank in re.findall(r"\d+", ranks)] for ranks in re.findall(r"\[(.*?)\]", row)] for row in rows
    ]


def test_the_picture_is_that_of_the_layout(explorer):
    assert explorer.picture.value == picture_of(explorer.shown)


@pytest.mark.parametrize(
    ("control", "value"),
    [("tp_size", 4), ("pp_size", 2), ("world_size", 32), ("order", "tp-pp-dp"), ("gpus_per_node", 4)],
)
def test_every_control_changes_the_picture_and_the_facts(explorer, control, value):
    picture, facts = explorer.picture.value, explorer.facts.value
    getattr(explorer, control).value = value
    assert explorer.fits
    assert explorer.picture.value != picture
    assert explorer.facts.value != facts


@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp", "pp-dp-tp"])
def test_the_tables_facts_are_the_layouts(explorer, order):
    explorer.order.value = order
    layout = ParallelLayout(16, 2, 4, order=order)
    assert groups_in_table(explorer.facts.value) == [layout.groups(axis) for axis in ("tp", "dp", "pp")]


def test_context_parallelism_gets_its_row(explorer):
    explorer.cp_size.value = 2
    layout = ParallelLayout(16, 2, 4, 2, order="tp-cp-dp-pp")
    assert explorer.shown == layout
    assert groups_in_table(explorer.facts.value) == [layout.groups(axis) for axis in ("tp", "cp", "dp", "pp")]


def test_context_parallelism_is_folded_away_by_its_checkbox(explorer):
    assert explorer.cp_size.layout.display == "none"
    explorer.context.value = True
    assert explorer.cp_size.layout.display is None
    explorer.cp_size.value = 2
    explorer.context.value = False
    assert explorer.cp_size.layout.display == "none"
    assert explorer.shown == ParallelLayout(16, 2, 4, order="tp-dp-pp")


def test_follow_shows_that_gpus_groups(explorer):
    explorer.following.value = True
    before = explorer.picture.value
    explorer.follow.value = 6
    assert explorer.picture.value != before
    assert [groups[0] for groups in groups_in_table(explorer.facts.value)] == [[6, 7], [4, 6], [2, 6, 10, 14]]


def test_a_smaller_world_takes_the_followed_gpu_along(explorer):
    explorer.following.value = True
    explorer.follow.value = 15
    explorer.world_size.value = 8
    assert explorer.follow.value == 7
    assert "group of GPU 7" in explorer.facts.value


def test_the_bytes_are_those_of_the_stated_model(explorer):
    traffic = step_traffic(MODEL, explorer.shown, gpus_per_node=8, batch_size=BATCH_SIZE)
    assert traffic["tp"].crossing_bytes == 0 < traffic["pp"].crossing_bytes
    for volume in traffic.values():
        assert (
            f"<td>{bytes_text(volume.total_bytes)}</td><td>{bytes_text(volume.crossing_bytes)}</td>"
            in explorer.facts.value
        )
    assert "7.5 billion parameters" in explorer.facts.value


def test_a_misfit_says_so_in_place_and_keeps_the_last_grid_dimmed(explorer):
    picture, facts = explorer.picture.value, explorer.facts.value
    explorer.tp_size.value = 3
    with pytest.raises(ValueError) as error:
        ParallelLayout(16, 3, 4, order="tp-dp-pp")
    assert not explorer.fits
    assert 'role="alert"' in explorer.says.value
    assert str(error.value) in explorer.says.value
    assert explorer.picture.value == picture_of(ParallelLayout(16, 2, 4), dimmed=True)
    assert facts in explorer.facts.value
    assert "labkit-stale" in explorer.facts.value

    explorer.tp_size.value = 2
    assert explorer.fits
    assert "alert" not in explorer.says.value
    assert (explorer.picture.value, explorer.facts.value) == (picture, facts)


def test_many_moves_leave_no_figure_behind(explorer):
    def figures():
        gc.collect()
        return sum(type(thing) is Figure for thing in gc.get_objects())

    before, artists = figures(), len(explorer._canvas.axes[0].get_children())
    for move in range(40):
        explorer.tp_size.value = 1 + move % 4
    assert figures() <= before  # of other tests, some may have been freed meanwhile
    assert len(explorer._canvas.axes[0].get_children()) == artists
    assert pyplot.get_fignums() == []


def test_sizes_beyond_the_usual_are_taken_as_they_are():
    explorer = layout_explorer(40, tp_size=20, pp_size=2, gpus_per_node=20, order="tp-cp-dp-pp")
    assert explorer.shown == ParallelLayout(40, 20, 2)
    assert explorer.gpus_per_node.value == 20


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not divide world_size=16"):
        layout_explorer(16, tp_size=3)


def test_its_repr_is_short_and_could_be_typed(explorer):
    again = eval(repr(explorer), {"layout_explorer": layout_explorer})
    assert again.choice == explorer.choice
    assert len(repr(explorer)) < 120
