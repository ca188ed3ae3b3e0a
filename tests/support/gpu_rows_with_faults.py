"""A table for tools/gpu_check.py in which rows go wrong, each in its own way."""

import os
import time

from tools.gpu_rows.row import Found, LeftOut, Row


def passes(where):
    return Found(True, "2", "2")


def is_wrong(where):
    return Found(False, "3", "2")


def raises(where):
    raise RuntimeError("the row raised | this")


def dies(where):
    os.abort()


def hangs(where):
    time.sleep(600)


def is_left_out(where):
    raise LeftOut("this GPU cannot")


def all_rows(num_gpus, numbers_of_ranks):
    checks = is_wrong, raises, dies, hangs, is_left_out, passes
    return [Row(check.__name__, "02_collectives", "measure", check, limit_seconds=3) for check in checks]
