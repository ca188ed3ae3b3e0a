"""MLP and self-attention on ranks give what one process gives, with no more messages than the paper needs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.communication import communication_log
from labkit.tensor_parallel import ParallelMLP, ParallelSelfAttention, local_shard
from tests.labkit.tensor_parallel.conftest import (
    BATCH,
    SEQUENCE,
    SIZES,
    assert_same,
    randoms,
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
        unsharded = one_process_mlp
    else:
        block = ParallelSelfAttention(24, 12, group, **options)
        column, row = block.qkv, block.out

        def unsharded(qkv, out):
            return one_process_attention(qkv, out, num_heads=12)

    masters = [layer.master_weight.clone().requires_grad_() for layer in (column, row)]
    x, grad = randoms((BATCH, SEQUENCE, 24), (BATCH, SEQUENCE, 24), dtype=dtype)
    unsharded_x = x.clone().requires_grad_()
    expected = unsharded(*masters)(unsharded_x)
    expected.backward(grad)

    local_x = sequence_slice(x, sequence_parallel).clone().requires_grad_()
    with communication_log() as forward:
        output = block(local_x)
    with communication_log() as backward:
        output.backward(sequence_slice(grad, sequence_parallel))
    assert_same(output, sequence_slice(expected, sequence_parallel), "output")
    assert_same(local_x.grad, sequence_slice(unsharded_x.grad, sequence_parallel), "input gradient")
    stride = column.stride
    assert_same(column.weight.grad, local_shard(masters[0].grad, group, 0, stride), "first weight's gradient")
    assert_same(row.weight.grad, local_shard(masters[1].grad, group, 1), "second weight's gradient")
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
