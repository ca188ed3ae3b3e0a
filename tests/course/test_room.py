"""A room is added up from its people's files, live, and one broken file is said and breaks nothing."""

import asyncio
import json
import os
import re
import threading
import time
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets.config import Config

from course import person, room
from course.exercises import record
from course.exercises.base import Exercise
from course.exercises.collectives import ring_all_reduce
from course.exercises.group_layout import group_lists, rank_to_coordinates
from course.exercises.vocabulary import vocab_cross_entropy
from course.predict import Choice, Number

ROOT = Path(__file__).parents[2]
ANNA = SimpleNamespace(user=SimpleNamespace(name="anna"))
TIME = "2026-11-22T16:20:03+01:00"
LATER = "2026-11-22T15:20:04+00:00"  # a second later, in a different zone


def note(folder, name, solved=(), checks=(), predictions=(), results=(), when=TIME, answer=8, last=None):
    content = {
        "results": dict.fromkeys(results, when),
        "solved": dict.fromkeys(solved, "2026-11-22"),
        "checks": {
            exercise: dict(status="wrong" if mistake else "passed", mistake=mistake, time=time, tries=1)
            for exercise, mistake, time in checks
        },
        "predictions": {
            key: dict(
                kind="number", first=answer, time=when, right=right, mistake=mistake, last=last or answer, tries=1
            )
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


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    made = {key: Number(key, f"How many in {key}?") for key in ("01.a", "01.b", "02.a")}
    made["01.c"] = Choice("01.c", "Which one?", ["all of them", "none"])
    monkeypatch.setattr(person, "questions", lambda: made)


def rows(shown):
    return {row[0]: row[1:] for row in shown.rows()}


def test_the_room_is_counted_by_notebook(folder):
    shown = rows(room.Room(folder))
    assert shown["01"][:3] == ["2", "1", "50% of 2"]
    assert shown["02"][:3] == ["2", "1", "0% of 1"], "ben's last check counts, whatever his clock's zone"
    assert f"{rank_to_coordinates.name} 2, " in shown["01"][-1] and f"{group_lists.name} 0" in shown["01"][-1]
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
        b'{"checks": {"case 1": 3}}',
        b'{"checks": 3}',
        b'{"predictions": {"01.a": {"time": "noon"}}}',
        b'{"predictions": {"01.a": {"time": 5, "right": true}}}',
        b'{"checks": {"case 1": {"time": "2026-11-22T16:20:03", "status": "wrong"}}}',
        b'{"predictions": {"02.a": {"time": "2026-11-22T16:20:03", "right": null, "mistake": null}}}',
        b'{"solved": 7}',
    ],
)
def test_a_broken_file_is_one_line_below_the_table_and_the_others_count(folder, content):
    whole = room.Room(folder)
    (folder / "eve.json").write_bytes(content)
    assert_is_one_line_more(folder, whole, "eve.json")


def assert_is_one_line_more(folder, whole, name):
    shown, named = room.Room(folder), room.Room(folder, names=True)
    assert len(shown.people) == len(whole.people) and shown.events == whole.events
    [line] = repr(shown).splitlines()[len(repr(whole).splitlines()) :]
    assert line.startswith("Not counted: a file: ") and Path(name).stem not in line
    assert repr(shown) == f"{whole!r}\n{line}" and f"<p>{escape(line)}</p>" in shown._repr_html_()
    assert f"Not counted: {name}: " in repr(named)
    return line


TRAPS = {
    "nested": (lambda path: path.write_text("[" * 200_000), "it is nested too deeply"),
    "large": (lambda path: path.write_bytes(b" " * 1_100_000 + b"{}"), "it has more than 256 KiB"),
    "a fifo": (os.mkfifo, "it is not a regular file"),
    "a folder": (os.mkdir, "it is not a regular file"),
    "a link": (lambda path: path.symlink_to(path.with_name("anna.json")), "it is a link"),
    "a loop": (lambda path: path.symlink_to(path), "it is a link"),
    "binary": (lambda path: path.write_bytes(os.urandom(999) + b"\xff"), "it is not text"),
    "end of time": (
        lambda path: note(path.parent, path.stem, [], [("case 1", None, "9999-12-31T23:59:59")]),
        "it is not a",
    ),
    "tomorrow": (
        lambda path: note(path.parent, path.stem, [], [("case 1", None, "2999-12-31T23:59:59")]),
        "the future",
    ),
    "huge": (lambda path: path.write_text('{"predictions": {"01.a": 1%s}}' % ("0" * 9999)), "it is not a record"),
    "letters": (lambda path: note(path.parent, path.stem, [], [("case 1", "", "\ud800\x1b")]), "it is not a"),
}


@pytest.fixture
def in_the_west(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/Los_Angeles")  # where the last second of the year 9999 is in 10000, by UTC
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("trap", TRAPS)
def test_no_file_of_a_participant_stops_the_table(folder, in_the_west, trap):
    whole, (lay, why) = room.Room(folder), TRAPS[trap]
    lay(folder / "mallory.json")
    assert why in assert_is_one_line_more(folder, whole, "mallory.json")
    assert repr(room.Room(folder)).encode() and "\x1b" not in repr(room.Room(folder, names=True))


def test_three_hundred_bad_files_are_a_few_lines_below_the_table(folder):
    whole = room.Room(folder)
    for number in range(300):
        lay, _ = list(TRAPS.values())[number % len(TRAPS)]
        lay(folder / f"mallory{number}.json")
    assert room.Room(folder).events == whole.events
    below = repr(room.Room(folder)).removeprefix(repr(whole)).split("\n")[1:]
    assert len(below) < len(TRAPS) + 3 and "Not counted: a file: it is nested too deeply (28 files)" in below
    below = repr(room.Room(folder, names=True)).split("Not counted: ")[1:]
    assert len(below) == room.MOST_FILES + 1 and below[-1] == "280 more files"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_with_the_name_of_a_different_user_does_not_count(folder, monkeypatch):
    whole, users = room.Room(folder), {"anna": 40_001, "mallory": 40_002}
    monkeypatch.setattr("course.shared_file.number_of", users.get)
    note(folder, "mallory")
    os.chown(folder / "anna.json", users["anna"], -1)
    os.chown(folder / "mallory.json", users["anna"], -1)
    assert "a different user" in assert_is_one_line_more(folder, whole, "mallory.json")
    os.chown(folder / "mallory.json", users["mallory"], -1)
    assert len(room.Room(folder).people) == len(whole.people) + 1


def test_a_hidden_file_is_nobody_and_an_earlier_record_counts_in_full(folder):
    note(folder, ".anna")
    (folder / "old.json").write_text(json.dumps({group_lists.name: "2025-01-31"}))
    shown = room.Room(folder)
    assert (len(shown.people), shown.solved[group_lists.name], shown.not_counted) == (5, 1, [])


def test_what_lies_further_is_a_table_of_its_own_once_somebody_is_there(folder):
    [lab] = room.Room(folder).tables()
    assert [row[0] for row in lab.rows] == [f"{number:02}" for number in range(1, 9)]
    note(folder, "eve", [], [(vocab_cross_entropy.name, "No sum.", TIME)])
    lab, further = room.Room(folder).tables()
    assert (lab.caption, further.caption) == ("the lab", "further")
    assert dict(row[:2] for row in further.rows)["09"] == "1" and "further" in room.Room(folder)._repr_html_()


def test_names_of_nothing_that_the_lab_asks_do_not_count(folder):
    whole = room.Room(folder)
    note(folder, "mallory", [], [(f"invented {n}", "wrong", TIME) for n in range(9)], [("01.invented", False, "n/t")])
    shown = room.Room(folder)
    assert (shown.rows(), shown.mistakes(), len(shown.people)) == (whole.rows(), whole.mistakes(), 5)


def test_a_check_and_a_prediction_of_one_name_and_moment_do_not_break_the_order(folder):
    note(folder, "eve", [], [("01.a", None, TIME)], [("01.a", False, "n/t")])
    assert rows(room.Room(folder))["01"][2] == "33% of 3"


def test_an_answer_that_waits_for_its_cell_and_one_after_the_result_are_neither_right_nor_wrong(folder):
    note(folder, "eve", [], [], [("01.a", None, None)])
    note(folder, "fred", [], [], [("01.a", None, None), ("01.b", None, None)], results=["01.a"])
    assert rows(room.Room(folder))["01"][1:5] == ["3", "50% of 2", "2", "1"]
    assert rows(room.Room(folder))["02"][1:5] == ["1", "0% of 1", "", ""]


def now(minutes_ago=0):
    return (datetime.now().astimezone() - timedelta(minutes=minutes_ago)).isoformat()


def test_the_question_that_is_open_has_a_count_of_each_answer_and_of_who_ran_it(folder):
    for name, answer, last in [("e", 8, 2), ("f", 2, 2), ("g", 2, 2), ("h", 4, 4)]:
        note(folder, name, [], [], [("01.b", None, None)], when=now(), answer=answer, last=last)
    note(folder, "h", [], [], [("01.b", True, None)], ["01.b"], when=now(1), answer=4, last=16)
    note(folder, "late", [], [], [("01.b", None, None)], ["01.b"], when=now(1), answer=4)
    note(folder, "lost", [], [], [("01.a", None, None)], when=now(10))
    note(folder, "text", [], [], [("01.b", None, None)], when=now(), answer=["<b>"])
    [table] = room.Room(folder).open_questions()
    assert table.caption == "01.b: How many in 01.b? 5 of 11 have answered; 2 ran it."
    assert list(map(list, table.rows)) == [["2", "███", "3"], ["8", "█", "1"], ["4", "█", "1"]]
    shown, named = room.Room(folder), room.Room(folder, names=True)
    assert re.search(r"answer +people\n2 +███ +3\n", repr(shown)) and "<td>███</td>" in shown._repr_html_()
    assert "h, late ran it." in repr(named) and "e, f, g" in repr(named)


def test_the_last_question_stays_open_until_a_new_one_is_answered(folder):
    note(folder, "eve", [], [], [("01.c", None, None)], when=now(20), answer="none")
    [table] = room.Room(folder).open_questions()
    assert table.caption.startswith("01.c: Which one? 1 of 5 have answered") and table.rows[0][0] == "none"
    note(folder, "fred", [], [], [("01.a", None, None), ("01.b", None, None)], when=now(1))
    assert [table.caption[:4] for table in room.Room(folder).open_questions()] == ["01.a", "01.b"]


def test_who_has_said_nothing_new_for_three_minutes_is_counted(folder):
    note(folder, "emil", [], [], [("01.a", None, None)], ["01.a"], when=now(2))
    note(folder, "fred", [], [(group_lists.name, "Off by one.", now(4))])
    note(folder, "greta")
    assert room.Room(folder).quiet() == ["anna", "ben", "cleo", "dora", "fred", "greta"]
    assert "Nothing new for three minutes: 6." in repr(room.Room(folder))
    assert "Nothing new for three minutes: anna, ben, cleo, dora, fred, greta." in repr(room.Room(folder, names=True))


def test_what_others_wrote_can_neither_steer_a_terminal_nor_run_in_a_page(folder):
    note(folder, "mallory", [], [(group_lists.name, "<img src=x onerror=alert(1)>\x1b[2J", TIME)])
    shown = room.Room(folder)
    assert "<img" not in shown._repr_html_() and "&lt;img" in shown._repr_html_()
    assert "\x1b" not in repr(shown)


def test_a_check_notes_what_the_room_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "anna.json"))
    square = Exercise("square", lambda x: x * x, [(0,), (3,)], notebook="00")
    monkeypatch.setattr(person, "notebooks", lambda: {"square": "01"})
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
    assert all(len(each.people) == 1 and not each.not_counted for each in seen)


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
