"""What is solved and predicted is remembered and forgotten, and a file that cannot be used stops nothing."""

import json

import pytest

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


def test_solved_and_predicted_do_not_overwrite_each_other():
    record.note_solved("double")
    record.note_prediction("01.data_size", EIGHT)
    record.note_prediction("01.data_size", {**EIGHT, "tries": 3})
    record.note_solved("half")
    assert list(record.solved()) == ["double", "half"]
    assert record.predictions() == {"01.data_size": {**EIGHT, "tries": 3}}
    record.clear()
    assert record.predictions() == {}
