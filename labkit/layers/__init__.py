"""Layers cut across a tensor-parallel group; each gives what the uncut layer of torch.nn would."""

from labkit.layers.blocks import ParallelMLP, ParallelSelfAttention
from labkit.layers.dropout import ShardedDropout, seed_replicas, sharded_dropout
from labkit.layers.linear import ColumnParallelLinear, RowParallelLinear
from labkit.layers.shards import own_shard
from labkit.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "ParallelMLP",
    "ParallelSelfAttention",
    "RowParallelLinear",
    "ShardedDropout",
    "VocabParallelEmbedding",
    "own_shard",
    "seed_replicas",
    "sharded_dropout",
    "vocab_parallel_cross_entropy",
]
