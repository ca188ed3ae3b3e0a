"""The explorer of collectives: what it shows is what the ranks did, or what was simulated, step by step."""

import pytest

from course.explorers.collectives import BOTH, collective_explorer
from course.measure.flow import numbered
from course.pictures.messages import ring_steps


@pytest.fixture(scope="module")
def explorer():
    return collective_explorer("broadcast", world_size=3, root=2)


def after(explorer):
    """What each rank has after the last step."""
    return [row[2] for row in explorer.picture.scenes[-1].table.rows]


def test_it_shows_every_message_and_a_sentence(explorer):
    explorer.operation.value = "broadcast"
    explorer.world_size.value, explorer.root.value = 3, 2
    assert len(explorer.picture.scenes) == 3  # the start, and 2 messages
    assert after(explorer) == ["2, 3, 4"] * 3
    assert "root" in explorer.says.value
    assert "3 real ranks" in explorer.says.value


def test_a_change_runs_the_ranks_again_and_redraws(explorer):
    explorer.operation.value = "all-reduce"
    assert after(explorer) == ["3, 6, 9"] * 3
    assert explorer.root.disabled


def test_a_root_that_left_with_its_rank_moves_and_says_so(explorer):
    explorer.operation.value = "gather"
    explorer.world_size.value, explorer.root.value = 3, 2
    explorer.world_size.value = 2
    assert (explorer.root.value, explorer.root.disabled) == (1, False)
    assert "root is 1 now, not 2" in explorer.says.value
    assert after(explorer) == ["nothing", "0, 1, 1, 2"]


def test_a_root_does_not_matter_where_there_is_none(explorer):
    explorer.operation.value = "all-to-all"
    explorer.world_size.value = 2
    explorer.root.value = 5
    assert (explorer.root.value, explorer.world_size.value) == (5, 2)


def test_a_ring_is_shown_message_by_message(explorer):
    explorer.world_size.value = 3
    explorer.operation.value = "all-reduce on a ring"
    assert list(explorer.picture.scenes) == ring_steps(numbered(3, 3))
    assert "Simulated" in explorer.says.value
    explorer.operation.value = "all-gather on a ring"
    assert [row[1] for row in explorer.picture.scenes[-1].table.rows] == ["0; 1; 2"] * 3
    explorer.operation.value = BOTH
    assert {row[0] for row in explorer.picture.scenes[-1].table.rows} == {
        "tree (simulated)",
        "ring (simulated)",
    }


def test_its_repr_is_the_call_that_makes_it(explorer):
    explorer.operation.value = "scatter"
    called = f"collective_explorer('scatter', {explorer.world_size.value}, {explorer.root.value}, 'counted')"
    assert repr(explorer) == called


def test_fewer_ranks_move_the_root_and_never_the_operation(explorer):
    explorer.operation.value = "broadcast"
    explorer.world_size.value, explorer.root.value = 8, 7
    explorer.world_size.value = 2
    assert explorer.choice[:3] == ("broadcast", 2, 1)
    assert "root is 1 now, not 7" in explorer.says.value


@pytest.mark.parametrize(
    ("operation", "ends"),
    [("all-reduce", ["5, 7, 9"] * 2), ("gather", ["3, 1, 4, 2, 6, 5", "nothing"]), ("scatter", ["3", "1"])],
)
def test_it_runs_on_numbers_of_ones_own(operation, ends):
    mine = collective_explorer(operation, numbers=[[3, 1, 4], [2, 6, 5]])
    assert mine.choice == (operation, 2, 0, "yours")
    assert after(mine) == ends  # what is cut into pieces takes as many numbers as can be cut
    with pytest.raises(ValueError, match="must be rows of one length"):
        collective_explorer(numbers=[[1], [2, 3]])


def test_it_runs_on_digits_too(explorer):
    explorer.operation.value, explorer.numbers.value = "all-gather", "digits of pi"
    explorer.world_size.value = 2
    assert after(explorer) == ["3, 1, 5, 3"] * 2
    explorer.numbers.value = "counted"


def test_all_to_all_starts_from_numbers_that_show_the_exchange(explorer):
    explorer.operation.value = "all-to-all"
    explorer.world_size.value = 2
    assert [row[1:3] for row in explorer.picture.scenes[-1].table.rows] == [["0, 1", "0, 10"], ["10, 11", "1, 11"]]
