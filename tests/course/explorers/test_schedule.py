"""The explorer of schedules, driven as a reader drives it: by changing the values of its controls."""

import pytest

from course.explorers.schedule import NAMES, schedule_explorer


@pytest.fixture
def explorer():
    return schedule_explorer("interleaved", 4, 8, 2)


def scene(explorer):
    return explorer.picture.scenes[0]


def cells(explorer):
    """The table's rows as lists of texts, by schedule."""
    return {name: rest for name, *rest in scene(explorer).table.rows}


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("name", "GPipe"),
        ("pp_size", 2),
        ("num_micro_batches", 4),
        ("num_chunks", 3),
        ("forward", 2.0),
        ("backward", 1.0),
        ("message", 0.5),
    ],
)
def test_every_control_changes_the_picture_and_the_facts(explorer, control, value):
    before, says = scene(explorer), explorer.says.value
    getattr(explorer, control).value = value
    assert getattr(explorer.choice, control) == value
    assert scene(explorer).marks != before.marks
    assert scene(explorer).table != before.table
    assert explorer.says.value != says


def test_an_op_keeps_its_key_when_its_time_changes(explorer):
    before = scene(explorer).by_key["2.F3.1"]
    explorer.backward.value = 4.0
    assert scene(explorer).by_key["2.F3.1"].x != before.x


def test_the_facts_are_the_known_numbers(explorer):
    table = cells(explorer)
    assert table["GPipe"] == ["33", "0.375", "27.3%", "8, 8, 8, 8"]
    assert table["1F1B"] == ["33", "0.375", "27.3%", "4, 3, 2, 1"]
    assert table["interleaved, v = 2 (shown)"][:2] == ["28.5", "0.188"]  # (p-1)/(v m) = 3/16
    assert table["zero bubble (ZB-H1)"] == ["27", "0.125", "11.1%", "4, 4, 4, 4"]
    assert "28.5 time units, of which 24 would do" in explorer.says.value
    assert "0.188 idle / ideal</b>, 15.8% of the total" in explorer.says.value


def test_chunks_can_be_chosen_only_where_there_are_any(explorer):
    assert not explorer.num_chunks.disabled
    explorer.name.value = "1F1B"
    assert explorer.num_chunks.disabled


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (8, 1, 4), (1, 24, 4), (8, 24, 4), (3, 5, 1)])
def test_there_is_a_picture_for_every_size(name, p, m, v):
    explorer = schedule_explorer(name, p, m, v, message=0.25)
    assert len(cells(explorer)) == len(NAMES)
    assert all(0 <= mark.x <= mark.x + mark.width <= 941 for mark in scene(explorer).marks)


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert repr(explorer) == "schedule_explorer('interleaved', 4, 8, 2, 1.0, 2.0, 0.0)"
    assert eval(repr(explorer), {"schedule_explorer": schedule_explorer}).choice == explorer.choice
