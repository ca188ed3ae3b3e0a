"""``python -m labkit.train``, in which rank 1 is killed in its third step as when a machine fails."""

import itertools
import os
import signal
import sys

from labkit.train import Trainer
from labkit.train.__main__ import main

really, calls = Trainer.compute_gradients, itertools.count(1)


def killed(trainer):
    if trainer.groups.rank == 1 and next(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return really(trainer)


if __name__ == "__main__":
    Trainer.compute_gradients = killed
    sys.exit(main())
