"""The exercises of notebook 02, on real ranks: they agree with torch, and faults on the ranks become reports."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import collectives

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")

EXERCISES = [collectives.all_reduce_from_halves, collectives.ring_all_reduce]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_reference_agrees_with_torchs_own_all_reduce(exercise):
    def all_reduce(x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    verdict = exercise.verdict(all_reduce)  # so the values are right, and only the way is not
    assert "the values are right" in verdict.text
    assert "It calls all_reduce" in verdict.text


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
