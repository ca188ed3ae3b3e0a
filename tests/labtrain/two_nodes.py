"""Two nodes of one rank on this machine, each with its torchrun; the rank of the second is killed in its third step.

Both nodes are forks of one process, and their ranks are forks, too: that saves their imports.
"""

import itertools
import multiprocessing
import os
import signal
import sys

import torch._dynamo  # noqa: F401 - which the optimizer would import on every rank
from torch.distributed.run import main as torchrun

from labtrain import Trainer
from labtrain.__main__ import main

really, calls = Trainer.compute_gradients, itertools.count(1)


def killed(trainer):
    if os.environ["NODE"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and next(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return really(trainer)


def node(number, port, options):
    os.environ["NODE"] = str(number)
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id lab --local-addr localhost"
    rendezvous += f" --nnodes 2 --nproc-per-node 1 --max-restarts 2 --rdzv-conf is_host={1 - number}"
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
