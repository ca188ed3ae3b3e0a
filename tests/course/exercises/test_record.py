"""What is solved is remembered and forgotten, and a file that cannot be used stops nothing."""

import json

from course.exercises import record
from course.exercises.base import Exercise


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
    assert list(json.loads(record.file().read_text())) == ["double"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "file" / "progress.json"))  # its folder is a file
    record.note_solved("double")
    assert record.solved() == {}
