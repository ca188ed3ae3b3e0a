"""What stands still on GPUs stands still on CPU ranks too, by NCCL's rules; gloo would let all of it pass."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from course.nccl_rules import Under
from labkit import groups
from labkit.launch import Deadlock, RankFailed, World, launch
from labkit.schedules import one_f_one_b
from tests.labkit.launch.test_fault_table import (
    a_rank_skips_a_collective,
    a_ring_of_messages_without_a_batch,
    different_operations_meet,
)
from tests.support.pipelines import parity


def unbatched_both_ways():
    """A pair has one queue for both directions, and both begin with a send."""
    peer = 1 - dist.get_rank()
    works = [dist.isend(torch.ones(1), peer), dist.irecv(torch.empty(1), peer)]
    for work in works:
        work.wait()


def opposite_orders():
    pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in pair[:: 1 - 2 * dist.get_rank()]:
        dist.all_reduce(torch.ones(1), group=group)


def sizes_differ():
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def no_channels():
    """Both directions between two stages share a queue."""
    groups._make_channels = lambda layout: {}
    parity(one_f_one_b(2, 4))


def not_connected():
    """A receive that is posted ahead connects first, and waits for its sender, which waits for the other message."""
    posted_ahead(is_connected=False)


def posted_ahead(is_connected):
    """One message each way, in groups of their own; rank 1 answers what it has received."""
    there, back = (dist.new_group([0, 1]) for _ in range(2))
    if is_connected:
        for group in (there, back):
            first_message(group)
    ahead = dist.irecv(torch.empty(1), group=back, group_src=1) if dist.get_rank() == 0 else None
    first_message(there)
    if ahead is None:
        dist.send(torch.ones(1), group=back, group_dst=0)
    else:
        ahead.wait()


def first_message(group):
    """From rank 0 to rank 1."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), group=group, group_dst=1)
    else:
        dist.recv(torch.ones(1), group=group, group_src=0)


STANDSTILLS = {
    a_ring_of_messages_without_a_batch: (3, "rank 0: waits in send to rank 1"),
    unbatched_both_ways: (2, "rank 1: waits in send to rank 0"),
    a_rank_skips_a_collective: (3, "rank 1: has returned"),
    opposite_orders: (2, "rank 0, 1: waits in all_reduce"),
    different_operations_meet: (2, "rank 0: waits in barrier"),
    sizes_differ: (2, "of the world [0, 1]: ranks 0, 1 wait"),
    no_channels: (2, "rank 0: waits in recv from rank 1"),
    not_connected: (2, "rank 0: waits in recv from rank 1"),
}
"""Functions, and for how many ranks; what the report says."""


def report_of(function):
    try:
        launch(Under(function), world_size=STANDSTILLS[function][0])
    except Deadlock as deadlock:
        return str(deadlock)
    return "it ran to its end"


@pytest.fixture(scope="module")
def reports():
    """Run three at once: it takes two seconds to tell a deadlock from slow ranks."""
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(STANDSTILLS, pool.map(report_of, STANDSTILLS)))


@pytest.mark.parametrize("function", STANDSTILLS, ids=lambda function: function.__name__)
def test_it_stands_still(reports, function):
    assert reports[function].startswith("no rank can go on")
    assert STANDSTILLS[function][1] in reports[function]


def test_both_sides_of_a_mismatch_are_printed(capfd):
    report_of(different_operations_meet)
    said = capfd.readouterr().err
    assert "rank 1 is in all_reduce of 3 float32, rank 0 in barrier" in said
    assert "rank 0 is in barrier of 1 float32, rank 1 in all_reduce of 3 float32" in said


def batched_ring():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    got = torch.empty(1)
    to, of = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    given = torch.full((1,), float(rank))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, to), dist.P2POp(dist.irecv, got, of)]):
        work.wait()
    return got.item()


def by_order_and_not_by_tag():
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    if dist.get_rank() == 0:
        dist.send(first, 1, tag=1)
        dist.send(second, 1, tag=2)
    else:
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
    return first.item(), second.item()


def one_call_is_skipped():
    """Return what rank 1 takes for 3 + 1, because it left out a call before."""
    value = torch.tensor([3.0, 1.0][dist.get_rank()])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.tensor(300.0), async_op=True)
    work = dist.all_reduce(value, async_op=True)
    if dist.get_rank() == 1:
        work.wait()
    return value.item()


def refusals():
    """Return what is said of tensors that NCCL does not take."""
    calls = {
        "transposed": lambda: dist.all_reduce(torch.ones(2, 3).T),
        "int16": lambda: dist.broadcast(torch.ones(2, dtype=torch.int16), 0),
        "from any": lambda: dist.recv(torch.ones(2)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            said[name] = str(error)
    return said


def test_what_runs():
    launch(Under(partial(posted_ahead, is_connected=True)), world_size=2)
    with World(3) as world:
        assert world.run(Under(batched_ring)) == [2, 0, 1]
    with World(2) as world:
        assert world.run(Under(by_order_and_not_by_tag))[1] == (2, 1)
        said = world.run(Under(refusals))[0]
        assert world.run(Under(one_call_is_skipped))[1] == 301
    assert said["transposed"] == "Tensors must be contiguous"
    assert "data type is not supported" in said["int16"]
    assert "name the sender" in said["from any"]


def one_fails_before_the_call(is_message):
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("before the call")
    if is_message:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 0)])
    else:
        dist.all_reduce(torch.tensor(40.0), async_op=True)


@pytest.mark.parametrize("is_message", [True, False])
def test_what_is_left_over_after_a_fault_meets_no_later_call(is_message):
    with World(2) as world:
        world.run(Under(dist.barrier))
        with pytest.raises(RankFailed, match="before the call"):
            world.run(Under(one_fails_before_the_call), is_message)
        assert world.ended
    with World(2) as world:
        with pytest.raises(RankFailed):
            world.run(Under(refusals_raised))
        assert not world.ended


def refusals_raised():
    batched_ring()
    dist.all_reduce(torch.ones(2, 3).T)


def a_kernel_fails():
    """As on a GPU: the function returns before anybody knows, and from then on CUDA refuses every call."""

    def refuse(*_):
        raise RuntimeError("device-side assert triggered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = torch.cuda.current_stream = refuse


def test_the_error_of_a_kernel_is_that_of_its_own_call_and_ends_the_world():
    with World(2) as world:
        with pytest.raises(RankFailed, match="device-side assert"):
            world.run(Under(a_kernel_fails))
        assert world.ended
