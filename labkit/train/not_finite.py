"""Where did the NaN come from? A few operations later it is everywhere, so this looks for the first place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups
from labkit.model import ParallelGPT


class Place(NamedTuple):
    """Where a rank has a number that is not finite. The smallest place of all ranks is the cause."""

    phase: int  # 0 the parameters before the step, 1 forward, 2 backward
    stage: int  # negative in backward, which starts at the last stage
    position: int  # within the stage, in the order of computation; the same on tensor-parallel ranks
    rank: int
    what: str


def first_not_finite(models: Sequence[ParallelGPT], groups: ProcessGroups, run_again: Callable[[], object]) -> str:
    """Return a sentence with the rank and the module or parameter in which a number first was not finite.

    The parameters are checked first. Then ``run_again`` runs the batch once more, and every module's output and every
    gradient is checked as it is computed: before tied weights or replicas add theirs up, which spreads a NaN to ranks
    that had none. Call it on every rank.
    """
    found = [
        Place(0, model.stage, position, groups.rank, f"the parameter {name}, before the step")
        for model in models
        for position, (name, parameter) in enumerate(model.named_parameters())
        if not parameter.isfinite().all()
    ]
    with _watched(models, groups.rank, found):
        run_again()
    everywhere: list[Any] = [None] * groups.layout.world_size
    dist.all_gather_object(everywhere, min(found, default=None))
    first = min((place for place in everywhere if place is not None), default=None)
    if first is None:
        return "Every rank's own numbers are finite: it came from adding them up over ranks"
    return f"First on rank {first.rank}: {first.what}. Nothing was updated in this step"


@contextmanager
def _watched(models: Sequence[ParallelGPT], rank: int, found: list[Place]) -> Iterator[None]:
    """Inside the block, outputs of modules and gradients that are not finite are added to ``found``."""
    num_outputs = dict.fromkeys([model.stage for model in models], 0)

    def output_hook(name: str, stage: int) -> Callable:
        def look(module: nn.Module, inputs: tuple, output: Any) -> None:
            num_outputs[stage] += 1
            tensor = output[0] if isinstance(output, tuple) else output
            if not tensor.isfinite().all():
                found.append(Place(1, stage, num_outputs[stage], rank, f"the output of {name}"))

        return look

    def gradient_hook(place: Place) -> Callable:
        return lambda parameter: None if parameter.grad.isfinite().all() else found.append(place)

    with ExitStack() as hooks:
        for model in models:
            for name, module in model.named_modules():
                if not list(module.children()):
                    hooks.enter_context(module.register_forward_hook(output_hook(name, model.stage)))
            for position, (name, parameter) in enumerate(reversed(list(model.named_parameters()))):
                hook = gradient_hook(Place(2, -model.stage, position, rank, f"the gradient of {name}"))
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))
        yield
