"""Messages between stages: none is taken for another, none is waited for in vain."""

import re
import time
from collections import defaultdict
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit import groups as groups_module
from labkit import pipeline
from labkit.groups import init_groups
from labkit.launch import Deadlock, RankFailed, launch
from labkit.layout import ParallelLayout
from labkit.pipeline.messages import Messages
from labkit.schedules import (
    SEND,
    Message,
    check,
    gpipe,
    greedy,
    interleaved,
    lowered,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from tests.support.pipelines import (
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
from tests.support.schedules import folded, schedule_of


def test_messages_between_two_ranks_never_cross(on_ranks):
    """Both neighbours are the same rank, and all messages of one shape: one taken for another would go unseen."""
    schedules = [interleaved(2, m, v) for m, v in ((1, 2), (2, 3), (5, 2), (4, 4))] + in_a_v(2, 1) + in_a_v(2, 4)
    on_ranks(partial(parity, *schedules, rows=even, make=partial(model_chunks, square=True)))


@pytest.mark.parametrize("recv_ahead", [True, False])
def test_receives_may_be_posted_earlier_or_later(on_ranks, recv_ahead):
    schedules = [renumbered(one_f_one_b(4, 6), [*range(1, 6), 0]), interleaved(4, 6, 3), zero_bubble(4, 6, 3)]
    on_ranks(partial(parity, *schedules, *in_a_v(4, 6), rows=even, recv_ahead=recv_ahead), world_size=4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_activations_may_have_a_shape_and_type_of_their_own(on_ranks, dtype):
    """Sequences of token numbers become flat rows; the last stage gives one number per row."""
    for schedule in (one_f_one_b(3, 4), zero_bubble(3, 4)):
        on_ranks(parity_of_tokens, schedule, dtype, world_size=3)


def parity_of_tokens(schedule, dtype):
    torch.default_generator.manual_seed(0)
    first = nn.Sequential(nn.Embedding(9, 4), nn.Flatten())
    chunks = [first, nn.Linear(20, 20), nn.Sequential(nn.Linear(20, 1), nn.Flatten(0))]
    chunks = [chunk.to(dtype) for chunk in chunks]
    x = torch.randint(0, 9, (7, 5))
    with init_groups(ParallelLayout(3, pp_size=3)) as groups:
        chunk = chunks[groups.coords.pp]
        spec = dtype, torch.Size([2, 20])
        pipeline.run(schedule, [chunk], groups, x.split(2), loss=mean_square, activation_spec=spec)
    got = [parameter.grad.clone() for parameter in chunk.parameters()]
    chunk.zero_grad()
    mean_square(nn.Sequential(*chunks)(x), None).backward()
    tolerance = 1e-10 if dtype == torch.float64 else 0.1  # rows are summed in a different order
    for gradient, parameter in zip(got, chunk.parameters()):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, parameter.grad, rtol=tolerance, atol=tolerance)


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


def parity_of_all(schedules, m, **options):
    layout = ParallelLayout(schedules[0].pp_size, pp_size=schedules[0].pp_size)
    with in_float64(), init_groups(layout) as groups:
        for schedule, square in product(schedules, (False, True)):
            compare(schedule, uneven(m), partial(model_chunks, square=square), False, groups, options)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 5)])
def test_nobody_waits_for_ever_by_the_rules_of_nccl(by_nccls_rules, p, m):
    by_nccls_rules(parity_of_all, every_schedule(p, m), m, world_size=p)


def parity_in_one_queue(schedules, m):
    with patch.object(groups_module, "_make_channels", lambda layout: {}):
        parity_of_all(schedules, m, recv_ahead=False)


def test_one_queue_for_each_pair_is_enough_where_receives_are_not_ahead(by_nccls_rules):
    """As under CUDA_LAUNCH_BLOCKING; `course.museum.gpu_faults` shows what becomes of it where they are."""
    by_nccls_rules(parity_in_one_queue, [one_f_one_b(2, 5), interleaved(2, 5, 2), *in_a_v(2, 5)], 5, world_size=2)


@pytest.mark.parametrize("schedule", [zero_bubble_v(8, 24), greedy(8, 24, 24)], ids=lambda schedule: schedule.name)
def test_eight_ranks_wait_for_nobody_for_ever(by_nccls_rules, schedule):
    """With 24 micro-batches, as a user might have them; `check` proves it for all sizes."""
    by_nccls_rules(parity, schedule, world_size=8)


def test_receives_are_posted_early_enough_for_nccl(by_nccls_rules):
    """If a channel's next receive were not always posted, two ranks with interleaved chunks would both wait to send."""
    by_nccls_rules(parity_of_all, [interleaved(2, 5, 2)], 5, world_size=2)
    for p, m in ((2, 2), (2, 5), (4, 5), (4, 8)):
        by_nccls_rules(parity_of_all, in_a_v(p, m), m, world_size=p)


def test_messages_that_wait_for_their_turn_hold_up_nobody(by_nccls_rules):
    """Rounds of 5 and 6 on 4 ranks: with receives posted when needed, all ranks would wait to send."""
    by_nccls_rules(parity_of_all, [interleaved(4, 11, 2)], 11, world_size=4)


def test_a_receiver_may_have_its_own_order(on_ranks, by_nccls_rules):
    """All messages have one shape: without tags, those of one micro-batch would be taken for another's, unseen."""
    lines = "F0 F1 F2 B1 B0 B2", "F2 F0 F1 B2 B1 B0"
    for schedule in (schedule_of(*lines, m=3), schedule_of(*reversed(lines), m=3)):
        on_ranks(partial(parity, schedule, rows=even))
        by_nccls_rules(parity_of_all, [schedule], 3, world_size=2)


@pytest.mark.parametrize("p", [2, 3])
def test_stages_that_fold_send_both_ways_between_two_ranks(on_ranks, by_nccls_rules, p):
    """Activations too go both ways, so no channel may be that of a kind alone."""
    on_ranks(partial(parity, *folded(p, 3)), world_size=p)
    by_nccls_rules(parity_of_all, folded(p, 3), 3, world_size=p)


# -- what is sent lives until it has left, and no longer ------------------------------------------------------------


def most_held(schedule):
    """How many sent tensors this rank kept at once of one channel, and in all, because they might not have left."""
    layout = ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size)
    held, do = [0], Messages.do

    def noted(messages, message):
        do(messages, message)
        held.append(len(messages.sent) + len(messages.results))

    Messages.do = noted
    try:
        with init_groups(layout) as groups:
            inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
            chunks = [nn.Linear(4, 4) for _ in range(schedule.num_chunks)]
            pipeline.run(schedule, chunks, groups, inputs, loss=mean_square)
    finally:
        Messages.do = do
    return max(held)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, partial(interleaved, num_chunks=2), zero_bubble, zero_bubble_v])
def test_what_has_left_is_let_go(on_ranks, make, p):
    """One tensor of each channel: in GPipe too, where a rank could send all its gradients before anything comes."""
    schedule = make(p, 32)
    for rank, num_held in enumerate(on_ranks(most_held, schedule, world_size=p)):
        items = lowered(schedule)[rank]
        channels = {(item.op.kind, item.peer) for item in items if isinstance(item, Message) and item.action == SEND}
        assert 1 <= num_held <= len(channels)


# -- what travels has one shape --------------------------------------------------------------------------------------


class Shrinks(nn.Linear):
    """Gives fewer columns each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)[:, self.calls :]


def test_a_shape_that_changes_unseen_is_an_error_where_it_is_sent():
    with pytest.raises(
        RankFailed, match=r"F0 gave torch.float32 \[2, 3\], but the next stage expects .* \[2, 4\]: .* activation_spec="
    ):
        launch(run_stage, gpipe(2, 2), lambda rank: nn.Identity() if rank else Shrinks(4, 4), world_size=2)


@pytest.mark.parametrize("spec", [(torch.float32, (2, 5)), (torch.float64, (2, 4))])
def test_a_shape_that_is_not_the_one_given_is_an_error_where_it_is_sent(spec):
    said = r"F0 gave torch.float32 \[2, 4\], but the next stage expects "
    with pytest.raises(RankFailed, match=said + re.escape(f"{spec[0]} {list(spec[1])}")):
        launch(run_stage, gpipe(2, 2), lambda _: nn.Linear(4, 4), activation_spec=spec, world_size=2)


def test_a_micro_batch_of_other_size_needs_rows_in_front():
    """Who receives it must know how large it is."""

    def stage_of_rank(rank):
        return nn.Flatten(0) if rank == 0 else nn.Identity()

    spec = torch.float32, torch.Size([12])
    with pytest.raises(RankFailed, match=r"F1 gave torch.float32 \[4\], but the next stage expects .* \[1\]: .* rows"):
        launch(run_stage, gpipe(2, 2), stage_of_rank, [3, 1], activation_spec=spec, world_size=2)


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda y: (y, y), "F0 gave a tuple: a stage must give one tensor of floats"),
        (lambda y: y.detach().long(), "F0 gave a torch.int64 tensor: a stage"),
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
    schedule = schedule_of(*lines, m=lines[0].count("F"))
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
