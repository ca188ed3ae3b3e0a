"""What becomes of each rank's numbers, and where they came from, for all nine operations on real ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from course.measure import flow as measured
from course.measure import operations
from course.measure.flow import ring_trace, trace_flow
from course.sizing import flow as simulated
from course.sizing.flow import Flow, numbered, row_and_column, simulate_flow
from course.sizing.messages import on_a_ring
from labkit.launch import RankFailed, World, launch

ALL = (0, 1, 2, 3)
START = numbered(4)  # [0,1,2,3] + rank
SUMS = [6, 10, 14, 18]


@pytest.fixture(scope="module", autouse=True)
def worlds():
    """Worlds of three and four ranks that run all flows: starting new ranks for each takes longer than the flow."""
    with World(3, backend="gloo") as three, World(4, backend="gloo") as four, pytest.MonkeyPatch.context() as patch:
        worlds = {3: three, 4: four}

        def run(function, *args, world_size, **options):
            if world_size in worlds:
                return worlds[world_size].run(function, *args)
            return launch(function, *args, world_size=world_size, **options)

        patch.setattr(measured, "launch", run)
        yield worlds


def flow_of(function, start=START, **options) -> Flow:
    return trace_flow(partial(function, **options), start)


def test_the_start():
    assert START == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


def test_all_reduce():
    flow = flow_of(operations.all_reduce)
    assert flow.after == [SUMS] * 4
    assert flow.sources == [[ALL] * 4] * 4


def test_reduce_scatter_then_all_gather_is_all_reduce():
    half = flow_of(operations.reduce_scatter)
    assert half.after == [[6], [10], [14], [18]]
    assert half.sources == [[ALL]] * 4
    whole = flow_of(operations.all_gather, half.after)
    assert whole.after == [SUMS] * 4
    assert whole.sources == [[(0,), (1,), (2,), (3,)]] * 4


def test_broadcast():
    flow = flow_of(operations.broadcast, root=1)
    assert flow.after == [START[1]] * 4
    assert flow.sources == [[(1,)] * 4] * 4


def test_scatter():
    flow = flow_of(operations.scatter, root=2)
    assert flow.after == [[2], [3], [4], [5]]
    assert flow.sources == [[(2,)]] * 4


def test_gather():
    flow = flow_of(operations.gather, numbered(4, 1), root=3)
    assert flow.after == [None, None, None, [0, 1, 2, 3]]
    assert flow.sources == [None, None, None, [(0,), (1,), (2,), (3,)]]


def test_reduce():
    flow = flow_of(operations.reduce, root=0)
    assert flow.after == [SUMS, None, None, None]
    assert flow.sources == [[ALL] * 4, None, None, None]


def test_all_to_all_is_a_transposition():
    flow = flow_of(operations.all_to_all, row_and_column(4))
    assert flow.after == [[r, 10 + r, 20 + r, 30 + r] for r in range(4)]
    assert flow.sources == [[(0,), (1,), (2,), (3,)]] * 4


def test_send_and_receive():
    flow = flow_of(operations.send_receive)
    assert flow.after == [START[3], START[0], START[1], START[2]]
    assert [row[0] for row in flow.sources] == [(3,), (0,), (1,), (2,)]


def test_a_partial_sum_names_its_ranks():
    def add_left_neighbour(x):
        return x + operations.send_receive(x)

    flow = flow_of(add_left_neighbour)
    assert flow.sources[0] == [(0, 3)] * 4
    assert flow.sources[2] == [(1, 2)] * 4


def test_before_is_what_went_in_even_when_the_function_writes_into_it():
    def overwrite(x):
        x.zero_()
        return x

    flow = trace_flow(overwrite, [[1, 2]])
    assert (flow.before, flow.after, flow.sources) == ([[1, 2]], [[0, 0]], [[(), ()]])


def test_it_names_the_element_that_arrived():
    flow = flow_of(operations.all_to_all, row_and_column(3, 3))
    assert flow.origins[1] == [[(0, 1)], [(1, 1)], [(2, 1)]]


def test_the_messages_of_a_real_ring_are_the_simulated_ones():
    start = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3]]
    flows = [flow_of(operations.ring_all_reduce, start, num_steps=step) for step in range(5)]
    assert as_data(ring_trace(flows)) == as_data(on_a_ring(start, "all-reduce"))


def as_data(steps):
    held = [[[(list(has.values), has.ranks) for has in row] for row in step.held] for step in steps]
    return held, [(sorted(step.moves), step.adds) for step in steps]


def test_as_text():
    text = str(Flow([[0, 1], [1, 2]], [[1.5, 3], None], [[[(0, 0), (1, 0)], [(0, 1), (1, 1)]], None]))
    assert text == "rank 0  [0, 1]  ->  [1.5, 3]\nrank 1  [1, 2]  ->  nothing"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_numbers_of_ranks(world_size):
    flow = trace_flow(operations.all_reduce, numbered(world_size, 2))
    triangle = world_size * (world_size - 1) / 2
    assert flow.after == [[triangle, triangle + world_size]] * world_size


def test_a_ring_adds_then_hands_around():
    after_one = flow_of(operations.ring_all_reduce, num_steps=1)
    assert after_one.after[0] == [0, 1, 2, 6 + 3]  # the last piece of rank 3, added to that of rank 0
    assert after_one.sources[0] == [(0,), (0,), (0,), (0, 3)]
    half = flow_of(operations.ring_all_reduce, num_steps=3)
    assert [row.count(ALL) for row in half.sources] == [1, 1, 1, 1]
    assert flow_of(operations.ring_all_reduce, num_steps=6).after == [SUMS] * 4


EVERY = {**operations.WITH_ROOT, **operations.WITHOUT_ROOT, "ring": partial(operations.ring_all_reduce, num_steps=6)}


def on_strided_tensors():
    """Which operations give something else on a tensor whose numbers do not lie side by side, or change it."""
    start = torch.arange(16.0).view(4, 4) + dist.get_rank()
    wide = start.repeat_interleave(2, 1)[:, ::2]
    wrong = []
    for name, operation in EVERY.items():
        for x in (wide, start.t().contiguous().t(), start.repeat_interleave(2, 0)[::2]):
            got, expected = operation(x), operation(start.clone())
            if (got is None) != (expected is None) or (got is not None and not torch.equal(got, expected)):
                wrong.append(name)
    return wrong


def test_strided_tensors(worlds):
    assert worlds[4].run(on_strided_tensors) == [[]] * 4


@pytest.mark.parametrize("name", ["scatter", "reduce-scatter", "all-to-all", "ring"])
def test_what_the_ranks_cannot_share_equally_is_refused(name):
    with pytest.raises(RankFailed, match=r"Misfit: .*4 does not divide .* 4 or 8"):
        trace_flow(EVERY[name], numbered(4, 6))


@pytest.mark.parametrize("name", [*operations.WITH_ROOT, *operations.WITHOUT_ROOT])
def test_what_is_simulated_is_what_ranks_do(name):
    function, roots = {**operations.WITH_ROOT, **operations.WITHOUT_ROOT}[name], name in operations.WITH_ROOT
    for start in (row_and_column(4, 8), numbered(3, 3)):
        root = len(start) - 1
        run = flow_of(function, start, **{"root": root} if roots else {})
        assert simulate_flow(name, start, root) == run
    assert (simulated.WITH_ROOT if roots else simulated.WITHOUT_ROOT)[name] == function.__doc__


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="'all-sum' is not an operation: use one of broadcast, scatter"):
        simulate_flow("all-sum", [[1], [2]])
