"""What a class would answer, written without a look at the checks: nothing wrong passes, nearly all is explained."""

import importlib
import os
import pkgutil

import pytest

from course.exercises import utilisation
from course.exercises.advice import ERRORS, NONE_IS_RIGHT, OWN_ERROR
from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise
from course.exercises.watch import UNWRITTEN
from course.progress import all_exercises
from tests.course.exercises import wrong_answers

EXERCISES = {exercise.name: exercise for exercise in all_exercises()}
FILES = [
    importlib.import_module(f"{wrong_answers.__name__}.{module.name}")
    for module in pkgutil.iter_modules(wrong_answers.__path__)
]
WRONG = [answer for file in FILES for answer in file.WRONG]
SAYS = [answer for file in FILES for answer in getattr(file, "SAYS", [])]
RIGHT = [answer for file in FILES for answer in file.RIGHT]
EXPLAINS = (
    "What this usually is:", "Every number is", "the right values, in a different", "are swapped", "None is what",
    "Your function does not use", "It is right on ranks", "these are only the first", "return all",
    "Nobody waited for", "call its wait()", "not the way they were computed", "Return one of the words",
    "to a new tensor", "was freed", "is as long as the largest number", "This is a dict", *ERRORS.values(),
    OWN_ERROR, NONE_IS_RIGHT, UNWRITTEN, "The first nan arises", "the right function with one change",
    "These are different groups", "The rows are right", "transposed", "New here:", "in reverse order",
    "as it was given", "of all ranks", "over the ranks, your answers", "should have.", "what is written",
    "It changes `", "too small by", "too large by", "of the right one", "the right one rounded",
    "times what it should be", "All ranks are in the same",
    "nobody keeps it", "The parts are right", "the dtype that was given", "a multiple of the right one",
    "It is wrong wherever",
    "0 counts as false",
)  # fmt: skip


UNEXPLAINED = {"two_ranks_written_in"}
MEASURED = {"sends too much with t = 8"}  # which only real ranks can tell


def is_explained(exercise, verdict):
    if exercise.name in ("mended_row", "beat"):  # whose report says what the row or the plan does
        return True
    return any(words in " ".join(verdict.text.split()) for words in EXPLAINS)


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    """No test depends on what `beat` measures."""
    monkeypatch.setattr(utilisation, "measure_step", lambda plan, **_: utilisation.predict_step(plan))


def test_the_unexplained_are_few():
    assert len(WRONG) >= 400 and len(UNEXPLAINED) <= 0.05 * len(WRONG)
    assert {name for name, *_ in WRONG} == {
        name for name, exercise in EXERCISES.items() if isinstance(exercise, Exercise)
    }


@pytest.mark.parametrize("name", sorted({name for name, *_ in WRONG}))
def test_wrong_answers_do_not_pass_and_are_explained(name, launches_on_kept_ranks):
    """Of answers on ranks every sixth, as each takes a quarter of a second; all with LABKIT_ALL_ANSWERS=1."""
    exercise = EXERCISES[name]
    answers = [function for other, function, why in WRONG if other == name and why not in MEASURED]
    if isinstance(exercise, RankExercise) and not os.environ.get("LABKIT_ALL_ANSWERS"):
        answers = answers[::6]
    verdicts = [(function.__name__, exercise.verdict(function)) for function in answers]
    assert [answer for answer, verdict in verdicts if verdict.status in ("passed", "not attempted")] == []
    unexplained = {answer for answer, verdict in verdicts if not is_explained(exercise, verdict)}
    assert unexplained <= UNEXPLAINED


@pytest.mark.parametrize(("name", "function", "words"), SAYS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_answer_is_told_what_is_wrong_in_it(name, function, words, launches_on_kept_ranks):
    verdict = EXERCISES[name].verdict(function)
    assert verdict.status in ("wrong", "raised", "stuck")
    assert words in " ".join(verdict.text.split())


@pytest.mark.parametrize(("name", "function"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_right_answers_pass(name, function, launches_on_kept_ranks):
    verdict = EXERCISES[name].verdict(function)
    assert verdict.status == "passed", verdict.text
