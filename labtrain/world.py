"""Joins the ranks of a run: those of launch or torchrun, or one process alone."""

import json
import os
import secrets
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from labkit.data_parallel.replicas import check_alike
from labkit.device import count_gpus, prepare_gpu, take_turns
from labkit.groups import local_device, local_rank
from labtrain.config import TrainConfig
from labtrain.data import TokenFile

CHECK_SECONDS = 10.0  # enough for some ten gigabytes on each rank


@contextmanager
def world(one_queue: bool = False, posts_receives: bool = True) -> Iterator[None]:
    """Keep torch.distributed up inside the block.

    On a GPU, both options are those of `labkit.device.prepare_gpu`.

    Raises:
        ValueError: the environment says that there are other ranks, but not where.
    """
    if dist.is_initialized():
        yield
        return  # whoever brought it up takes it down
    check_launcher(os.environ)
    store, rank, world_size = meet(os.environ)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(num_threads(ranks_here, os.environ))
    prepare_gpu(one_queue, posts_receives)  # before CUDA is asked for anything
    has_gpu = count_gpus() >= ranks_here
    on_gpu = _on_all_ranks(has_gpu, store, rank, world_size)
    if world_size > 1 and not on_gpu:
        take_turns()
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    if on_gpu:
        torch.cuda.set_device(local_device())
    process = f"{_machine()} {os.getpid()}"
    dist.distributed_c10d._get_default_store().set(f"{PROCESS} {rank}", process)
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if not (has_failed and on_gpu):  # it would wait for messages that never come
            dist.destroy_process_group()


def _on_all_ranks(has_gpu: bool, store: Store, rank: int, world_size: int) -> bool:
    """Return whether every rank has a GPU; no process group is up yet."""
    store.set(f"gpu {rank}", str(has_gpu))
    answers = store.multi_get([f"gpu {peer}" for peer in range(world_size)])
    return all(answer == b"True" for answer in answers)


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise a ValueError if somebody else than torchrun has started several processes.

    Each of them would train alone. A script of sbatch is one process, and has SLURM_NTASKS, too:
    only the variables with STEP are srun's.
    """
    if "RANK" in environment:
        return
    names = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
    for name, launcher in names.items():
        if environment.get(name, "1") != "1":
            processes = f"{launcher} has started {environment[name]} processes"
            fault = f"{processes}, but does not say where rank 0 is"
            way_out = "let it start one torchrun on each node, as labtrain/train.sbatch does"
            raise ValueError(f"{fault}: {way_out}")


def meet(environment: Mapping[str, str]) -> tuple[Store, int, int]:
    """Return the store in which the ranks of this run meet, this rank's number, and the number of
    ranks.
    """
    if "RANK" not in environment:  # alone
        return HashStore(), 0, 1
    address = environment.get("MASTER_ADDR")
    try:
        socket.getaddrinfo(address, None)  # torch would ask again and again for half an hour
        store, rank, world_size = next(rendezvous("env://"))
    except (ValueError, OSError) as error:
        where = f"MASTER_ADDR={address} ({error})"
        fault = f"RANK={environment['RANK']} is set, but rank 0 cannot be found at {where}"
        way_out = "start the ranks with torchrun, or unset RANK to train alone"
        raise ValueError(f"{fault}: {way_out}") from error
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = fresh(store, rank, world_size)
    return store, rank, world_size


def fresh(store: Store, rank: int, world_size: int) -> Store:
    """Return a new part of torchrun's store, which outlives a restart and still has the addresses
    of dead ranks.

    Rank 0 makes up a name, and gives it to each rank that shows a new ticket. (Each node counts
    restarts for itself.)
    """
    ticket = secrets.token_hex(8)
    if rank == 0:
        name = ticket
        waiting = set(range(1, world_size))
        while waiting:
            for peer in waiting:
                # It may be the ticket of a rank that has died, so look again
                ticket_of_peer = store.get(f"ticket of {peer}").decode()
                store.set(f"name for {ticket_of_peer}", name)
            time.sleep(0.01)
            waiting = {peer for peer in waiting if not store.check([f"{name} has {peer}"])}
        return PrefixStore(name, store)
    store.set(f"ticket of {rank}", ticket)
    name = store.get(f"name for {ticket}").decode()
    store.set(f"{name} has {rank}", "")
    return PrefixStore(name, store)


def num_threads(ranks_here: int, environment: Mapping[str, str]) -> int:
    """Return this rank's share of the cores; torch's own number if it is alone on its node, or if
    the user set one.
    """
    is_set = "OMP_NUM_THREADS" in environment
    # Torchrun itself sets 1 if it was started without a number
    if "TORCHELASTIC_RUN_ID" in environment:
        is_set = b"OMP_NUM_THREADS=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    if is_set or ranks_here == 1:
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def check_same_options(config: TrainConfig | str, spelled: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError on every rank if ranks differ in an option, or in the content of the text.

    Call it first.

    A rank whose options cannot be read gives instead what is wrong with them: then that is the
    error on all ranks. Options are called as fields, or as ``spelled`` has them.
    """
    faults = [""] * dist.get_world_size()
    dist.all_gather_object(faults, config if isinstance(config, str) else "")
    if fault := next(filter(None, faults), None):
        raise ValueError(fault)
    assert isinstance(config, TrainConfig)
    facts = {}
    for field in fields(config):
        name = spelled[field.name] if spelled else field.name
        facts[name] = repr(getattr(config, field.name))
    facts["the content of text"] = config.make_dataset().fingerprint
    check_alike(facts, "start every rank with the same options")


def check_tokens(config: TrainConfig) -> None:
    """Look through a file of tokens once, each rank through a part of it.

    Otherwise a run would meet a wrong token steps later. What no rank has come to in
    `CHECK_SECONDS` is checked as it is read.

    Raises:
        ValueError: on every rank, if one has found a token that is not in the vocabulary.
    """
    dataset = config.make_dataset()
    if config.tokens is None or not isinstance(dataset, TokenFile):
        return
    count = 0
    fault = ""
    try:
        count = dataset.check(dist.get_rank(), dist.get_world_size(), CHECK_SECONDS)
    except (ValueError, OSError) as error:
        fault = str(error)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (count, fault))
    faults = [fault for _, fault in of_ranks if fault]
    if faults:
        raise ValueError(faults[0])
    num_checked = sum(count for count, _ in of_ranks)
    if num_checked < dataset.num_tokens and local_rank() == 0:
        share = f"{num_checked / dataset.num_tokens:.0%} of {config.tokens}"
        print(f"{share} is checked; the rest will be as it is read", flush=True)


PROCESS = "labtrain process of"  # and a rank: where it is, for those on its machine
PATIENCE_SECONDS = 10.0  # for a rank on another machine; torchrun leaves 30 before it kills


def describe_lost_peer(checkpoint_dir: str | None) -> str:
    """Return which ranks are gone, and where a restart goes on."""
    from labtrain import checkpoint

    store = dist.distributed_c10d._get_default_store()
    silent = "0"  # if the store is gone: with rank 0, or with the first node's torchrun
    with suppress(RuntimeError):
        silent = ", ".join(map(str, silent_ranks(store)))
        # All ranks say what one has found
        silent = store.compare_set("labtrain silent", "", silent).decode()
    who = f" (no answer from rank {silent})" if silent else ""
    newest = checkpoint.newest(checkpoint_dir) if checkpoint_dir else None
    then = "no checkpoint is there to resume"
    if newest:
        then = f"with --resume, a restart goes on after {newest.name}"
    return f"a peer is gone{who}, so the other ranks end: {then}"


def silent_ranks(store: Store) -> list[int]:
    """Return the ranks that are gone: all ranks that still run call this, and so answer each other.

    On a busy machine an answer may take seconds. So a rank counts as gone when somebody on its
    machine sees that its process has ended; or if nobody can see that, when there is no news for
    long.
    """
    there = "labtrain is there"
    gone = "labtrain is gone"
    store.set(f"{there} {dist.get_rank()}", "")
    unknown = set(range(dist.get_world_size()))
    ended = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while unknown and time.monotonic() < deadline:
        time.sleep(0.02)
        answered = {rank for rank in unknown if store.check([f"{there} {rank}"])}
        unknown -= answered
        for rank in unknown:
            if _has_ended(store, rank):
                store.set(f"{gone} {rank}", "")
        reported = {rank for rank in unknown if store.check([f"{gone} {rank}"])}
        unknown -= reported
        ended |= reported
        if answered or reported:  # news: wait for more
            deadline = time.monotonic() + PATIENCE_SECONDS
    return sorted(ended | unknown)


def _has_ended(store: Store, rank: int) -> bool:
    """Return whether a rank's process on this machine has ended; False if it is on another one."""
    if not store.check([f"{PROCESS} {rank}"]):
        return False
    machine, pid = store.get(f"{PROCESS} {rank}").decode().split()
    if machine != _machine():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")  # a zombie, which its parent has not asked for yet


def _machine() -> str:
    """Return what tells this machine from others, and a container's processes from
    those outside.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def say_once(text: str, restart_helps: bool = False) -> None:
    """Print a last message on stderr, once for all ranks of a node that say it; torchrun repeats it
    below its report.

    The ranks wait a moment for each other, because torchrun ends all others when one has left with
    an error. No exit code keeps it from restarting them: if that would end in the same way, one
    rank of each node tells it to stop.
    """
    store: Store = HashStore()
    world_size = 1
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        world_size = dist.get_world_size()
    stops_torchrun = not restart_helps and _may_restart()
    if stops_torchrun:
        text += "\n(A restart would end in the same way, so torchrun is told to stop.)"
    node = os.environ.get("GROUP_RANK", "0")
    message = f"says {zlib.crc32(text.encode())} on node {node}"
    is_said_here = _is_first(store, message, if_gone=restart_helps)
    stops_here = stops_torchrun and _is_first(store, f"stops node {node}", if_gone=False)
    if is_said_here:
        print(text, file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        _tell_torchrun(text if is_said_here else "")
    _leave_together(store, world_size)
    if stops_here:
        os.kill(os.getppid(), signal.SIGTERM)
    if stops_torchrun:
        # Torchrun stops this rank, too; if it came to an end first, torchrun might restart it
        time.sleep(60)


def _may_restart() -> bool:
    """Whether torchrun would restart the ranks once more."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return restarts > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _is_first(store: Store, what: str, if_gone: bool) -> bool:
    """Whether this rank is the first to do something; ``if_gone`` is the answer without a store."""
    try:
        return store.add(f"labtrain {what}", 1) == 1
    except RuntimeError:  # the store has gone, with the rank that kept it
        return if_gone


def _tell_torchrun(text: str) -> None:
    """Write what torchrun reports of this rank; an empty text if another rank says it."""
    about = {"message": text or "as on another rank", "timestamp": int(time.time())}
    if not text:
        # Torchrun takes the earliest as the root cause, and shows it last
        about["timestamp"] += 1
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(about))


def _leave_together(store: Store, world_size: int) -> None:
    """Wait until all ranks are about to leave, but not for long."""
    deadline = time.monotonic() + 2.0
    with suppress(RuntimeError):
        left = store.add("labtrain left", 1)
        while left < world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            left = store.add("labtrain left", 0)
