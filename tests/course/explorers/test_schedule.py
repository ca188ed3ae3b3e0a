"""The explorer of schedules, driven as a reader drives it: by changing the values of its controls."""

import re

import pytest
from matplotlib import pyplot

from course.explorers.schedule import NAMES, schedule_explorer


@pytest.fixture
def explorer():
    return schedule_explorer("interleaved", 4, 8, 2)


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("name", "GPipe"),
        ("num_stages", 2),
        ("num_micro_batches", 4),
        ("num_chunks", 3),
        ("forward", 2.0),
        ("backward", 1.0),
        ("message", 0.5),
    ],
)
def test_every_control_changes_the_picture_and_the_facts(explorer, control, value):
    picture, facts, says = explorer.picture.value, explorer.facts.value, explorer.says.value
    getattr(explorer, control).value = value
    assert getattr(explorer.choice, control) == value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert explorer.picture.value != picture
    assert explorer.facts.value != facts
    assert explorer.says.value != says


def cells(explorer):
    """The table's rows as lists of texts, by schedule."""
    rows = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", explorer.facts.value.partition("<tbody>")[2])
    return {name: re.findall(r"<td><(?:b|span)>(.*?)</", row) for name, row in rows}


def test_the_facts_are_the_known_numbers(explorer):
    table = cells(explorer)
    assert table["GPipe"] == ["33", "0.375", "27.3%", "8, 8, 8, 8"]
    assert table["1F1B"] == ["33", "0.375", "27.3%", "4, 3, 2, 1"]
    assert table["interleaved, v = 2"][:2] == ["28.5", "0.188"]  # (p-1)/(v m) = 3/16
    assert table["zero bubble (ZB-H1)"] == ["27", "0.125", "11.1%", "4, 4, 4, 4"]
    assert "<b>28.5</b>" in explorer.facts.value
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
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert len(cells(explorer)) == len(NAMES)
    assert pyplot.get_fignums() == []


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert repr(explorer) == "schedule_explorer('interleaved', 4, 8, 2, 1.0, 2.0, 0.0)"
    assert eval(repr(explorer), {"schedule_explorer": schedule_explorer}).choice == explorer.choice
