"""Pipeline parallelism on real ranks: each holds some stages of the model, and obeys a schedule."""

from labkit.launch.client import will_train
from labkit.pipeline.worker import run

__all__ = ["run"]

will_train()
