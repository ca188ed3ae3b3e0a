"""What srun does with labtrain, on this machine: a process for each task, with the task's variables.

The tasks are forks of one process, which saves their imports.
"""

import json
import multiprocessing
import os
import sys

import torch._dynamo  # noqa: F401 - which the optimizer would import on every rank

from labtrain.__main__ import main


def task(variables):
    os.environ.update(variables)
    sys.exit(main())


if __name__ == "__main__":
    tasks = json.loads(sys.argv.pop(1))
    processes = [multiprocessing.get_context("fork").Process(target=task, args=(variables,)) for variables in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
