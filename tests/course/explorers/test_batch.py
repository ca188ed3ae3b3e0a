"""The explorer of notebook 05: every control changes what is shown, and what does not fit is said in place."""

import pytest
from matplotlib import pyplot

from course.explorers.batch import GRADIENT_BYTES, batch_explorer, facts_table
from labkit.cuts import BatchCut


@pytest.fixture
def explorer():
    return batch_explorer(128, 4, num_micro_batches=2)


@pytest.mark.parametrize(("control", "value"), [("batch_size", 256), ("dp_size", 8), ("num_micro_batches", 4)])
def test_every_control_changes_the_picture_and_the_facts(explorer, control, value):
    picture, facts = explorer.picture.value, explorer.facts.value
    getattr(explorer, control).value = value
    assert explorer.fits
    assert getattr(explorer.shown, control) == value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert explorer.picture.value != picture
    assert explorer.facts.value != facts


def test_the_facts_are_rows_and_bytes(explorer):
    assert GRADIENT_BYTES == 16_793_600
    assert "Each of 4 ranks sees 32 rows of 128 in a step" in explorer.says.value
    facts = explorer.facts.value
    assert "2 backwards of 16 rows: activations of 16 rows at a time" in facts
    assert "1/16 in its micro-batch · 1/2 in its rank · 1/4 in the average = 1/128" in facts
    assert "all gradients once, 16.8 MB; on a ring each rank sends 25.2 MB (without no_sync 50.4 MB)" in facts
    assert "<th>sent in a step</th><td>nothing</td>" in facts_table(BatchCut(8))


def test_a_misfit_says_so_in_place_and_keeps_the_last_picture_dimmed(explorer):
    picture, facts = explorer.picture.value, explorer.facts.value
    explorer.dp_size.value = 3
    assert not explorer.fits
    assert explorer.shown.dp_size == 4
    assert 'role="alert"' in explorer.says.value
    assert "= 6 does not divide batch_size=128: use batch_size 126 or 132" in explorer.says.value
    assert explorer.picture.value != picture
    assert "labkit-stale" in explorer.facts.value
    explorer.dp_size.value = 4
    assert explorer.fits
    assert (explorer.picture.value, explorer.facts.value) == (picture, facts)


def test_redraws_leave_nothing_behind(explorer):
    artists = len(explorer._canvas.axes[0].get_children())
    for dp_size in (1, 2, 4, 8, 4):
        explorer.dp_size.value = dp_size
    assert len(explorer._canvas.axes[0].get_children()) == artists
    assert pyplot.get_fignums() == []


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert repr(explorer) == "batch_explorer(128, 4, 2)"
    assert eval(repr(explorer), {"batch_explorer": batch_explorer}).shown == explorer.shown


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"dp_size=3 .* does not divide batch_size=128"):
        batch_explorer(dp_size=3)
