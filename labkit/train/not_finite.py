"""Where did the NaN come from? After one or two ops it is everywhere; this looks for the place where it was first."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from labkit.train.trainer import Trainer


class Place(NamedTuple):
    """Where a rank has its first number that is not finite. Of all ranks' places, the smallest is the cause."""

    phase: int  # 0 the parameters before the step, 1 forward, 2 backward
    stage: int  # negative in backward, which comes from the last
    position: int  # in that stage, in the order of computation; tensor-parallel ranks compute the same
    rank: int
    what: str


def first_not_finite(trainer: "Trainer", inputs, targets, loss: float, norm: float) -> str:
    """A sentence with the step, the rank and the module or parameter in which a number first was not finite.

    The parameters are those before the step. They are looked at first; then the batch runs once more, with
    the same dropout, with an eye on what every module gives, and with gradients that no replica has averaged
    and no tied weight has added up. To be called on every rank.
    """
    found = list(_parameters(trainer))
    trainer.optimizer.zero_grad()
    trainer.seed_dropout()
    with _watched_outputs(trainer, found):
        trainer.run(trainer.schedule, inputs, targets, tied=())
    found += _gradients(trainer)
    everywhere: list[Any] = [None] * trainer.groups.layout.world_size
    dist.all_gather_object(everywhere, min(found, default=None))
    first = min((place for place in everywhere if place is not None), default=None)
    values = f"step {trainer.steps_done + 1}: the loss is {loss:g}, the gradient norm {norm:g}"
    if first is None:
        return f"{values}. Every rank's own numbers are finite: it came from adding them up over ranks"
    return f"{values}. First on rank {first.rank}: {first.what}. Nothing was updated in this step"


def _chunks(trainer: "Trainer") -> Iterator[tuple[int, nn.Module]]:
    for number, model in enumerate(trainer.models):
        yield trainer.schedule.stage_of(trainer.groups.coords.pp, number), model


def _parameters(trainer: "Trainer") -> Iterator[Place]:
    for stage, model in _chunks(trainer):
        for position, (name, parameter) in enumerate(model.named_parameters()):
            if not parameter.isfinite().all():
                what = f"the parameter {name}, before the step"
                yield Place(0, stage, position, trainer.groups.rank, what)


def _gradients(trainer: "Trainer") -> Iterator[Place]:
    for stage, model in _chunks(trainer):
        for position, (name, parameter) in enumerate(reversed(list(model.named_parameters()))):
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                yield Place(2, -stage, position, trainer.groups.rank, f"the gradient of {name}")


@contextmanager
def _watched_outputs(trainer: "Trainer", found: list[Place]) -> Iterator[None]:
    """Inside the block, modules whose output is not finite are noted, each with how many had computed before."""
    handles, calls = [], dict.fromkeys([stage for stage, _ in _chunks(trainer)], 0)

    def watch(name: str, stage: int):
        def look(module: nn.Module, inputs: tuple, output: Any) -> None:
            calls[stage] += 1
            tensor = output[0] if isinstance(output, tuple) else output
            if not tensor.isfinite().all():
                found.append(Place(1, stage, calls[stage], trainer.groups.rank, f"the output of {name}"))

        return look

    for stage, model in _chunks(trainer):
        for name, module in model.named_modules():
            if not list(module.children()):
                handles.append(module.register_forward_hook(watch(name, stage)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
