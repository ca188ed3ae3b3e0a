"""Messages between stages: none is taken for another, none is waited for in vain."""

import re
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import cycle, product
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
from tests.support.sweep import IS_SWEEP


def test_messages_between_two_ranks_never_cross(on_ranks):
    """Both neighbours are the same rank, and all messages of one shape: one taken for another would go unseen."""
    schedules = [interleaved(2, m, v) for m, v in ((1, 2), (2, 3), (5, 2), (4, 4))] + in_a_v(2, 1) + in_a_v(2, 4)
    on_ranks(partial(parity, *schedules, rows=even, make=partial(model_chunks, square=True)))


def test_receives_may_be_posted_when_they_are_needed(on_ranks):
    """Elsewhere they are posted ahead."""
    schedules = [renumbered(one_f_one_b(4, 6), [*range(1, 6), 0]), interleaved(4, 6, 3), zero_bubble(4, 6, 3)]
    on_ranks(partial(parity, *schedules, *in_a_v(4, 6), rows=even, recv_ahead=False), world_size=4)


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

    inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
    chunks = [nn.Linear(4, 4) for _ in range(schedule.num_chunks)]
    with init_groups(ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size)) as groups:
        groups.channel = lambda *key: key
        with patch.object(dist, "isend", noted_send), patch.object(dist, "irecv", noted_receive):
            pipeline.run(schedule, chunks, groups, inputs, loss=mean_square)
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


def parity_of_all(schedules, m, in_turn=False, **options):
    """Of a model whose ends are wider than what is between, and of a square one; or of one of them in turn."""
    layout = ParallelLayout(schedules[0].pp_size, pp_size=schedules[0].pp_size)
    runs = zip(schedules, cycle((False, True))) if in_turn else product(schedules, (False, True))
    with in_float64(), init_groups(layout) as groups:
        for schedule, square in runs:
            compare(schedule, uneven(m), partial(model_chunks, square=square), False, groups, options)


def every_one_once(p, m):
    """Both lists have some of the schedules that fold, and of few micro-batches some have the same ops."""
    return [*{repr(replace(each, name="")): each for each in (*every_schedule(p, m), *in_a_v(p, m))}.values()]


BY_NCCLS_RULES = {  # p, m: schedules
    (2, 5): every_one_once(2, 5),  # with interleaved chunks, both would wait to send
    (4, 5): every_one_once(4, 5),
    (4, 11): [interleaved(4, 11, 2)],  # rounds of 5 and 6: messages that wait for their turn hold up nobody
}
if IS_SWEEP:  # `check` proves it for all sizes
    BY_NCCLS_RULES |= {(p, m): in_a_v(p, m) for p, m in ((2, 2), (4, 8))}
    BY_NCCLS_RULES |= {(8, 24): [zero_bubble_v(8, 24), greedy(8, 24, 24)]}


@pytest.mark.parametrize(("p", "m"), BY_NCCLS_RULES)
def test_nobody_waits_for_ever_by_the_rules_of_nccl(by_nccls_rules, p, m):
    """With four stages each schedule has one of the models; `make sweep-layouts` tries both."""
    by_nccls_rules(parity_of_all, BY_NCCLS_RULES[p, m], m, p == 4 and not IS_SWEEP, world_size=p)


def parity_in_one_queue(schedules, m):
    with patch.object(groups_module, "_make_channels", lambda layout: {}):
        parity_of_all(schedules, m, recv_ahead=False)


def test_one_queue_for_each_pair_is_enough_where_receives_are_not_ahead(by_nccls_rules):
    """As under CUDA_LAUNCH_BLOCKING; `course.museum.gpu_faults` shows what becomes of it where they are."""
    by_nccls_rules(parity_in_one_queue, [one_f_one_b(2, 5), interleaved(2, 5, 2), *in_a_v(2, 5)], 5, world_size=2)


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
    held, do = [0], Messages.do

    def noted(messages, message):
        do(messages, message)
        held.append(len(messages.sent) + len(messages.results))

    inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
    chunks = [nn.Linear(4, 4) for _ in range(schedule.num_chunks)]
    with init_groups(ParallelLayout(4, pp_size=4)) as groups, patch.object(Messages, "do", noted):
        pipeline.run(schedule, chunks, groups, inputs, loss=mean_square)
    return max(held)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, partial(interleaved, num_chunks=2), zero_bubble, zero_bubble_v])
def test_what_has_left_is_let_go(on_ranks, make):
    """One tensor of each channel: in GPipe too, where a rank could send all its gradients before anything comes."""
    schedule = make(4, 32)
    for rank, num_held in enumerate(on_ranks(most_held, schedule, world_size=4)):
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


class Gives(nn.Linear):
    """A first stage that changes what it gives."""

    def __init__(self, change):
        super().__init__(4, 4)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


def first(make):
    return lambda rank: nn.Identity() if rank else make()


FLOATS = "F0 gave torch.float32 [2, 4], but the next stage expects "
REFUSED = {  # the stage of each rank, its options: what is said where it is sent
    "F0 gave torch.float32 [2, 3], but the next stage expects torch.float32 [2, 4]: ": (
        first(lambda: Shrinks(4, 4)),
        {},
    ),
    f"{FLOATS}torch.float32 [2, 5]": (lambda _: nn.Linear(4, 4), {"activation_spec": (torch.float32, (2, 5))}),
    f"{FLOATS}torch.float64 [2, 4]": (lambda _: nn.Linear(4, 4), {"activation_spec": (torch.float64, (2, 4))}),
    "F1 gave torch.float32 [4], but the next stage expects torch.float32 [1]: ": (
        first(lambda: nn.Flatten(0)),
        {"rows": [3, 1], "activation_spec": (torch.float32, torch.Size([12]))},
    ),
    "F0 gave a tuple: a stage must give one tensor of floats": (first(lambda: Gives(lambda y: (y, y))), {}),
    "F0 gave a torch.int64 tensor: a stage": (first(lambda: Gives(lambda y: y.detach().long())), {}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_the_next_stage_does_not_expect_is_an_error_where_it_is_sent(said):
    stage_of_rank, options = REFUSED[said]
    with pytest.raises(RankFailed, match=re.escape(said)) as refused:
        launch(run_stage, gpipe(2, 2), stage_of_rank, **options, world_size=2)
    assert "expects" not in said or "activation_spec=" in str(refused.value)


@pytest.mark.usefixtures("no_rank_is_left")
def test_a_schedule_that_deadlocks_is_reported_with_the_ops_that_wait():
    schedule = schedule_of("F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 F1 B0 B1 F2 B2", m=3)
    start = time.monotonic()
    with pytest.raises(Deadlock) as stuck:
        launch(run_stage, schedule, lambda rank: nn.Linear(4, 4), allow_deadlock=True, world_size=3)
    assert time.monotonic() - start < 15
    report = str(stuck.value)
    for pattern in ("rank 0: .* from rank 1 .* for B0", "rank 1: .* from rank 2 .* for B0"):
        assert re.search(pattern, report)
    assert re.search("rank 2: .* from rank 1 .* for F1", report)
    assert report.count("\n    at ") == 3  # in whose code, on a line of its own
    assert "pipelines.py" in report
    assert " labkit/pipeline" not in report and ", tag " not in report
    with pytest.raises(ValueError, match="deadlock in 'own': rank 0 waits at B0 for B0 of rank 1"):
        check(schedule)
