"""Trains a GPT over all five axes at once, whoever started the ranks."""

import os

# OpenMP's threads spin while they wait. On cores that something else uses too, torch's two threads were 15 times slower
# than one. With a short spin, two threads on cores of their own are only 10% slower. torch reads this when imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if {"RANK", "SLURM_PROCID"} & os.environ.keys():  # when a peer dies, torch would warn of it in 60 lines of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from labkit.launch.client import will_train
from labtrain.config import TrainConfig
from labtrain.console import Step
from labtrain.trainer import Trainer, steps, train, training

__all__ = ["Step", "TrainConfig", "Trainer", "steps", "train", "training"]

will_train()
