"""What is solved and predicted is remembered and forgotten, and a file that cannot be used stops nothing."""

import json
import os
from pathlib import Path

import pytest

from course import progress
from course.exercises import record
from course.exercises.base import Exercise

EIGHT = record.Prediction(
    kind="number", first=8, time="2026-11-22T16:20:03+01:00", right=False, mistake="That is n/t.", last=2, tries=2
)


def test_a_solved_exercise_is_remembered_and_forgotten(capsys):
    double = Exercise("double", lambda x: 2 * x, [(0,), (3,)], notebook="00")
    double.check(lambda x: 3 * x)
    double.check(lambda x: ...)
    assert record.solved() == {}
    double.check(lambda x: x + x)
    assert list(record.solved()) == ["double"]
    record.clear()
    assert record.solved() == {}
    record.clear()  # forgetting nothing is not an error
    assert capsys.readouterr().out.count("Forgotten") == 2


def test_a_file_that_is_damaged_or_cannot_be_written_stops_nothing(monkeypatch, tmp_path):
    record.file().write_text("{half")
    assert record.solved() == {}
    record.note_solved("double")
    record.note_prediction("01.data_size", EIGHT)
    assert list(json.loads(record.file().read_text())["solved"]) == ["double"]
    assert record.predictions() == {"01.data_size": EIGHT}
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "file" / "progress.json"))  # its folder is a file
    record.note_solved("double")
    assert record.solved() == {}
    record.note_prediction("01.data_size", EIGHT)
    assert record.predictions() == {}


@pytest.mark.parametrize(
    "content",
    [
        {"double": "2026-01-31"},
        {"double": "2026-01-31", "solved": {"treble": "2026-02-01"}},  # an earlier version wrote into a later file
        {"double": "2026-01-31", "solved": [], "predictions": None},
    ],
)
def test_what_an_earlier_version_noted_still_counts(content):
    record.file().write_text(json.dumps(content))
    record.note_prediction("01.data_size", EIGHT)
    record.note_solved("half")
    assert record.solved()["double"] == "2026-01-31"
    assert set(json.loads(record.file().read_text())) == {"solved", "checks", "predictions", "results"}
    assert record.predictions() == {"01.data_size": EIGHT}
    if "treble" in content.get("solved", []):
        assert record.solved()["treble"] == "2026-02-01"


def test_an_answer_that_is_damaged_does_not_count():
    damaged = {"predictions": {"01.a": EIGHT, "01.b": {"kind": "number", "first": 8}, "01.c": 8}}
    record.file().write_text(json.dumps(damaged))
    assert record.predictions() == {"01.a": EIGHT}


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder in which everybody may write, and anna's file in it, which is not there yet."""
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "anna.json"))
    record._said.clear()
    return tmp_path


def test_no_link_leads_what_is_written_to_a_different_file(room):
    victim = room / "diary"
    victim.write_text("dear diary")
    for name in (".anna.json", "anna.tmp", f"anna.{os.getpid()}", ".anna.json.tmp"):
        (room / name).symlink_to(victim)
    record.note_solved("double")
    assert list(record.solved()) == ["double"]
    progress.save(room / "anna.json")
    record.file().unlink()
    record.file().symlink_to(victim)
    record.note_solved("half")
    assert record.solved() == {} and victim.read_text() == "dear diary"
    with pytest.raises(PermissionError, match="it is a link"):
        progress.save(record.file())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_neither_believed_nor_overwritten_and_a_cell_says_so_once(room, capsys):
    record.file().write_text('{"solved": {"half": "2026-01-31"}}')
    os.chown(record.file(), 40_001, -1)
    assert record.solved() == {}
    record.note_prediction("01.data_size", EIGHT)
    assert capsys.readouterr().out == "", "the form of the question says so"
    for status in ("wrong", "passed"):
        record.note_check("double", status, None)
    said = capsys.readouterr().out
    assert said.count(f"Your progress is not kept in {record.file()}: it belongs to user 40001. Set") == 1
    assert "half" in record.file().read_text() and list(room.iterdir()) == [record.file()]
    with pytest.raises(PermissionError, match="belongs to user 40001"):
        progress.save(record.file())
    record.file().write_text("[" * 200_000)
    os.chown(record.file(), 0, -1)
    assert record.solved() == {}


def test_where_nothing_can_be_written_nothing_is_left_and_a_cell_says_so(room, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    record.note_solved("double")
    assert list(room.iterdir()) == [] and "No space left on device. Set LABKIT_PROGRESS" in capsys.readouterr().out
    (room / "file").touch()
    monkeypatch.setenv("LABKIT_PROGRESS", str(room / "file" / "progress.json"))
    record.note_result("01.data_size")
    assert "is not kept" in capsys.readouterr().out
    record.clear()
    assert "Nothing is forgotten" in capsys.readouterr().out


def test_the_file_is_as_readable_as_the_umask_says(room):
    for umask, mode in [(0o022, 0o644), (0o077, 0o600)]:
        before = os.umask(umask)
        record.note_solved(f"with {umask}")
        os.umask(before)
        assert record.file().stat().st_mode & 0o777 == mode


def test_solved_and_predicted_do_not_overwrite_each_other():
    record.note_solved("double")
    record.note_prediction("01.data_size", EIGHT)
    record.note_prediction("01.data_size", {**EIGHT, "tries": 3})
    record.note_solved("half")
    assert list(record.solved()) == ["double", "half"]
    assert record.predictions() == {"01.data_size": {**EIGHT, "tries": 3}}
    record.clear()
    assert record.predictions() == {}
