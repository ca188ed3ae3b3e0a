"""A stage gives the gradients of one process, whatever it is made of, and holds activations no longer than it must."""

import copy
import weakref
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit import pipeline
from labkit.data_parallel import DataParallel, FullyShardedDataParallel
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from labkit.pipeline.worker import Stage
from labkit.placement import placed_parameters
from labkit.schedules import Op, gpipe, interleaved, one_f_one_b, zero_bubble
from tests.labkit.data_parallel.conftest import local_part
from tests.support.graphs import Keeps
from tests.support.pipelines import WIDTH, even, in_float64, mean_square, model_chunks, parity


class ForgetsItsInput(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (2 * self.weight).expand(len(x), -1)


def frozen_chunks(which, count):
    chunks = model_chunks(count, square=True)
    for number in which:
        chunks[number].requires_grad_(False)
    return chunks


def chunks_with(number, make, count):
    chunks: list[nn.Module] = list(model_chunks(count, square=True))
    chunks[number] = make()
    return chunks


def unusual_stages():
    for number in range(3):
        yield partial(frozen_chunks, [number])
        yield partial(chunks_with, number, partial(ForgetsItsInput, WIDTH))
        yield partial(chunks_with, number, nn.Identity)
    yield partial(frozen_chunks, [0, 1])


@pytest.mark.parametrize("make_schedule", [one_f_one_b, zero_bubble])
def test_stages_that_are_frozen_or_forget_their_input_or_do_nothing(on_ranks, make_schedule):
    for make in unusual_stages():
        on_ranks(partial(parity, make_schedule(3, 3), rows=even, make=make), world_size=3)


def test_the_mean_is_over_rows_whatever_their_number_in_a_micro_batch(on_ranks):
    on_ranks(partial(parity, one_f_one_b(2, 4), rows=lambda m: [4, 1, 3, 2], targets=True))


class LastDimFirst(nn.Linear):
    """Logits as `F.cross_entropy` wants them: [rows, words, tokens]."""

    def forward(self, x):
        return super().forward(x).transpose(1, 2)


IGNORED = {  # a rate of targets, and the rows of micro-batches, of each replica
    "different numbers": ([0.2, 0.7], [[2, 2, 2], [2, 2, 2]]),
    "a whole micro-batch": ([0.2, 0.2], [[2, 2, 2], [2, 2, 2]]),
    "none on one": ([0.5, 1.0], [[2, 2, 2], [2, 2, 2]]),
    "none at all": ([1.0, 1.0], [[2, 2, 2], [2, 2, 2]]),
    "different rows": ([0.0, 0.0], [[2, 2, 2], [3, 1, 1]]),
}


def drawn_labels(name, ignore_index):
    """All labels, and which of their rows each replica has."""
    rates, rows = IGNORED[name]
    starts = [0, sum(rows[0]), sum(map(sum, rows))]
    labels = torch.randint(0, 3, (starts[-1], 4))
    held = [slice(*pair) for pair in pairwise(starts)]
    for rate, part in zip(rates, held):
        labels[part].masked_fill_(torch.rand(labels[part].shape) < rate, ignore_index)
    if name == "a whole micro-batch":
        labels[:2] = ignore_index
    return labels, held


def classify(wrap, schedule, ignore_index):
    """A step of a pipeline on each of two replicas, against one process with the rows of both."""
    loss = partial(F.cross_entropy, ignore_index=ignore_index)
    with in_float64(), init_groups(ParallelLayout(4, pp_size=2)) as groups:
        dp_rank, pp_rank = groups.coords.dp, groups.coords.pp
        for name, (_, rows_of_replicas) in IGNORED.items():
            torch.default_generator.manual_seed(0)
            labels, held = drawn_labels(name, ignore_index)
            x = torch.randn(len(labels), 4, 5)
            chunks = [nn.Linear(5, 4), LastDimFirst(4, 3)]
            whole = copy.deepcopy(nn.Sequential(*chunks))
            expected = loss(whole(x), labels)
            expected.backward()
            replica = wrap(chunks[pp_rank], groups.dp_cp)
            rows, part = rows_of_replicas[dp_rank], held[dp_rank]
            given = dict(targets=labels[part].split(rows), loss=loss, ignore_index=ignore_index, average=True)
            given["activation_spec"] = x.dtype, torch.Size([rows[0], 4, 4])
            for item in (schedule.forward_only(), schedule):
                got = pipeline.run(item, [replica], groups, x[part].split(rows), **given)
                if got is not None:
                    dist.all_reduce(got, group=groups.dp)
                    torch.testing.assert_close(got / 2, expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
            there = zip(placed_parameters(replica.module).items(), whole[pp_rank].parameters(), strict=True)
            for (p, placement), unsharded in there:
                wanted = local_part(unsharded.grad, placement, p)
                torch.testing.assert_close(p.grad, wanted, rtol=1e-10, atol=1e-12, equal_nan=True, msg=name)


WRAPPED = [
    (DataParallel, zero_bubble(2, 3)),
    (DataParallel, gpipe(2, 3)),
    (partial(FullyShardedDataParallel, units=[]), one_f_one_b(2, 3)),
]


@pytest.mark.parametrize("ignore_index", [-100, 1])
@pytest.mark.parametrize(("wrap", "schedule"), WRAPPED, ids=["zero bubble", "GPipe", "sharded"])
def test_targets_that_count_are_counted_over_micro_batches_and_replicas(on_ranks, wrap, schedule, ignore_index):
    on_ranks(classify, wrap, schedule, ignore_index, world_size=4)


def values_read(ignore_index):
    """The mean over all targets, and how often the host asked a tensor for its values: on a GPU it would wait."""
    labels, asked, tolist = torch.tensor([[0, 2], [1, 1], [2, 0]]), [], torch.Tensor.tolist

    def noted(tensor):
        asked.append(tensor)
        return tolist(tensor)

    given = dict(targets=labels.split(2), loss=F.cross_entropy, ignore_index=ignore_index)
    given["activation_spec"] = torch.float32, torch.Size([2, 2, 4])
    torch.default_generator.manual_seed(0)
    x, chunks = torch.randn(3, 2, 5), [nn.Linear(5, 4), LastDimFirst(4, 3)]
    with init_groups(ParallelLayout(2, pp_size=2)) as groups:
        local = [chunks[groups.coords.pp]]
        with patch.object(torch.Tensor, "tolist", noted):
            loss = pipeline.run(one_f_one_b(2, 2), local, groups, x.split(2), **given)
    if loss is not None:
        torch.testing.assert_close(loss, F.cross_entropy(nn.Sequential(*chunks)(x), labels).detach())
    return len(asked)


def test_where_all_targets_count_no_values_are_read(on_ranks):
    assert on_ranks(values_read, None) == [0, 0]
    assert on_ranks(values_read, -100) == [0, 1]


def most_alive(schedule):
    """For how many passes this rank kept activations at once, and for how many after the step."""
    with init_groups(ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size)) as groups:
        return most_alive_in(groups, schedule)


def most_alive_in(groups, schedule):
    given, alive = [], []

    class Watched(nn.Linear):
        def __init__(self, width):
            super().__init__(width, width)
            self.scale = nn.Parameter(torch.ones(()))  # a weight after the activation, which it must outlive

        def forward(self, x):
            output = Keeps.apply(super().forward(x), given) * self.scale
            alive.append(sum(item() is not None for item in given))
            return output

    inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
    pipeline.run(schedule, [Watched(4) for _ in range(schedule.num_chunks)], groups, inputs, loss=mean_square)
    return max(alive), sum(item() is not None for item in given)


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 6), one_f_one_b(4, 6), interleaved(4, 6, 2), zero_bubble(4, 6), zero_bubble(4, 9, 3)]
)
def test_activations_live_until_their_backward_and_no_longer(on_ranks, schedule):
    found = on_ranks(most_alive, schedule, world_size=4)
    assert found == [(schedule.peak_in_flight(rank), 0) for rank in range(4)]


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 1), zero_bubble(2, 1)])
def test_an_output_that_was_sent_takes_no_memory_until_its_backward(schedule):
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    stage = Stage(layer, 0, schedule, [x], None, mean_square, None, False)
    output = stage.forward(Op("forward", 0), None)
    sent = weakref.ref(output)
    del output
    assert sent() is None
    stage.backward(Op("backward", 0), torch.ones(3, 4))
    if "weight_gradient" in schedule.kinds:
        stage.do(Op("weight_gradient", 0), None)
    torch.testing.assert_close(layer.weight.grad, torch.ones(3, 4).T @ x)
