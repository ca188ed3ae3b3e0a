"""Compares runs in any layout with one process: losses, norms, all tensors that are kept."""

import math
import random
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from itertools import groupby
from unittest.mock import patch

import pytest
import torch

from labkit.expert_parallel import Router
from labkit.groups import init_groups
from labkit.parallel_config import ParallelConfig
from labkit.sizes import Misfit
from labtrain import Trainer, training
from labtrain.build import build
from labtrain.checkpoint_tensors import SlicedTensor, tensors_of
from tests.labtrain.tiny import numbers
from tests.support.collectives import check_order, recorded

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
OF_ONE_PROCESS = {
    field.name: field.default for field in fields(ParallelConfig) if not field.name.endswith("batch_size")
}


def alone(config):
    """The run of one process with the same losses: if no loss is one of micro-batches, it has the batch at once."""
    is_of_micro_batches = config.aux_loss == "micro_batch" and config.aux_loss_coefficient
    rows = config.micro_batch_size if is_of_micro_batches else config.batch_size
    return replace(config, **OF_ONE_PROCESS, micro_batch_size=rows)


def trained(config, expected=None, build=build, kind=Trainer):
    """On a rank: the numbers of a run, and its tensors; or its collectives, if the tensors are compared here."""
    recording = recorded() if config.num_experts else nullcontext([])
    with recording as calls, training(config, build) as trainer:
        trainer.__class__ = kind
        steps = numbers(trainer.steps())
        tensors = dict(tensors_of(trainer._state))
        check_loads(trainer)
    if expected is None:
        return steps, {name: unsliced(tensor) for name, tensor in tensors.items()}
    if config.precision == "float64" and expected:
        for name, tensor in tensors.items():
            for where, block in blocks(tensor):
                there = expected[name][where]
                torch.testing.assert_close(block, there, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n} {text}")
    return steps, calls


def check_loads(trainer):
    """Every token is computed by as many experts as it should be."""
    config = trainer.config
    routers = [module for model in trainer.models for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        assert router.last_load.sum() == config.batch_size * config.seq_length * config.top_k


def blocks(tensor):
    """Where each block of a tensor lies in the whole, and its numbers."""
    if not isinstance(tensor, SlicedTensor):
        yield (), tensor
        return
    for offsets, block in tensor.slices.items():
        yield tuple(slice(at, at + size) for at, size in zip(offsets, block.shape)), block


def unsliced(tensor):
    """A whole tensor of one process."""
    result = torch.full(tensor.size(), math.nan, dtype=tensor.dtype)
    for where, block in blocks(tensor):
        result[where] = block
    return result


def one_after_the_other(function, calls):
    """On a rank: the results of a function for several arguments, whose first one is a config; all have one layout.

    Process groups are made once: that takes longer than two steps of a tiny model.
    """
    results, groups = [], None

    def init_once(layout, shard_size=None):
        nonlocal groups
        groups = groups or init_groups(layout, shard_size)
        return nullcontext(groups)

    with patch("labtrain.trainer.init_groups", init_once):
        for args in calls:
            try:
                results.append(function(*args))
            except Exception as error:
                raise RuntimeError(f"{args[0]}: {error}") from error
    if groups is not None:
        groups.close()
    return results


def in_few_launches(on_ranks, function, runs):
    """Yield each of ``runs`` (world size, arguments, whatever) with the results of all ranks, layout by layout."""

    def layout_of(run):
        world_size, (config, *_), _ = run
        return world_size, repr(config.layout(world_size)), str(config.shard_size)

    for (world_size, *_), same in groupby(sorted(runs, key=layout_of), layout_of):
        same = list(same)
        for few in (same[start : start + 20] for start in range(0, len(same), 20)):
            ranks = on_ranks(one_after_the_other, function, [args for _, args, _ in few], world_size=world_size)
            yield from zip(few, zip(*ranks))


def compare(on_ranks, runs, *parts, with_tensors=True):
    """Compare runs (world size, config) with one process; ``parts`` are what `trained` takes beside a config."""
    references, compared = {}, []
    for world_size, config in runs:
        reference = alone(config)
        if reference not in references:
            [references[reference]] = on_ranks(trained, reference, None, *parts, world_size=1)
        expected, tensors = references[reference]
        compared.append((world_size, (config, tensors if with_tensors else {}, *parts), expected))
    for (world_size, (config, *_), expected), ranks in in_few_launches(on_ranks, trained, compared):
        check_order([calls for _, calls in ranks])
        for rank, (got, _) in enumerate(ranks):
            wanted = pytest.approx(expected, rel=TOLERANCE[config.precision], abs=0)
            assert got == wanted, f"rank {rank} of {world_size}: {config}"


def drawn(draw, parts, num_tried):
    """A few of the runs that ``draw`` makes of random choices, with all parts that any of them has.

    The next one always adds most for what it takes.
    """
    choose, left = random.Random(0).choice, {}
    for _ in range(num_tried):
        with suppress(Misfit):
            world_size, config = draw(choose)
            config.make_schedule(world_size)
            left[world_size, config] = parts(world_size, config)
    missing = set().union(*left.values())
    while missing:
        best = max(left, key=lambda run: len(left[run] & missing) / work(*run))
        missing -= left.pop(best)
        yield best


def work(world_size, config):
    """About how much all ranks do in a step: some for the step, and what each layer does with each micro-batch.

    A single micro-batch counts as two: nothing of it adds up, so it is to be no cheaper.
    """
    num_layers = config.num_layers / config.pp_size
    passes = 1.4 if config.recompute == "full" else 1
    return world_size * (2 + max(2, config.num_micro_batches(world_size)) * num_layers * passes)
