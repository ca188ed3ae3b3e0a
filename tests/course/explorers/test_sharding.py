"""The explorer of shards, driven as a reader drives it: by changing the values of its controls."""

import pytest
from matplotlib import pyplot

from course.explorers.sharding import facts_table, shard_explorer
from course.pictures.linear_cut import LinearCut


@pytest.fixture
def explorer():
    return shard_explorer("column", 1024, 512, tp_size=2)


@pytest.mark.parametrize(
    ("control", "value"),
    [("cut", "row"), ("input_size", 2048), ("output_size", 1024), ("tp_size", 4), ("batch_size", 64)],
)
def test_every_control_changes_the_picture_and_the_facts(explorer, control, value):
    picture, facts = explorer.picture.value, explorer.facts.value
    getattr(explorer, control).value = value
    assert explorer.fits
    assert getattr(explorer.shown, control) == value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert explorer.picture.value != picture
    assert explorer.facts.value != facts


def test_the_facts_of_a_column_cut_are_bytes_and_messages(explorer):
    assert "weight [256, 1024] 1.05 MB" in explorer.facts.value
    assert "<th>sent forward</th><td>nothing</td>" in explorer.facts.value
    assert "all-reduce of dX [256, 1024], 1.05 MB" in explorer.facts.value
    explorer.whole.value = True
    assert "all-gather of Y [256, 512], 524 kB; on a ring each rank sends 262 kB" in explorer.facts.value


def test_the_facts_of_a_row_cut_name_the_sum():
    table = facts_table(LinearCut("row", 1024, 512, tp_size=4, batch_size=256), whole=True)
    assert "all-reduce of Y [256, 512], 524 kB; on a ring each rank sends 786 kB" in table
    assert "all-gather of dX [256, 1024]" in table
    assert "input_is_parallel=False" in table


def test_a_misfit_says_so_in_place_and_keeps_the_last_picture_dimmed(explorer):
    picture, facts = explorer.picture.value, explorer.facts.value
    explorer.tp_size.value = 3
    assert not explorer.fits
    assert explorer.shown.tp_size == 2
    assert 'role="alert"' in explorer.says.value
    assert "tp_size=3 does not divide output_size=512" in explorer.says.value
    assert explorer.picture.value != picture
    assert "labkit-stale" in explorer.facts.value
    explorer.tp_size.value = 2
    assert explorer.fits
    assert "alert" not in explorer.says.value
    assert (explorer.picture.value, explorer.facts.value) == (picture, facts)


def test_redraws_leave_nothing_behind(explorer):
    artists = len(explorer._canvas.axes[0].get_children())
    for tp_size in (1, 2, 4, 8, 2):
        explorer.tp_size.value = tp_size
    assert len(explorer._canvas.axes[0].get_children()) == artists
    assert pyplot.get_fignums() == []


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tp_size=3 does not divide output_size=512"):
        shard_explorer(tp_size=3)


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert repr(explorer) == "shard_explorer('column', 1024, 512, 2, 256)"
    assert eval(repr(explorer), {"shard_explorer": shard_explorer}).shown == explorer.shown
