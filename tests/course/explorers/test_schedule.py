"""The explorer of schedules, driven as a reader drives it: by changing the values of its controls."""

import pytest

from course.explorers.schedule import GREEDY, NAMES, schedule_explorer
from labkit.schedules import dualpipe_v, greedy


@pytest.fixture
def explorer():
    return schedule_explorer("interleaved", 4, 8, 2)


def scene(explorer):
    return explorer.steps[0]


def cells(explorer):
    """The table's rows as lists of texts, by schedule."""
    return {name: rest for name, *rest in scene(explorer).table.rows}


def test_an_op_keeps_its_key_when_its_time_changes(explorer):
    before = scene(explorer).by_key["2.F3.1"]
    explorer.choose(backward=4.0)
    assert scene(explorer).by_key["2.F3.1"].x != before.x


def test_the_facts_are_the_known_numbers(explorer):
    table = cells(explorer)
    assert table["GPipe"] == ["33", "0.375", "27.3%", "8, 8, 8, 8"]
    assert table["1F1B"] == ["33", "0.375", "27.3%", "4, 3, 2, 1"]
    assert table["interleaved, v = 2 (shown)"][:2] == ["28.5", "0.188"]  # (p-1)/(v m) = 3/16
    assert table["zero bubble (ZB-H1)"] == ["27", "0.125", "11.1%", "4, 4, 4, 4"]
    assert "28.5 time units, of which 24 would do" in explorer.says
    assert "0.188 idle / ideal</b>, 15.8% of the total" in explorer.says


def test_chunks_can_be_chosen_only_where_there_are_any(explorer):
    assert not explorer.controls["num_chunks"].disabled
    explorer.choose(name="1F1B")
    assert explorer.controls["num_chunks"].disabled


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (8, 1, 4), (1, 24, 4), (8, 24, 4), (3, 5, 1)])
def test_there_is_a_picture_for_every_size(name, p, m, v):
    if name == "DualPipeV" and m < 2 * p:
        pytest.skip("it has no order for so few micro-batches")
    explorer = schedule_explorer(name, p, m, v, message=0.25)
    assert len(cells(explorer)) == len(NAMES) - (name != GREEDY)
    assert all(0 <= mark.x <= mark.x + mark.width <= 941 for mark in scene(explorer).marks)


def test_a_v_holds_equally_much_on_every_rank(explorer):
    table = cells(explorer)
    assert table["zero bubble V (ZB-V)"] == ["25.5", "0.063", "5.9%", "4, 4, 4, 4"]
    assert table["V-Half"] == ["26.5", "0.104", "9.4%", "3, 3, 3, 3"]
    assert table["V-Min"] == ["29.5", "0.229", "18.6%", "2, 2, 2, 2"]
    assert table["DualPipeV"] == ["25.5", "0.063", "5.9%", "4.5, 4.5, 4.5, 4.5"]


def test_the_limit_decides_what_the_greedy_one_finds(explorer):
    assert explorer.controls["limit"].disabled
    explorer.choose(name=GREEDY)
    assert not explorer.controls["limit"].disabled
    for limit in (8, 6, 3, 2):
        explorer.choose(limit=limit)
        found = greedy(4, 8, max_in_flight=limit)
        held = ", ".join(f"{found.peak_in_flight(rank) / 2:g}" for rank in range(4))
        assert cells(explorer)[f"{GREEDY}, limit {limit} (shown)"][-1] == held
        assert {f"{rank}.{op}" for rank in range(4) for op in found.ranks[rank]} <= scene(explorer).by_key.keys()
    assert GREEDY not in " ".join(cells(schedule_explorer("V-Min")))  # which takes a while to find for many ranks


def test_too_few_micro_batches_for_dualpipe_v_are_said_in_words():
    explorer = schedule_explorer("1F1B", 4, 6)
    assert cells(explorer)["DualPipeV"] == ["micro-batches m = 6 is below 2 * ranks p = 8", "", "", ""]
    explorer = schedule_explorer("DualPipeV", 4, 8)
    explorer.choose(pp_size=5)
    assert (explorer.choice.name, explorer.choice.num_micro_batches) == ("DualPipeV", 10)
    assert "<b>micro-batches m is 10 now, not 8.</b> micro-batches m = 8 is below 2 * ranks p = 10." in (explorer.says)
    assert {f"0.{op}" for op in dualpipe_v(5, 10).ranks[0]} <= scene(explorer).by_key.keys()


def test_two_schedules_race_on_one_clock(explorer):
    explorer.choose(rival="1F1B")
    [race] = explorer.steps
    ops = [mark for mark in race.marks if mark.name and not mark.name.startswith("idle")]
    work = {name: [mark.right for mark in ops if mark.row.startswith(name)] for name in ("interleaved", "1F1B")}
    assert race.title == "interleaved and 1F1B"
    assert max(work["interleaved"]) < max(work["1F1B"]) == pytest.approx(race.clock[1])
    assert "interleaved: 28.5 time units" in explorer.says and "1F1B: 33 time units" in explorer.says
    assert repr(explorer) == "schedule_explorer('interleaved', 4, 8, 2, 1.0, 2.0, 0.0, 8, '1F1B')"
    explorer.choose(name="1F1B")  # nobody races against itself
    assert explorer.steps[0].title == "1F1B"
    explorer.choose(name="GPipe", rival="interleaved")
    assert not explorer.controls["num_chunks"].disabled
