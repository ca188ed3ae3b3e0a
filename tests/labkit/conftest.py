"""What several tests of labkit share."""

import pytest

from labkit.launch import RankFailed, World


@pytest.fixture(scope="module")
def on_ranks():
    """Run a function on every rank; what fails there fails here. The ranks are kept warm until something fails."""
    worlds: dict[int, World] = {}

    def run(function, *args, world_size=2):
        if world_size not in worlds:
            worlds[world_size] = World(world_size)
        try:
            return worlds[world_size].run(function, *args)
        except RankFailed:
            worlds.pop(world_size).close()
            raise

    yield run
    for world in worlds.values():
        world.close()
