"""Training a GPT over all three axes at once; on a rank, whatever has launched it."""

from labkit.train.config import TrainConfig
from labkit.train.trainer import Step, Trainer, train

__all__ = ["Step", "TrainConfig", "Trainer", "train"]
