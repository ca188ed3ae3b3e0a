"""What a call of a learner's function does beside its answer: arguments it changes, a graph it lacks, no end."""

import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from course.exercises import calling, on_ranks
from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise
from labkit.launch import launch


def words(verdict):
    return " ".join(verdict.text.split())


def double_of_tensors(tensors):
    return [2 * tensor for tensor in tensors]


def doubled_in_place(tensors):
    return [tensor.mul_(2) for tensor in tensors]


CASES = [([torch.tensor([1.0]), torch.tensor([2.0, torch.nan])],)]
double = Exercise("double", lambda x: 2 * x, [(0,), (3,)], notebook="00")
double.mistake("You squared it.")(lambda x: x * x)


def test_an_answer_that_changes_what_it_was_given_is_wrong():
    verdict = Exercise("twice", double_of_tensors, CASES, notebook="00").verdict(doubled_in_place)
    assert verdict.status == "wrong" and "It changes `tensors[0]`, which it was given" in words(verdict)


def test_memory_that_nobody_has_written_to_is_never_right():
    """By luck it holds zeros: then the sum would be right."""

    def sum_into_new_memory(tensors):
        total = torch.empty(1)
        return [total.index_add_(0, torch.zeros(1, dtype=torch.long), 2 * tensor) for tensor in tensors]

    right = Exercise("twice", double_of_tensors, [([torch.tensor([1.0])],)], notebook="00")
    assert "new memory to which nobody has written" in words(right.verdict(sum_into_new_memory))
    assert torch.get_deterministic_debug_mode() == 0


def test_an_operation_that_torch_does_not_have_is_no_stub():
    def counts(tensors):
        return [torch.bincount(tensor) for tensor in tensors]

    verdict = Exercise("twice", double_of_tensors, CASES, notebook="00").verdict(counts)
    assert verdict.status == "raised" and "not implemented for 'Float'" in words(verdict)


def test_it_may_change_what_the_exercise_lets_it_change():
    exercise = Exercise("twice", double_of_tensors, CASES, notebook="00", may_change=("tensors",))
    assert exercise.verdict(doubled_in_place).status == "passed"


def test_nan_and_a_new_list_are_no_change():
    def longer(tensors):
        doubled = double_of_tensors(tensors)
        tensors.clear()
        return doubled

    assert Exercise("twice", double_of_tensors, CASES, notebook="00").verdict(longer).status == "passed"


def test_a_module_that_was_changed_is_named_with_its_parameter():
    def trains(model):
        model.bias.data += 1
        return 2

    exercise = Exercise("count", lambda model: 2, [(torch.nn.Linear(2, 3),)], notebook="00")
    assert "It changes `model.bias`" in words(exercise.verdict(trains))


@pytest.fixture
def one_second(monkeypatch):
    monkeypatch.setattr(calling, "MOST_SECONDS", 1)


def turns_for_ever(x):
    while True:
        try:
            x += 1
        except Exception:
            pass


def turns_from_3_on(x):
    return 1 if x < 3 else turns_for_ever(x)


def test_an_endless_loop_is_ended_and_not_tried_again(one_second):
    before, since = signal.getsignal(signal.SIGPROF), time.process_time()
    verdict = double.verdict(turns_for_ever)
    assert verdict.status == "endless" and time.process_time() - since < 2
    assert "After 1 s of computing it had not come back" in words(verdict)
    assert re.search(r"in line \d of turns_for_ever: ", words(verdict))
    assert signal.getsignal(signal.SIGPROF) == before and signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_a_loop_in_a_later_case_is_said_beside_what_is_wrong_here(one_second):
    verdict = double.verdict(turns_from_3_on)
    assert verdict.status == "wrong" and "And in a later case: After 1 s" in words(verdict)


def test_beside_the_main_thread_a_check_goes_on_without_the_timer():
    found = []
    thread = threading.Thread(target=lambda: found.append(double.verdict(lambda x: x + x)))
    thread.start()
    thread.join()
    assert found[0].status == "passed"


def never_stops_adding(x):
    while dist.get_rank() == 1:
        x += 1
    dist.all_reduce(x)
    return x


def test_a_loop_on_a_rank_is_ended_and_shown_with_the_others(monkeypatch):
    def launch_with_one_second(function, *args, **how):
        def on_rank(*args):
            calling.MOST_SECONDS = 1
            return function(*args)

        return launch(on_rank, *args, **how)

    monkeypatch.setattr(on_ranks, "launch", launch_with_one_second)
    exercise = RankExercise(
        "add", on_ranks.summed, [(2,)], notebook="02", inputs=lambda: (torch.ones(2),), may_change=("tensor",)
    )
    verdict = exercise.verdict(never_stops_adding)
    assert verdict.status == "endless", verdict.text
    assert "had not come back" in words(verdict) and "rank 0: waits in all_reduce" in words(verdict)


def gathered_by_its_old_name(x):
    both = x.new_empty(2 * len(x))
    dist.all_gather_into_tensor(both, x)
    return both


def gathered_answer():
    return calling.answer(gathered_by_its_old_name, (torch.ones(1),)).tolist()


def test_an_old_name_of_torch_prints_nothing_before_the_verdict(capfd):
    assert launch(gathered_answer, world_size=2) == [[1, 1], [1, 1]]
    assert "deprecated" not in "".join(capfd.readouterr())
