"""The explorer of notebook 13: every control changes what is shown, and what cannot be is said."""

import pytest

from course.explorers.context import HEAD_SIZE, context_explorer


@pytest.fixture
def explorer():
    return context_explorer(4096, cp_size=4, num_heads=32, num_kv_heads=8)


def test_the_facts_are_messages_and_bytes(explorer):
    assert (
        "Each rank has 32 heads and 8 kv heads of 1,024 tokens. It sends in each layer: ring <b>58.7 MB</b>"
        in explorer.says
    )
    own = 2 * 1024 * 8 * HEAD_SIZE * 2  # keys and values, in bfloat16
    assert own == 4_194_304
    facts = explorer.facts.html
    assert "<td>ring</td><td>3 + 7</td><td>12.6 MB</td><td>46.1 MB</td>" in facts  # 3 and 3 of them, 4 of float32
    assert "<td>Ulysses</td><td>4 + 4</td><td>15.7 MB</td><td>15.7 MB</td>" in facts  # 3/4 of 20 M
    assert "<td>all_gather</td><td>1 + 2</td><td>12.6 MB</td><td>37.7 MB</td>" in facts


def test_ulysses_is_closed_where_heads_would_have_to_be_cut(explorer):
    explorer.choose(tp_size=4)
    assert "t * c = 16 does not divide kv heads = 8" in explorer.facts.html
    assert "Ulysses <b>does not fit</b>" in explorer.says
    assert "alert" not in explorer.says


def test_one_rank_sends_nothing(explorer):
    explorer.choose(cp_size=1)
    assert explorer.facts.html.count("<td>0 + 0</td><td>none</td><td>none</td>") == 3


def test_more_tensor_ranks_than_kv_heads_do_not_fit(explorer):
    explorer.choose(num_kv_heads=2)
    explorer.choose(tp_size=8)
    assert 'role="alert"' in explorer.says
    assert explorer.choice.num_kv_heads % explorer.choice.tp_size == 0
    assert explorer.shown.num_query_groups == explorer.choice.num_kv_heads
