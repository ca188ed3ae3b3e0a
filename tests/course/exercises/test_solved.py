"""What is solved is remembered and forgotten, and a file that cannot be used stops nothing."""

import json

from course.exercises import Exercise, solved


def test_a_solved_exercise_is_remembered_and_forgotten(capsys):
    double = Exercise("double", lambda x: 2 * x, [(0,), (3,)])
    double.check(lambda x: 3 * x)
    double.check(lambda x: ...)
    assert solved.solved() == {}
    double.check(lambda x: x + x)
    assert list(solved.solved()) == ["double"]
    solved.clear()
    assert solved.solved() == {}
    solved.clear()  # forgetting nothing is not an error
    assert capsys.readouterr().out.count("Forgotten") == 2


def test_a_file_that_is_damaged_or_cannot_be_written_stops_nothing(monkeypatch, tmp_path):
    solved.file().write_text("{half")
    assert solved.solved() == {}
    solved.note_solved("double")
    assert list(json.loads(solved.file().read_text())) == ["double"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "file" / "progress.json"))  # its folder is a file
    solved.note_solved("double")
    assert solved.solved() == {}
