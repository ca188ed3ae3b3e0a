"""A pipeline on real ranks gives the gradients of one process, for any schedule; what goes wrong is said."""

import os
import re
import subprocess
import time
import weakref
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.measure.paced import PacedStage
from labkit import pipeline
from labkit.data_parallel import DataParallel
from labkit.groups import ProcessGroups, _make_channels, group_of_one, init_groups
from labkit.launch import Deadlock, RankFailed, World, launch
from labkit.layout import ParallelLayout
from labkit.model import ParallelGPT
from labkit.schedules import Op, Schedule, check, gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.shape import GPT
from labkit.tensor_parallel import cut_like
from labkit.timeline import measured, simulate
from labkit.timeline.trace import Trace
from tests.support.as_on_nccl import as_on_nccl

KINDS = {"F": "forward", "B": "backward", "W": "weight_gradient"}
WIDTHS = [6, 5, 9, 4, 7]  # of what stages take and give, over and over


def own(*ranks, m, **sizes):
    """A schedule from lines like "F0 F1 B0.1"."""
    ops = [[Op(KINDS[word[0]], *map(int, word[1:].split("."))) for word in line.split()] for line in ranks]
    return Schedule("own", len(ranks), m, ops, **sizes)


def renumbered(schedule, order):
    """The same with the micro-batches in another order."""
    ranks = [[op._replace(micro_batch=order[op.micro_batch]) for op in ops] for ops in schedule.ranks]
    return replace(schedule, name=f"{schedule.name}, {order}", ranks=ranks)


def every_schedule(p, m):
    made = [gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, 2), interleaved(p, m, 3)]
    made += [zero_bubble(p, m, extra) for extra in {0, p // 2, p - 1}]
    return [*made, renumbered(one_f_one_b(p, m), [*range(1, m), 0])]


def model_chunks(count, square=False):
    """The same on every rank, in float64: each takes another width than it gives, unless they are square."""
    torch.manual_seed(0)
    width = [WIDTHS[0 if square else i % len(WIDTHS)] for i in range(count + 1)]
    return [
        nn.Sequential(nn.Linear(n, n + 1), nn.GELU(), nn.LayerNorm(n + 1), nn.Linear(n + 1, k))
        for n, k in pairwise(width)
    ]


def mean_square(output, target):
    return (output if target is None else output - target).square().mean()


def parity(schedule, rows, make=model_chunks, targets=False, **options):
    """Run the schedule and compare with one process: the loss, and the gradients of this rank's chunks."""
    torch.set_default_dtype(torch.float64)
    with init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages)) as groups:
        compare(schedule, rows, make, targets, groups, options)


def compare(schedule, rows, make, with_targets, groups, options):
    whole, copies = make(schedule.num_model_chunks), make(schedule.num_model_chunks)
    numbers = [schedule.stage_of(groups.coords.pp, chunk) for chunk in range(schedule.num_chunks)]
    mine = [copies[number] for number in numbers]
    torch.manual_seed(1)
    x = torch.randn(sum(rows), WIDTHS[0])
    y = nn.Sequential(*whole)(x)
    target = torch.randn(y.shape) if with_targets else None
    expected = mean_square(y, target)
    if expected.requires_grad:
        expected.backward()
    options = {"loss": mean_square, "targets": None if target is None else target.split(rows)} | options
    evaluated = pipeline.run(schedule.forward_only(), mine, groups, x.split(rows), **options)
    assert not any(parameter.grad is not None for chunk in mine for parameter in chunk.parameters())
    trained = pipeline.run(schedule, mine, groups, x.split(rows), **options)
    is_last = groups.is_last_stage
    for loss in (evaluated, trained):
        assert (loss is not None) == is_last, schedule.name
        if loss is not None:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
            assert not loss.requires_grad
    for number, chunk in zip(numbers, mine):
        same_gradients(chunk, whole[number], f"{schedule.name}, m = {len(rows)}, chunk {number}")


def same_gradients(got, expected, what):
    wanted = dict(expected.named_parameters())
    for name, parameter in got.named_parameters():
        theirs, ours = (torch.zeros(()) if each.grad is None else each.grad for each in (wanted[name], parameter))
        if (
            ours.shape != theirs.shape
        ):  # behind a stage that forgets its input zeros are sent, where one process has None
            ours, theirs = ours.abs().sum(), theirs.abs().sum()
        assert_same(ours, theirs, f"{what}, {name}")


def assert_same(got, expected, what):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(("p", "sizes"), [(1, [1, 3]), (2, [1, 3, 4]), (4, [1, 3, 5, 8])])
def test_gradients_of_one_process(p, sizes):
    with World(p) as world:
        for m in sizes:
            for schedule in every_schedule(p, m):
                world.run(parity, schedule, [3] * (m - 1) + [2])


def test_gradients_of_one_process_on_eight_ranks():
    with World(8) as world:
        for schedule in (one_f_one_b(8, 5), interleaved(8, 8, 2), zero_bubble(8, 9, 7)):
            world.run(parity, schedule, [1] * schedule.num_micro_batches)


def test_messages_between_two_ranks_never_cross():
    """Both neighbours are the same rank, and all messages of one shape: one taken for another would go unseen."""
    with World(2) as world:
        for m in range(1, 7):
            for v in (2, 3, 4):
                world.run(parity, interleaved(2, m, v), [2] * m, make=partial(model_chunks, square=True))


def test_ranks_that_take_micro_batches_in_orders_of_their_own():
    lines = ("F0 F1 F2 F3 B2 B0 B1 B3", "F2 F0 F3 F1 B0 B3 B2 B1", "F3 F2 F1 F0 B3 B2 B0 B1")
    launch(parity, own(*lines, m=4), [2, 2, 2, 1], world_size=3)


def test_halves_of_backward_put_off_to_the_end():
    lines = ("F0 F1 B1 B0 W0 W1", "F1 F0 B1 B0 W1 W0")
    launch(parity, own(*lines, m=2, kinds=tuple(KINDS.values())), [2, 2], world_size=2)


def test_the_mean_is_over_rows_whatever_their_number_in_a_micro_batch():
    launch(parity, one_f_one_b(2, 4), [4, 1, 3, 2], targets=True, world_size=2)


@pytest.mark.parametrize("ahead", [0, 1, 100])
def test_receives_may_be_posted_earlier_or_later(ahead):
    with World(4) as world:
        for schedule in every_schedule(4, 6):
            world.run(parity, schedule, [2] * 6, ahead=ahead)


# -- unusual stages -------------------------------------------------------------------------------------------------


class ForgetsItsInput(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (2 * self.weight).expand(len(x), -1)


def frozen_chunks(which, count):
    chunks = model_chunks(count, square=True)
    for number in which:
        chunks[number].requires_grad_(False)
    return chunks


def chunks_with(number, make, count):
    chunks: list[nn.Module] = list(model_chunks(count, square=True))
    chunks[number] = make()
    return chunks


def unusual_stages():
    for number in range(3):
        yield partial(frozen_chunks, [number])
        yield partial(chunks_with, number, partial(ForgetsItsInput, WIDTHS[0]))
        yield partial(chunks_with, number, nn.Identity)
    yield partial(frozen_chunks, [0, 1])


@pytest.mark.parametrize("make_schedule", [gpipe, one_f_one_b, zero_bubble])
def test_stages_that_are_frozen_or_forget_their_input_or_do_nothing(make_schedule):
    with World(3) as world:
        for make in unusual_stages():
            world.run(parity, make_schedule(3, 4), [2] * 4, make=make)


def shapes_that_change(schedule, dtype):
    """Sequences, then flat rows, then a number a row."""
    torch.manual_seed(0)
    make = [nn.Sequential(nn.Linear(3, 4), nn.Flatten()), nn.Sequential(nn.Linear(20, 6), nn.Unflatten(1, (2, 3)))]
    chunks = [*make, nn.Sequential(nn.Flatten(), nn.Linear(6, 1), nn.Flatten(0))]
    chunks = [chunk.to(dtype) for chunk in chunks]
    groups = init_groups(ParallelLayout(3, pp_size=3))
    x = torch.randn(7, 5, 3).to(dtype)
    chunk = chunks[groups.coords.pp]
    pipeline.run(schedule, [chunk], groups, x.split(2), loss=mean_square)
    got = [parameter.grad.clone() for parameter in chunk.parameters()]
    chunk.zero_grad()
    mean_square(nn.Sequential(*chunks)(x), None).backward()
    tolerance = 1e-10 if dtype == torch.float64 else 0.1  # rows are added up in another order
    for ours, parameter in zip(got, chunk.parameters()):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, parameter.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shapes_and_types_of_activations_need_not_be_declared(dtype):
    with World(3) as world:
        for schedule in (one_f_one_b(3, 4), zero_bubble(3, 4)):
            world.run(shapes_that_change, schedule, dtype)


# -- a GPT ----------------------------------------------------------------------------------------------------------

SHAPE = GPT(num_layers=4, hidden_size=8, seq_length=6, vocab_size=13, num_attention_heads=2)
BATCH = 8


def gpt_parity(schedule, layout, steps=1, **options):
    """The GPT in stages, over tensor- and data-parallel ranks too, against the whole model on one process."""
    with init_groups(layout) as groups:
        place = {"dtype": torch.float64}
        mine = [
            ParallelGPT(
                SHAPE,
                groups.tp,
                stage=schedule.stage_of(groups.coords.pp, chunk),
                num_stages=schedule.num_model_chunks,
                **options,
                **place,
            )
            for chunk in range(schedule.num_chunks)
        ]
        whole = ParallelGPT(SHAPE, group_of_one(), **place)
        tied = [chunk.embedding.weight for chunk in mine if hasattr(chunk, "embedding")]
        replicas = [DataParallel(chunk, groups.dp) for chunk in mine]
        for step in range(steps):
            tokens = torch.randint(0, SHAPE.vocab_size, (BATCH, SHAPE.seq_length + 1), generator=seeded(step))
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            expected = whole.loss(whole(inputs), targets).mean()
            expected.backward()
            own_rows = slice(groups.coords.dp, None, layout.dp_size)
            split = [rows[own_rows].chunk(schedule.num_micro_batches) for rows in (inputs, targets)]
            loss = step_of_gpt(schedule, mine, replicas, tied, groups, *split, sync=step == steps - 1)
        if loss is not None:
            mean = loss.clone()
            dist.all_reduce(mean, group=groups.dp)
            torch.testing.assert_close(mean / layout.dp_size, expected.detach(), rtol=1e-12, atol=1e-12)
        wanted = dict(whole.named_parameters())
        for chunk in mine:
            for name, parameter in chunk.named_parameters():
                theirs = cut_like(wanted[name].grad, parameter, groups.tp)
                assert_same(parameter.grad, theirs, f"{schedule.name}, {name}")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def step_of_gpt(schedule, chunks, replicas, tied, groups: ProcessGroups, inputs, targets, sync):
    """The gradients add up over steps; the last sends them to the other replicas."""

    def loss(logits, target):
        return chunks[-1].loss(logits, target).mean()

    with replicas[0].no_sync(), replicas[-1].no_sync():
        total = pipeline.run(schedule, chunks, groups, inputs, targets=targets, loss=loss, tied=tied)
    if sync:
        for replica in replicas:
            replica.sync_gradients()
    return total


def gpt_schedules(p, m):
    return [one_f_one_b(p, m), interleaved(p, m, 2) if p == 2 else gpipe(p, m), zero_bubble(p, m)]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_gpt_in_stages_with_its_embedding_tied(p):
    with World(p) as world:
        for schedule in gpt_schedules(p, 4):
            world.run(gpt_parity, schedule, ParallelLayout(p, pp_size=p), steps=2)


@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp"])
@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 1), (1, 2), (2, 2)])
def test_a_gpt_in_stages_beside_tensor_and_data_parallel_ranks(tp_size, dp_size, order):
    layout = ParallelLayout(2 * tp_size * dp_size, tp_size=tp_size, pp_size=2, order=order)
    with World(layout.world_size) as world:
        for schedule in gpt_schedules(2, 4):
            world.run(gpt_parity, schedule, layout)
            if tp_size > 1:
                world.run(gpt_parity, schedule, layout, sequence_parallel=True, recompute=True)


# -- what a rank does -----------------------------------------------------------------------------------------------


def traced(schedule, make_chunk, m):
    groups = init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages))
    trace = Trace(groups.coords.pp)
    chunks = [make_chunk() for _ in range(schedule.num_chunks)]
    step = partial(pipeline.run, schedule, chunks, groups, torch.ones(2 * m, 4).chunk(m), loss=mean_square)
    step()  # in a process's first backward torch imports a second's worth of itself
    dist.barrier()
    step(trace=trace)
    return trace.spans()


@pytest.mark.parametrize("schedule", every_schedule(4, 6), ids=lambda schedule: schedule.name)
def test_a_trace_has_each_op_in_the_order_of_the_schedule(schedule):
    for rank, spans in enumerate(launch(traced, schedule, partial(nn.Linear, 4, 4), 6, world_size=4)):
        assert all(one.end <= other.start for one, other in pairwise(spans))
        assert all(span.rank == rank for span in spans)
        ops = [(span.kind, span.label) for span in spans if span.kind != "wait"]
        assert ops == [(op.kind, str(op)) for op in schedule.ranks[rank]]
        waits = [span.label for span in spans if span.kind == "wait"]
        elsewhere = [op for op in schedule.ranks[rank] if any(who != rank for who, _ in schedule.needs(rank, op))]
        assert waits == [f"for {op}" for op in elsewhere]


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 4), interleaved(4, 4, 2), zero_bubble(4, 4)])
def test_paced_stages_take_about_the_time_that_is_predicted(schedule):
    v = schedule.num_chunks
    stage = partial(PacedStage, 0.020 / v, 0.040 / v)
    timeline = measured(launch(traced, schedule, stage, 4, world_size=4), "paced")
    predicted = simulate(schedule, 0.020, 0.040)
    assert 1 <= timeline.makespan_seconds / predicted.makespan_seconds < 1.5
    for rank in range(4):
        assert 1 <= timeline.computing_seconds(rank) / predicted.computing_seconds(rank) < 1.5


class Activation:
    """What a node of autograd's graph keeps until its backward."""


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, given):
        ctx.activation = Activation()
        given.append(weakref.ref(ctx.activation))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def most_alive(schedule):
    """For how many passes this rank kept activations at once, and for how many after the step."""
    groups = init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages))
    given, alive = [], []

    class Watched(nn.Linear):
        def forward(self, x):
            output = Keeps.apply(super().forward(x), given)
            alive.append(sum(each() is not None for each in given))
            return output

    inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
    pipeline.run(schedule, [Watched(4, 4) for _ in range(schedule.num_chunks)], groups, inputs, loss=mean_square)
    return max(alive), sum(each() is not None for each in given)


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 6), one_f_one_b(4, 6), interleaved(4, 6, 2), zero_bubble(4, 6), zero_bubble(4, 9, 3)]
)
def test_activations_live_until_their_backward_and_no_longer(schedule):
    found = launch(most_alive, schedule, world_size=4)
    assert found == [(schedule.peak_in_flight(rank), 0) for rank in range(4)]


def channels_used(schedule):
    """The tags that this rank sent and received, in order, by channel: (kind, wraps, sender, receiver)."""
    groups = init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages))
    sent, received, channel = defaultdict(list), defaultdict(list), None
    isend, irecv, mine = dist.isend, dist.irecv, groups.channel

    def noted_channel(kind, wraps):
        nonlocal channel
        channel = kind, wraps
        return mine(kind, wraps)

    def noted_send(tensor, group_dst, tag, **options):
        sent[(*channel, dist.get_rank(), group_dst)].append(tag)
        return isend(tensor, group_dst=group_dst, tag=tag, **options)

    def noted_receive(tensor, group_src, tag, **options):
        received[(*channel, group_src, dist.get_rank())].append(tag)
        return irecv(tensor, group_src=group_src, tag=tag, **options)

    groups.channel, dist.isend, dist.irecv = noted_channel, noted_send, noted_receive
    try:
        inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
        pipeline.run(schedule, [nn.Linear(4, 4) for _ in range(schedule.num_chunks)], groups, inputs, loss=mean_square)
    finally:
        dist.isend, dist.irecv = isend, irecv
    return dict(sent), dict(received)


@pytest.mark.parametrize("p", [2, 4])
def test_each_channel_receives_in_the_order_in_which_it_sends(p):
    """NCCL knows no tags, so this is what keeps messages apart there; here gloo shows the order."""
    with World(p) as world:
        for schedule in every_schedule(p, 6):
            ranks = world.run(channels_used, schedule)
            sent = {channel: tags for rank in ranks for channel, tags in rank[0].items()}
            received = {channel: tags for rank in ranks for channel, tags in rank[1].items()}
            assert sent == received, schedule.name
            for kind, wraps, sender, receiver in sent:
                assert (kind, wraps, receiver, sender) not in sent  # one way only: a message waits for none going back


def parity_as_on_nccl(schedule, rows):
    torch.set_default_dtype(torch.float64)
    layout = ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages)
    with as_on_nccl(), init_groups(layout) as groups:
        groups._channels = _make_channels(layout)
        compare(schedule, rows, model_chunks, False, groups, {})


@pytest.mark.parametrize(("p", "sizes"), [(2, [1, 5]), (4, [6])])
def test_nobody_waits_for_ever_by_the_rules_of_nccl(p, sizes):
    with World(p) as world:
        for m in sizes:
            for schedule in every_schedule(p, m):
                world.run(parity_as_on_nccl, schedule, [3] * (m - 1) + [2])


# -- what goes wrong ------------------------------------------------------------------------------------------------

INPUTS = list(torch.zeros(4, 2, 4))


@pytest.mark.parametrize(
    ("schedule", "given", "said"),
    [
        (one_f_one_b(3, 4), {}, "'1F1B' is for 3 ranks, but the layout has pp_size=2"),
        (interleaved(2, 4, 2), {}, "1 chunks for a schedule of num_chunks=2"),
        (one_f_one_b(2, 5), {}, "4 inputs for a schedule of num_micro_batches=5"),
        (one_f_one_b(2, 4), {"targets": INPUTS[:3]}, "3 targets for a schedule of num_micro_batches=4"),
        (one_f_one_b(2, 4), {"inputs": [*INPUTS[:3], INPUTS[3][:0]]}, "micro-batch 3 of 4 has no rows"),
        (
            one_f_one_b(2, 2),
            {"inputs": [INPUTS[0], torch.zeros(2, 3)]},
            r"micro-batch 1 is float32 \[2, 3\], micro-batch 0 is float32 \[2, 4\]: they may differ only in the",
        ),
        (one_f_one_b(2, 2), {"inputs": [INPUTS[0], INPUTS[1].double()]}, r"micro-batch 1 is float64 \[2, 4\]"),
        (own("F0 F1 B0 B1", "F0 B0 F1", m=2), {"inputs": INPUTS[:2]}, "rank 1 lacks B1"),
        (own("F0 B0", "B0 F0", m=1), {"inputs": INPUTS[:1]}, "rank 1 has B0 before F0, whose result it needs"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(schedule, given, said):
    def refused():
        groups = init_groups(ParallelLayout(2, pp_size=2))
        if groups.coords.pp == 0:  # alone: had it sent or received anything, it would wait
            with pytest.raises(ValueError, match=said):
                pipeline.run(schedule, [nn.Linear(4, 4)], groups, **({"inputs": INPUTS, "loss": mean_square} | given))

    launch(refused, world_size=2)


def run_stage(schedule, stage_of_rank, rows=None):
    groups = init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages))
    m = schedule.num_micro_batches
    inputs = torch.zeros(2 * m, 4).split(rows or [2] * m)
    return pipeline.run(schedule, [stage_of_rank(groups.coords.pp)], groups, inputs, loss=mean_square)


class Raises(nn.Linear):
    def forward(self, x):
        raise FloatingPointError("this stage is broken")


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


@pytest.fixture
def no_rank_is_left():
    """Ranks are children of the launcher's server, which is ours."""
    yield
    deadline = time.monotonic() + 5
    while (left := [child for server in children(os.getpid()) for child in children(server)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert left == []


@pytest.mark.usefixtures("no_rank_is_left")
def test_a_stage_that_raises_is_reported_as_any_rank_is():
    def stage_of_rank(rank):
        return Raises(4, 4) if rank == 2 else nn.Linear(4, 4)

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 2 of 4 raised FloatingPointError: this stage is broken") as failed:
        launch(run_stage, one_f_one_b(4, 4), stage_of_rank, world_size=4)
    assert time.monotonic() - start < 10
    assert re.search(r"rank 1: waits in recv from rank 2 \(.*\) for B0", str(failed.value))
    assert re.search(r"rank 3: waits in recv from rank 2 \(.*\) for F0", str(failed.value))


def test_a_micro_batch_of_other_size_needs_rows_in_front():
    """Who receives it must know how large it is."""

    def stage_of_rank(rank):
        return nn.Flatten(0) if rank == 0 else nn.Identity()

    with pytest.raises(RankFailed, match=r"micro-batch 0 has 3 rows, but activations of shape \[12\]"):
        launch(run_stage, gpipe(2, 2), stage_of_rank, [3, 1], world_size=2)


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda y: (y, y), "F0 gave a tuple: a stage must give one tensor of floats, of at most 8 dims"),
        (lambda y: y.detach().long(), "F0 gave a torch.int64 of 2 dims: a stage"),
        (lambda y: y.reshape(2, 4, *[1] * 7), "F0 gave a torch.float32 of 9 dims: a stage"),
    ],
)
def test_a_stage_that_gives_something_else_is_told(give, said):
    class Gives(nn.Linear):
        def forward(self, x):
            return give(super().forward(x))

    with pytest.raises(RankFailed, match=re.escape(said)):
        launch(run_stage, gpipe(2, 2), lambda rank: Gives(4, 4) if rank == 0 else nn.Identity(), world_size=2)


DEADLOCKS = [
    (("F0 B0 F1 B1", "F0 F1 B0 B1"), ["rank 0: .* for B0", "rank 1: .* for F1"]),
    (
        ("F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 F1 B0 B1 F2 B2"),
        ["rank 0: .* from rank 1 .* for B0", "rank 1: .* from rank 2 .* for B0", "rank 2: .* from rank 1 .* for F1"],
    ),
]


@pytest.mark.usefixtures("no_rank_is_left")
@pytest.mark.parametrize(("lines", "said"), DEADLOCKS)
def test_a_schedule_that_deadlocks_is_reported_with_the_ops_that_wait(lines, said):
    schedule = own(*lines, m=lines[0].count("F"))
    start = time.monotonic()
    with pytest.raises(Deadlock) as stuck:
        launch(run_stage, schedule, lambda rank: nn.Linear(4, 4), world_size=len(lines))
    assert time.monotonic() - start < 15
    for pattern in said:
        assert re.search(pattern, str(stuck.value))
    assert str(stuck.value).count("\n    at ") == len(lines)  # in whose code, on a line of its own
    assert "test_worker.py" in str(stuck.value)
    assert "messages.py" not in str(stuck.value)
    assert ", tag " not in str(stuck.value)
    with pytest.raises(ValueError, match="deadlock in 'own': rank 0 waits at B0 for B0 of rank 1"):
        check(schedule)


def test_a_rank_can_run_again_after_a_refusal():
    """Nothing of a refused step is left behind in the world."""

    def twice():
        groups = init_groups(ParallelLayout(2, pp_size=2))
        chunks = [nn.Linear(4, 4)]
        with pytest.raises(ValueError, match="3 inputs"):
            pipeline.run(gpipe(2, 4), chunks, groups, INPUTS[:3], loss=mean_square)
        return pipeline.run(gpipe(2, 4), chunks, groups, INPUTS, loss=mean_square)

    none, loss = launch(twice, world_size=2)
    assert none is None
    assert loss > 0


def test_the_loss_of_several_targets_is_that_of_cross_entropy():
    def classify():
        groups = init_groups(ParallelLayout(2, pp_size=2))
        torch.manual_seed(0)
        chunks = [nn.Linear(4, 4), nn.Linear(4, 3)]
        x, labels = torch.randn(6, 4), torch.randint(0, 3, (6,))
        mine = [chunks[groups.coords.pp]]
        got = pipeline.run(gpipe(2, 3), mine, groups, x.split(2), targets=labels.split(2), loss=F.cross_entropy)
        return got, F.cross_entropy(nn.Sequential(*chunks)(x), labels)

    _, (got, expected) = launch(classify, world_size=2)
    torch.testing.assert_close(got, expected.detach())
