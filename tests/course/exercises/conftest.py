"""What the tests of exercises share."""

import resource
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist

from course.exercises import calling, found_by, on_ranks, pipeline_parallel, tensor_parallel
from labkit.launch.world import World, _pickled_call

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import it, and pytest


@pytest.fixture(scope="module")
def worlds():
    """Ranks that stay alive from mistake to mistake, by their number; a mistake that ends them gets new ones."""
    made: dict[int, World] = {}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture
def launches_on_kept_ranks(worlds, monkeypatch):
    """Grows at every launch that a learner waits for. Ranks are kept: to recognise a mistake, one world makes all."""
    return keep_ranks(worlds, monkeypatch)


@pytest.fixture
def launches_on_lasting_ranks(worlds, monkeypatch):
    """Do so, but keep ranks after errors and deadlocks too: a thousand wrong answers take minutes and not an hour."""
    return keep_ranks(worlds, monkeypatch, after_errors=True)


def limit_memory(more_bytes: int = 2 * 2**30) -> None:
    """Let this process have that much more memory than now: a faulty answer may ask for all that the machine has."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + more_bytes, most))


def keep_ranks(worlds, patch, after_errors=False):
    calls = []

    def launch(function, *args, world_size, backend):
        def on_rank(*args):
            if after_errors:
                limit_memory()
                calling.MOST_SECONDS = 0.5
            for group in dist.distributed_c10d._world.pg_group_ranks.keys() - {dist.group.WORLD}:
                dist.destroy_process_group(group)  # of the answer before: its threads wake up a hundred times a second
            return function(*args)

        calls.append(function)
        world = worlds.pop(world_size, None)
        if world is None or world.ended:
            world = World(world_size, backend=backend)
        if after_errors:
            worlds[world_size] = world
        call = _pickled_call(on_rank, args, {})
        result = world._run(call, live=False, keep=after_errors)  # if not, the ranks go after an error, as in `launch`
        worlds[world_size] = world
        return result

    for module in (on_ranks, found_by, pipeline_parallel, tensor_parallel):
        patch.setattr(module, "launch", launch)
    return calls
