"""What real layers need on GPUs, counted on fake tensors: every plan of notebook 12 fits."""

from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import nbformat
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.measure import utilisation
from course.measure.fake_trainer import fake_tensors
from course.measure.utilisation.step import default_schedule
from course.measure.utilisation.work import computing_work
from labkit import launch
from labkit.groups import init_groups

NOTEBOOK = Path(__file__).parents[4] / "notebooks/further/12_utilisation.ipynb"
MOST_BYTES = 30e9
"""On one GPU of eight, beside what CUDA and NCCL take: a GPU of 40 GB is enough."""


@pytest.fixture
def measured(monkeypatch):
    """The plans and schedules that the notebook runs on ranks: its cells run here, but the steps are predicted."""
    steps = []

    def predicted(plan, schedule=None, pace=None, **_):
        steps.append((plan, schedule or default_schedule(plan)))
        return utilisation.predict_step(plan, schedule)

    class NoWorld:
        backend = "gloo"

        def __init__(self, world_size):
            self.world_size = world_size

    monkeypatch.setattr(utilisation, "measure_step", predicted)
    monkeypatch.setattr(launch, "World", NoWorld)
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    last = max(number for number, source in enumerate(cells) if "measure_step(" in source)
    names = {}
    for source in cells[: last + 1]:
        exec(source, names)
    return steps


@contextmanager
def a_fake_rank(plan, rank):
    """Let this process be a rank that sends nothing, on tensors without memory; who looks at them is content."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    number = patch.object(FakeTensor, "item", lambda _: 1.0)
    truth = patch.object(FakeTensor, "__bool__", lambda _: False)
    try:
        with init_groups(plan.layout) as groups, fake_tensors(), number, truth:
            yield groups
    finally:
        dist.destroy_process_group()


def held_bytes(plan, schedule, rank):
    """Weights, gradients, and what the fullest chunk leaves for backward, for all passes that are under way at once."""
    with a_fake_rank(plan, rank) as groups:
        work = computing_work(plan, schedule, groups)
        weights = sum(weight.nbytes for chunk in work.chunks for weight in chunk.parameters())
        saved = max(saved_bytes(chunk, work) for chunk in work.chunks)
        return 2 * weights + schedule.peak_in_flight(groups.coords.pp) * saved


def saved_bytes(chunk, work):
    """What one micro-batch leaves for backward in a chunk, the loss included."""
    weights = {weight.untyped_storage()._cdata for weight in chunk.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tokens = work.inputs[0]
        if not chunk.is_first:
            rows = tokens.shape[1] // (chunk.group.size() if chunk.sequence_parallel else 1)
            hidden = len(tokens), rows, chunk.shape.hidden_size
            tokens = torch.empty(hidden, dtype=torch.bfloat16, requires_grad=True)
        output = chunk(tokens)
        if chunk.is_last:
            output = work.loss(output, work.inputs[0]).mean()
    return sum(storage.nbytes() for key, storage in saved.items() if key not in weights)


def test_every_plan_of_the_notebook_fits_one_gpu_of_eight(measured):
    assert len(measured) > 8
    held = {}
    for plan, schedule in measured:
        for rank in (0, plan.world_size - 1):
            what = f"t = {plan.tp_size}, p = {plan.pp_size}, b = {plan.micro_batch_size}, {schedule.name}, rank {rank}"
            held[what] = held_bytes(plan, schedule, rank)
    print(*(f"{value / 1e9:5.1f} GB  {what}" for what, value in held.items()), sep="\n")
    assert max(held.values()) < MOST_BYTES
