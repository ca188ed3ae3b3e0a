"""The explorer of notebook 15: every control changes what is shown, and the facts are the routing's."""

import pytest

from course.explorers.routing import HIDDEN, routing_explorer
from course.sizing.routing import drawn_logits, route


@pytest.fixture
def explorer():
    return routing_explorer()


def test_the_facts_are_bytes_of_each_link(explorer):
    rows = route(drawn_logits(4, 4, 8), 2).rows
    facts = explorer.facts.html
    assert HIDDEN * 2 == 8192
    cells = [f"<td>{rows[0][to] * 8.192:.3g} kB</td>" if rows[0][to] else "<td>none</td>" for to in (1, 2, 3)]
    assert f"<td>rank 0</td><td>stays</td>{''.join(cells)}" in facts
    assert facts.count("stays") == 4


def test_with_all_skew_one_rank_computes_everything(explorer):
    explorer.choose(num_experts=4)
    explorer.choose(ep_size=2)
    explorer.choose(skew=3.0)
    assert explorer.shown.loads == route(drawn_logits(2, 4, 4), 2, 3.0).loads
    busiest = max(explorer.shown.loads) / explorer.shown.mean_load
    assert f"<b>{busiest:.2f} times</b> the mean load" in explorer.says


def test_more_ranks_than_experts_move_a_control(explorer):
    explorer.choose(num_experts=2)
    assert 'role="alert"' in explorer.says
    assert explorer.choice.num_experts % explorer.choice.ep_size == 0


def test_a_router_of_the_readers_own_decides_the_sizes():
    logits = drawn_logits(2, 4, 4)[::-1]
    explorer = routing_explorer(logits)
    assert explorer.choice == ("yours", 4, 4, 2, 2, 0.0)
    assert explorer.shown == route(logits, 2)
    explorer.choose(skew=1.0)
    assert explorer.shown == route(logits, 2, 1.0)


def test_own_tokens_are_divided_among_more_ranks_and_other_experts_need_another_router():
    logits = drawn_logits(2, 4, 4)[::-1]
    explorer = routing_explorer(logits)
    explorer.choose(ep_size=4)
    assert explorer.choice[:5] == ("yours", 2, 4, 2, 4)
    tokens = logits[0] + logits[1]
    assert explorer.shown == route([tokens[:2], tokens[2:4], tokens[4:6], tokens[6:]], 2)
    explorer.choose(num_experts=8)
    assert explorer.choice.router == "drawn" and 'role="alert"' in explorer.says
    assert "yours is for 8 tokens in all, and 4 experts" in explorer.says
