"""The exercise framework: what check, hint and solution say to a learner."""

import numpy as np
import pytest

from course.exercises.base import Exercise


def halves(values):
    middle = len(values) // 2
    return values[:middle], values[middle:]


def swapped_halves(values):
    return halves(values)[::-1]


def interleaved_halves(values):
    return values[::2], values[1::2]


@pytest.fixture
def exercise():
    cases = [([1, 2],), ([1, 2, 3, 4],)]
    halves_exercise = Exercise("halves", halves, cases, hints=["First hint.", "Second hint."], notebook="00")
    halves_exercise.mistake("The halves are the wrong way round.")(swapped_halves)
    halves_exercise.mistake("These are every second value, not halves.")(interleaved_halves)
    return halves_exercise


def test_the_solution_passes(exercise):
    verdict = exercise.verdict(halves)
    assert verdict.status == "passed"
    assert verdict.text == "halves: correct, all 2 cases."


def test_another_container_passes(exercise):
    assert exercise.verdict(lambda values: np.array(halves(values))).status == "passed"


@pytest.mark.parametrize("mistake", [0, 1])
def test_each_mistake_gets_its_own_advice(exercise, mistake):
    verdict = exercise.verdict(exercise.mistakes[mistake].function)
    assert verdict.status == "wrong"
    assert exercise.mistakes[mistake].advice in verdict.text
    assert exercise.mistakes[1 - mistake].advice not in verdict.text


def test_noting_a_mistake_leaves_the_function_as_it_is(exercise):
    assert exercise.mistake("A third.")(swapped_halves) is swapped_halves
    assert [mistake.advice for mistake in exercise.mistakes][2:] == ["A third."]


def test_mistakes_of_one_function_differ_in_its_options(exercise):
    exercise.mistakes_of(lambda values, cut: (values[:cut], values[cut:]), (dict(cut=0), "Cut later."))
    assert "Cut later." in exercise.verdict(lambda values: ([], values)).text


def test_report_names_the_first_wrong_case_and_both_values(exercise):
    text = exercise.verdict(interleaved_halves).text  # right for two values, wrong for four
    assert "halves(values=[1, 2, 3, 4])" in text
    assert "gave      [[1, 3], [2, 4]]" in text
    assert "expected  [[1, 2], [3, 4]]" in text


def test_report_says_where_nested_lists_differ(exercise):
    assert "differs   at [0]: [1, 3], expected [1, 2]" in exercise.verdict(interleaved_halves).text
    assert "differs   1 part, expected 2" in exercise.verdict(lambda values: [values]).text


def test_a_long_answer_is_broken_into_lines(exercise):
    lines = exercise.verdict(lambda values: [list(range(1000, 1016))] * 2).text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "    gave      [[1000, 1001, " in "\n".join(lines)


def test_a_branch_without_return_is_wrong_and_not_a_stub(exercise):
    verdict = exercise.verdict(lambda values: halves(values) if len(values) == 2 else None)
    assert verdict.status == "wrong"
    assert "gave      None" in verdict.text


def test_a_called_function_is_told_apart_from_a_function(exercise):
    verdict = exercise.verdict(halves([1, 2]))
    assert verdict.status == "wrong"
    assert "without parentheses" in verdict.text


def test_an_unknown_mistake_gets_no_advice(exercise):
    verdict = exercise.verdict(lambda values: 7)
    assert verdict.status == "wrong"
    assert "usually" not in verdict.text


@pytest.mark.parametrize("stub", [lambda values: None, lambda values: ..., "raises"])
def test_a_blank_stub_is_not_attempted(exercise, stub):
    def raises(values):
        raise NotImplementedError

    assert exercise.verdict(raises if stub == "raises" else stub).status == "not attempted"


def test_an_answer_that_was_not_returned_is_no_blank_stub(exercise, capsys):
    def in_place(values):
        values[:] = values[::-1]

    for function in (in_place, lambda values: print(halves(values))):
        verdict = exercise.verdict(function)
        assert verdict.status == "wrong" and "None is what a function gives back" in verdict.text


def test_generators_pass(exercise):
    assert exercise.verdict(lambda values: (map(int, half) for half in halves(values))).status == "passed"


def test_whole_numbers_as_floats_are_right_values_of_a_wrong_kind(exercise):
    text = exercise.verdict(lambda values: [[float(value) for value in half] for half in halves(values)]).text
    assert "the values are right" in text and "stored as floats" in text


def test_two_mistakes_at_once_are_both_named():
    pair = Exercise("pair", lambda x: (x, 2 * x), [(2,), (3,)], notebook="00")
    pair.mistakes_in(
        (0, lambda first: -first, "The first has a sign."), (1, lambda second: second + 1, "One too many.")
    )
    assert "The first has a sign. And: One too many." in pair.verdict(lambda x: (-x, 2 * x + 1)).text
    assert "usually" not in pair.verdict(lambda x: (-x, 0)).text


def test_an_error_names_the_learners_line(exercise):
    def broken(values):
        middle = 1 // 0
        return values[:middle]

    verdict = exercise.verdict(broken)
    assert verdict.status == "raised"
    assert "halves(values=[1, 2]) raised an error" in verdict.text
    assert "ZeroDivisionError" in verdict.text
    assert "in line 2 of broken: middle = 1 // 0" in verdict.text


def test_a_wrong_signature_is_reported_not_raised(exercise):
    assert "TypeError" in exercise.verdict(lambda: 1).text


def test_changing_the_arguments_does_not_spoil_the_check(exercise):
    def destructive(values):
        result = halves(list(values))
        values.clear()
        return result

    assert exercise.verdict(destructive).status == "passed"
    assert exercise.cases[0] == ([1, 2],)


def test_check_prints_the_verdict(exercise, capsys):
    assert exercise.check(swapped_halves) is None
    assert capsys.readouterr().out.strip() == exercise.verdict(swapped_halves).text


def test_hints_come_one_after_another_and_end(exercise):
    shown = [repr(exercise.hint()) for _ in range(4)]
    assert shown[0] == "Hint 1 of 2: First hint."
    assert shown[1] == "Hint 2 of 2: First hint.\n\nSecond hint."  # the first is no longer on the screen
    assert shown[2] == shown[3]
    assert "halves.solution()" in shown[2]


def test_solution_shows_the_reference_source(exercise):
    folded = exercise.solution()
    assert repr(folded).startswith("def halves(values):")
    assert "return values[:middle], values[middle:]" in repr(folded)
    assert "```python\ndef halves" in folded._repr_markdown_()
