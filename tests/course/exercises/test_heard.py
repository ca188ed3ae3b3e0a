"""A check hears messages through every API of torch: right values by forbidden messages are refused, and say so."""

import pytest

from course.progress import all_exercises
from tests.course.exercises.wrong_answers.with_other_apis import FORBIDDEN

EXERCISES = {exercise.name: exercise for exercise in all_exercises()}


@pytest.mark.parametrize(("name", "function", "said"), FORBIDDEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_forbidden_message_is_heard(name, function, said, launches_on_kept_ranks):
    verdict = EXERCISES[name].verdict(function)
    text = " ".join(verdict.text.split())
    assert verdict.status == "wrong" and "the values are right" in text and said in text, verdict.text
