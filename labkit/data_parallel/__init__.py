"""Data parallelism: a whole model and its own rows on each rank; gradients are averaged, optimizer
states divided.
"""

from labkit.data_parallel.fully_sharded import FullyShardedDataParallel
from labkit.data_parallel.gradients import DataParallel, average_gradients
from labkit.launch.client import will_train

__all__ = ["DataParallel", "FullyShardedDataParallel", "average_gradients"]

will_train()
