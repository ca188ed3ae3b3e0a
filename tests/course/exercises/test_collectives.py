"""The exercises of notebook 02, on real ranks: solutions pass, each typical mistake gets its own advice."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import collectives

EXERCISES = [collectives.all_reduce_from_halves, collectives.ring_all_reduce]
MISTAKES = [(exercise, index) for exercise in EXERCISES for index in range(len(exercise.mistakes))]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_solution_passes(exercise):
    verdict = exercise.verdict(exercise.solution_function)
    assert verdict.status == "passed", verdict.text
    assert verdict.text.endswith("correct, on 4, 2 and 3 ranks.")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_reference_agrees_with_torchs_own_all_reduce(exercise):
    def all_reduce(x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    verdict = exercise.verdict(all_reduce)  # so the values are right, and only the way is not
    assert "the values are right" in verdict.text
    assert "It calls all_reduce" in verdict.text


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_blank_stub_is_not_attempted(exercise):
    def stub(x: torch.Tensor) -> torch.Tensor: ...

    def raises(x):
        raise NotImplementedError

    assert exercise.verdict(stub).status == "not attempted"
    assert exercise.verdict(raises).status == "not attempted"


@pytest.mark.parametrize(
    ("exercise", "index"), MISTAKES, ids=[f"{e.name}-{e.mistakes[i].function.__name__}" for e, i in MISTAKES]
)
def test_each_mistake_gets_its_own_advice(exercise, index):
    verdict = exercise.verdict(exercise.mistakes[index].function)
    text = " ".join(verdict.text.split())
    assert verdict.status == "wrong"
    assert [mistake.advice in text for mistake in exercise.mistakes] == [
        i == index for i in range(len(exercise.mistakes))
    ]
    assert "rank 0 of 4, starting from [0, 1, 2, 3]" in text


def test_a_ring_of_whole_tensors_is_told_how_many_bytes_it_sent():
    def whole_tensors_go_around(x):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        total, outgoing = x.clone(), x.clone()
        for _ in range(world_size - 1):
            arriving = torch.empty_like(x)
            operations = [
                dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size),
            ]
            for request in dist.batch_isend_irecv(operations):
                request.wait()
            total, outgoing = total + arriving, arriving
        return total

    text = " ".join(collectives.ring_all_reduce.verdict(whole_tensors_go_around).text.split())
    assert "This rank sent 48 bytes, and a ring needs 24" in text


def test_a_deadlock_becomes_a_report():
    def all_send_first(x):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.send(x, (rank + 1) % world_size)
        dist.recv(x, (rank - 1) % world_size)
        return x

    verdict = collectives.ring_all_reduce.verdict(all_send_first)
    assert verdict.status == "stuck"
    assert "waits in send to rank 1" in verdict.text
    assert "nobody is left to receive" in verdict.text


def test_an_error_on_one_rank_becomes_a_report():
    def fails_on_rank_one(x):
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.all_reduce(x)

    verdict = collectives.all_reduce_from_halves.verdict(fails_on_rank_one)
    assert verdict.status == "raised"
    assert "rank 1 of 4 raised KeyError" in verdict.text
    assert 'raise KeyError("lost")' in verdict.text
    assert "course/exercises" not in verdict.text  # only the learner's own lines
