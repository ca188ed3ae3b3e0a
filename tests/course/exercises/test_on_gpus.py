"""A right answer that NCCL's rules would break is right, and told so; one that they would not break hears nothing."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import on_gpus
from course.exercises.collectives import ring_all_reduce
from course.exercises.context_parallel import attend, merge, ring_forward
from course.exercises.three_axes import tied
from tests.course.exercises.wrong_answers import collectives, context_parallel, of_both_kinds
from tests.course.exercises.wrong_answers.tied import tied_by_messages_between_the_ends

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def ends(gradient, num_stages):
    """This end's gradient, a tensor to receive into, and the other end."""
    return gradient, torch.empty_like(gradient), num_stages - 1 - dist.get_rank()


def tied_unbatched(gradient, num_stages):
    if gradient is None:
        return None
    sent, other, peer = ends(gradient, num_stages)
    works = [dist.isend(sent, peer), dist.irecv(other, peer)]
    for work in works:
        work.wait()
    return sent + other


def tied_in_a_group(gradient, num_stages):
    group = dist.new_group([0, num_stages - 1])
    if gradient is None:
        return None
    sent, other, peer = ends(gradient, num_stages)
    messages = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return sent + other


def tied_by_parity_from_any(gradient, num_stages):
    """A receive that names no sender."""
    if gradient is None:
        return None
    sent, other, peer = ends(gradient, num_stages)
    if dist.get_rank() == 0:
        dist.send(sent, peer)
        dist.recv(other)
    else:
        dist.recv(other)
        dist.send(sent, peer)
    return sent + other


def values_before_keys(q, k, v):
    """A ring of batches that sends keys first and receives values first: only their tags tell them apart."""
    rank, c = dist.get_rank(), dist.get_world_size()
    out, lse = attend(q, k, v, causal=True)
    for step in range(1, c):
        new_k, new_v = torch.empty_like(k), torch.empty_like(v)
        to, come_from = (rank + 1) % c, (rank - 1) % c
        messages = [
            dist.P2POp(dist.isend, k, to, tag=1),
            dist.P2POp(dist.isend, v, to, tag=2),
            dist.P2POp(dist.irecv, new_v, come_from, tag=2),
            dist.P2POp(dist.irecv, new_k, come_from, tag=1),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        k, v = new_k, new_v
        if step <= rank:
            out, lse = merge(out, lse, *attend(q, k, v, causal=False))
    return out


TOLD = [
    (ring_all_reduce, collectives.ring_that_waits_in_order, "sent = dist.isend(pieces[", on_gpus.ONE_QUEUE),
    (ring_forward, context_parallel.while_it_computes, "works = [dist.isend(k, to)", on_gpus.ONE_QUEUE),
    (tied, tied_unbatched, "in tied_unbatched: work.wait()", on_gpus.ONE_QUEUE),
    (tied, tied_by_messages_between_the_ends, "for work in dist.batch_isend_irecv(messages)", on_gpus.FIRST_USE),
    (ring_forward, values_before_keys, "rank 1: receives at tests/course/exercises/test_on_gpus.py", "and get what rank 0 sends with tag 1"),
    (tied, tied_by_parity_from_any, "dist.recv(other)", "NCCL cannot receive from any rank: name the sender"),
]  # fmt: skip
"""Exercises and right answers; the line that they are told, and the reason."""

NOT_TOLD = [
    (ring_all_reduce, ring_all_reduce.solution_function),
    (ring_all_reduce, of_both_kinds.one_rank_sends_first),
    (ring_forward, ring_forward.solution_function),
    (tied, tied_in_a_group),
]


@pytest.mark.parametrize(("exercise", "answer", "line", "why"), TOLD, ids=lambda value: getattr(value, "__name__", ""))
def test_what_goes_wrong_on_gpus_is_right_and_told(exercise, answer, line, why):
    verdict = exercise.verdict(answer)
    assert verdict.status == "passed", verdict.text
    text = " ".join(verdict.text.split())
    assert on_gpus.BUT in text and line in text and why in text


@pytest.mark.parametrize(("exercise", "answer"), NOT_TOLD, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_right_on_gpus_hears_nothing(exercise, answer):
    verdict = exercise.verdict(answer)
    assert verdict.text == f"{exercise.name}: correct, {exercise.cases_text()}."
