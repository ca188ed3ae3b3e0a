"""What is said of an answer that is no typical mistake: how it is related to the right one, and what an error means."""

import math

import pytest
import torch
import torch.distributed as dist

from course.exercises.advice import NAN, OWN_ERROR, Evidence, explain, joined
from course.exercises.calling import Raised
from course.exercises.relations import RANKS
from course.exercises.source import is_written, rebound, received_into_what_is_sent, sized_by_data, unused
from course.exercises.watch import UNWRITTEN
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
        ([[1, 2**63 - 1]], [[1, 2]], f"New memory is in this answer, to which nobody has written. {UNWRITTEN}"),
        ([[2.0, math.nan]], [[1.0, math.nan]], "Only part 1 of the 2 is wrong."),
        ([1, 2], [[1, 5], [2, 6]], "This is part 1 of the 2: return all."),
        ([[0, 1, 4, 5, 8]], [[0, 1, 4, 5, 8, 9]], "What is there is right, but these are only the first 5 of 6."),
        ([[1, 5]], [[1, 6]], "Only part 2 of the 2 is wrong."),
        ([6, 20], [3, 5], "Every number is t times the right one."),
        ([3, 5], [3, 4], "All are too large, or right: 1 to 1.25 times the right one."),
        (
            [[[[0, 1], [2, 3], [4, 5]], 7]],
            [[[[0, 2], [1, 3], [4, 5]], 7]],
            "Only part 1 of the 2 is wrong. These are different groups: 0 is with 1 in [0, 1], and belongs to [0, 2].",
        ),
        (
            [[[[2, 3], [0, 1], [4, 5]], 7]],
            [[[[0, 1], [2, 3], [4, 5]], 7]],
            "Only part 1 of the 2 is wrong. The rows are right, and in a different order.",
        ),
        (
            [[1, 2, 3, 5, 4]],
            [[1, 2, 3, 4, 5]],
            "These are the right values, in a different order. The first 3 of 5 are right.",
        ),
        ([[2.0, 3.0, 9.0]], [[2.2, 3.4, 9.9]], "Every number is the right one rounded down."),
        ([[4.0, 9.0, 25.0, 49.0, 1.0]], [[2.0, 3.0, 5.0, 7.0, 1.0]], "Every number is the square of the right one."),
        ([[[1.0, 3.0], [2.0, 4.0]]], [[[1.0, 2.0], [3.0, 4.0]]], "These are the right values, transposed."),
        (
            [[[1, 2], [3, 9], [5, 9], [6, 9], [7, 9]]],
            [[[1, 2], [3, 4], [5, 9], [6, 9], [7, 9]]],
            "9 of the 10 numbers are right.",
        ),
        (
            [[[1, 2], [4, 5], [7, 8], [9, 6], [3, 1]]],
            [[[1, 2], [4, 5], [7, 8], [9, 6], [4, 4]]],
            "Only row 4 of 5 is wrong, counted from 0.",
        ),
    ],
)
def test_what_is_seen_of_a_wrong_answer(got, right, words):
    assert explain(Evidence(got, right, [], [{"t": 2, "d": 7}, {"t": 4, "d": 7}])) == words


SHARDS = [[1.0, 2.0], [3.0, 5.0], [7.0, 4.0]]
TOTAL, JOINED = [11.0, 11.0], [1.0, 2.0, 3.0, 5.0, 7.0, 4.0]


@pytest.mark.parametrize(
    ("got", "right", "words"),
    [
        ([6, 1, 2], [6, 6, 6], "It is right on ranks [0], and wrong on [1, 2]."),
        ([[1, 2]] * 3, [[3, 6]] * 3, "That is 1 / the number of ranks."),
        (SHARDS, [TOTAL] * 3, "Added up over the ranks, your answers are the right one"),
        (SHARDS, [[11 / 3, 11 / 3]] * 3, "The mean of the ranks' answers is the right one"),
        (SHARDS, [JOINED] * 3, "Joined along dim 0, the ranks' answers are the right one"),
        ([JOINED] * 3, SHARDS, "This is the whole, and right is the rank's own piece of it, along dim 0."),
        ([TOTAL] * 3, SHARDS, "These are the right answers of all ranks, added up."),
        ([SHARDS[1]] * 3, SHARDS, "All ranks have what rank 1 should have."),
        ([*SHARDS[1:], SHARDS[0]], SHARDS, "Each rank has what the next rank should have."),
        ([[9.0], [9.5], [9.7]], [[4.0], [4.5], [5.7]], "It is too large by 1 times `bias`"),
        ([[5.0, 7.0]] * 3, SHARDS, "This is `x` of all ranks, of which the largest number was taken at each place."),
        ([[0.0, 7.0]] * 3, SHARDS, "All ranks have `x` of rank 1, as it was given."),
    ],
)  # fmt: skip
def test_of_ranks_it_says_how_they_differ(got, right, words):
    given = [
        {RANKS: 3, "x": x, "bias": bias} for x, bias in (([5.0, 1.0], [5.0]), ([0.0, 7.0], [5.0]), ([2.0, 3.0], [4.0]))
    ]
    assert words in explain(Evidence(got, right, [], given))


def test_equal_sizes_are_told_apart_by_a_second_case():
    """In the first case there are as many ranks as rows."""
    first = Evidence([[2.0, 4.0]] * 2, [[4.0, 8.0]] * 2, [], [{RANKS: 2, "x": [9.0, 2.0]}] * 2)
    other = Evidence([[3.0, 1.0]] * 3, [[6.0, 2.0]] * 3, [], [{RANKS: 3, "x": [9.0, 2.0]}] * 3)
    assert "1 / the number of ranks or 1 / len(x)" in explain(first)
    assert explain(first, "", joined([first, other])).endswith("That is 1 / len(x).")


def test_mistakes_that_explain_different_cases_are_joined_and_a_half_matching_one_is_not_taken():
    right, got = [0, 0, 0, 0], [1, 2, 0, 0]
    one, other, both = ("One.", [1, 0, 0, 0]), ("Other.", [0, 2, 0, 0]), ("All of it.", [1, 2, 3, 4])
    assert explain(Evidence(got, right, [both, one, other])) == "What this usually is: One. And: Other."
    assert explain(Evidence(got, right, [both, one])) == ""


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
        ("RuntimeError: Split sizes doesn't match total dim 0 size", "each splits must add up to the rows"),
        ("NotImplementedError: \"bincount_cpu\" not implemented for 'Float'", "no such operation for this dtype"),
        (
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)",
            "Given were x [1, 2], weight [2, 4].",
        ),
    ],
)
def test_an_error_is_explained(message, words):
    given = [{"x": [[1, 2]], "weight": [[0] * 4] * 2, "rank": 1}]
    assert words in explain(Evidence([Raised(message)], [[7]], [], given))


def test_of_a_shape_that_does_not_fit_it_says_that_of_the_case_that_failed():
    got = [7, Raised("RuntimeError: The size of tensor a (4) must match the size of tensor b (5)")]
    assert explain(Evidence(got, [7, 8], [], [{"x": [1]}, {"x": [1, 2]}])) == "The shapes do not fit. Given were x [2]."


@pytest.mark.parametrize(
    ("where", "is_own"),
    [
        ("\nin line 2 of answer: raise ValueError('ep must divide dp')", True),
        (
            "rank 1 of 2 raised AssertionError:\n    at notebook cell In[3], line 2, in answer:  assert d % ep == 0",
            True,
        ),
        ("\nin line 2 of answer: return torch.cat(raise_all)", False),
        ("rank 1 of 2 raised ValueError:\n    at labkit/layout.py, line 9, in groups:  raise ValueError(text)", False),
    ],
)
def test_an_error_that_the_answer_raises_itself_is_told_so(where, is_own):
    assert (explain(Evidence([Raised("ValueError: no", where)], [7], [])) == OWN_ERROR) is is_own


def by_the_data(x):
    return torch.bincount(x)


def as_wide_as_the_data(x):
    return torch.nn.functional.one_hot(x)


def of_a_known_length(x):
    return torch.bincount(x, minlength=8) + torch.nn.functional.one_hot(x, 8).sum(0)


def test_a_size_by_the_data_is_named():
    assert sized_by_data(by_the_data).startswith("`torch.bincount(x)` is as long as the largest number in it asks for")
    assert sized_by_data(as_wide_as_the_data).endswith("by `num_classes=`.")
    assert sized_by_data(of_a_known_length) == sized_by_data(print) == ""


def test_an_argument_that_is_not_used_is_named():
    assert unused(lambda rank, size: [rank for _ in range(3)]) == "Your function does not use `size`."
    assert unused(lambda rank, size: [rank + size for _ in range(3)]) == ""

    def in_a_function_inside(rank, size):
        size += 1

        def inside():
            return rank

        return inside

    assert unused(in_a_function_inside) == ""


def lost(tensors):
    for tensor in tensors:
        tensor = tensor / 2
    return tensors


def kept_in_a_list(tensors):
    halves = []
    for tensor in tensors:
        tensor = tensor / 2
        halves.append(tensor)
    return halves


def new_in_each_turn(tensors):
    for tensor in tensors:
        half = tensor / 2
    return half


def test_a_variable_of_a_loop_that_is_bound_anew_for_nothing_is_named():
    assert rebound(lost).startswith("`tensor = tensor / 2` gives the name `tensor` to a new tensor")
    assert not rebound(kept_in_a_list) and not rebound(new_in_each_turn)


def swaps(x, new, right, left):
    dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, new, left)])


def overwrites(x, right, left):
    dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, x, left)])


def test_a_buffer_that_is_sent_and_received_into_is_named():
    assert received_into_what_is_sent(overwrites).startswith("`x` is sent and received into at the same time")
    assert not received_into_what_is_sent(swaps)


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
