"""Two nodes of one rank on this machine, each with its torchrun; the second fails twice.

First its rank is killed, in its third step, then rank and torchrun together, in the third step after the restart. Both
nodes are forks of one process, and their ranks are forks, too (--start-method fork): that saves their imports.
"""

import itertools
import multiprocessing
import os
import signal
import sys

import torch._dynamo  # noqa: F401 - which the optimizer would import on every rank
from torch.distributed.run import main as torchrun

from labkit.train import Trainer
from labkit.train.__main__ import main

really, calls = Trainer.compute_gradients, itertools.count(1)


def killed(trainer):
    if os.environ["NODE"] == "1" and next(calls) == 3:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return really(trainer)


def node(number, port, options):
    """Wait at most a few seconds for the other node, then go on without it."""
    os.environ["NODE"] = str(number)
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id lab --local-addr localhost"
    rendezvous += " --nnodes 1:2 --nproc-per-node 1 --max-restarts 2 --rdzv-conf keep_alive_interval=1,"
    rendezvous += f"keep_alive_max_attempt=2,last_call_timeout=6,is_host={1 - number}"
    torchrun([*rendezvous.split(), "--run-path", "--start-method", "fork", __file__, *options])


if __name__ == "__main__" and "RANK" in os.environ:
    Trainer.compute_gradients = killed
    if code := main():
        sys.exit(code)
elif __name__ == "__main__":
    port, *options = sys.argv[1:]
    nodes = [multiprocessing.get_context("fork").Process(target=node, args=(each, port, options)) for each in range(2)]
    for each in nodes:
        each.start()
    for each in nodes:
        each.join()
    print([each.exitcode for each in nodes])
