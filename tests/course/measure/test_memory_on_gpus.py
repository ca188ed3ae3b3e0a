"""What rank functions make on a GPU only, because they take larger sizes there, fits 30 GB: counted on fake tensors.

All else that notebooks run on ranks has the same sizes on CPU ranks, and they run on 24 GiB together. The plans of
notebook 12 are counted in utilisation/test_work.py.
"""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.measure import roofline, this_machine
from tests.course.measure.utilisation.test_work import MOST_BYTES, NOTEBOOK

CPU = torch.device("cpu")
ON_A_GPU = this_machine.large_sizes(torch.device("cuda"))


@contextmanager
def sizes_of_a_gpu(world_size):
    """Let this process be a rank that works as on a GPU, on tensors without memory, and whose messages go nowhere."""
    with ExitStack() as stack:
        for module in (roofline, this_machine):
            stack.enter_context(patch.object(module, "large_sizes", lambda _: ON_A_GPU))
        stack.enter_context(patch.object(roofline, "NUM_REPEATS", 0))  # the counter follows one call of each layer
        stack.enter_context(patch.object(FakeTensor, "item", lambda _: 1.0))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode())
        yield


def roofline_of_notebook_12():
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    [cell] = [source for source in cells if "measured_roofline(shape)" in source]
    names = {}
    exec(cells[0], names)  # what is imported
    exec(next(source for source in cells if source.startswith("attention =")).split("world =")[0], names)
    exec(cell.split("machine, measured =")[0], names)
    roofline._on_a_rank(names["shape"])


CALLS = {
    "measured_hardware(8)": (this_machine.hardware_of_ranks, 8),
    "measured_roofline(shape)": (roofline_of_notebook_12, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_fits(name):
    call, world_size = CALLS[name]
    counter = MemTracker()
    with sizes_of_a_gpu(world_size), counter:
        call()
    peak = counter.get_tracker_snapshot("peak")[CPU]["Total"]
    assert 2e9 < peak < MOST_BYTES  # a copy's source and target, at least
