"""A room is added up from its people's files, live, and one broken file is said and breaks nothing."""

import asyncio
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets.config import Config

from course import room
from course.exercises import record
from course.exercises.base import Exercise
from course.exercises.collectives import ring_all_reduce
from course.exercises.group_layout import group_lists, rank_to_coordinates

ROOT = Path(__file__).parents[2]
ANNA = SimpleNamespace(user=SimpleNamespace(name="anna"))
TIME = "2026-11-22T16:20:03+01:00"
LATER = "2026-11-22T15:20:04+00:00"  # a second later, in a different zone


def note(folder, name, solved=(), checks=(), predictions=()):
    content = {
        "solved": dict.fromkeys(solved, "2026-11-22"),
        "checks": {
            exercise: dict(status="wrong" if mistake else "passed", mistake=mistake, time=time, tries=1)
            for exercise, mistake, time in checks
        },
        "predictions": {
            key: dict(kind="number", first=8, time=TIME, right=right, mistake=mistake, last=8, tries=1)
            for key, right, mistake in predictions
        },
    }
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    first = rank_to_coordinates.name
    note(tmp_path, "anna", [first], [(first, None, TIME), (group_lists.name, "Off by one.", LATER)])
    note(tmp_path, "ben", [first], [(first, None, TIME), (ring_all_reduce.name, "You added twice.", LATER)])
    note(
        tmp_path, "cleo", [], [(group_lists.name, "Off by one.", TIME)], [("01.a", True, None), ("01.b", False, "n/t")]
    )
    note(tmp_path, "dora", [], [], [("02.a", False, None)])
    return tmp_path


def rows(shown):
    return {row[0]: row[1:] for row in shown.rows()}


def test_the_room_is_counted_by_notebook(folder):
    shown = rows(room.Room(folder))
    assert shown["01"][:3] == ["2", "1", "50% of 2"]
    assert shown["02"][:3] == ["2", "1", "0% of 1"], "ben's last check counts, whatever his clock's zone"
    assert f"{rank_to_coordinates.name} 2, " in shown["01"][3] and f"{group_lists.name} 0" in shown["01"][3]
    assert repr(room.Room(folder)).startswith("4 people; something last happened at ")


def test_the_mistake_made_most_often_comes_first(folder):
    made = room.Room(folder).mistakes()
    assert made[0] == ["2", f"{group_lists.name}: Off by one."]
    others = [f"{ring_all_reduce.name}: You added twice.", "01.b: n/t", "02.a: answered 8"]
    assert sorted(made[1:]) == sorted(["1", text] for text in others)


def test_nobody_is_named_unless_asked(folder):
    unnamed, named = room.Room(folder), room.Room(folder, names=True)
    for name in ("anna", "ben", "cleo", "dora"):
        assert name not in repr(unnamed) + unnamed._repr_html_()
        assert name in repr(named) and name in named._repr_html_()
    assert named.mistakes()[0] == ["2", f"{group_lists.name}: Off by one. [anna, cleo]"]


@pytest.mark.parametrize(
    "content",
    [
        b"{half",
        b"\xff\xfe\x00",
        b"3",
        b"[1, 2]",
        b'{"checks": {"x": 3}}',
        b'{"checks": 3}',
        b'{"predictions": {"01.a": {"time": "noon"}}}',
        b'{"predictions": {"01.a": {"time": 5, "right": true}}}',
        b'{"checks": {"x": {"time": "2026-11-22T16:20:03", "status": "wrong"}}}',
        b'{"solved": 7}',
    ],
)
def test_a_broken_file_is_reported_and_the_others_count(folder, content):
    whole = room.Room(folder)
    (folder / "eve.json").write_bytes(content)
    shown = room.Room(folder)
    assert shown.num_people == 4 and shown.events == whole.events
    for text in (repr(shown), shown._repr_html_()):
        assert "Could not be read: a file (" in text and "eve" not in text
    assert "Could not be read: eve.json (" in repr(room.Room(folder, names=True))
    assert repr(shown).splitlines()[2:] == repr(whole).splitlines()[1:]


def test_a_file_that_may_not_be_read_does_not_say_whose_it_is(folder):
    (folder / "eve.json").symlink_to(folder / "eve has none")
    assert "Could not be read: a file (FileNotFoundError: No such file or directory)." in repr(room.Room(folder))


def test_a_check_and_a_prediction_of_one_name_and_moment_do_not_break_the_order(folder):
    note(folder, "eve", [], [("01.a", None, TIME)], [("01.a", False, "n/t")])
    assert rows(room.Room(folder))["01"][2] == "33% of 3"


def test_an_answer_whose_cell_has_not_run_is_neither_right_nor_wrong(folder):
    note(folder, "eve", [], [], [("01.a", None, None)])
    assert rows(room.Room(folder))["01"][1:3] == ["2", "50% of 2"]


def test_what_others_wrote_can_neither_steer_a_terminal_nor_run_in_a_page(folder):
    note(folder, "mallory", [], [(group_lists.name, "<img src=x onerror=alert(1)>\x1b[2J", TIME)])
    shown = room.Room(folder)
    assert "<img" not in shown._repr_html_() and "&lt;img" in shown._repr_html_()
    assert "\x1b" not in repr(shown)


def test_a_check_notes_what_the_room_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "anna.json"))
    square = Exercise("square", lambda x: x * x, [(0,), (3,)], notebook="00")
    square.mistake("You   doubled it.")(lambda x: 2 * x)
    square.check(lambda x: ...)
    assert record.checks() == {}
    square.check(lambda x: 2 * x)
    square.check(lambda x: 2 * x)
    assert room.Room(tmp_path).mistakes() == [["1", "square: You doubled it."]]
    assert record.checks()["square"]["tries"] == 2
    square.check(lambda x: 1 / x)
    assert room.Room(tmp_path).mistakes() == [["1", "square: no typical mistake (raised)"]]
    square.check(lambda x: x**2)
    assert room.Room(tmp_path).mistakes() == [] and room.Room(tmp_path).solved == {"square": 1}


def test_a_file_can_be_read_at_any_moment_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "anna.json"))
    record.note_check("x" * 10_000, "wrong", None)

    def write():
        for number in range(60):
            record.note_check(f"exercise {number}", "wrong", None)

    writer, seen = threading.Thread(target=write), []
    writer.start()
    while writer.is_alive():
        seen.append(room.Room(tmp_path))
    assert len(seen) > 3
    assert all(each.num_people == 1 and not each.unreadable for each in seen)


def test_a_live_view_follows_and_stops_when_it_is_closed(folder):
    async def follow():
        before = len(asyncio.all_tasks())
        _, view = room.watch(folder, seconds=0.01).children
        assert "4 people" in view.value
        note(folder, "emil")
        while "5 people" not in view.value:
            await asyncio.sleep(0.01)
        folder.rename(folder.with_name("moved"))
        while "is not a folder" not in view.value:
            await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == before + 1
        view.close()
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(follow(), 60))


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder: give the one"):
        room.Room(tmp_path / "nowhere")


def test_the_hub_of_the_page_on_servers_gives_everybody_a_file_of_their_own():
    [config] = re.findall(
        r"```python\n(# jupyterhub_config.py.*?)```", (ROOT / "course/servers.md").read_text(), re.DOTALL
    )
    c = Config()
    exec(config, {"c": c})
    values = c.Spawner.environment
    anna = {name: value(ANNA) if callable(value) else value for name, value in values.items()}
    assert anna["LABKIT_PROGRESS"] == "/shared/room/anna.json" and anna["PYTHONPATH"] == "/home/anna/handout"
    assert f"python -m course.room {Path(anna['LABKIT_PROGRESS']).parent} " in (ROOT / "INSTRUCTOR.md").read_text()
