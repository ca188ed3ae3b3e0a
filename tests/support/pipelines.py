"""Schedules on real ranks, compared with the same model in one process."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from labkit import pipeline
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from labkit.schedules import (
    dualpipe_v,
    gpipe,
    greedy,
    interleaved,
    one_f_one_b,
    v_half,
    v_min,
    zero_bubble,
    zero_bubble_v,
)

WIDTH = 6  # of the model's input


def renumbered(schedule, order):
    """The same with the micro-batches in a different order."""
    ranks = [[op._replace(micro_batch=order[op.micro_batch]) for op in ops] for ops in schedule.ranks]
    return replace(schedule, name=f"{schedule.name}, {order}", ranks=ranks)


def every_schedule(p, m):
    made = [gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, 2), interleaved(p, m, 3)]
    made += [zero_bubble(p, m, extra) for extra in {0, p // 2, p - 1}]
    made += [zero_bubble_v(p, m), v_half(p, m), v_min(p, m), greedy(p, m, 3)]
    made += [dualpipe_v(p, m)] if m >= 2 * p else []
    return [*made, renumbered(one_f_one_b(p, m), [*range(1, m), 0])]


def in_a_v(p, m):
    """All schedules that fold, the greedy one with less memory than any other and with plenty."""
    made = [zero_bubble_v(p, m), v_half(p, m), v_min(p, m), greedy(p, m, 2), greedy(p, m, 3 * p)]
    return [*made, dualpipe_v(p, m)] if m >= 2 * p else made


def model_chunks(count, square=False):
    """The same on every rank. Between stages all have one width; unless square, the model's ends have others."""
    torch.default_generator.manual_seed(0)
    between = WIDTH if square else 5
    width = [WIDTH, *[between] * (count - 1), WIDTH if square else 7]
    return [
        nn.Sequential(nn.Linear(n, n + 1), nn.GELU(), nn.LayerNorm(n + 1), nn.Linear(n + 1, k))
        for n, k in pairwise(width)
    ]


def mean_square(output, target):
    return (output if target is None else output - target).square().mean()


def uneven(m):
    """How many rows each of m micro-batches has: the last has fewer."""
    return [3] * (m - 1) + [2]


def even(m):
    return [2] * m


def parity(*schedules, rows=uneven, make=model_chunks, targets=False, **options):
    """Run schedules of one size on a rank, each compared with one process: the loss, and this rank's gradients."""
    p = schedules[0].pp_size
    with in_float64(), init_groups(ParallelLayout(p, pp_size=p)) as groups:
        for schedule in schedules:
            compare(schedule, rows(schedule.num_micro_batches), make, targets, groups, options)


@contextmanager
def in_float64():
    """What is made inside the block is float64; afterwards a kept rank makes float32 again, as a new one does."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def compare(schedule, rows, make, with_targets, groups, options):
    whole = make(schedule.num_stages)
    copies = make(schedule.num_stages)
    numbers = [schedule.stage_of(groups.coords.pp, chunk) for chunk in range(schedule.num_chunks)]
    local = [copies[number] for number in numbers]
    torch.default_generator.manual_seed(1)
    x = torch.randn(sum(rows), WIDTH)
    y = nn.Sequential(*whole)(x)
    target = torch.randn(y.shape) if with_targets else None
    expected = mean_square(y, target)
    if expected.requires_grad:
        expected.backward()
    between = whole[0](x.split(rows)[0])
    given = {"loss": mean_square, "activation_spec": (between.dtype, between.shape)}
    options = given | {"targets": None if target is None else target.split(rows)} | options
    evaluated = pipeline.run(schedule.forward_only(), local, groups, x.split(rows), **options)
    assert not any(parameter.grad is not None for chunk in local for parameter in chunk.parameters())
    trained = pipeline.run(schedule, local, groups, x.split(rows), **options)
    is_last = schedule.num_stages - 1 in numbers
    for loss in (evaluated, trained):
        assert (loss is not None) == is_last, schedule.name
        if loss is not None:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
            assert not loss.requires_grad
    for number, chunk in zip(numbers, local):
        same_gradients(chunk, whole[number], f"{schedule.name}, m = {len(rows)}, chunk {number}")


def same_gradients(got, expected, what):
    wanted = dict(expected.named_parameters())
    for name, parameter in got.named_parameters():
        here, there = (torch.zeros(()) if p.grad is None else p.grad for p in (parameter, wanted[name]))
        if here.shape != there.shape:  # a stage that forgets its input sends zeros back; one process has None there
            here, there = here.abs().sum(), there.abs().sum()
        assert_same(here, there, f"{what}, {name}")


def assert_same(got, expected, what):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def run_stage(schedule, stage_of_rank, rows=None, **options):
    """On a rank: a step of the schedule, with what ``stage_of_rank`` gives for this rank as its stage."""
    groups = init_groups(ParallelLayout(schedule.pp_size, pp_size=schedule.pp_size))
    m = schedule.num_micro_batches
    inputs = torch.zeros(2 * m, 4).split(rows or [2] * m)
    return pipeline.run(schedule, [stage_of_rank(groups.coords.pp)], groups, inputs, loss=mean_square, **options)
