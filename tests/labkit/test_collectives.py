"""All-to-all with its gradient; and traces: two spans for each call, whether or not torch says when it is done."""

import time

import pytest
import torch
import torch.distributed as dist

from labkit.collectives import all_to_all, reduce_scatter_single, trace_communication
from labkit.launch import World
from labkit.timeline.trace import Trace


@pytest.fixture(scope="module")
def world():
    with World(2, backend="gloo") as two_ranks:
        yield two_ranks


def traced_calls():
    """Call both kinds on a rank, and wait for each after it is done, for one of them twice."""
    trace = Trace(dist.get_rank())
    with trace_communication(trace):
        all_reduce = dist.all_reduce(torch.ones(4), async_op=True)
        while not all_reduce.is_completed():
            time.sleep(0.01)
        time.sleep(0.1)
        all_reduce.wait()
        reduce_scatter = reduce_scatter_single(torch.ones(2), torch.ones(4), async_op=True)
        reduce_scatter.wait()
        reduce_scatter.wait()
    dist.all_reduce(torch.ones(4))  # is not traced
    return trace.spans()


@pytest.mark.gloo  # gloo's thread notes the end
def test_a_call_is_under_way_until_it_is_done_or_waited_for(world):
    for spans in world.run(traced_calls):
        by_end = sorted(spans, key=lambda span: (span.end, span.kind))
        assert [(span.label, span.kind) for span in by_end] == [
            ("all_reduce", "communication"),
            ("all_reduce", "wait"),
            ("reduce_scatter", "communication"),
            ("reduce_scatter", "wait"),
            ("reduce_scatter", "wait"),
        ]
        all_reduce, its_wait, reduce_scatter, first_wait, second_wait = by_end
        assert all_reduce.start < all_reduce.end < its_wait.start  # gloo's thread noted the end
        assert reduce_scatter.start <= first_wait.start  # which it does not say here
        assert reduce_scatter.end == first_wait.end <= second_wait.start


def exchanged():
    rows = (torch.arange(4.0) + 10 * dist.get_rank()).requires_grad_()
    got = all_to_all(rows, dist.group.WORLD)
    got.backward(got.detach())  # the rows themselves go back
    return got.tolist(), torch.equal(rows.grad, rows)


def test_all_to_all_sends_each_rank_its_rows_and_backward_sends_them_back(world):
    assert world.run(exchanged) == [([0, 1, 10, 11], True), ([2, 3, 12, 13], True)]
