"""A training program made of labkit: it trains a GPT over all five axes at once, whoever started
the ranks.

``import labtrain`` loads no torch: each name below is loaded when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING

from labkit import lab_folders

if TYPE_CHECKING:
    from labtrain.config import TrainConfig
    from labtrain.console import Step
    from labtrain.trainer import Trainer, steps, train, training

__all__ = ["Step", "TrainConfig", "Trainer", "steps", "train", "training"]

lab_folders.extend(__path__)  # so that a report tells this code from the user's

_MODULES = {"TrainConfig": "labtrain.config", "Step": "labtrain.console"}


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'labtrain' has no attribute {name!r}")
    importlib.import_module("labtrain.before_torch")
    return getattr(importlib.import_module(_MODULES.get(name, "labtrain.trainer")), name)
