"""The communication log: it hears every operation, counts as documented, and leaves torch as it was."""

import threading
import warnings
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from course.communication import Communication, CommunicationLog, communication_log
from course.measure import operations
from labkit.collectives import trace_communication
from labkit.launch import World
from labkit.timeline.trace import Trace

FLOAT = 4  # bytes


@pytest.fixture(scope="module")
def world():
    with World(4, backend="gloo") as four_ranks:
        yield four_ranks


def logged(function, *shape):
    """On a rank: the records of one call."""
    with communication_log() as log:
        function(torch.ones(shape))
    return log.records


@pytest.mark.parametrize(
    ("function", "operation", "message_bytes"),
    [
        (operations.broadcast, "broadcast", 8 * FLOAT),
        (operations.reduce, "reduce", 8 * FLOAT),
        (operations.all_reduce, "all_reduce", 8 * FLOAT),
        (operations.reduce_scatter, "reduce_scatter", 8 * FLOAT),
        (operations.all_to_all, "all_to_all", 8 * FLOAT),
        (operations.scatter, "scatter", 8 * FLOAT),
        (operations.all_gather, "all_gather", 4 * 8 * FLOAT),
        (operations.gather, "gather", 4 * 8 * FLOAT),
    ],
)
def test_every_collective_counts_the_full_buffer_on_every_rank(world, function, operation, message_bytes):
    for (record,) in world.run(logged, function, 8):
        assert (record.operation, record.group, record.message_bytes) == (operation, (0, 1, 2, 3), message_bytes)
        assert 0 < record.seconds < 30


@pytest.mark.gloo
def test_batched_messages_are_two_records(world):
    for records in world.run(logged, operations.send_receive, 8):
        assert [(record.operation, record.message_bytes) for record in records] == [("send", 32), ("recv", 32)]
        assert all(record.seconds > 0 for record in records)


def test_the_single_tensor_forms_count_the_same_under_old_and_new_names(world):
    def work(x):
        big, small = torch.ones(32), torch.ones(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 deprecates the older names
            for name in ("all_gather_into_tensor", "all_gather_single"):
                if hasattr(dist, name):
                    getattr(dist, name)(big, small)
            for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
                if hasattr(dist, name):
                    getattr(dist, name)(small, big)

    for records in world.run(logged, work, 1):
        names = {record.operation for record in records}
        assert names == {"all_gather", "reduce_scatter"}
        assert {record.message_bytes for record in records} == {32 * FLOAT}


def test_the_group_is_the_one_that_was_used(world):
    def work():
        pair = dist.new_group([1, 3])
        with communication_log() as log:
            if dist.get_rank() in (1, 3):
                dist.all_reduce(torch.ones(2), group=pair)
        return [record.group for record in log.records]

    assert world.run(work) == [[], [(1, 3)], [], [(1, 3)]]


def test_an_asynchronous_call_is_timed_to_its_wait(world):
    def work():
        with communication_log() as log:
            handle = dist.all_reduce(torch.ones(2), async_op=True)
            before = log.records[0].seconds
            handle.wait()
            return before, log.records[0].seconds, isinstance(handle, dist.Work)

    for before, after, is_torchs in world.run(work):
        assert before is None
        assert after > 0
        assert is_torchs  # FSDP2 waits for nothing else


def test_a_rank_that_arrives_early_counts_its_waiting(world):
    def work():
        import time

        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(0.4)
        with communication_log() as log:
            dist.barrier()
        return log.total_seconds("barrier")

    seconds = world.run(work)
    assert min(seconds[0], seconds[1], seconds[3]) > 0.3
    assert seconds[2] < 0.3


@pytest.mark.gloo
def test_a_call_that_leaves_nothing_to_wait_for_is_timed_too(world):
    """As on NCCL, whose blocking calls run in the stream."""

    def blocking():
        trace = Trace(dist.get_rank())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.Work, "unbox", lambda boxed: None)
            with trace_communication(trace), communication_log() as log:
                dist.all_reduce(torch.ones(4))
        [communication, wait] = trace.spans()
        return log.total_seconds(), communication.kind, wait.kind, communication.seconds, wait.seconds

    for seconds, *kinds, lasting, waiting in world.run(blocking):
        assert kinds == ["communication", "wait"]
        assert seconds > 0 and lasting == waiting > 0


def test_a_barrier_carries_no_bytes(world):
    (record,) = world.run(logged, lambda x: dist.barrier(), 1)[0]
    assert (record.operation, record.message_bytes) == ("barrier", 0)


def test_nothing_stays_patched_even_after_an_error(world):
    def state():
        patched = vars(dist.ProcessGroup), dist.Work.wait, threading.Thread.start
        return [dict(each) if isinstance(each, Mapping) else each for each in patched]

    def work():
        before, keys = state(), str(torch._C._dispatch_tls_local_include_set())
        try:
            with communication_log() as log:
                is_patched = [one != other for one, other in zip(before, state())]
                raise KeyError
        except KeyError:
            dist.all_reduce(torch.ones(2))
        return is_patched, state() == before, str(torch._C._dispatch_tls_local_include_set()) == keys, len(log)

    assert world.run(work) == [([True] * 3, True, True, 0)] * 4


def test_logs_nest(world):
    def work():
        with communication_log() as outer:
            dist.barrier()
            with communication_log() as inner:
                dist.barrier()
            dist.barrier()
        return len(outer), len(inner)

    assert world.run(work) == [(3, 1)] * 4


def test_totals_choose_by_operation():
    log = CommunicationLog([Communication("send", (0, 1), 10, 0.5), Communication("recv", (0, 1), 20, None)])
    assert (log.total_bytes(), log.total_bytes("send"), log.total_bytes("barrier")) == (30, 10, 0)
    assert log.total_seconds() == 0.5


def test_the_table_adds_up_calls_of_one_operation_and_group():
    log = CommunicationLog([Communication("send", (0, 1), 1000, 0.5)] * 3 + [Communication("send", (2, 3), 1, 0.0)])
    lines = [line.split() for line in str(log).splitlines()]
    assert lines[1] == ["send", "[0,", "1]", "3", "3,000", "1500.00"]
    assert lines[2] == ["send", "[2,", "3]", "1", "1", "0.00"]
