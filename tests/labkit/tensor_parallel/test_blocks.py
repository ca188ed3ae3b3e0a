"""MLP and self-attention on ranks give what one process gives, with no more messages than the paper needs."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.communication import communication_log
from labkit.tensor_parallel import (
    ParallelMLP,
    ParallelSelfAttention,
    VocabParallelEmbedding,
    column_linear,
    gather_whole,
    own_shard,
    vocab_parallel_cross_entropy,
)
from tests.labkit.tensor_parallel.conftest import (
    BATCH,
    SEQUENCE,
    SIZES,
    assert_same,
    randoms,
    refused_before_any_communication,
    sequence_slice,
)


def one_process_mlp(up, down):
    return lambda x: F.linear(F.gelu(F.linear(x, up)), down)


def one_process_attention(qkv, out, num_heads):
    def attention(x):
        q, k, v = F.linear(x, qkv).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(-3, -2) for part in (q, k, v))
        return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2), out)

    return attention


def block_parity(kind, sequence_parallel):
    group, dtype = dist.group.WORLD, torch.float64
    torch.manual_seed(2)
    options = {"sequence_parallel": sequence_parallel, "keep_master_weight_for_test": True, "dtype": dtype}
    if kind is ParallelMLP:
        block = ParallelMLP(24, 48, group, **options)
        column, row = block.up, block.down
        whole = one_process_mlp
    else:
        block = ParallelSelfAttention(24, 12, group, **options)
        column, row = block.qkv, block.out

        def whole(qkv, out):
            return one_process_attention(qkv, out, num_heads=12)

    masters = [layer.master_weight.clone().requires_grad_() for layer in (column, row)]
    x, grad = randoms((BATCH, SEQUENCE, 24), (BATCH, SEQUENCE, 24), dtype=dtype)
    whole_x = x.clone().requires_grad_()
    expected = whole(*masters)(whole_x)
    expected.backward(grad)

    mine = sequence_slice(x, sequence_parallel).clone().requires_grad_()
    with communication_log() as forward:
        output = block(mine)
    with communication_log() as backward:
        output.backward(sequence_slice(grad, sequence_parallel))
    assert_same(output, sequence_slice(expected, sequence_parallel), "output")
    assert_same(mine.grad, sequence_slice(whole_x.grad, sequence_parallel), "input gradient")
    stride = column.stride
    assert_same(column.weight.grad, own_shard(masters[0].grad, group, 0, stride), "first weight's gradient")
    assert_same(row.weight.grad, own_shard(masters[1].grad, group, 1), "second weight's gradient")
    return [[record.operation for record in log.records] for log in (forward, backward)]


@pytest.mark.nccl_rules
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("kind", [ParallelMLP, ParallelSelfAttention])
def test_block(on_ranks, kind, sequence_parallel, world_size):
    forward, backward = on_ranks(block_parity, kind, sequence_parallel, world_size=world_size)[0]
    if world_size == 1:
        assert forward == backward == []
    elif sequence_parallel:
        assert forward == ["all_gather", "reduce_scatter"]
        # of the output's gradient; of the input again, for the weight gradient; of the input's; of the row's bias
        assert sorted(backward) == ["all_gather", "all_gather", "all_reduce", "reduce_scatter"]
    else:
        assert forward == backward == ["all_reduce"]


MISTAKES = {
    "tp_size=2 does not divide num_attention_heads=3: use tp_size 1 or 3, or num_attention_heads 2 or 4": lambda g: (
        ParallelSelfAttention(12, 3, g)
    ),
    "num_attention_heads=4 does not divide hidden_size=10: use num_attention_heads 1, 2, 5 or 10, or hidden_size ": (
        lambda g: ParallelSelfAttention(10, 4, g)
    ),
    "num_attention_heads=2.0 must be a whole number": lambda g: ParallelSelfAttention(12, 2.0, g),
    "hidden_size=12.5 must be a whole number": lambda g: ParallelSelfAttention(12.5, 2, g),
    "tp_size=2 does not divide output_size=7": lambda g: ParallelMLP(4, 7, g),
}


def test_mistakes_are_refused_before_any_communication(on_ranks):
    on_ranks(refused_before_any_communication, MISTAKES)


def gradient_penalty(sequence_parallel, smoothing):
    """The squared gradient of a loss by its input, differentiated again: by the weights, as in one process."""
    group, dtype = dist.group.WORLD, torch.float64
    torch.manual_seed(2)
    options = {"sequence_parallel": sequence_parallel, "keep_master_weight_for_test": True, "dtype": dtype}
    block, head = ParallelMLP(12, 24, group, **options), VocabParallelEmbedding(20, 12, group, **options)
    up, down, words = (layer.master_weight.clone().requires_grad_() for layer in (block.up, block.down, head))
    (x,) = randoms((BATCH, SEQUENCE, 12), dtype=dtype)
    target = torch.arange(BATCH * SEQUENCE).remainder(20).view(BATCH, SEQUENCE)
    mine, whole = sequence_slice(x, sequence_parallel).clone().requires_grad_(), x.clone().requires_grad_()

    logits = column_linear(block(mine), head.weight, None, group, sequence_parallel)
    loss = vocab_parallel_cross_entropy(logits, target, group, smoothing)
    (gradient,) = torch.autograd.grad(loss, mine, create_graph=True)
    expected_logits = F.linear(one_process_mlp(up, down)(whole), words)
    expected_loss = F.cross_entropy(expected_logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing)
    (expected,) = torch.autograd.grad(expected_loss, whole, create_graph=True)
    assert_same(gradient, sequence_slice(expected, sequence_parallel), "gradient")

    gradient.square().sum().backward()
    expected.square().sum().backward()
    assert_same(mine.grad, sequence_slice(whole.grad, sequence_parallel), "input")
    for layer, master, dim in ((block.up, up, 0), (block.down, down, 1), (head, words, 0)):
        assert_same(layer.weight.grad, own_shard(master.grad, group, dim), "weight")


def test_a_gradient_can_be_differentiated_again(on_ranks):
    def all_penalties():
        for case in product([False, True], [0.0, 0.1]):
            gradient_penalty(*case)

    on_ranks(all_penalties)


def in_autocast(group, sequence_parallel):
    """A forward in autocast and its backward outside, as torch advises: output, and all gradients made whole."""
    torch.manual_seed(2)
    block = ParallelMLP(16, 32, group, sequence_parallel=sequence_parallel)
    head = VocabParallelEmbedding(20, 16, group)
    x = sequence_slice(randoms((BATCH, SEQUENCE, 16), dtype=torch.float32)[0], sequence_parallel).requires_grad_()
    target = torch.arange(BATCH * SEQUENCE).remainder(20).view(BATCH, SEQUENCE)
    with torch.autocast("cpu", torch.bfloat16):
        logits = column_linear(block(x), head.weight, None, group, sequence_parallel)
        loss = vocab_parallel_cross_entropy(logits, target, group)
    loss.backward()
    dtypes = logits.dtype, loss.dtype
    return dtypes, loss, *(gather_whole(p.grad, p) for p in (*block.parameters(), *head.parameters()))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast_gives_what_it_gives_in_one_process(on_ranks, sequence_parallel):
    alone_types, *alone = on_ranks(lambda: in_autocast(dist.group.WORLD, False), world_size=1)[0]
    for types, *ours in on_ranks(lambda: in_autocast(dist.group.WORLD, sequence_parallel)):
        assert types == alone_types == (torch.bfloat16, torch.float32)
        for got, expected in zip(ours, alone, strict=True):
            assert torch.dist(got, expected) <= 0.01 * expected.norm()  # partial sums are rounded to bfloat16
