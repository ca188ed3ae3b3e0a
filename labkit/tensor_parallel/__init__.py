"""Divides layers among a tensor-parallel group; each gives what the whole layer of torch.nn would.

They compute in the dtype that they are made with. What they refuse, autocast and second
derivatives, is in `labkit.autograd`.
"""

from labkit.tensor_parallel.blocks import ParallelMLP, ParallelSelfAttention
from labkit.tensor_parallel.dropout import ShardedDropout, seed_replicas
from labkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from labkit.tensor_parallel.shards import local_shard, shard_like, unshard
from labkit.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ParallelMLP", "ParallelSelfAttention",
    "ShardedDropout", "seed_replicas",
    "ColumnParallelLinear", "RowParallelLinear", "column_linear",
    "shard_like", "unshard", "local_shard",
    "VocabParallelEmbedding", "vocab_parallel_cross_entropy",
]  # fmt: skip
