"""A collective to which a rank does not come: the simulated report is the one that real ranks get."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.sizing.flow import numbered
from course.sizing.missing_rank import without_rank
from labkit.launch import Deadlock, launch
from tests.support.sweep import IS_SWEEP

CASES = [
    ("broadcast", 8, 5, 3), ("scatter", 4, 2, 1), ("all-reduce", 3, 1, 0), ("send and receive", 4, 0, 0),
]  # fmt: skip
MORE = [
    ("broadcast", 4, 1, 0), ("broadcast", 4, 0, 0), ("scatter", 4, 1, 1), ("scatter", 2, 1, 0), ("scatter", 2, 0, 0),
    ("gather", 3, 0, 0), ("gather", 4, 2, 0), ("reduce", 3, 1, 0), ("reduce", 4, 0, 0), ("all-to-all", 3, 0, 0),
    ("all-gather", 2, 0, 0), ("send and receive", 2, 1, 0),
]  # fmt: skip
"""An operation, the number of ranks, the rank that does not come, the root. Gloo has no reduce-scatter of its own."""


def unless_away(function, start, away):
    rank = dist.get_rank()
    return None if rank == away else function(torch.tensor(start[rank], dtype=torch.float32))


@pytest.mark.parametrize(("operation", "world_size", "away", "root"), CASES + MORE * IS_SWEEP)
def test_real_ranks_report_the_same(operation, world_size, away, root):
    function = partial(WITH_ROOT[operation], root=root) if operation in WITH_ROOT else WITHOUT_ROOT[operation]
    start = numbered(world_size, world_size)
    with pytest.raises(Deadlock) as deadlock:
        launch(unless_away, function, start, away, world_size=world_size, backend="gloo")
    report = re.sub(", at .*", "", str(deadlock.value))  # without the lines of code
    assert report == without_rank(operation, start, away, root).report


@pytest.mark.parametrize("operation", [*WITH_ROOT, *WITHOUT_ROOT])
@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_whoever_waits_waits_in_the_end_for_the_rank_that_does_not_come(operation, world_size):
    for away in range(world_size):
        missing = without_rank(operation, numbered(world_size, world_size), away, root=1)
        assert missing.waits and away not in missing.waits
        assert {*missing.waits, *missing.left, away} == {*range(world_size)}
        for rank in missing.waits:
            for _ in range(world_size):
                rank = missing.waits[rank][0] if rank != away else rank
            assert rank == away
