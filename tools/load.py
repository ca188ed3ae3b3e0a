"""Measures how many participants this machine carries: their kernels at once, each with 8 ranks that train.

    python -m tools.load --participants 4 8

For each number it prints what one participant takes, once all have trained: memory as proportional set size (PSS, so
that shared pages are counted once), and the seconds, median and slowest, while all started at the same moment.
"""

import argparse
import os
import platform
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor

import psutil

from labtrain.command_line import run_command
from tools.kernel import Kernel

SETUP = """
from labtrain import TrainConfig, train
config = TrainConfig(steps={steps}, tp_size=2, pp_size=2, num_layers=4, hidden_size=64, num_attention_heads=8)
"""
WORLD = "world = World(8, timeout_seconds=900)"  # stays: its ranks keep what training took
TRAIN = "records = world.run(train, config)"
MIB = 2**20


def pss(pid: int) -> tuple[int, int]:
    """Return a process's memory and that of all below it, in bytes, and how many processes these are."""
    parent = psutil.Process(pid)
    family = [parent, *parent.children(recursive=True)]
    return sum(each.memory_full_info().pss for each in family), len(family)


def measure(num_participants: int, steps: int) -> str:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_participants) as pool:
        kernels = list(pool.map(Kernel, [folder] * num_participants))

        def everybody(code: str) -> list[float]:
            ran = list(pool.map(lambda kernel: kernel.run(code, timeout=900), kernels))
            if failed := [each.error for each in ran if each.error]:
                raise RuntimeError(f"{len(failed)} of {num_participants} failed, the first with:\n{failed[0]}")
            return [each.seconds for each in ran]

        try:
            everybody(SETUP.format(steps=steps))
            first, again = everybody(f"{WORLD}; {TRAIN}"), everybody(TRAIN)
            memory, processes = zip(*(pss(kernel.pid) for kernel in kernels))
        finally:
            list(pool.map(Kernel.close, kernels))
    cells = [num_participants, sum(processes), f"{statistics.mean(memory) / MIB:.0f}", f"{sum(memory) / 2**30:.1f}"]
    for seconds in (first, again):
        cells.append(f"{statistics.median(seconds):.0f} ({max(seconds):.0f})")
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--participants", type=int, nargs="+", default=[4], help="how many at once; several: one by one"
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps of each launch")
    given = parser.parse_args()
    gib = psutil.virtual_memory().total / 2**30
    print(f"{os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}; {given.steps} steps on 8 ranks each")
    print("| participants | processes | MiB each (PSS) | GiB together | s, start and first run | s, next run |")
    print("|---|---|---|---|---|---|")
    for number in given.participants:
        print(measure(number, given.steps), flush=True)


if __name__ == "__main__":
    run_command(main)
