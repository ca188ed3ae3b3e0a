"""What is said of an answer that is no typical mistake: how it is related to the right one, and what an error means."""

import math

import pytest

from course.exercises.advice import NAN, Evidence, explain, joined
from course.exercises.calling import Raised
from course.exercises.relations import RANKS
from course.exercises.source import is_written, unused
from course.progress import all_exercises


@pytest.mark.parametrize(
    ("got", "right", "words"),
    [
        ([[1, 2, 3]], [[3, 2, 1]], "Parts 1 and 3 are swapped."),
        (
            [[1, [[3], [4]]]],
            [[1, [3, 4]]],
            "Only part 2 of the 2 is wrong. These are the right values, in a different shape: [2, 1], not [2].",
        ),
        (
            [[[[6, 2]], [1.5]]],
            [[[[6, 2]], [[1.5]]]],
            "Only part 2 of the 2 is wrong. These are the right values, in a different shape: [1], not [1, 1].",
        ),
        ([[[6], [2]]], [[[6, 2, 6, 4, 4]]], "The shape is [2, 1], not [1, 5]."),
        (
            [[[[0], [1], [2], [3]], 7]],
            [[[[0, 2], [1, 3]], 7]],  # groups of ranks: whatever they are, their values are all ranks
            "Only part 1 of the 2 is wrong. The shape is [4, 1], not [2, 2].",
        ),
        ([[7]], [7], "These are the right values, in a different shape: [1], not one number."),
        ([{"one": 1, "two": 2}], [[1, 2]], "This is a dict. Return what is in it, without the names."),
        ([[1.0, math.nan]], [[1.0, 2.0]], NAN),
        ([[2.0, math.nan]], [[1.0, math.nan]], "Only part 1 of the 2 is wrong."),
        ([[1, 5]], [[1, 6]], "Only part 2 of the 2 is wrong."),
        ([6, 10], [3, 5], "Every number is 2 times the right one."),
        (
            [[1, [[2], [4]]], [3, [[6], [8]]]],
            [[2, [[4], [8]]], [6, [[12], [16]]]],
            "Every number is 0.5 times the right one.",
        ),
        ([[[1, 2], [[3], [4]]]], [[[1, 3], [[3], [5]]]], ""),
        (
            [[[[2, 3], [0, 1], [4, 5]], 7]],
            [[[[0, 1], [2, 3], [4, 5]], 7]],
            "Only part 1 of the 2 is wrong. These are the right values, in a different order.",
        ),
        ([[1, 2, 3, 5, 4]], [[1, 2, 3, 4, 5]], "These are the right values, in a different order."),
        ([[[5], [1, 2]]], [[[1, 2], [5]]], "Parts 1 and 2 are swapped."),
        ([[[7], [1, 2], [3]]], [[[1, 2], [3], [7]]], "These are the right values, in a different order."),
    ],
)
def test_what_is_seen_of_a_wrong_answer(got, right, words):
    assert explain(Evidence(got, right, [], [{"t": 2, "d": 7}, {"t": 4, "d": 7}])) == words


def test_of_ranks_it_says_where_they_are_right():
    given = [{RANKS: 3}] * 3
    assert explain(Evidence([6, 1, 2], [6, 6, 6], [], given)) == "It is right on ranks [0], and wrong on [1, 2]."
    assert explain(Evidence([6, 1, 2], [6, 6, 6], [], [{RANKS: 1}] * 3)) == ""  # these are three cases


def test_what_holds_in_more_cases_is_preferred():
    first = Evidence([[2.0, 4.0]] * 2, [[4.0, 8.0]] * 2, [], [{RANKS: 2}] * 2)
    other = Evidence([[3.0, 1.0]] * 3, [[6.0, 3.0]] * 3, [], [{RANKS: 3}] * 3)
    like_it = Evidence([[3.0, 1.0]] * 3, [[6.0, 2.0]] * 3, [], [{RANKS: 3}] * 3)
    half = "Every number is 0.5 times the right one."
    assert explain(first, joined([first, like_it])) == explain(first, joined([first, other])) == half


def test_a_mistake_that_matches_half_of_the_answers_is_not_taken():
    right, got = [0, 0, 0, 0], [1, 2, 0, 0]
    assert explain(Evidence(got, right, [("All of it.", [1, 2, 3, 4])])) == ""
    assert explain(Evidence(got, right, [("Nearly all.", [1, 2, 0, 4])])) == "What this usually is: Nearly all."


def test_a_mistake_is_recognised_though_a_later_case_raises():
    got = [1, 2, 3, Raised("ZeroDivisionError: division by zero")]
    mistake = ("Divided.", [1, 2, 3, Raised("ZeroDivisionError: float division by zero")])
    assert explain(Evidence(got, [0, 0, 0, 0], [mistake])) == "What this usually is: Divided."


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("RuntimeError: grad can be implicitly created only for scalar outputs", "backward() starts from one number"),
        ("TypeError: parameter `tensor` of type torch.Tensor\n   but got <class 'int'>", "Put the number into one"),
        (
            "TypeError: unsupported operand type(s) for +: 'NoneType' and 'Tensor'",
            "dist.all_reduce, which works in place",
        ),
        ("TypeError: parameter `output` of type torch.Tensor\n   but got <class 'list'>", "Put the number into one"),
        ("ValueError: Invalid process group specified", "not a member of the group"),
        ("rank 2 of 3 was killed by SIGABRT: C++ code gave up", "gets more or fewer bytes than it expects"),
        ("ValueError: not enough values to unpack (expected 2, got 1)", "Look at the shapes."),
        ("ValueError: something else", ""),
    ],
)
def test_an_error_is_explained(message, words):
    told = explain(Evidence([Raised(message)], [[7]], []))
    assert words in told and bool(words) == bool(told)


def test_an_argument_that_is_not_used_is_named():
    assert unused(lambda rank, size: [rank for _ in range(3)]) == "Your function does not use `size`."
    assert unused(lambda rank, size: [rank + size for _ in range(3)]) == ""

    def in_a_function_inside(rank, size):
        size += 1

        def inside():
            return rank

        return inside

    assert unused(in_a_function_inside) == ""


def test_a_function_without_source_is_taken_for_a_stub():
    names = {}
    exec("def doubled(x):\n    y = 2 * x", names)
    assert not is_written(names["doubled"]) and not is_written(print)
    assert unused(names["doubled"]) == unused(print) == ""


def test_a_stub_is_told_from_what_has_more_than_a_docstring():
    def stub(x):
        """Return x."""
        ...
        raise NotImplementedError("your lines here")

    def assigned(x):
        y = 2 * x  # noqa: F841

    def branches(x):
        if x:
            return

    assert [is_written(each) for each in (stub, assigned, branches)] == [False, True, True]


@pytest.mark.parametrize(
    "exercise", [each for each in all_exercises() if hasattr(each, "solution_function")], ids=lambda each: each.name
)
def test_every_solution_uses_all_its_arguments(exercise):
    """Or an unused one would be no hint."""
    assert unused(exercise.solution_function) == ""
