"""Finds the rank and module where a number first was not finite; a few operations later NaN is everywhere."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit.data_parallel.replicas import DataParallelBase
from labkit.groups import ProcessGroups


class Place(NamedTuple):
    """Where a rank has a number that is not finite. The smallest place of all ranks is the cause."""

    phase: int  # 0 the parameters before the step, 1 forward, 2 backward
    stage: int  # negative in backward, which starts at the last stage
    position: int  # within the stage, in the order of computation (negative too in backward); alike on tensor ranks
    rank: int
    what: str


def first_not_finite(chunks: Sequence[DataParallelBase], groups: ProcessGroups, run_again: Callable[[], object]) -> str:
    """Return a sentence with the rank and the module or parameter in which a number first was not finite.

    The parameters are checked first. While ``run_again`` runs the batch once more, so is every output and gradient,
    before tied weights or replicas add theirs up and spread a NaN to ranks that had none. Call it on every rank.
    """
    found: list[Place] = []

    def look(tensor: torch.Tensor, phase: int, stage: int, position: int, what: str) -> None:
        if not tensor.isfinite().all():
            found.append(Place(phase, stage, position, groups.rank, what))

    def look_at_output(stage: int, num_outputs: Iterator[int], name: str, module, inputs, output: Any) -> None:
        tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        bad = next((x for x in tensors if not x.isfinite().all()), tensors[0])
        look(bad, 1, stage, next(num_outputs), f"the output of {name}")

    with ExitStack() as hooks:
        for chunk in chunks:
            model: Any = chunk.module
            stage, num_outputs = model.stage, itertools.count()
            for position, (name, parameter) in enumerate(model.named_parameters()):
                look(parameter, 0, stage, position, f"the parameter {name}, before the step")
                if not parameter.requires_grad:
                    continue
                place = (2, -stage, -position, f"the gradient of {name}")
                register = chunk.whole(parameter).register_post_accumulate_grad_hook
                hooks.enter_context(register(lambda p, place=place: look(p.grad, *place)))
            for name, module in model.named_modules():
                if not list(module.children()):
                    hook = partial(look_at_output, stage, num_outputs, name)
                    hooks.enter_context(module.register_forward_hook(hook))
        run_again()
    everywhere: list[Any] = [None] * groups.layout.world_size
    dist.all_gather_object(everywhere, min(found, default=None))
    first = min((place for place in everywhere if place is not None), default=None)
    if first is None:
        over_ranks = ", or over ranks" if groups.layout.world_size > 1 else ""
        return f"Every parameter, output and gradient is finite; a sum is not: of losses, of squares{over_ranks}"
    return f"First on rank {first.rank}: {first.what}. Nothing was updated in this step"
