"""The explorer of collectives: what it shows is what the ranks did, or what was simulated, step by step."""

import pytest

from course.explorers import collectives, collectives_on_ranks
from course.explorers.collectives import BOTH
from course.pictures.messages import ring_steps
from course.pictures.missing_rank import EXIT, with_exit
from course.sizing.flow import numbered


def simulated(*values, **named):
    return collectives.collective_explorer(*values, **named)


def on_ranks(*values, **named):
    return collectives_on_ranks.collective_explorer(*values, **named).explorer


@pytest.fixture(scope="module", params=[simulated, on_ranks])
def make(request):
    return request.param


@pytest.fixture(scope="module")
def explorer(make):
    return make("broadcast", world_size=3, root=2)


def after(explorer):
    """What each rank has after the last step."""
    return [row[2] for row in explorer.steps[-1].table.rows]


def test_it_shows_every_message_and_a_sentence(explorer, make):
    explorer.choose(operation="broadcast", world_size=3, root=2)
    assert len(explorer.steps) == 3  # the start, and 2 messages
    assert after(explorer) == ["2, 3, 4"] * 3
    assert "root" in explorer.says
    assert ("Simulated for 3" if make is simulated else "3 real ranks have just run it") in explorer.says


def test_a_change_runs_the_ranks_again_and_redraws(explorer):
    explorer.choose(operation="all-reduce")
    assert after(explorer) == ["3, 6, 9"] * 3
    assert explorer.controls["root"].disabled


def test_a_root_that_left_with_its_rank_moves_and_says_so(explorer):
    explorer.choose(operation="gather", world_size=3, root=2)
    explorer.choose(world_size=2)
    assert (explorer.choice.root, explorer.controls["root"].disabled) == (1, False)
    assert "root is 1 now, not 2" in explorer.says
    assert after(explorer) == ["nothing", "0, 1, 1, 2"]


def test_a_root_does_not_matter_where_there_is_none(explorer):
    explorer.choose(operation="all-to-all", world_size=2)
    explorer.choose(root=5)
    assert (explorer.choice.root, explorer.choice.world_size) == (5, 2)


def test_a_ring_is_shown_message_by_message(explorer):
    explorer.choose(world_size=3)
    explorer.choose(operation="all-reduce on a ring")
    assert list(explorer.steps) == with_exit(ring_steps(numbered(3, 3)))
    assert "Simulated" in explorer.says
    explorer.choose(operation="all-gather on a ring")
    assert [row[1] for row in explorer.steps[-1].table.rows] == ["0; 1; 2"] * 3
    explorer.choose(operation=BOTH)
    assert {row[0] for row in explorer.steps[-1].table.rows} == {
        "tree (simulated)",
        "ring (simulated)",
    }


def test_its_repr_is_the_call_that_makes_it(explorer):
    explorer.choose(operation="scatter")
    called = f"collective_explorer('scatter', {explorer.choice.world_size}, {explorer.choice.root}, 'counted', '10 MB')"
    assert repr(explorer) == called


def test_fewer_ranks_move_the_root_and_never_the_operation(explorer):
    explorer.choose(operation="broadcast", world_size=8, root=7)
    explorer.choose(world_size=2)
    assert explorer.choice[:3] == ("broadcast", 2, 1)
    assert "root is 1 now, not 7" in explorer.says


@pytest.mark.parametrize(
    ("operation", "ends"),
    [("all-reduce", ["5, 7, 9"] * 2), ("gather", ["3, 1, 4, 2, 6, 5", "nothing"]), ("scatter", ["3", "1"])],
)
def test_it_runs_on_numbers_of_ones_own(make, operation, ends):
    mine = make(operation, numbers=[[3, 1, 4], [2, 6, 5]])
    assert mine.choice == (operation, 2, 0, "yours", "10 MB")
    assert after(mine) == ends  # what is cut into pieces takes as many numbers as can be cut
    with pytest.raises(ValueError, match="must be rows of one length"):
        make(numbers=[[1], [2, 3]])


def test_it_runs_on_digits_too(explorer):
    explorer.choose(operation="all-gather", numbers="digits of pi", world_size=2)
    assert after(explorer) == ["3, 1, 5, 3"] * 2
    explorer.choose(numbers="counted")


def test_all_to_all_starts_from_numbers_that_show_the_exchange(explorer):
    explorer.choose(operation="all-to-all", world_size=2)
    assert [row[1:3] for row in explorer.steps[-1].table.rows] == [["0, 1", "0, 10"], ["10, 11", "1, 11"]]


def test_tree_and_ring_race_for_a_tensor_of_the_size_that_one_chooses(explorer):
    explorer.choose(operation=BOTH, world_size=8)
    ends = {}
    for size in ("10 kB", "100 MB"):
        explorer.choose(size=size)
        ends[size] = [explorer.steps[-1].by_key[f"{number}.clock"].text for number in (0, 1)]
    assert "done in 61 µs" in ends["10 kB"][0] and "done in 3,640 µs" in ends["100 MB"][1]
    assert "10 µs (α), and its bytes at 50 GB/s (B)" in explorer.says and not explorer.controls["size"].disabled
    explorer.choose(operation="broadcast", world_size=2)
    assert explorer.controls["size"].disabled


def test_a_rank_that_is_pressed_or_dragged_away_stands_the_others_still(explorer):
    explorer.choose(operation="all-gather", world_size=3)
    whole = len(explorer.steps)
    for act in (lambda: explorer.click("0.rank1"), lambda: explorer.drop("0.rank1", EXIT)):
        act()
        assert len(explorer.steps) == 1 and "rank 0 waits to receive from rank 2" in explorer.says
        assert "alert" in explorer.says and "Simulated" in explorer.says
        assert "rank 1 has returned without it" in explorer.steps[0].table.caption
        assert explorer.picked == {"away": "1"}
        explorer.click("0.rank1")
        assert len(explorer.steps) == whole and explorer.picked == {"away": ""}


def test_a_rank_that_is_away_comes_back_by_its_row_by_its_place_and_with_fewer_ranks(explorer):
    explorer.choose(operation="broadcast", world_size=4)
    for back in (
        lambda: explorer.drop("0.rank3", "state3"), lambda: explorer.click(EXIT), lambda: explorer.choose(world_size=3),
    ):  # fmt: skip
        explorer.drop("0.rank3", "0.rank1")  # that is not away
        assert explorer.away is None
        explorer.drop("0.rank3", EXIT)
        explorer.drop("0.rank3", EXIT)  # it is there
        assert explorer.away == 3
        explorer.click("state0")
        assert explorer.away == 3
        back()
        assert explorer.away is None and len(explorer.steps) > 1


def test_an_address_says_who_is_away(explorer):
    explorer.choose(world_size=4)
    explorer.pick({"away": "2"})
    explorer.choose()
    assert "Rank 2 does not come" in explorer.says
    explorer.pick({"away": ""})
    explorer.choose()
    with pytest.raises(ValueError, match="away = me must be the number of a rank"):
        explorer.pick({"away": "me"})
