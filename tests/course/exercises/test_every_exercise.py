"""Every exercise of the course, by one set of rules. What is particular to one is in the test of its own file."""

import json
import re

import pytest

from course.exercises import utilisation
from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise
from course.museum import Museum
from course.progress import all_exercises
from course.working_copy import ROOT, find
from tests.support.sweep import IS_SWEEP

ALL = all_exercises()
EXERCISES = [each for each in ALL if isinstance(each, Exercise)]
MISTAKES = [
    pytest.param(exercise, mistake, id=f"{exercise.name}-{index}")
    for exercise in EXERCISES
    for index, mistake in enumerate(exercise.mistakes)
    if not (index % 6 and isinstance(exercise, RankExercise)) or IS_SWEEP
]
"""Of those on ranks every sixth, as each takes a quarter of a second; all in `make sweep-answers`."""


def by_name(exercise):
    return exercise.name


def without_spaces(text):
    return "".join(text.split())  # the report breaks long lines


def test_names_are_unique():
    names = [exercise.name for exercise in ALL]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("exercise", [each for each in ALL if not isinstance(each, Museum)], ids=by_name)
def test_its_notebook_checks_it_under_its_name(exercise):
    path = ROOT / find(f"{exercise.notebook}_*")
    code = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    assert re.search(rf"\b{exercise.name}\.check\(", code)


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_it_has_hints_and_at_least_four_typical_mistakes(exercise):
    assert len(exercise.hints) >= 2
    assert len(exercise.mistakes) >= 4


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_a_blank_stub_is_not_attempted(exercise, launches_on_kept_ranks):
    assert exercise.verdict(lambda *_: ...).status == "not attempted"


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_the_solution_passes(exercise, monkeypatch, launches_on_kept_ranks):
    # Real ranks may be slow when something else runs beside them, so no test depends on what `beat` measures.
    monkeypatch.setattr(utilisation, "measure_step", lambda plan, **_: utilisation.predict_step(plan))
    verdict = exercise.verdict(exercise.solution_function)
    assert verdict.status == "passed", verdict.text


@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_each_mistake_gets_its_own_advice_soon(exercise, mistake, launches_on_kept_ranks):
    verdict = exercise.verdict(mistake.function)
    assert verdict.status in ("wrong", "raised")
    text = without_spaces(verdict.text)
    given = {other.advice for other in exercise.mistakes if without_spaces(other.advice) in text}
    assert given == {mistake.advice}, verdict.text
    assert verdict.status == "raised" or max(map(len, verdict.text.splitlines())) <= 100
    assert len(launches_on_kept_ranks) <= 9  # about a second: the case that failed, and the others to be sure
