"""Attention on ranks gives what whole attention gives on one process, and sends what it says it sends."""

import itertools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from course.communication import communication_log
from labkit.context_parallel import all_gather_attention, block, blockwise, positions, ring_attention, ulysses_attention
from labkit.groups import group_of_one, init_groups
from labkit.layout import ParallelLayout

WAYS = {"ring": ring_attention, "ulysses": ulysses_attention, "all_gather": all_gather_attention}
BATCH, HEADS, SEQUENCE, HEAD_SIZE = 2, 8, 16, 4


def world():
    """The group of all ranks; a stand-in where no world is up."""
    return dist.group.WORLD if dist.is_initialized() else group_of_one()


def unsharded(kv_heads=HEADS, dtype=torch.float64, sequence=SEQUENCE, head_size=HEAD_SIZE):
    """q, k, v and the gradient of the output, on every rank the same, laid out as a linear layer leaves them."""
    draw, heads = torch.Generator().manual_seed(1), (HEADS, kv_heads, kv_heads, HEADS)
    drawn = [torch.randn(BATCH, sequence, h, head_size, dtype=torch.float64, generator=draw) for h in heads]
    return [(2 * x).to(dtype).transpose(1, 2) for x in drawn]


def go_back(out, grad):
    """As ``out.backward(grad)``, for which torch first imports half a second's worth of itself, on every rank."""
    (out * grad).sum().backward()


def with_gradients(attention, q, k, v, grad):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    go_back(out, grad)
    return out.detach(), q.grad, k.grad, v.grad


def parity(name, group=None, kv_heads=HEADS, causal=True, zigzag=True, sequence=SEQUENCE, dtype=torch.float64):
    """What this rank has, and its slices of what one process has in float64 from the same inputs."""
    group, tensors = group or world(), unsharded(kv_heads, dtype, sequence)

    def attention(q, k, v):
        return WAYS[name](q, k, v, group, causal=causal, zigzag=zigzag)

    def on_one_process(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    held = positions(sequence, group.size(), group.rank(), zigzag)
    got = with_gradients(attention, *(x[:, :, held] for x in tensors))
    expected = with_gradients(on_one_process, *(x.double() for x in tensors))
    return list(zip(("out", "dq", "dk", "dv"), got, (x[:, :, held] for x in expected)))


def errors(name, cases, **options):
    """The largest difference from one process in each case; compared later, in the process of the test."""
    return {
        (name, what, *case): (got - expected).abs().max().item()
        for case in cases
        for what, got, expected in parity(name, None, *case, **options)
    }


def assert_none(errors_of_ranks):
    for found in errors_of_ranks:
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("c", [1, 2, 4])
def test_values_and_gradients_of_one_process(on_ranks, c, name):
    cases = [*itertools.product([4], [True, False], [True, False]), (8, True, True)]
    if name != "ulysses":
        cases.append((1, True, True))
    assert_none([errors(name, cases)] if c == 1 else on_ranks(errors, name, cases, world_size=c))


def errors_of_all_ways():
    cases = [(8, True, True), (8, True, False)]
    return {case: error for name in WAYS for case, error in errors(name, cases, sequence=48).items()}


@pytest.mark.nccl_rules
def test_values_and_gradients_on_eight_ranks(on_ranks):
    assert_none(on_ranks(errors_of_all_ways, world_size=8))


def beside_other_groups():
    with init_groups(ParallelLayout(4, tp_size=2, cp_size=2)) as groups:
        compared = [(name, *pair) for name in WAYS for pair in parity(name, groups.cp)]
    return {(name, what): (got - expected).abs().max().item() for name, what, got, expected in compared}


def test_a_group_need_not_be_the_world(on_ranks):
    assert_none(on_ranks(beside_other_groups, world_size=4))


def test_gradients_are_those_of_finite_differences():
    """No world is up: a group of one sends nothing."""
    q, k, v = (torch.randn(1, h, 3, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    assert torch.autograd.gradcheck(lambda *qkv: ring_attention(*qkv, group_of_one()), (q, k, v))


def errors_of_plain_tensors(cases):
    with patch.object(block, "_has_flash", lambda q, k: False):
        return {case: error for name in ("ring", "all_gather") for case, error in errors(name, cases).items()}


def test_plain_tensors_do_what_no_kernel_does(on_ranks):
    """As on a GPU without a flash kernel for float64."""
    cases = [*itertools.product([4], [True, False], [True, False]), (1, True, True)]
    assert_none(on_ranks(errors_of_plain_tensors, cases, world_size=2))


def drawn_block(num_queries, num_keys, kv_heads, dtype, head_size=HEAD_SIZE):
    """q, k, v and the gradient of the output; then the out and lse of whole rows, of which the block is a share."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(HEADS, num_queries), (kv_heads, num_keys), (kv_heads, num_keys), (HEADS, num_queries)]
    drawn = (torch.randn(BATCH, *shape, head_size, dtype=torch.float64, generator=draw) for shape in shapes)
    q, k, v, grad = (x.to(dtype) for x in drawn)
    row_out, row_lse = block._plain(q, *(torch.cat([x, x.flip(3)], 2) for x in (k, v)), False)
    return q, k, v, grad, row_out.to(dtype), row_lse


ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


BLOCKS = [(1, 1, True), (37, 37, True), (600, 600, True), (37, 20, False), (5, 700, False)]
KERNEL = [(*lengths, kv_heads, torch.float64, HEAD_SIZE) for lengths in BLOCKS for kv_heads in (HEADS, 2, 1)]
KERNEL += [(*BLOCKS[number], 2, dtype, HEAD_SIZE) for dtype in list(ROUNDING)[1:] for number in (1, 4)]
KERNEL += [(9, 7, False, 2, torch.float32, head_size) for head_size in (1, 3, 96, 512)]


@pytest.mark.parametrize(("num_queries", "num_keys", "causal", "kv_heads", "dtype", "head_size"), KERNEL)
def test_the_kernel_agrees_with_plain_tensors(num_queries, num_keys, causal, kv_heads, dtype, head_size):
    """Blocks longer than what the kernel takes at a time, and of other lengths than the queries."""
    q, k, v, grad, *row = drawn_block(num_queries, num_keys, kv_heads, dtype, head_size)
    assert block._has_flash(q, k)
    expected = *block._plain(q, k, v, causal), *block._plain_backward(grad, q, k, v, *row, causal)
    got = *block.attend(q, k, v, causal), *block.attend_backward(grad, q, k, v, *row, causal)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a - b).norm() <= ROUNDING[dtype] * b.norm()


def errors_of_channels_last():
    """torch leaves q and k so when it joins two halves of a head with one number each, as rotary positions may."""
    held, found = positions(SEQUENCE, world().size(), world().rank()), {}
    for name, attention in WAYS.items():
        local = [x[:, :, held] for x in unsharded()]
        expected = with_gradients(lambda *qkv, way=attention: way(*qkv, world()), *local)
        *qkv, grad = (x.contiguous(memory_format=torch.channels_last) for x in local)
        got = with_gradients(lambda *qkv, way=attention: way(*qkv, world()), *qkv, grad)
        found[(name,)] = max((a - b).abs().max().item() for a, b in zip(got, expected))
    return found


def test_heads_may_lie_in_memory_in_any_order(on_ranks):
    assert_none(on_ranks(errors_of_channels_last, world_size=2))


# -- precision ------------------------------------------------------------------------------------------------------


def errors_in_bfloat16(name):
    compared = parity(name, kv_heads=4, dtype=torch.bfloat16, sequence=64)
    assert all(got.dtype == torch.bfloat16 for _, got, _ in compared)
    return {what: ((got.double() - expected).norm() / expected.norm()).item() for what, got, expected in compared}


@pytest.mark.parametrize("name", WAYS)
def test_bfloat16_is_rounded_at_the_ends_only(on_ranks, name):
    """One rounding to 8 bits makes a relative error of 2 ** -9 at most, of 0.0017 on average; sums make none."""
    for errors in on_ranks(errors_in_bfloat16, name, world_size=4):
        assert 1e-3 < errors["out"] < 2**-9
        assert all(errors[what] < 2**-7 for what in ("dq", "dk", "dv"))  # backward starts from the rounded output


def test_the_flash_kernel_is_called_as_torch_declares_it():
    """On the meta device, which knows the kernel's arguments and shapes; it computes nothing."""
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in unsharded(kv_heads=2, head_size=8))
    out, lse = block._flash(q, k, v, True)
    plain = block._plain(q, k, v, True)
    assert [(x.shape, x.dtype) for x in (out, lse)] == [(x.shape, x.dtype) for x in plain]
    gradients = block._flash_backward(grad, q, k, v, out, lse, True)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


# -- what is sent ---------------------------------------------------------------------------------------------------


def communication(name, kv_heads, dtype):
    """The calls of forward and those of backward, by operation: how many, and their bytes."""
    held = positions(SEQUENCE, world().size(), world().rank())
    q, k, v, grad = (x[:, :, held].requires_grad_() for x in unsharded(kv_heads, dtype))
    with communication_log() as forward:
        out = WAYS[name](q, k, v, world())
    with communication_log() as backward:
        go_back(out, grad)
    return [
        {op: (n, log.total_bytes(op)) for op, n in Counter(record.operation for record in log.records).items()}
        for log in (forward, backward)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("c", [2, 4])
def test_messages_and_bytes(on_ranks, c, dtype):
    size, wide = dtype.itemsize, max(dtype.itemsize, 4)  # gradients of keys and values travel in float32 or better
    h_kv = 4
    per_head = BATCH * SEQUENCE // c * HEAD_SIZE
    kv = 2 * per_head * h_kv
    forward, backward = (c - 1, (c - 1) * kv * size), (2 * c - 1, (c - 1) * kv * size + c * kv * wide)
    expected = {
        "ring": [dict.fromkeys(("send", "recv"), forward), dict.fromkeys(("send", "recv"), backward)],
        "ulysses": [{"all_to_all": (4, 2 * per_head * (HEADS + h_kv) * size)}] * 2,
        "all_gather": [
            {"all_gather": (1, c * kv * size)},
            {"all_gather": (1, c * kv * size), "reduce_scatter": (1, c * kv * wide)},
        ],
    }
    assert forward[0] + backward[0] == 3 * c - 2
    for name in WAYS:
        for got in on_ranks(communication, name, h_kv, dtype, world_size=c):
            assert got == expected[name], name


class Noted:
    """Messages under way, whose wait is an event."""

    def __init__(self, works, events):
        self.works, self.events = works, events

    def wait(self):
        self.events.append("w")
        for work in self.works:
            work.wait()


def events_of_the_ring():
    """The order of p, a message posted; b, a block computed; w, a message waited for: forward and backward."""
    events = []

    def noted(event, function):
        return lambda *args: (events.append(event), function(*args))[1]

    post = noted("p", dist.batch_isend_irecv)
    held = positions(SEQUENCE, world().size(), world().rank())
    q, k, v, grad = (x[:, :, held].requires_grad_() for x in unsharded())
    with (
        patch.object(dist, "batch_isend_irecv", lambda operations: [Noted(post(operations), events)]),
        patch.object(blockwise, "attend", noted("b", blockwise.attend)),
        patch.object(blockwise, "attend_backward", noted("b", blockwise.attend_backward)),
    ):
        out = ring_attention(q, k, v, world())
        events.append(" ")
        go_back(out, grad)
    return "".join(events)


@pytest.mark.parametrize("c", [2, 4])
def test_the_next_message_travels_while_a_block_is_computed(on_ranks, c):
    """Backward also posts the gradients after each block, and waits for them after the next one."""
    forward = "pbw" * (c - 1) + "b"
    backward = "pbpw" + "pbwpw" * (c - 2) + "bwp" + "w"
    assert on_ranks(events_of_the_ring, world_size=c) == [f"{forward} {backward}"] * c


# -- what is computed and kept --------------------------------------------------------------------------------------


def pairs_computed(name, zigzag):
    """The number of pairs of a query and a key in each block of this rank, forward and backward."""
    blocks = []

    def noted(function, first):
        def call(*args):
            q, k = args[first : first + 2]
            n, m = q.size(-2), k.size(-2)
            blocks.append(n * (n + 1) // 2 if args[-1] else n * m)
            return function(*args)

        return call

    with (
        patch.object(blockwise, "attend", noted(blockwise.attend, 0)),
        patch.object(blockwise, "attend_backward", noted(blockwise.attend_backward, 1)),
    ):
        parity(name, zigzag=zigzag)
    return sorted(blocks)


@pytest.mark.parametrize("name", ["ring", "all_gather"])
def test_work_is_equal_when_it_is_balanced(on_ranks, name):
    """With n = 4 tokens a rank, a triangle has 10 pairs, half a block 8, and a block 16."""
    assert on_ranks(pairs_computed, name, True, world_size=4) == [[8] * 6 + [10] * 2] * 4
    unequal = [[10] * 2 + [16] * 2 * rank for rank in range(4)]
    assert on_ranks(pairs_computed, name, False, world_size=4) == unequal


class Largest(TorchFunctionMode):
    """Notes the largest tensor that torch's functions give inside the block, but not those that the engine calls."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = function(*args, **kwargs or {})
        for tensor in given if isinstance(given, (tuple, list)) else [given]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return given


def memory(name, zigzag):
    s, c = 512, world().size()
    held = positions(s, c, world().rank(), zigzag)
    q, k, v, grad = (x[:, :, held].clone().requires_grad_() for x in unsharded(sequence=s, dtype=torch.bfloat16))
    with Largest() as forward:
        out = WAYS[name](q, k, v, world(), zigzag=zigzag)
    kept = sorted(x.nbytes for x in out.grad_fn.saved_tensors)
    with Largest() as backward, torch.no_grad():  # as autograd calls it
        out.grad_fn.apply(grad)
    return (forward.numbers, backward.numbers), kept


@pytest.mark.parametrize("name", ["ring", "all_gather"])
@pytest.mark.parametrize("zigzag", [False, True])
def test_no_matrix_of_scores_is_made_and_little_is_kept(on_ranks, name, zigzag):
    c, n = 4, 512 // 4
    tensor = BATCH * HEADS * n * HEAD_SIZE
    kv = 2 * tensor * (c if name == "all_gather" else 1)  # and their gradients
    assert kv < BATCH * HEADS * n * n // 2  # half a block's scores
    for largest, kept in on_ranks(memory, name, zigzag, world_size=c):
        assert largest == (kv, kv)
        assert kept == [4 * tensor // HEAD_SIZE, *[2 * tensor] * 4]  # lse in float32; q, k, v and out as they are
