"""What the log and the timeline hear beside the functions of `dist`: each call once, as `CommDebugMode` counts them."""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from course.communication import communication_log
from labkit.collectives import trace_communication
from labkit.launch import World
from labkit.timeline.trace import Trace

WHOLE = 64  # bytes of x


@pytest.fixture(scope="module")
def world():
    with World(2, backend="gloo") as two_ranks:
        yield two_ranks


def mesh():
    return init_device_mesh("cpu", (2,))


def backward(y):
    y.square().sum().backward()  # a sum alone would give a gradient that torch 2.11 cannot scatter


def used(x):
    return x + 1  # the result of a functional collective waits where it is used


def redistributed(x, given, wanted):
    return used(DTensor.from_local(x, mesh(), [given]).redistribute(placements=[wanted]).to_local())


def parallelized(x):
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(pair, mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
    backward(pair(x))


def data_parallel(x):
    replica = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, bias=False), init_sync=False)
    backward(replica(x))


def sharded(x):
    layer = nn.Linear(4, 4, bias=False)
    fully_shard(layer, mesh=mesh())
    backward(layer(x))


def in_a_thread(x):
    thread = threading.Thread(target=lambda: used(funcol.all_reduce(x, "sum", dist.group.WORLD)))
    thread.start()
    thread.join()


CALLS = {
    "function": (lambda x: dist.all_reduce(x.detach().clone()), [("all_reduce", WHOLE)]),
    "functional": (lambda x: used(funcol.all_reduce(x, "sum", dist.group.WORLD)), [("all_reduce", WHOLE)]),
    "broadcast": (lambda x: used(funcol.broadcast(x, 0, dist.group.WORLD)), [("broadcast", WHOLE)]),
    "coalesced": (
        lambda x: [used(each) for each in funcol.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)],
        [("all_reduce", 2 * WHOLE)],
    ),
    "in autograd": (
        lambda x: backward(funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)),
        [("all_gather", 2 * WHOLE), ("reduce_scatter", 2 * WHOLE)],
    ),
    "back and forth": (
        lambda x: backward(funcol.all_to_all_single_autograd(x, [2, 2], [2, 2], dist.group.WORLD)),
        [("all_to_all", WHOLE)] * 2,
    ),
    "dist.nn": (lambda x: backward(dist_nn.all_reduce(x)), [("all_reduce", WHOLE)] * 2),
    "gathered DTensor": (lambda x: redistributed(x, Shard(0), Replicate()), [("all_gather", 2 * WHOLE)]),
    "summed DTensor": (lambda x: redistributed(x, Partial(), Replicate()), [("all_reduce", WHOLE)]),
    "scattered DTensor": (lambda x: redistributed(x, Partial(), Shard(0)), [("reduce_scatter", WHOLE)]),
    "parallelize_module": (parallelized, [("all_reduce", WHOLE)] * 2),
    "DistributedDataParallel": (data_parallel, [("all_reduce", WHOLE)]),
    "fully_shard": (sharded, [("all_gather", WHOLE), ("reduce_scatter", WHOLE)]),
    "thread": (in_a_thread, [("all_reduce", WHOLE)]),
}


@pytest.mark.gloo  # CommDebugMode counts no calls of a backend in Python, and only gloo's are timed in C++
@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_heard_once(name, world):
    call, expected = CALLS[name]

    def work():
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13's new names
        torch.manual_seed(0)
        with communication_log() as log:
            call(torch.ones(4, 4, requires_grad=True))
        with communication_log() as again, CommDebugMode() as mode:
            call(torch.ones(4, 4, requires_grad=True))
        return log.records, again.records, mode.get_total_counts()

    for records, again, num_counted in world.run(work):
        for heard in (records, again):
            assert [(record.operation, record.message_bytes) for record in heard] == expected
            assert {record.group for record in heard} == {(0, 1)}
            if name != "DistributedDataParallel":  # waits in C++, which may end before gloo's thread has said so
                assert all(record.seconds > 0 for record in heard)
        assert num_counted == (0 if name == "thread" else len(expected))  # which asks its own thread only


@pytest.mark.gloo  # its wait is in C++, too
def test_the_wait_of_a_functional_collective_is_in_the_timeline(world):
    def work():
        trace = Trace(dist.get_rank())
        with trace_communication(trace):
            total = funcol.reduce_scatter_tensor(torch.ones(4), "sum", 0, dist.group.WORLD)
            before = len(trace.spans())
            used(total)
            used(total)
        return before, [(span.kind, span.label) for span in trace.spans()]

    spans = [("communication", "reduce_scatter"), ("wait", "reduce_scatter")]
    assert world.run(work) == [(0, spans)] * 2


def test_what_nobody_used_has_no_handle_that_was_forgotten(world):
    def work():
        with communication_log() as log:
            total = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
            dist.all_reduce(torch.ones(4), async_op=True)
        used(total)
        return [(record.has_handle, record.seconds) for record in log.records][1]

    assert world.run(work) == [(True, None)] * 2


def test_a_thread_that_was_there_before_is_heard_in_functions_of_dist(world):
    """While blocks open and close: none may find it in the middle of a call, and end it."""

    def work():
        group, stop, num_calls = dist.new_group([dist.get_rank()], use_local_synchronization=True), [], []

        def call():
            while not stop:
                dist.all_reduce(torch.ones(1), group=group)
                num_calls.append(1)

        thread = threading.Thread(target=call)
        thread.start()
        num_heard = 0
        for _ in range(1000):
            with communication_log() as log:
                if not num_heard:
                    seen = len(num_calls)
                    while len(num_calls) < seen + 3:
                        pass
            num_heard += len(log)
        stop.append(True)
        thread.join()
        return num_heard, len(num_calls)

    for num_heard, num_calls in world.run(work):
        assert 2 <= num_heard <= num_calls
