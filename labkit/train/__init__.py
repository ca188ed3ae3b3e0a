"""Training a GPT over all three axes at once; on a rank, whatever has launched it."""

import os

# OpenMP's threads spin while they wait. On cores that somebody else uses too, torch's two threads were 15 times slower
# than one; with a short spin, 10% slower than with a long one on cores of their own. It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from labkit.train.config import TrainConfig
from labkit.train.trainer import Step, Trainer, steps, train, training

__all__ = ["Step", "TrainConfig", "Trainer", "steps", "train", "training"]
