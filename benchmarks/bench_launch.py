"""One all-reduce on 2 to 16 new ranks: labkit.launch against the launchers that one would use otherwise.

Each launcher runs in an interpreter of its own, as in a new kernel. "First" counts from before its import to the result
of the first launch; "repeated" is the median of the launches after that. Every rank of every launcher uses gloo on
loopback and one thread, so that only the launching differs.
"""

import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

WORLD_SIZES = (2, 4, 8, 16)
PEERS = {
    "spawn": "torch.multiprocessing.spawn",
    "accelerate": "accelerate's notebook_launcher",
    "forkserver": "multiprocessing's forkserver, torch preloaded",
}


def rows() -> Iterator[tuple[str, float, float]]:
    for world_size in WORLD_SIZES:
        ours = _in_new_interpreter("labkit", world_size)
        for peer, peer_name in PEERS.items():
            theirs = _in_new_interpreter(peer, world_size)
            for which in ("first", "repeated"):
                name = f"{which} launch of {world_size} ranks, against {peer_name}"
                yield (name, ours[which], theirs[which]) if theirs else (f"{name} (hung)", ours[which], math.nan)


def _in_new_interpreter(launcher: str, world_size: int) -> dict[str, float] | None:
    """The seconds of the first and of repeated launches; None if they did not end in two minutes."""
    command = [sys.executable, "-m", "benchmarks.bench_launch", launcher, str(world_size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = run.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # with the ranks that it waits for
        run.communicate()
        return None
    assert run.returncode == 0, f"{launcher} failed with {world_size} ranks"
    return json.loads(printed.splitlines()[-1])


def all_reduce_ones() -> float:
    """What each rank does, once torch.distributed is up."""
    import torch

    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return ones.item()


def launch_with_labkit(world_size: int) -> None:
    from labkit.launch import launch

    assert launch(all_reduce_ones, world_size=world_size, backend="gloo") == [world_size] * world_size


def launch_with_spawn(world_size: int) -> None:
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_spawned_rank, args=(world_size, f"file://{folder}/store"), nprocs=world_size)


def _on_spawned_rank(rank: int, world_size: int, init_method: str) -> None:
    import torch

    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    assert all_reduce_ones() == world_size
    torch.distributed.destroy_process_group()


def launch_with_forkserver(world_size: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"file://{folder}/store")
        ranks = [context.Process(target=_on_spawned_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world_size


def launch_with_accelerate(world_size: int) -> None:
    from accelerate import notebook_launcher

    notebook_launcher(_on_elastic_rank, args=(world_size,), num_processes=world_size)


def _on_elastic_rank(world_size: int) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    assert all_reduce_ones() == world_size
    torch.distributed.destroy_process_group()


def main(launcher: str, world_size: int) -> None:
    launch = globals()[f"launch_with_{launcher}"]
    repeats = 1 if launcher == "spawn" and world_size > 4 else 5  # spawn takes half a minute for 16 ranks
    durations = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        launch(world_size)
        durations.append(time.perf_counter() - start)
    print(json.dumps({"first": durations[0], "repeated": statistics.median(durations[1:])}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
