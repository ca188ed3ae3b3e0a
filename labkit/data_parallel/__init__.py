"""Data parallelism: every rank has the whole model and other rows; gradients are averaged, optimizer states divided."""

from labkit.data_parallel.gradients import DataParallel
from labkit.data_parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DataParallel", "ShardedOptimizer"]
