"""A right answer that sends messages is told what they would do on GPUs, and stays right; a good one hears nothing."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import on_gpus
from course.exercises.collectives import ring_all_reduce
from course.exercises.context_parallel import attend, merge, ring_forward
from course.exercises.on_ranks import RankExercise, summed, whole_numbers
from course.exercises.three_axes import tied
from tests.course.exercises.read_answers import answer_named

pytestmark = [pytest.mark.usefixtures("launches_on_kept_ranks"), pytest.mark.gloo]


def even_ranks_send_first(q, k, v):
    rank, c = dist.get_rank(), dist.get_world_size()
    out, lse = attend(q, k, v, True)
    kv = torch.stack([k, v])
    for step in range(1, c):
        arriving = torch.empty_like(kv)
        if rank % 2 == 0:
            dist.send(kv, (rank + 1) % c)
        dist.recv(arriving, (rank - 1) % c)
        if rank % 2 == 1:
            dist.send(kv, (rank + 1) % c)
        kv = arriving
        if step <= rank:
            out, lse = merge(out, lse, *attend(q, *kv, False))
    return out


def pieces(sizes):
    return tuple(whole_numbers((size,), 10 * dist.get_rank() + place) for place, size in enumerate(sizes))


def given_to_the_other(first, second):
    """Return rank 0's tensors on both ranks."""
    return [summed(tensor * (dist.get_rank() == 0)) for tensor in (first, second)]


two_messages = RankExercise(
    "two_messages",
    given_to_the_other,
    notebook="00",
    cases=[(2, (2, 2))],
    inputs=pieces,
    may_change=("first", "second"),
)
two_sizes = RankExercise(
    "two_sizes", given_to_the_other, notebook="00", cases=[(2, (2, 3))], inputs=pieces, may_change=("first", "second")
)


def by_tag(first, second):
    if dist.get_rank() == 0:
        works = [dist.isend(first, 1, tag=1), dist.isend(second, 1, tag=2)]
        for work in works:
            work.wait()
    else:
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
    return [first, second]


def by_tag_in_a_batch(first, second):
    peer = 1 - dist.get_rank()
    if dist.get_rank() == 0:
        messages = [dist.P2POp(dist.isend, first, peer, tag=1), dist.P2POp(dist.isend, second, peer, tag=2)]
    else:
        messages = [dist.P2POp(dist.irecv, second, peer, tag=2), dist.P2POp(dist.irecv, first, peer, tag=1)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [first, second]


def in_order(first, second):
    for tag, tensor in enumerate([first, second]):
        if dist.get_rank() == 0:
            dist.send(tensor, 1, tag=tag)
        else:
            dist.recv(tensor, 0, tag=tag)
    return [first, second]


def from_anywhere(first, second):
    for tensor in (first, second):
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor)
    return [first, second]


waits_in_order = answer_named("ring_all_reduce", "ring_that_waits_in_order")
while_it_computes = answer_named("ring_forward", "while_it_computes")
between_the_ends = answer_named("tied", "tied_by_messages_between_the_ends")
leftwards = answer_named("ring_all_reduce", "leftwards")
one_rank_sends_first = answer_named("ring_all_reduce", "one_rank_sends_first")
STANDS_STILL, MIXED_UP = "On GPUs it would stand still: ", "On GPUs its messages would be mixed up: "
TOLD = [
    (ring_all_reduce, waits_in_order, STANDS_STILL, "dist.recv(buffer, (rank - 1) % n)", on_gpus.ONE_QUEUE),
    (ring_forward, while_it_computes, STANDS_STILL, "works = [dist.isend(k, to), ", on_gpus.ONE_QUEUE),
    (tied, between_the_ends, STANDS_STILL, "in dist.batch_isend_irecv", on_gpus.ALL_MUST_COME),
    (two_messages, by_tag, MIXED_UP, "works = [dist.isend(first, 1, tag=1), ", on_gpus.BY_ORDER),
    (two_messages, by_tag_in_a_batch, MIXED_UP, "in dist.batch_isend_irecv(messages)", on_gpus.BY_ORDER),
    (two_sizes, by_tag, MIXED_UP, "dist.recv(second, 0, tag=2)", on_gpus.BY_ORDER),
    (two_messages, from_anywhere, "On GPUs it would raise an error: ", "dist.recv(tensor)", on_gpus.NAME_THE_SENDER),
]
HEARS_NOTHING = [
    (ring_all_reduce, ring_all_reduce.solution_function),
    (ring_all_reduce, leftwards),
    (ring_all_reduce, one_rank_sends_first),
    (ring_forward, ring_forward.solution_function),
    (ring_forward, even_ranks_send_first),
    (two_sizes, in_order),
]


@pytest.mark.parametrize(("exercise", "function", "fate", "line", "why"), TOLD)
def test_an_answer_that_gloo_alone_takes_is_right_and_told_so(exercise, function, fate, line, why):
    verdict = exercise.verdict(function)
    assert verdict.status == "passed" and verdict.text.startswith(f"{exercise.name}: correct, on ")
    text = " ".join(verdict.text.split())
    assert fate in text and line in text and text.endswith(why)
    assert (
        exercise.verdict(exercise.solution_function).text == verdict.text.partition("\n")[0]
    )  # the next check is well


@pytest.mark.parametrize(("exercise", "function"), HEARS_NOTHING)
def test_an_answer_that_nccl_takes_hears_nothing(exercise, function):
    verdict = exercise.verdict(function)
    assert verdict.status == "passed" and "\n" not in verdict.text


def test_an_answer_without_messages_is_not_run_again(monkeypatch):
    monkeypatch.setattr(on_gpus, "launch", None)
    assert two_sizes.verdict(given_to_the_other).status == "passed"
