"""Answers of learners, written without a look at the checks: each gets the verdict and the words that its text expects.

Of the wrong answers on ranks few have the mark for `make test`, as each takes a quarter of a second.
"""

import pytest

from course.exercises import utilisation
from course.exercises.base import Exercise
from course.progress import all_exercises
from tests.course.exercises.read_answers import ONLY_MEASURED, answers
from tests.support.sweep import IS_SWEEP

EXERCISES = {exercise.name: exercise for exercise in all_exercises() if isinstance(exercise, Exercise)}
ANSWERS = answers()
TRIED = [each for each in ANSWERS if each.status != ONLY_MEASURED and (each.in_make_test or IS_SWEEP)]


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    """No test depends on what `beat` measures."""
    monkeypatch.setattr(utilisation, "measure_step", lambda plan, **_: utilisation.predict_step(plan))


def test_every_exercise_has_right_answers_and_wrong_ones():
    right = {each.exercise for each in ANSWERS if each.status == "passed"}
    wrong = {each.exercise for each in ANSWERS if each.status != "passed"}
    assert right == wrong == EXERCISES.keys()


@pytest.mark.parametrize("answer", TRIED, ids=lambda each: f"{each.exercise}-{each.function.__name__}")
def test_an_answer_gets_the_verdict_that_its_text_expects(answer, launches_on_kept_ranks):
    verdict = EXERCISES[answer.exercise].verdict(answer.function)
    text = " ".join(verdict.text.split())
    assert verdict.status == answer.status, text
    assert [words for words in answer.says if words not in text] == [], text
