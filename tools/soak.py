"""Runs correct programs and planted faults on an overloaded machine: no correct one may be called a deadlock.

A workshop on one node has dozens of runnable processes for each core. This makes as many, which turn without end, and
launches beside them: correct programs of several kinds, and each fault many times. It prints a table. It is not part of
CI, because it takes half an hour: `python -m tools.soak --help`.
"""

import argparse
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import torch.distributed as dist
from tqdm import tqdm

from labkit.launch import Deadlock, RankFailed, launch
from labtrain import TrainConfig, train
from labtrain.command_line import run_command
from tools.kernel import Kernel

TINY = dict(
    steps=4, batch_size=8, micro_batch_size=2, seq_length=8, hidden_size=16, num_attention_heads=8, num_layers=4
)


def collectives(count: int = 300):
    x = torch.ones(1000)
    for _ in range(count):
        dist.all_reduce(x)
        x /= dist.get_world_size()
    assert x.eq(1).all()


def ring(turns: int = 100):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    got = torch.empty(100)
    for turn in range(turns):
        request = dist.isend(torch.full((100,), float(turn)), (rank + 1) % num_ranks)
        dist.recv(got, (rank - 1) % num_ranks)
        request.wait()
        assert got.eq(turn).all()


def helper_threads():
    """A thread sends late; its main thread has other work, then waits for it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    late = threading.Timer(3.0, dist.send, (torch.ones(3), (rank + 1) % num_ranks))
    late.start()
    dist.recv(torch.empty(3), (rank - 1) % num_ranks)
    late.join()


def groups():
    for _ in range(4):
        made = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]
        dist.all_reduce(torch.ones(10), group=made[dist.get_rank() // 2])


def random_program(seed: int, leave_out: bool = False):
    """A legal program: pairs and groups meet in one order. ``leave_out``: one rank skips one of its meetings."""
    draw, rank, num_ranks = random.Random(seed), dist.get_rank(), dist.get_world_size()
    everybody = dist.new_group(list(range(num_ranks)))
    skipped = draw.randrange(20) if leave_out else None
    for number in range(20):
        kind, members = draw.choice(["all_reduce", "barrier", "message"]), draw.sample(range(num_ranks), 2)
        pause, who = draw.choice([0.0, 0.0, 0.01, 0.3, 1.5]), draw.randrange(num_ranks)
        if number == skipped and rank == members[0]:
            continue
        if rank == who:
            time.sleep(pause)
        if kind == "all_reduce":
            dist.all_reduce(torch.ones(draw.choice([1, 10_000])), group=everybody)
        elif kind == "barrier":
            dist.barrier()
        elif rank == members[0]:
            dist.send(torch.ones(7), members[1])
        elif rank == members[1]:
            dist.recv(torch.empty(7), members[0])


def cell(number: int):
    """A cell of a notebook, in a kernel of its own."""
    kernel = Kernel(tempfile.gettempdir())
    try:
        ran = kernel.run(
            "def work():\n    x = torch.ones(4)\n    for _ in range(50): dist.all_reduce(x); x /= 4\n"
            "    return x[0].item()\nprint(launch(work, world_size=4))",
            timeout=600,
        )
    finally:
        kernel.close()
    if "Deadlock" in ran.error:
        raise Deadlock(ran.error)
    assert ran.stdout.endswith("[1.0, 1.0, 1.0, 1.0]\n"), ran


def cells_on_ranks(number: int):
    """A typo on all ranks, and then a cell that needs the names from before it."""
    kernel = Kernel(tempfile.gettempdir())
    try:
        kernel.run("from course.ranks import ranks")
        kernel.run("%%ranks 4\nx = torch.ones(4)", timeout=600)
        typo = kernel.run("%%ranks\nmistyped", timeout=600)
        ran = kernel.run("%%ranks\nfor _ in range(50): dist.all_reduce(x); x /= 4\nx[0].item()", timeout=600)
    finally:
        kernel.close()
    if "Deadlock" in ran.error + typo.error:
        raise Deadlock(ran.error + typo.error)
    assert "NameError" in typo.error and ran.stdout == "ranks 0-3: 1.0\n", (typo, ran)


HEALTHY = {
    "trainer, t = 8": lambda _: launch(train, TrainConfig(**TINY, tp_size=8), world_size=8),
    "trainer, t = 2, p = 4": lambda _: launch(train, TrainConfig(**TINY, tp_size=2, pp_size=4), world_size=8),
    "300 all-reduces": lambda _: launch(collectives, world_size=4),
    "ring of messages": lambda _: launch(ring, world_size=4),
    "helper threads": lambda _: launch(helper_threads, world_size=3),
    "groups are made": lambda _: launch(groups, world_size=4),
    "random programs": lambda number: launch(random_program, number, world_size=4),
    "notebook cells": cell,
    "cells on ranks": cells_on_ranks,
}


def skips_a_collective():
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def calls_another():
    dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(3))


def receives_both():
    dist.recv(torch.ones(3), 1 - dist.get_rank())


def sends_unheard():
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)


def loses_a_request():
    dist.isend(torch.ones(3), 1 - dist.get_rank())
    dist.recv(torch.ones(3), 1 - dist.get_rank())


def makes_groups_in_different_order():
    orders = [[0, 1], [1, 2]]
    for ranks in orders[:: -1 if dist.get_rank() == 1 else 1]:
        dist.new_group(ranks)


def makes_a_group_alone():
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def waits_in_a_thread():
    if dist.get_rank() == 0:
        thread = threading.Thread(target=dist.recv, args=(torch.ones(3), 1))
        thread.start()
        thread.join()


def raises():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


FAULTS = {  # name -> function, ranks, what the report must say
    "a rank skips a collective": (skips_a_collective, 2, "Deadlock.*rank 0 waits; rank 1 has returned without it"),
    "ranks call different collectives": (calls_another, 2, "Deadlock.*Different operations meet"),
    "two receives wait for each other": (receives_both, 2, "Deadlock.*rank 0: waits in recv from rank 1"),
    "nobody receives": (sends_unheard, 2, "Deadlock.*rank 0: waits in send to rank 1"),
    "a request is lost": (loses_a_request, 2, "RankFailed.*request of this isend to rank .* is lost"),
    "groups in different order": (makes_groups_in_different_order, 3, "Deadlock.*new_group of ranks"),
    "a group made by one": (makes_a_group_alone, 2, "Deadlock.*rank 0: waits in new_group"),
    "a thread waits for ever": (waits_in_a_thread, 2, "Deadlock.*rank 0: waits for a thread of its own"),
    "an exception": (raises, 3, "RankFailed.*rank 1 of 3 raised ValueError: planted"),
    "a killed rank": (dies, 3, "RankFailed.*rank 1 of 3 was killed by SIGKILL"),
    "a random program with a meeting left out": (random_program, 4, "Deadlock|RankFailed"),
}


def healthy(name: str, number: int) -> str:
    try:
        HEALTHY[name](number)
    except Deadlock as deadlock:
        return f"called a deadlock: {deadlock}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "right"


def faulty(name: str, number: int) -> str:
    function, num_ranks, expected = FAULTS[name]
    arguments = (number, True) if function is random_program else ()
    try:
        launch(function, *arguments, world_size=num_ranks, timeout_seconds=120)
    except RankFailed as failed:
        said = f"{type(failed).__name__}: {failed}"
        return "right" if re.search(expected, said, re.DOTALL) else f"reported as {said}"
    return "not noticed"


def soak(kinds: list[tuple], num_threads: int) -> None:
    """Run all kinds in random order, some at once, and print what came of them."""
    verdicts, seconds = defaultdict(Counter), defaultdict(list)

    def timed(judge, name, number):
        start = time.monotonic()
        verdict = judge(name, number)
        return name, verdict, time.monotonic() - start

    random.Random(0).shuffle(kinds)
    with ThreadPoolExecutor(num_threads) as pool:
        for done in tqdm(as_completed([pool.submit(timed, *kind) for kind in kinds]), total=len(kinds)):
            name, verdict, took = done.result()
            verdicts[name][verdict.partition(":")[0]] += 1
            seconds[name].append(took)
            if verdict != "right":
                tqdm.write(f"{name}: {verdict}")
    print("| kind | runs | right | otherwise | median s | slowest s |\n|---|---|---|---|---|---|")
    for name in sorted(verdicts):
        took, counts = sorted(seconds[name]), verdicts[name]
        otherwise = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if verdict != "right")
        print(f"| {name} | {len(took)} | {counts['right']} | {otherwise or '-'}", end=" ")
        print(f"| {took[len(took) // 2]:.1f} | {took[-1]:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=500, help="runs of correct programs, of all kinds together")
    parser.add_argument("--faults", type=int, default=20, help="runs of each fault")
    parser.add_argument("--load", type=int, default=30, help="processes for each core that turn without end")
    parser.add_argument("--at-once", type=int, default=4, help="launches at a time")
    given = parser.parse_args()
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(given.load * multiprocessing.cpu_count())
    ]
    try:
        runs = [(healthy, list(HEALTHY)[number % len(HEALTHY)], number) for number in range(given.healthy)]
        soak(runs, given.at_once)
        soak([(faulty, name, number) for name in FAULTS for number in range(given.faults)], given.at_once)
        print(f"load: {os.getloadavg()[0]:.0f} processes on {multiprocessing.cpu_count()} cores")
    finally:
        for process in load:
            process.kill()


if __name__ == "__main__":
    run_command(main)
