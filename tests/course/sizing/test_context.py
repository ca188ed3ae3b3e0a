"""Attention over context ranks: its pairs against the ring's own blocks, its messages against real ranks' logs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course.communication import communication_log
from course.sizing import CONTEXT_PARALLEL, attention_messages, attention_pairs, attention_work, pace
from labkit.context_parallel import all_gather_attention, part_with_work, ring_attention, ulysses_attention
from labkit.launch import launch
from labkit.shape import GPT

SHAPE = GPT(num_layers=1, hidden_size=32, seq_length=16, vocab_size=1, num_attention_heads=8)


# -- work -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("c", [1, 2, 4, 8])
def test_pairs_are_those_that_the_ring_computes(c, zigzag):
    length, places = 6, range(6)

    def computed(rank, source):
        part = part_with_work(rank, source, length, True, zigzag)
        queries, keys = (list(places[each]) for each in ((part.queries, part.keys) if part else (slice(0), slice(0))))
        return sum(k <= q or not part.causal for q in queries for k in keys)

    assert attention_pairs(c * length, c, zigzag) == [[computed(r, j) for j in range(c)] for r in range(c)]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("c", [1, 2, 3, 8])
def test_every_token_sees_itself_and_all_before_it_once(c, zigzag):
    s = 12 * c
    assert sum(map(sum, attention_pairs(s, c, zigzag))) == s * (s + 1) // 2
    assert sum(attention_work(s, c, zigzag)) == pytest.approx(1)


@pytest.mark.parametrize("c", [2, 4, 8, 64])
def test_the_last_of_consecutive_ranks_sets_the_pace_and_balanced_none_does(c):
    s = 2**20
    assert attention_work(s, c, zigzag=False) == pytest.approx([(2 * r + 1) / c**2 for r in range(c)], rel=1e-3)
    assert pace(s, c, zigzag=False) == pytest.approx(c / (2 * c - 1), rel=1e-3)
    assert attention_work(s, c) == [1 / c] * c
    assert pace(s, c) == 1


# -- messages -------------------------------------------------------------------------------------------------------

CASES = [(way, *case) for way in CONTEXT_PARALLEL for case in ((4, torch.bfloat16), (8, torch.float64))]


def logged(cases):
    """What this rank sends in forward and in backward, by the attention of labkit."""
    ways = {"ring": ring_attention, "ulysses": ulysses_attention, "all_gather": all_gather_attention}
    c, logs = dist.get_world_size(), []
    for way, kv_heads, dtype in cases:
        q, k, v = (
            torch.ones(2, heads, 16 // c, 4, dtype=dtype, requires_grad=True) for heads in (8, kv_heads, kv_heads)
        )
        with communication_log() as forward:
            out = ways[way](q, k, v, dist.group.WORLD)
        with communication_log() as backward:
            out.sum().backward()
        logs.append([sorted((r.operation, r.message_bytes) for r in log.records if r.operation != "recv")
                     for log in (forward, backward)])  # fmt: skip
    return logs


@pytest.mark.parametrize("c", [2, 4])
def test_messages_are_those_of_real_ranks(c):
    formulas = []
    for way, kv_heads, dtype in CASES:
        shape = replace(SHAPE, num_query_groups=kv_heads)
        sent = attention_messages(shape, way, c, batch_size=2, bytes_per_element=dtype.itemsize)
        formulas.append([sorted((each.operation, each.message_bytes) for each in some) for some in sent])
    for logs in launch(logged, CASES, world_size=c):
        assert dict(zip(CASES, logs)) == dict(zip(CASES, formulas))


@pytest.mark.parametrize("c", [2, 3, 8])
def test_a_ring_sends_3c_2_messages_and_ulysses_8(c):
    shape = replace(SHAPE, seq_length=48)
    sent = {way: attention_messages(shape, way, c) for way in CONTEXT_PARALLEL}
    numbers = {way: (len(forward), len(backward)) for way, (forward, backward) in sent.items()}
    assert numbers == {"ring": (c - 1, 2 * c - 1), "ulysses": (4, 4), "all_gather": (1, 2)}
    divided = attention_messages(shape, "ring", c, tp_size=2)
    assert [2 * each.message_bytes for each in divided.backward] == [
        each.message_bytes for each in sent["ring"].backward
    ]


def test_a_rank_alone_sends_nothing():
    assert all(attention_messages(SHAPE, way, 1) == ([], []) for way in CONTEXT_PARALLEL)
