"""Bytes by axis: every record of real ranks is counted once, where its group runs."""

import pytest
import torch
import torch.distributed as dist

from course.communication import Communication, CommunicationLog, communication_log
from course.measure.by_axis import sent_by_axis
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout

LAYOUT = ParallelLayout(8, tp_size=2, pp_size=2)


def talk_on_every_axis():
    models = [dist.new_group(ranks) for ranks in LAYOUT.groups("tp", "pp")]
    with init_groups(LAYOUT) as groups, communication_log() as log:
        for size, group in ((10, groups.tp), (100, groups.dp), (3, models[groups.coords.dp])):
            dist.all_reduce(torch.zeros(size, dtype=torch.float64), group=group)
        pieces = [torch.zeros(5, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(pieces, torch.zeros(5, dtype=torch.float64), group=groups.tp)
        message = torch.zeros(7, dtype=torch.float64)
        if groups.coords.pp == 0:
            dist.send(message, group=groups.pp, group_dst=1)
        else:
            dist.recv(message, group=groups.pp, group_src=0)
    return log


def test_what_ranks_really_sent():
    assert sent_by_axis(launch(talk_on_every_axis, world_size=8), LAYOUT) == {
        ("dp", "all_reduce"): 8 * 100 * 8 * 1.0,  # 2(n-1)/n = 1 in a group of two
        ("model", "all_reduce"): 8 * 3 * 8 * 1.5,
        ("pp", "send"): 4 * 7 * 8,  # the four ranks of the first stage
        ("tp", "all_gather"): 8 * 10 * 8 * 0.5,
        ("tp", "all_reduce"): 8 * 10 * 8 * 1.0,
    }


def test_an_operation_that_does_not_go_around_counts_its_message():
    log = CommunicationLog([Communication("broadcast", (0, 2), 64), Communication("barrier", (0, 1), 0)])
    assert sent_by_axis([log, log], LAYOUT) == {("dp", "broadcast"): 128.0}


@pytest.mark.parametrize("group", [(0, 1, 4, 5), (0, 3), tuple(range(8))])
def test_a_group_of_no_single_axis_is_called_model(group):
    log = CommunicationLog([Communication("send", group, 8)])
    assert sent_by_axis([log], LAYOUT) == {("model", "send"): 8.0}
