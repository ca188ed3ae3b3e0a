"""The explorer of collectives: what it shows is what the ranks did."""

import pytest

from course.explorers.collectives import collective_explorer, run_example


@pytest.fixture(scope="module")
def explorer():
    return collective_explorer("broadcast", world_size=3, root=2)


def test_it_shows_picture_text_and_sentence(explorer):
    explorer.operation.value = "broadcast"
    explorer.world_size.value, explorer.root.value = 3, 2
    assert explorer.flow.after == [[2, 3, 4]] * 3
    assert str(explorer.flow).replace(">", "&gt;") in explorer.says.value
    assert "root" in explorer.says.value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")


def test_a_change_runs_the_ranks_again_and_redraws(explorer):
    explorer.operation.value = "broadcast"
    before = bytes(explorer.picture.value)
    explorer.operation.value = "all-reduce"
    assert explorer.flow.after == [[3, 6, 9]] * 3
    assert bytes(explorer.picture.value) != before
    assert explorer.root.disabled


def test_fewer_ranks_take_a_root_that_left_with_them(explorer):
    explorer.operation.value = "gather"
    explorer.world_size.value, explorer.root.value = 3, 2
    explorer.world_size.value = 2
    assert (explorer.root.value, explorer.root.max, explorer.root.disabled) == (1, 1, False)
    assert explorer.flow.after == [None, [0, 1, 1, 2]]


def test_its_stored_form_is_short(explorer):
    explorer.operation.value = "scatter"
    assert repr(explorer) == f"collective_explorer('scatter', {explorer.world_size.value}, {explorer.root.value})"


def test_all_to_all_starts_from_numbers_that_show_the_exchange():
    flow = run_example("all-to-all", 2)
    assert (flow.before, flow.after) == ([[0, 1], [10, 11]], [[0, 10], [1, 11]])
