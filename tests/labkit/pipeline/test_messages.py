"""Messages between stages: none is taken for another, none is waited for in vain."""

import re
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit import pipeline
from labkit.groups import init_groups
from labkit.launch import Deadlock, RankFailed, launch
from labkit.layout import ParallelLayout
from labkit.pipeline.messages import Messages
from labkit.schedules import (
    BACKWARD,
    check,
    gpipe,
    greedy,
    interleaved,
    one_f_one_b,
    v_half,
    zero_bubble,
    zero_bubble_v,
)
from tests.support.pipelines import (
    WIDTHS,
    compare,
    even,
    every_schedule,
    in_a_v,
    in_float64,
    mean_square,
    model_chunks,
    parity,
    renumbered,
    run_stage,
    uneven,
)
from tests.support.schedules import folded, own


def test_messages_between_two_ranks_never_cross(on_ranks):
    """Both neighbours are the same rank, and all messages of one shape: one taken for another would go unseen."""
    schedules = [interleaved(2, m, v) for m, v in ((1, 2), (2, 3), (5, 2), (4, 4))] + in_a_v(2, 1) + in_a_v(2, 4)
    on_ranks(partial(parity, *schedules, rows=even, make=partial(model_chunks, square=True)))


@pytest.mark.parametrize("recv_prefetch", [1, 100])
def test_receives_may_be_posted_earlier_or_later(on_ranks, recv_prefetch):
    schedules = [renumbered(one_f_one_b(4, 6), [*range(1, 6), 0]), interleaved(4, 6, 3), zero_bubble(4, 6, 3)]
    on_ranks(partial(parity, *schedules, *in_a_v(4, 6), rows=even, recv_prefetch=recv_prefetch), world_size=4)


def shapes_that_change(schedule, dtype):
    """Sequences, then flat rows, then one number per row."""
    torch.default_generator.manual_seed(0)
    make = [nn.Sequential(nn.Linear(3, 4), nn.Flatten()), nn.Sequential(nn.Linear(20, 6), nn.Unflatten(1, (2, 3)))]
    chunks = [*make, nn.Sequential(nn.Flatten(), nn.Linear(6, 1), nn.Flatten(0))]
    chunks = [chunk.to(dtype) for chunk in chunks]
    x = torch.randn(7, 5, 3).to(dtype)
    with init_groups(ParallelLayout(3, pp_size=3)) as groups:
        chunk = chunks[groups.coords.pp]
        pipeline.run(schedule, [chunk], groups, x.split(2), loss=mean_square)
    got = [parameter.grad.clone() for parameter in chunk.parameters()]
    chunk.zero_grad()
    mean_square(nn.Sequential(*chunks)(x), None).backward()
    tolerance = 1e-10 if dtype == torch.float64 else 0.1  # rows are summed in a different order
    for ours, parameter in zip(got, chunk.parameters()):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, parameter.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shapes_and_types_of_activations_need_not_be_declared(on_ranks, dtype):
    for schedule in (one_f_one_b(3, 4), zero_bubble(3, 4)):
        on_ranks(shapes_that_change, schedule, dtype, world_size=3)


def channels_used(schedule):
    """The tags that this rank sent and received, in order, by channel: (kind, sender, receiver)."""
    with init_groups(ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size)) as groups:
        return sent_and_received(schedule, groups)


def sent_and_received(schedule, groups):
    sent, received = defaultdict(list), defaultdict(list)
    isend, irecv = dist.isend, dist.irecv

    def noted_send(tensor, group, group_dst, tag):
        assert group[1:] == (dist.get_rank(), group_dst)
        sent[group].append(tag)
        return isend(tensor, group=groups.pp, group_dst=group_dst, tag=tag)

    def noted_receive(tensor, group, group_src, tag):
        assert group[1:] == (group_src, dist.get_rank())
        received[group].append(tag)
        return irecv(tensor, group=groups.pp, group_src=group_src, tag=tag)

    groups.channel, dist.isend, dist.irecv = (lambda *key: key), noted_send, noted_receive
    try:
        inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
        pipeline.run(schedule, [nn.Linear(4, 4) for _ in range(schedule.num_chunks)], groups, inputs, loss=mean_square)
    finally:
        dist.isend, dist.irecv = isend, irecv
    return dict(sent), dict(received)


@pytest.mark.gloo
@pytest.mark.parametrize("p", [2, 3])
def test_each_channel_receives_in_the_order_in_which_it_sends(on_ranks, p):
    """NCCL knows no tags, so this is what keeps messages apart there; here gloo shows the order."""
    for schedule in every_schedule(p, 6):
        ranks = on_ranks(channels_used, schedule, world_size=p)
        sent = {channel: tags for rank in ranks for channel, tags in rank[0].items()}
        received = {channel: tags for rank in ranks for channel, tags in rank[1].items()}
        assert sent == received, schedule.name


def parity_with_shapes_and_without(schedules, m):
    layout = ParallelLayout(schedules[0].pp_size, pp_size=schedules[0].pp_size)
    with in_float64(), init_groups(layout) as groups:
        for schedule, make in product(schedules, (model_chunks, partial(model_chunks, square=True))):
            rows, options = uneven(m), {}
            if make is not model_chunks:
                options["activation"] = torch.float64, torch.Size([rows[0], WIDTHS[0]])
            compare(schedule, rows, make, False, groups, options)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 5)])
def test_nobody_waits_for_ever_by_the_rules_of_nccl(by_nccls_rules, p, m):
    """With shape messages and without."""
    by_nccls_rules(parity_with_shapes_and_without, every_schedule(p, m), m, world_size=p)


def parity_with_known_shapes(schedule):
    layout, rows = ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size), even(schedule.num_micro_batches)
    with in_float64(), init_groups(layout) as groups:
        known = {"activation": (torch.float64, torch.Size([rows[0], WIDTHS[0]]))}
        compare(schedule, rows, partial(model_chunks, square=True), False, groups, known)


@pytest.mark.parametrize("schedule", [zero_bubble_v(8, 24), greedy(8, 24, 24)], ids=lambda schedule: schedule.name)
def test_eight_ranks_that_know_all_shapes_wait_for_nobody_for_ever(by_nccls_rules, schedule):
    """With 24 micro-batches, as a user might have them; `test_nccls_rules` has more sizes, simulated."""
    by_nccls_rules(parity_with_known_shapes, schedule, world_size=8)


def test_receives_are_posted_early_enough_for_nccl(by_nccls_rules):
    """If a channel's next receive were not always posted, two ranks with interleaved chunks would both wait to send."""
    by_nccls_rules(parity_with_shapes_and_without, [interleaved(2, 5, 2)], 5, world_size=2)
    for p, m in ((2, 2), (2, 5), (4, 5), (4, 8)):
        by_nccls_rules(parity_with_shapes_and_without, in_a_v(p, m), m, world_size=p)
    with pytest.raises(RankFailed, match="recv_prefetch=0 must be at least 1"):
        launch(parity, interleaved(2, 5, 2), recv_prefetch=0, world_size=2)


def test_messages_that_wait_for_their_turn_hold_up_nobody(by_nccls_rules):
    """Rounds of 5 and 6 on 4 ranks: a receive for each message that waits, or all ranks would wait to send."""
    by_nccls_rules(parity_with_shapes_and_without, [interleaved(4, 11, 2)], 11, world_size=4)


def test_a_receiver_may_have_its_own_order(on_ranks, by_nccls_rules):
    """All messages have one shape: without tags, those of one micro-batch would be taken for another's, unseen."""
    lines = "F0 F1 F2 B1 B0 B2", "F2 F0 F1 B2 B1 B0"
    for schedule in (own(*lines, m=3), own(*reversed(lines), m=3)):
        on_ranks(partial(parity, schedule, rows=even))
        by_nccls_rules(parity_with_known_shapes, schedule)
        by_nccls_rules(parity_with_shapes_and_without, [schedule], 3, world_size=2)


@pytest.mark.parametrize("p", [2, 3])
def test_stages_that_fold_send_both_ways_between_two_ranks(on_ranks, by_nccls_rules, p):
    """Activations too go both ways, so no channel may be that of a kind alone."""
    on_ranks(partial(parity, *folded(p, 3)), world_size=p)
    by_nccls_rules(parity_with_shapes_and_without, folded(p, 3), 3, world_size=p)


# -- what is sent lives until it has left, and no longer ------------------------------------------------------------


class Told:
    """Wraps a send that a backend knows to have left at once, as NCCL may."""

    def __init__(self, work):
        self.wait, self.is_completed = work.wait, lambda: True


def most_held(schedule, is_told=False):
    """How many gradients, and how many tensors in all, this rank kept at once because they might not have left."""
    layout = ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size)
    held, send, isend = [], Messages.send, dist.isend

    def noted(messages, op, result):
        send(messages, op, result)
        kinds = [route.op.kind for route in messages.pending_sends]
        held.append((kinds.count(BACKWARD), len(kinds)))

    Messages.send = noted
    if is_told:
        dist.isend = lambda *args, **options: Told(isend(*args, **options))
    try:
        with init_groups(layout) as groups:
            inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
            chunks = [nn.Linear(4, 4) for _ in range(schedule.num_chunks)]
            pipeline.run(schedule, chunks, groups, inputs, loss=mean_square)
    finally:
        Messages.send, dist.isend = send, isend
    return tuple(map(max, zip(*held)))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, partial(interleaved, num_chunks=2), zero_bubble])
def test_what_has_left_is_let_go(on_ranks, make, p):
    """Never more than the activations that a rank holds, and one: with 1F1B on two ranks, two gradients of 32."""
    schedule = make(p, 32)
    for rank, (num_gradients, num_tensors) in enumerate(on_ranks(most_held, schedule, world_size=p)):
        assert num_tensors <= schedule.peak_in_flight(rank) + (schedule.num_chunks if p > 1 else 0)
        assert num_gradients <= 3 * p or schedule.name == "GPipe"  # there nothing comes back that shows they have left
    for num_gradients, num_tensors in on_ranks(partial(most_held, schedule, is_told=True), world_size=p):
        assert num_gradients <= num_tensors <= 1


# -- shapes that are known are not sent -----------------------------------------------------------------------------


def shape_messages(schedule, is_known):
    """How many shape messages this rank sent and received in a run of evaluation, and in one of training."""
    counts, isend, irecv = [], dist.isend, dist.irecv

    def counted(post):
        def posted(tensor, **options):
            counts[-1] += tensor.dtype == torch.int64
            return post(tensor, **options)

        return posted

    p = schedule.pp_size
    with in_float64(), init_groups(ParallelLayout(p, pp_size=p)) as groups:
        torch.default_generator.manual_seed(0)
        widths = [3, *[4] * (schedule.num_stages - 1), 5]
        whole = nn.Sequential(*(nn.Linear(n, k) for n, k in pairwise(widths)))
        mine = [whole[schedule.stage_of(groups.coords.pp, chunk)] for chunk in range(schedule.num_chunks)]
        dist.isend, dist.irecv = counted(isend), counted(irecv)
        try:
            x = torch.randn(7, 6, 3)
            activation = (torch.float64, torch.Size([2, 6, 4])) if is_known else None
            for each in (schedule.forward_only(), schedule):
                counts.append(0)
                pipeline.run(each, mine, groups, x.split(2), loss=mean_square, activation=activation)
            got = [parameter.grad for chunk in mine for parameter in chunk.parameters()]
            whole.zero_grad()
            mean_square(whole(x), None).backward()
            expected = [parameter.grad for chunk in mine for parameter in chunk.parameters()]
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        finally:
            dist.isend, dist.irecv = isend, irecv
    return counts


def test_shapes_that_are_known_cost_no_messages(on_ranks):
    """Each message is counted where it is sent and where it is received; the last micro-batch has fewer rows."""
    for schedule, counts in [(interleaved(2, 4, 2), [3, 3]), (one_f_one_b(3, 4), [1, 2, 1]), (v_half(2, 4), [2, 2])]:
        p = schedule.pp_size
        assert on_ranks(shape_messages, schedule, False, world_size=p) == [[count] * 2 for count in counts]
        assert on_ranks(shape_messages, schedule, True, world_size=p) == [[0, 0]] * p


class Shrinks(nn.Linear):
    """Gives fewer columns each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)[:, self.calls :]


def test_a_shape_that_changes_unseen_is_an_error_where_it_is_sent():
    with pytest.raises(RankFailed, match=r"F1 gave torch.float32 \[2, 2\], but the next stage expects .* \[2, 3\]"):
        launch(run_stage, gpipe(2, 2), lambda rank: nn.Identity() if rank else Shrinks(4, 4), world_size=2)


@pytest.mark.parametrize("activation", [(torch.float32, (2, 5)), (torch.float64, (2, 4))])
def test_a_shape_that_is_not_the_one_given_is_an_error_where_it_is_sent(activation):
    said = r"F0 gave torch.float32 \[2, 4\], but the next stage expects "
    with pytest.raises(RankFailed, match=said + re.escape(f"{activation[0]} {list(activation[1])}")):
        launch(run_stage, gpipe(2, 2), lambda _: nn.Linear(4, 4), activation=activation, world_size=2)


def test_a_micro_batch_of_other_size_needs_rows_in_front():
    """Who receives it must know how large it is."""

    def stage_of_rank(rank):
        return nn.Flatten(0) if rank == 0 else nn.Identity()

    with pytest.raises(RankFailed, match=r"F1 gave torch.float32 \[4\], but the next stage expects .* \[1\]: .* rows"):
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
        launch(run_stage, schedule, lambda rank: nn.Linear(4, 4), allow_deadlock=True, world_size=len(lines))
    assert time.monotonic() - start < 15
    for pattern in said:
        assert re.search(pattern, str(stuck.value))
    assert str(stuck.value).count("\n    at ") == len(lines)  # in whose code, on a line of its own
    assert "pipelines.py" in str(stuck.value)
    assert " labkit/pipeline" not in str(stuck.value)
    assert ", tag " not in str(stuck.value)
    with pytest.raises(ValueError, match="deadlock in 'own': rank 0 waits at B0 for B0 of rank 1"):
        check(schedule)
