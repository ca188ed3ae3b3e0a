"""What several tests of labkit share."""

import pytest
from hypothesis import settings

from labkit.launch import RankFailed, World
from tests.support.nccl import is_under_nccls_rules, under_nccls_rules
from tests.support.sweep import IS_SWEEP

settings.register_profile("labkit", deadline=None, max_examples=5000 if IS_SWEEP else 100)  # a busy machine is no fault
settings.load_profile("labkit")


@pytest.fixture(scope="module")
def on_ranks():
    """Run a function on every rank; what fails there fails here. The ranks are kept warm until something fails."""
    worlds: dict[tuple[int, bool], World] = {}

    def run(function, *args, world_size=2):
        key = world_size, is_under_nccls_rules()
        if key not in worlds:
            worlds[key] = World(world_size)
        try:
            return worlds[key].run(function, *args)
        except RankFailed:
            worlds.pop(key).close()
            raise

    yield run
    for world in worlds.values():
        world.close()


@pytest.fixture
def by_nccls_rules(on_ranks):
    """Run a function as `on_ranks` does, on ranks that talk by NCCL's rules."""

    def run(*args, **kwargs):
        with under_nccls_rules():
            return on_ranks(*args, **kwargs)

    return run
