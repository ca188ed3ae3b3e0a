"""Who chooses whom, in integers: loads, orders and messages are those of `labkit.expert_parallel.dispatch`."""

import pytest
import torch
import torch.distributed as dist

from course.sizing.routing import Routed, drawn_logits, route
from labkit.expert_parallel import dispatch
from labkit.groups import init_groups
from labkit.layout import ParallelLayout

BY_HAND = Routed([[[0, 3], [1, 3]], [[3, 2], [0, 1]]], [[[0.6, 0.4], [0.5, 0.5]], [[0.9, 0.1], [0.7, 0.3]]], 4)


def test_loads_and_messages_of_four_tokens():
    assert BY_HAND.loads == [2, 2, 1, 3] and BY_HAND.mean_load == 2
    assert BY_HAND.rows == [[2, 2], [2, 2]]
    assert [(each.rank, each.token, each.expert) for each in BY_HAND.received(1)] == [
        (0, 0, 3), (0, 1, 3), (1, 0, 2), (1, 0, 3),
    ]  # fmt: skip
    assert [each.prob for each in BY_HAND.sent(0)] == [0.6, 0.5, 0.4, 0.5]


def dispatched(routed):
    """Send rows [rank, token] as `routed` says, and return what arrived, by expert, and the splits."""
    rank = dist.get_rank()
    experts = torch.tensor(routed.experts[rank])
    x = torch.tensor([[float(rank), float(token)] for token in range(len(experts))])
    with init_groups(ParallelLayout(4, ep_size=4)) as groups:
        rows, exchange = dispatch(x, experts, routed.num_experts, groups)
    return rows.tolist(), exchange.send_splits, exchange.recv_splits, exchange.ends.tolist()


@pytest.mark.parametrize("skew", [0.0, 1.5])
def test_it_is_what_dispatch_does_on_ranks(on_ranks, skew):
    routed = route(drawn_logits(4, 5, 8), top_k=3, skew=skew)
    for rank, (rows, sent, received, ends) in enumerate(on_ranks(dispatched, routed, world_size=4)):
        by_expert = sorted(routed.received(rank), key=lambda each: each.expert)
        assert rows == [[each.rank, each.token] for each in by_expert]
        assert sent == routed.rows[rank] and received == [row[rank] for row in routed.rows]
        loads = routed.loads[2 * rank : 2 * rank + 2]
        assert ends == [loads[0], sum(loads)]


def test_the_choice_is_softmax_and_top_k():
    logits = drawn_logits(2, 3, 4)
    scores = torch.tensor(logits).softmax(-1)
    probs, experts = scores.topk(2, -1)
    routed = route(logits, top_k=2)
    assert routed.experts == experts.tolist()
    torch.testing.assert_close(torch.tensor(routed.probs), probs / probs.sum(-1, keepdim=True))


def test_skew_ends_where_all_choose_the_first_experts():
    logits = drawn_logits(4, 4, 8)
    busiest = [max(route(logits, 2, skew).loads) for skew in (0.0, 1.0, 100.0)]
    assert busiest == sorted(busiest) and busiest[-1] == 16
    assert route(logits, 2, 100.0).loads == [16, 16, 0, 0, 0, 0, 0, 0]


def test_more_tokens_leave_the_first_as_they_are():
    few, many = drawn_logits(2, 2, 4), drawn_logits(4, 3, 8)
    assert [[token[:4] for token in rank[:2]] for rank in many[:2]] == few
